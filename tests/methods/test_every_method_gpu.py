"""Every method and read-out on a GPU: the numbers of a CPU."""

from __future__ import annotations

import pytest
import torch

import fedquilt as fq
from fedquilt.methods import METHODS
from fedquilt.readouts import READOUTS
from fedquilt.sharing import MixedUnit
from fedquilt.testing import small_scenario

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SETTINGS = {
    "fedmn": {"blocks": (2, 2), "width": 6, "dropout": 0.0},
    "feddl": {"interval": 0},
    "feddf": {"steps": 20},
    "fedrep": {"head_epochs": 2},
}
# Scores that are no probabilities, and a router in the place of a head: these refuse what compares or mixes answers.
LEFT_OUT = dict.fromkeys(
    ("fedmn", "fedproto", "score-sharing"), ("averaged-by-class", "knn", "vote", "fine-tuned-chosen")
)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("name", METHODS)
def test_the_numbers_of_a_cpu(name: str, share: float) -> None:
    method = METHODS[name](**SETTINGS.get(name, {}))  # type: ignore[arg-type]
    readouts = [READOUTS[kind]() for kind in READOUTS if kind not in LEFT_OUT.get(name, ("averaged-by-class",))]
    found = {}
    for device, engine in (("cpu", "sequential"), ("cuda", "vectorised")):
        federation = fq.Federation(
            small_scenario(share=share), method, device=device, engine=engine, readouts=readouts
        )  # fmt: skip
        reports = [federation.step() for _ in range(federation.training.rounds)]
        family_states = federation.simulation.family_states
        rows = {
            c.name: r.cpu()
            for family_state in family_states
            for c, r in zip(family_state.clients, family_state.store.all(), strict=True)
        }
        found[device] = rows, federation.server.plan, [e.score for e in reports[-1].evaluations], reports[-1].traffic
        federation.close()
    (here, plan, scores, moved), (there, other_plan, other_scores, other_moved) = found["cpu"], found["cuda"]
    for client, row in here.items():
        torch.testing.assert_close(there[client], row, atol=2e-4, rtol=1e-3, msg=lambda m, c=client: f"{c}: {m}")  # type: ignore[misc]
    assert_same_plan(plan, other_plan)
    assert moved.total_up == other_moved.total_up
    assert scores == pytest.approx(other_scores, abs=0.05)


def assert_same_plan(one: fq.Plan, other: fq.Plan) -> None:
    """Plans are the same; mixtures, which are computed from models, nearly."""
    assert one.units.keys() == other.units.keys()
    for unit, plan in one.units.items():
        if isinstance(plan, MixedUnit):
            torch.testing.assert_close(plan.matrix.cpu(), other[unit].matrix.cpu(), atol=1e-3, rtol=1e-3)  # type: ignore[union-attr]
        else:
            assert plan == other[unit]
