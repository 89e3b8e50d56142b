"""Steps that are recorded and compiled: the numbers of steps that are not, or a sentence and the step as it is."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from core_help import points, rows_of
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.engines import recording
from fedquilt.engines.recording import recorded
from fedquilt.layers.draws import drawing, hashes, in_one_operation
from fedquilt.methods import FedProx

compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="TorchInductor needs a C++ compiler")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Dropout(0.3),
        nn.Flatten(), nn.Linear(16, 17), nn.Dropout(0.2), nn.Tanh(), nn.Linear(17, 3),
    )  # fmt: skip


def trained(engine: str, device: str, sizes: tuple[int, ...]) -> fq.Federation:
    scenario = points(net, sizes=sizes, shape=(2, 4, 4), training={"rounds": 3, "batch": 4, "lr": 0.05, "epochs": 2})
    federated = fq.Federation(scenario, FedProx(mu=0.3), device=device, engine=engine)
    for _ in range(3):
        federated.step(evaluate=False)
    return federated


@pytest.mark.parametrize(
    ("device", "sizes"),
    [
        pytest.param("cpu", (9, 6, 4), marks=[compiler, pytest.mark.slow], id="cpu, uneven"),
        pytest.param("cuda", (9, 6, 4), marks=gpu, id="gpu, uneven"),
        pytest.param("cuda", (7, 7, 7), marks=gpu, id="gpu, even with a short batch"),
    ],
)
def test_the_numbers_of_one_by_one(device: str, sizes: tuple[int, ...]) -> None:
    ours, plain = trained("compiled", device, sizes), trained("sequential", "cpu", sizes)
    assert ours.simulation.engines == ["compiled"]
    rtol, atol = (1e-2, 2e-3) if device == "cuda" else (1e-4, 1e-6)  # convolutions are in TF32 there
    mine, other = rows_of(ours), rows_of(plain)
    for name in other:
        torch.testing.assert_close(mine[name].cpu(), other[name], rtol=rtol, atol=atol)


def test_hashes_in_one_operation_are_the_same() -> None:
    def drawn(start: Tensor) -> tuple[Tensor, Tensor]:
        with drawing(start):
            return hashes([3, 40]), hashes([2])

    starts = torch.tensor([7, -12345678901234, 2**61 + 5])
    with in_one_operation():
        ours = torch.func.vmap(drawn)(starts)
    for mine, other in zip(ours, torch.func.vmap(drawn)(starts), strict=True):
        assert torch.equal(mine, other)


class Counting(nn.Module):
    """Every second call is another one."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls % 2 else -x


@pytest.mark.parametrize("compiled", [False, True])
def test_what_decides_in_python_is_not_recorded(compiled: bool) -> None:
    net = Counting()
    with pytest.warns(RuntimeWarning, match="decides something in Python"):
        step = recorded(lambda x: (net(x),), net, (torch.ones(1),), compiled)
    assert {float(*step(torch.ones(1))) for _ in range(2)} == {1.0, -1.0}


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(traced: Any, tensors: list[Tensor]) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(recording, "_compiled", refuses)
    with pytest.warns(RuntimeWarning, match="could not be compiled and runs as it is: no compiler here"):
        step = recorded(lambda given, none: (2 * given["x"],), nn.Identity(), ({"x": torch.ones(1)}, None), True)
    assert step({"x": torch.tensor([3.0])}, None)[0].tolist() == [6.0]


def test_what_is_compiled_is_given_tensors_of_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a number takes a view of a table, and one that a graph replays a copy: programs are for one of them."""
    seen: list[tuple[int, ...]] = []

    def noting(traced: Any, tensors: list[Tensor]) -> Any:
        def program(*given: Tensor) -> Any:
            seen.extend(tensor.stride() for tensor in given)
            return traced(*given)

        return program

    monkeypatch.setattr(recording, "_compiled", noting)
    table = torch.arange(24.0).view(2, 3, 4)
    step = recorded(lambda x: (x + 1,), nn.Identity(), (table[:, 1],), compiled=True)
    assert torch.equal(*step(table[:, 1]), *step(table[:, 1].clone()))
    assert seen == [(4, 1), (4, 1)]
