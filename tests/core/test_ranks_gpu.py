"""Ranks whose values go between GPUs: with one GPU, a run of one rank by nccl beside the same without it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import fedquilt as fq
from fedquilt.core.ranks import Ranks, among

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not dist.is_nccl_available(), reason="wants a GPU and nccl"),
]


@pytest.fixture
def nccl() -> Iterator[Ranks]:
    """This process as the only rank, which talks to itself as it would to others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    found = Ranks()
    try:
        yield found
    finally:
        found.close()


def scored(ranks: Ranks, merge: str) -> list[torch.Tensor]:
    with among(ranks):
        made = fq.scenarios.build("digits", clients=8)
        federation = fq.Federation(made, fq.methods.FedAvg(), device="cuda", rule=fq.sharing.pick(merge))
        for _ in range(3):
            federation.step(evaluate=False)
        values = [each.value.cpu() for each in federation.server.all_values]
        federation.close()
    return values


@pytest.mark.parametrize("merge", ["mean", "median", "krum"])
def test_by_nccl_the_values_are_those_without_it(nccl: Ranks, merge: str) -> None:
    found = scored(nccl, merge)
    assert nccl.direct
    alone = Ranks()
    nccl.close()
    for mine, other in zip(found, scored(alone, merge), strict=True):
        assert torch.equal(mine, other)
