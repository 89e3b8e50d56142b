"""Several processes as one federation: each trains and measures clients of its own, and the server half runs on all.

Clients belong to a fixed number of shards by their numbers, and shards to ranks. What is computed together is computed
shard by shard, and added pair by pair in one order, so the bits do not depend on how many ranks there are. What a
client keeps stays on its own rank, and goes to rank 0 only to be written down. Between ranks go tensors of known sizes,
and bytes of safetensors and JSON where sizes are not known, by torch.distributed: nothing is unpickled. GPUs talk to
each other (nccl) where every rank has one of its own, else values go through host memory (gloo).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor, nn

SHARDS = 4  # at least: so many ranks give the same bits as one

Said = tuple[dict[str, Tensor], Any]


class RankLost(OSError):
    """Another process of the run is gone."""


class Ranks:
    """This process among those of a run; `mine` are the shards that it has, `sent` the bytes that it gave to others."""

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0, shards: int | None = None) -> None:
        self.rank, self.size, self.local = rank, size, local
        self.shards = shards or max(SHARDS, size)
        self.sent = 0
        self._devices: list[str] = []  # what ranks compute on, once they have told each other
        self._direct: dist.ProcessGroup | None = None  # by which GPUs talk to each other

    def over(self, shards: int) -> None:
        """Share so many shards among the ranks."""
        if self.size > shards:
            raise ValueError(
                f"this run was begun in {shards} shards, which are too few for {self.size} ranks; go on with "
                f"--ranks {shards} or fewer"
            )
        self.shards = shards

    def on(self, device: torch.device) -> None:
        """Say what this rank computes on; GPUs talk to each other from now on where no two ranks share one."""
        if self._devices or not dist.is_initialized():
            return
        name = device.type
        if device.type == "cuda":
            torch.cuda.set_device(device)
            name += f" {torch.cuda.get_device_properties(device).uuid}"
        self._devices = [text for _, text in self.gather({}, name)]
        if len({name.split()[0] for name in self._devices}) > 1:
            raise ValueError(
                "some ranks of this run have a GPU and others none, so they would not compute alike; start it on "
                "machines with GPUs alone, or say --device cpu"
            )
        if device.type == "cuda" and len(set(self._devices)) == self.size and dist.is_nccl_available():
            self._direct = dist.new_group(backend="nccl")

    @property
    def direct(self) -> bool:
        """Whether values go from GPU to GPU."""
        return self._direct is not None

    @property
    def mine(self) -> range:
        """The shards of this rank: neighbours."""
        return self._of(self.rank)

    def _of(self, rank: int) -> range:
        return range(-(-rank * self.shards // self.size), -(-(rank + 1) * self.shards // self.size))

    def bounds(self, rank: int) -> range:
        """Where the shards of a rank begin and end: one number more than it has."""
        mine = self._of(rank)
        return range(mine.start, mine.stop + 1)

    def owns(self, client: int) -> bool:
        """Whether a client, by its number, is of this rank."""
        return client % self.shards in self.mine

    def order(self, clients: Tensor) -> list[Tensor]:
        """Of each rank the places of its clients among these numbers (k,), shard by shard."""
        shard = clients % self.shards
        by_shard = shard.argsort(stable=True)
        bounds = torch.searchsorted(shard[by_shard], torch.tensor([self._of(r).start for r in range(1, self.size)]))
        return list(by_shard.tensor_split(bounds.tolist()))

    # --- what goes between ranks -------------------------------------------------------------------------------------

    def added(self, parts: Mapping[int, Tensor]) -> Tensor:
        """(n,) the sum of a vector of every shard, given this rank's: added in one order, whoever has which. n > 0.

        Each rank adds one part of the numbers for all, so that about twice the vector leaves a rank, however many.
        """
        tops = [_tops(self._of(rank), 0, self.shards) for rank in range(self.size)]
        known = {(shard, shard + 1): part for shard, part in parts.items()}
        rows = torch.stack([_pairwise(known, *top) for top in tops[self.rank]])  # (t, n)
        if not dist.is_initialized():
            return rows[0]
        width = -(-rows.shape[1] // self.size)
        padded = nn.functional.pad(rows, (0, self.size * width - rows.shape[1]))
        found = self.swap([part.flatten() for part in padded.split(width, dim=1)], [len(some) * width for some in tops])
        known = dict(zip((top for some in tops for top in some), torch.cat(found).view(-1, width), strict=True))
        return torch.cat(self.spread(_pairwise(known, 0, self.shards), [width] * self.size))[: rows.shape[1]]

    def swap(self, parcels: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Give every rank its parcel, a vector, and get theirs, of these sizes."""
        if not dist.is_initialized():
            return list(parcels)
        mine = self._carried(torch.cat(list(parcels)))
        found = mine.new_empty(sum(sizes))
        self.sent += (len(mine) - len(parcels[self.rank])) * mine.element_size()
        with _named():
            dist.all_to_all_single(found, mine, list(sizes), [len(p) for p in parcels], group=self._direct)
        return list(found.to(parcels[0].device).split(list(sizes)))

    def spread(self, mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Give all ranks this vector, and get theirs, of these sizes."""
        if not dist.is_initialized():
            return [mine]
        device, longest = mine.device, max(sizes)
        mine = self._carried(nn.functional.pad(mine, (0, longest - len(mine))))  # all of one length, as gloo wants it
        found = [torch.empty_like(mine) for _ in sizes]
        self.sent += (self.size - 1) * longest * mine.element_size()
        with _named():
            dist.all_gather(found, mine, group=self._direct)
        return [part[:size].to(device) for part, size in zip(found, sizes, strict=True)]

    def _carried(self, vector: Tensor) -> Tensor:
        """A vector where the transport can take it from."""
        return vector.contiguous() if self._direct is not None and vector.is_cuda else vector.cpu().contiguous()

    def gather(self, tensors: Mapping[str, Tensor], text: Any, to_all: bool = True) -> list[Said]:
        """What every rank says, in their order; without `to_all` only rank 0 hears it, and others get nothing."""
        if not dist.is_initialized():
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
            self.sent += longest * (self.size - 1 if to_all else min(self.rank, 1))
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


def _pairwise(known: Mapping[tuple[int, int], Tensor], start: int, stop: int) -> Tensor:
    """The sum over shards from `start` to `stop`, of the sums over some of them: halves first, in one order always."""
    if (start, stop) in known:
        return known[start, stop]
    middle = (start + stop) // 2
    return _pairwise(known, start, middle) + _pairwise(known, middle, stop)


def _tops(mine: range, start: int, stop: int) -> list[tuple[int, int]]:
    """The fewest sums of `_pairwise` that make up what is known of these shards.

    >>> _tops(range(0, 2), 0, 4), _tops(range(1, 4), 0, 4)
    ([(0, 2)], [(1, 2), (2, 4)])
    """
    if mine.start <= start and stop <= mine.stop:
        return [(start, stop)]
    middle = (start + stop) // 2
    found = _tops(mine, start, middle) if mine.start < middle and start < mine.stop else []
    return found + (_tops(mine, middle, stop) if middle < mine.stop and mine.start < stop else [])


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
            dist.barrier()  # rank 0 has the addresses: if it went before all have met, others would wait half an hour
    return Ranks(rank, size, local)
