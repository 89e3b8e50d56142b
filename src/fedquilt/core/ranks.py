"""Several processes as one federation: each trains and measures clients of its own, and all hear what all sent.

Clients belong to a fixed number of shards by their numbers, and shards to ranks. What is computed together is computed
shard by shard, so the bits do not depend on how many ranks there are. The server half runs alike on every rank; what a
client keeps stays on its own rank, and goes to rank 0 only to be written down. Between ranks go bytes of safetensors
and JSON, by torch.distributed's gloo, in which nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

SHARDS = 4  # at least: so many ranks give the same bits as one

Said = tuple[dict[str, Tensor], Any]


class RankLost(OSError):
    """Another process of the run is gone."""


class Ranks:
    """This process among those of a run; `mine` are the shards that it has."""

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0, shards: int | None = None) -> None:
        self.rank, self.size, self.local = rank, size, local
        self.shards = shards or max(SHARDS, size)

    def over(self, shards: int) -> None:
        """Share so many shards among the ranks."""
        if self.size > shards:
            raise ValueError(
                f"this run was begun in {shards} shards, which are too few for {self.size} ranks; go on with "
                f"--ranks {shards} or fewer"
            )
        self.shards = shards

    @property
    def mine(self) -> range:
        """The shards of this rank."""
        return range(self.rank, self.shards, self.size)

    def owns(self, client: int) -> bool:
        """Whether a client, by its number, is of this rank."""
        return client % self.shards % self.size == self.rank

    def gather(self, tensors: Mapping[str, Tensor], text: Any, to_all: bool = True) -> list[Said]:
        """What every rank says, in their order; without `to_all` only rank 0 hears it, and others get nothing."""
        if self.size == 1:
            return [(dict(tensors), json.loads(json.dumps(text)))]
        apart = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        words = json.dumps(text).encode()
        data = len(words).to_bytes(8, "little") + words + save(apart)
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with _named():
            dist.all_gather(lengths, torch.tensor([len(mine)]))
            longest = int(max(lengths))
            mine = torch.cat([mine, mine.new_zeros(longest - len(mine))])  # all of one length, as the transport wants
            heard = [torch.empty_like(mine) for _ in range(self.size)] if to_all or self.rank == 0 else None
            if to_all:
                dist.all_gather(heard, mine)
            else:
                dist.gather(mine, heard)
        return [_read(all_[: int(length)]) for all_, length in zip(heard or (), lengths, strict=bool(heard))]

    def close(self) -> None:
        """Leave the others."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _read(told: Tensor) -> Said:
    data = told.numpy().tobytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return load(data[start:]), json.loads(data[8:start])


@contextmanager
def _named() -> Iterator[None]:
    """Turn what the transport says of a rank that is gone into a sentence."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(
            "another rank of this run is gone (was it killed, or out of memory?); its last checkpoint is kept"
        ) from error


_joined: list[Ranks] = []


def ranks() -> Ranks | None:
    """The ranks that this process is one of; None: it works by itself."""
    return _joined[-1] if _joined else None


def is_first() -> bool:
    """Whether this process writes and speaks: it works by itself, or is rank 0."""
    found = ranks()
    return found is None or found.rank == 0


def as_first(value: Any) -> Any:
    """A plain value as rank 0 has it."""
    found = ranks()
    return value if found is None else found.gather({}, value)[0][1]


def anywhere(value: bool) -> bool:
    """Whether something holds on any rank."""
    found = ranks()
    return value if found is None else any(text for _, text in found.gather({}, value))


@contextmanager
def among(found: Ranks | None) -> Iterator[Ranks | None]:
    """While this holds, federations of this process are shared with its other ranks; None: with nobody."""
    if found is None:
        yield None
        return
    _joined.append(found)
    try:
        yield found
    finally:
        _joined.remove(found)


def from_environment() -> tuple[int, int, int] | None:
    """This process's rank, how many there are and its rank on this machine, as torchrun or Slurm say; None: neither.

    Of Slurm's variables they are taken only where MASTER_ADDR says where rank 0 is.
    """
    for rank, size, local in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")):
        with suppress(KeyError, ValueError):
            _ = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
            return int(os.environ[rank]), int(os.environ[size]), int(os.environ.get(local, 0))
    return None


def join() -> Ranks | None:
    """Meet the other ranks that the environment tells of; None where it tells of none."""
    told = from_environment()
    if told is None:
        return None
    rank, size, local = told
    if size > 1:
        with _named():
            dist.init_process_group("gloo", rank=rank, world_size=size)
    return Ranks(rank, size, local)
