"""Every method and read-out on a GPU: the numbers of a CPU."""

from __future__ import annotations

import pytest
import torch

import fedquilt as fq
from fedquilt.methods import METHODS
from fedquilt.readouts import READOUTS
from fedquilt.testing import small_scenario

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SETTINGS = {
    "fedmn": {"blocks": (2, 2), "width": 6, "dropout": 0.0},
    "feddl": {"interval": 0},
    "fedrep": {"head_epochs": 2},
}


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("name", METHODS)
def test_the_numbers_of_a_cpu(name: str, share: float) -> None:
    method = METHODS[name](**SETTINGS.get(name, {}))  # type: ignore[arg-type]
    readouts = [READOUTS[kind]() for kind in READOUTS if kind != "averaged-by-class"]
    found = {}
    for device, engine in (("cpu", "sequential"), ("cuda", "vectorised")):
        federation = fq.Federation(
            small_scenario(share=share), method, device=device, engine=engine, readouts=readouts
        )  # fmt: skip
        reports = [federation.step() for _ in range(federation.training.rounds)]
        crews = federation.fleet.crews
        rows = {c.name: r.cpu() for crew in crews for c, r in zip(crew.clients, crew.rest.all(), strict=True)}
        found[device] = rows, federation.server.plan, [e.accuracy for e in reports[-1].evaluations], reports[-1].traffic
        federation.close()
    (here, plan, scores, moved), (there, other_plan, other_scores, other_moved) = found["cpu"], found["cuda"]
    for client, row in here.items():
        torch.testing.assert_close(there[client], row, atol=2e-4, rtol=1e-3, msg=lambda m, c=client: f"{c}: {m}")  # type: ignore[misc]
    assert plan == other_plan
    assert moved.total_up == other_moved.total_up
    assert scores == pytest.approx(other_scores, abs=0.02)
