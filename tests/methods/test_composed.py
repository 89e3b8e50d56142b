"""Two methods as one: against each of them alone, against federations by circle, and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from plain import close, first_weights, gradient, loss_of, mean, moved, scenario
from torch import nn

import fedquilt as fq
from fedquilt.core.federation import Federation
from fedquilt.interface.messages import Instructions, Update
from fedquilt.methods.find import find
from fedquilt.runs.rebuilding import make_method
from fedquilt.runs.settings import method_from, method_to
from fedquilt.sharing import pick
from fedquilt.testing import check_method, small_scenario

EVERYONE = {"configuration": "everyone", "operation": "everyone"}
COHORTS = {"configuration": "cohort", "operation": "cohort"}


def ran(of: fq.Scenario, method: str, rounds: int = 3, merge: str = "mean", **settings: Any) -> Federation:
    made = make_method(method, settings)
    federation = Federation(of, made, of.training, device="cpu", engine="sequential", rule=pick(merge))
    for _ in range(rounds):
        federation.step(evaluate=False)
    return federation


def values(federation: Federation, client: int = 0) -> torch.Tensor:
    units = [u.name for u in federation.simulation.family_states[0].family.layout.units if not u.state]
    shared = [u for u in units if bool(federation.server.plan.sends(u)[client])]
    return torch.cat([federation.server.held(unit, torch.tensor([client]))[0] for unit in shared])


def model(federation: Federation, name: str) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in federation.model(name).parameters()])


@pytest.mark.parametrize(("added", "settings"), [("fedadam", {"rate": 0.05}), ("fedavgm", {"beta": 0.7})])
def test_each_circle_has_an_optimiser_as_if_it_were_a_federation_by_itself(
    added: str, settings: dict[str, Any]
) -> None:
    whole = small_scenario()
    together = ran(whole, f"modfl+{added}", by=COHORTS, **settings)
    for circle in ("north", "south"):
        members = [i for i, client in enumerate(whole.clients) if client.traits["cohort"] == circle]
        alone = ran(replace(whole, clients=tuple(whole.clients[i] for i in members)), added, **settings)
        torch.testing.assert_close(values(together, members[0]), values(alone), atol=1e-6, rtol=1e-5)
    plain = ran(whole, "modfl", by=COHORTS)
    assert not torch.allclose(values(plain), values(together), atol=1e-3)


@pytest.mark.parametrize(("added", "settings"), [("fedprox", {"mu": 0.5}), ("fedyogi", {"rate": 0.05})])
def test_one_circle_for_all_is_the_added_method(added: str, settings: dict[str, Any]) -> None:
    whole = small_scenario()
    together, alone = ran(whole, f"modfl+{added}", by=EVERYONE, **settings), ran(whole, added, **settings)
    torch.testing.assert_close(values(together), values(alone), atol=1e-6, rtol=1e-5)


def test_a_private_head_trained_first_is_fedrep() -> None:
    whole = small_scenario()
    by = {"configuration": "everyone", "operation": "private"}
    together = ran(whole, "modfl+fedrep", by=by, head_epochs=2)
    alone = ran(whole, "fedrep", head_epochs=2, personal=1)
    for client in whole.clients:
        torch.testing.assert_close(model(together, client.name), model(alone, client.name), atol=1e-6, rtol=1e-5)


def test_a_twin_beside_one_circle_for_all_is_ditto_s() -> None:
    whole = small_scenario()
    together, alone = ran(whole, "modfl+ditto", by=EVERYONE, lam=0.3), ran(whole, "ditto", lam=0.3)
    plain = ran(whole, "modfl", by=EVERYONE)
    for client in whole.clients:
        torch.testing.assert_close(model(together, client.name), model(alone, client.name), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(values(together), values(plain), atol=0, rtol=0)  # the others never hear of twins


def test_a_twin_beside_a_plan_with_private_units_by_hand() -> None:
    """Two rounds of FedPer's heads and bodies, each with one step, and of twins that are drawn to them."""
    of, lam, eta = scenario(rounds=2), 0.4, 0.3
    together = ran(of, "fedper+ditto", rounds=2, lam=lam)
    sizes = [client.samples for client in of.clients]
    heads = {"2.weight", "2.bias"}
    shared = [first_weights(of) for _ in of.clients]
    twins = [first_weights(of) for _ in of.clients]
    for _ in range(2):
        received = mean(shared, sizes) if _ else shared[0]
        at = [{n: (own[n] if n in heads else received[n]) for n in own} for own in shared]
        losses = [loss_of(client) for client in of.clients]
        shared = [moved(w, gradient(loss, w), -eta) for w, loss in zip(at, losses, strict=True)]
        anchors = [{n: (own[n] if n in heads else received[n]) for n in own} for own in shared]
        twins = [
            moved(v, {n: g + lam * (v[n] - anchor[n]) for n, g in gradient(loss, v).items()}, -eta)
            for v, loss, anchor in zip(twins, losses, anchors, strict=True)
        ]
    for client, twin in zip(of.clients, twins, strict=True):
        found = dict(together.model(client.name).named_parameters())
        close({n: p.detach() for n, p in found.items()}, twin)


def test_robust_merges_in_ifca_s_clusters() -> None:
    """A cluster's value is the median of its own members' copies, and not of everybody's."""
    of = scenario((6, 9, 4, 7, 8, 5), groups=2)
    federation = ran(of, "ifca", rounds=4, merge="median")
    handed, sent = federation.simulation.run, list[Update]()

    def tapped(down: Instructions) -> Update:
        sent.append(handed(down))
        return sent[-1]

    federation.simulation.run = tapped  # type: ignore[method-assign]
    federation.step(evaluate=False)
    plan, part = federation.server.plan["0"], sent[0].part(["0"])
    assert isinstance(plan, fq.UnitPlan)
    assert part is not None
    circle, (ids, copies) = plan.circle, part
    assert 1 < len(circle.unique()) < len(circle)
    for group in circle.unique().tolist():
        mine = copies[circle[ids] == group]
        held = federation.server.held("0", (circle == group).nonzero()[0])[0]
        torch.testing.assert_close(held, mine.quantile(0.5, dim=0), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["modfl+fedadam", "modfl+fedrep+ditto", "auto+ditto", "feddl+ditto", "ifca+fedavgm"])
def test_checked(name: str) -> None:
    assert "network" in check_method(find(name)())


def test_a_method_of_one_s_own_takes_additions_and_is_found_again() -> None:
    made = make_method("fedquilt.methods.fedper:FedPer+ditto", {"lam": 0.2})
    assert made.name == "fedper+ditto"
    assert method_from(method_to(made)) == made
    auto = make_method("auto+ditto", {"lam": 0.1, "ditto_lam": 2.0})
    assert (auto.first.lam, auto.second.lam) == (0.1, 2.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("fedavg+ditto", {}, r"fedavg\+ditto is Ditto: use the method 'ditto'"),
        ("scaffold+ditto", {}, "reads something off its clients' steps"),
        ("feddyn+fedadam", {}, "both say what becomes of a circle's value"),
        ("feddyn+fedrep", {}, "clients of 'feddyn' train in a way of their own"),
        ("fedproto+ditto", {}, "predicts in a way of its own"),
        ("modfl+ditto", {"lams": (0.1, 1.0)}, "has one lam"),
        ("modfl+fedadm", {}, "no method to be added to another 'fedadm'; did you mean 'fedadam'"),
        ("modfl+fedprox", {"mu": 0}, "FedProx with mu=0 is FedAvg"),
    ],
)
def test_what_makes_no_sense_together_is_refused(name: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_method(name, settings)


class Tracking(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("local+fedavgm", "shares nothing that a server could optimise"),
        ("fedamp+fedavgm", "mixes clients' copies"),
        ("fml+ditto", "has several models"),
        ("fedper+ditto", r"has running statistics \(BatchNorm1d\), and a twin keeps none"),
    ],
)
def test_what_a_federation_does_not_allow_is_refused(name: str, says: str) -> None:
    of = scenario()
    if name == "fedper+ditto":
        of = replace(of, clients=tuple(replace(client, model=Tracking) for client in of.clients))
    with pytest.raises(ValueError, match=says):
        ran(of, name, rounds=0)
