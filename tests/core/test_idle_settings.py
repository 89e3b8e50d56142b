"""A setting that could do nothing for a method is refused before work: every method with every kind of setting."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("dp_accounting")
pytest.importorskip("cryptography")

import torch
from core_help import federation
from torch import Tensor

import fedquilt as fq
from fedquilt import attacks
from fedquilt.methods.find import find
from fedquilt.testing import small_scenario

METHODS = [*fq.methods.METHODS, "fedper+fedadam", "fedper+ditto", "pfedhn+fedprox", "fedproto+fedavgm"]
LATER = ("fedamp", "feddl", "fedfomo", "pfedhn", "pfedhn+fedprox")  # what was sent in a round shows in the next
NEEDS: dict[str, dict[str, Any]] = {
    "fedmn": {"blocks": (2, 2), "width": 6},
    "feddl": {"interval": 0},
    "feddf": {"steps": 5},
    "fedrep": {"head_epochs": 1},
    "pfedme": {"steps": 2},
    "modfl": {"by": {"*": "cohort"}},
}
KINDS: dict[str, dict[str, Any]] = {
    "merge": {"rule": fq.sharing.pick("median")},
    "attack on copies": {"attack": attacks.SignFlip(0.4)},
    "attack on reports": {"attack": attacks.Impostor(0.4)},
    "codes up": {"compress": fq.Compression("int8")},
    "halves down": {"compress": fq.Compression(down="float16")},
    "dp client": {"privacy": fq.Privacy(noise=1.0, clip=0.1, smallest=2)},
    "dp local": {"privacy": fq.Privacy(noise=1.0, clip=0.1, level="local")},
    "dp sample": {"privacy": fq.Privacy(noise=1.0, clip=0.1, level="sample")},
    "secure sums": {"secure": fq.SecureSums()},
}


class Seen:
    """What a round or two came to: what clients and the server hold, and how many bytes moved."""

    def __init__(self, name: str, **how: Any) -> None:
        scenario = small_scenario()
        training = scenario.training.but({"rounds": 1 + (name in LATER), "epochs": 1, "batch": 8})
        federated = federation(scenario, find(name)(**NEEDS.get(name, {})), training=training, **how)
        try:
            moved = [federated.step(evaluate=False).traffic for _ in range(training.rounds)]
            self.held = [state.store.all()[:, : width(state)].clone() for state in federated.simulation.family_states]
            self.held += [values.value.clone() for values in federated.server.all_values]
            self.bytes = [(each.total_up, each.total_down) for each in moved]
        finally:
            federated.close()

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Seen)
        return self.bytes == other.bytes and all(map(same, self.held, other.held))


def width(state: Any) -> int:
    layout = state.family.layout
    return int(layout.width - layout.waiting)


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


@cache
def plain(name: str) -> Seen:
    return Seen(name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_a_setting_does_something_or_is_refused(name: str, kind: str) -> None:
    without = plain(name)
    try:
        done = Seen(name, **KINDS[kind])
    except ValueError as error:
        refused: str | None = str(error)
    else:
        refused = None if done != without else ""
    assert refused is None or len(refused.split()) > 8, "it did nothing, and that was not said in a sentence"


def test_what_is_refused_and_why() -> None:
    both = r"^the merge 'median' and dp\.level=local would do nothing: clients of the method 'local' share nothing here"
    with pytest.raises(ValueError, match=both):
        Seen("local", **KINDS["merge"], **KINDS["dp local"])
    with pytest.raises(
        ValueError, match=r"^compress\.up=int8 would do nothing: only parameters of models are compressed"
    ):
        Seen("fedproto+fedavgm", **KINDS["codes up"])
    assert Seen("local", **KINDS["dp sample"]) != plain("local")  # a model of one's own may be given out


def test_a_method_with_something_added_goes_with_what_it_goes_with_alone() -> None:
    """The server half of fedper+fedadam learns from nobody's update, so sums are enough for it, with noise too."""
    for name in ("fedper+fedadam", "fedper+ditto"):
        for kind in ("dp client", "secure sums"):
            assert Seen(name, **KINDS[kind]) != plain(name)
    with pytest.raises(ValueError, match="merges no copies"):
        Seen("pfedhn+fedprox", **KINDS["merge"])
    assert find("fedmn+fedprox").depends_on_rounds
