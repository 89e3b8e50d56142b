"""Clients whose sensors differ: the samples that everybody holds come in a form for each, aligned sample by sample."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.client import Client, Split
from fedquilt.core.federation import Federation
from fedquilt.engines.settings import Training
from fedquilt.families.common import ByTrait
from fedquilt.methods import FedDL, Method, ModFL, ScoreSharing
from fedquilt.runs.onboarding import onboard
from fedquilt.runs.settings import fingerprint
from fedquilt.scenario import Scenario
from fedquilt.sharing import affinity

SENSORS = {"radar": 4, "camera": 6, "lidar": 4}  # how many numbers they give; two as many, but not the same ones
NAMES = {"north": torch.tensor([0, 1, 2]), "south": torch.tensor([1, 2, 0])}


class Sensing(nn.Module):
    """A configuration module as wide as its sensor, and an operation module for all; nothing is declared."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.configuration = nn.Sequential(nn.Linear(channels, 5), nn.Tanh())
        self.operation = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.operation(self.configuration(x))
        return out


def events(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Events and their kinds, before anybody has sensed them."""
    draw = torch.Generator().manual_seed(seed)
    kinds = torch.arange(count) % 3
    return torch.randn(count, 3, generator=draw) + 3 * torch.eye(3)[kinds], kinds


def sensed(events: Tensor, sensor: str) -> Tensor:
    at = list(SENSORS).index(sensor)
    return events @ torch.randn(3, SENSORS[sensor], generator=torch.Generator().manual_seed(at))


def unlike(common: Any = None, each: int = 2, rounds: int = 4) -> Scenario:
    """Two sites that name things in different ways, with three kinds of sensors each."""
    clients = []
    for at, (site, sensor) in enumerate([(site, s) for site in NAMES for s in SENSORS for _ in range(each)]):
        drawn = [events(count, 10 * at + part) for part, count in enumerate((24, 6, 12))]
        train, validation, test = ((sensed(what, sensor), NAMES[site][kinds]) for what, kinds in drawn)
        traits = {"device": sensor, "cohort": site}
        model = partial(Sensing, SENSORS[sensor])
        clients.append(Client(f"{site}-{sensor}-{at}", model, train, validation, test, traits))
    held, kinds = events(15, 991)
    more, more_kinds = events(9, 992)
    forms = {"device": {sensor: (sensed(held, sensor), kinds) for sensor in SENSORS}}
    apart = {"device": {sensor: (sensed(more, sensor), more_kinds) for sensor in SENSORS}}
    training = Training(rounds=rounds, epochs=2, batch=8, lr=0.2)
    return Scenario("unlike", clients, training, forms if common is None else common, apart, ("a", "b", "c"))


def federation(method: Method, scenario: Scenario | None = None, engine: str = "sequential") -> Federation:
    return Federation(scenario or unlike(), method, device="cpu", engine=engine, readouts=())


def test_models_are_compared_on_the_same_events_as_their_sensors_see_them() -> None:
    fed = federation(FedDL(interval=0))
    fed.step(evaluate=False)
    common = fed.scenario.common
    assert isinstance(common, ByTrait)
    answers = []
    for number, client in enumerate(fed.scenario.clients):  # what they sent is what they have: nothing else is shared
        model = Sensing(SENSORS[client.traits["device"]])
        model.load_state_dict(fed.simulation.model(number).state_dict())
        answers.append(model(common.forms[client.traits["device"]].x).softmax(1).detach())
    torch.testing.assert_close(fed.server.state["answers"], torch.stack(answers), rtol=1e-5, atol=1e-6)
    assert bool((affinity(torch.stack(answers)) > 0).any())


def test_who_has_the_same_network_but_another_sensor_is_shown_its_own_form() -> None:
    fed = federation(FedDL())
    families = [
        {fed.scenario.clients[i].traits["device"] for i in family_state.family.ids}
        for family_state in fed.simulation.family_states
    ]
    assert sorted(families, key=str) == [{"camera"}, {"lidar"}, {"radar"}]  # radar and lidar are as wide as each other


def test_layers_that_fit_are_shared_between_sensors() -> None:
    by = {"configuration": "device", "operation": "affinity"}
    result = fq.run(
        unlike(rounds=8), ModFL(by=by, linkage="average"), engine="sequential", device="cpu", alone=False,
        evaluate_every=8,
    )  # fmt: skip
    circle = result.plan["operation"].circle  # type: ignore[union-attr]
    assert len({int(c) for c in circle[:6]} & {int(c) for c in circle[6:]}) == 0  # the sites have nothing in common
    assert int(circle[0]) == int(circle[2]) == int(circle[4])  # radar, camera and lidar of one site have


def test_scores_of_unlike_sensors_by_hand() -> None:
    scenario = unlike(each=1)
    training = scenario.training.but({"epochs": 20})
    two = Scenario("two", scenario.clients[:2], training, scenario.common, None, ("a", "b", "c"))
    fed = federation(ScoreSharing(), two)
    fed.step(evaluate=False)
    said, alpha = [], 24 / 15
    assert isinstance(two.common, ByTrait)
    for number, sensor in enumerate(("radar", "camera")):
        said.append(fed.simulation.model(number)(two.common.forms[sensor].x).softmax(1).detach())  # (15, 3)
    labels = two.common.y
    right = [(s.argmax(1) == labels).float() for s in said]
    for label in range(3):
        beta = [float(r[labels == label].mean()) for r in right]
        total = sum(b * s[:, label] for b, s in zip(beta, said, strict=True)) / sum(beta) * alpha / (1 + alpha)
        held = next(s.column(key) for s in fed.server.all_values for key in s.keys if key[0] == f"label-{label}")
        torch.testing.assert_close(held[0], total)


METHODS = [FedDL(interval=1), ScoreSharing(), ScoreSharing(scored="own"), ScoreSharing(distil=1)]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_engines_agree_about_unlike_sensors(method: Method) -> None:
    rows = []
    for engine in ("sequential", "vectorised"):
        fed = federation(method, engine=engine)
        fed.run()
        rows.append(
            {
                c.name: r
                for family_state in fed.simulation.family_states
                for c, r in zip(family_state.clients, family_state.store.all(), strict=True)
            }
        )
        fed.close()
    for name, row in rows[0].items():
        torch.testing.assert_close(rows[1][name], row, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("method", [FedDL(interval=1), ScoreSharing(distil=1)], ids=str)
def test_devices_hold_their_own_form_and_give_the_numbers_of_a_simulation(method: Method, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    import numpy as np

    from fedquilt.deploy.device.local import LocalTransport
    from fedquilt.deploy.ops.create import create_from_scenario
    from fedquilt.deploy.project import Address
    from fedquilt.deploy.server.coordinator import make_federation
    from fedquilt.deploy.server.declarations import declare
    from fedquilt.runs.settings import method_to

    scenario = unlike(each=1)
    project = create_from_scenario(tmp_path / "project", scenario, Address())
    for client in scenario.clients:
        with np.load(project.client_folder(client.name) / "common.npz") as held:
            assert set(held) == {"x", "y"}
            assert held["x"].shape == (15, SENSORS[client.traits["device"]])
    spec = {"run": "unlike", "method": method.name, "settings": method_to(method)["settings"], "rounds": 3}
    post = LocalTransport(project)
    remote, simulated = make_federation(project, spec, post, declare(project, spec, post)), federation(method, scenario)
    for _ in range(3):
        simulated.step(evaluate=False)
        remote.step(evaluate=False)
        assert remote.server.plan == simulated.server.plan
        values = {key: circle_values for circle_values in simulated.server.all_values for key in circle_values.keys}
        for circle_values in remote.server.all_values:
            for key in circle_values.keys:
                torch.testing.assert_close(circle_values.column(key), values[key].column(key), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [FedDL(interval=1), ScoreSharing()], ids=str)
def test_a_newcomer_is_shown_its_own_form(method: Method, tmp_path: Path) -> None:
    whole = unlike()
    others = Scenario(
        "unlike", whole.clients[:-1], whole.training, whole.common, whole.public_test, ("a", "b", "c")
    )  # fmt: skip
    fq.run(others, method, engine="sequential", device="cpu", alone=False, out=tmp_path / "run")
    joined = onboard(tmp_path / "run", whole.clients[-1], visits=1, scenario=others)
    assert joined.plan.clients == len(whole.clients)


def test_a_run_is_known_by_all_forms() -> None:
    base, other = unlike(), unlike()
    assert fingerprint(base) == fingerprint(other)
    assert isinstance(other.common, ByTrait)
    other.common.forms["lidar"].x[0, 0] += 1
    assert fingerprint(base) != fingerprint(other)


def test_every_client_may_have_a_form_of_its_own() -> None:
    scenario = unlike()
    held, kinds = events(15, 991)
    own = {client.name: (sensed(held, client.traits["device"]), kinds) for client in scenario.clients}
    by_name, by_device = federation(FedDL(interval=0), unlike({"client": own})), federation(FedDL(interval=0))
    for fed in (by_name, by_device):
        fed.step(evaluate=False)
    torch.testing.assert_close(by_name.server.state["answers"], by_device.server.state["answers"])


def test_refusals() -> None:
    held, kinds = events(15, 991)
    radar, camera = (sensed(held, "radar"), kinds), (sensed(held, "camera"), kinds)
    with pytest.raises(ValueError, match=r"^client 'north-lidar-4' is device 'lidar', and of the samples that everyb"):
        unlike({"device": {"radar": radar, "camera": camera}})
    with pytest.raises(ValueError, match=r"declares no trait 'sensor', and of the samples that everybody holds"):
        unlike({"sensor": {"radar": radar}})
    with pytest.raises(ValueError, match=r"the labels for device 'camera' are not those for 'radar'; sample i has to"):
        unlike({"device": {"radar": radar, "camera": (camera[0], kinds.flip(0))}})
    with pytest.raises(TypeError, match=r"give \(samples, labels\), or one trait and a pair for each of its values"):
        unlike({"radar": radar, "camera": camera})
    # One form for all, which some models do not take: said before work, with what to do.
    for method in (ScoreSharing(), ScoreSharing(distil=1)):
        with pytest.raises(ValueError, match=r"^the model of client 'north-camera-2' cannot be run on .*several forms"):
            federation(method, unlike(Split(*radar)))
    fed = federation(FedDL(interval=0), unlike(Split(*radar)))
    with pytest.raises(ValueError, match=r"^the model of client 'north-camera-2' cannot be run on .*several forms"):
        fed.step(evaluate=False)
    federation(fq.methods.FedPer(), unlike(Split(*radar))).step(evaluate=False)  # which never looks at them


@pytest.mark.parametrize("method", ["feddl", "score-sharing"])
def test_the_bundled_scenario_has_common_samples_for_both_generations(method: str) -> None:
    scenario = fq.scenarios.build("digits", clients=8, common=4)
    assert isinstance(scenario.common, ByTrait)
    assert {device: tuple(form.x.shape) for device, form in scenario.common.forms.items()} == {
        "gen1": (40, 1, 4, 4),
        "gen2": (40, 1, 8, 8),
    }
    fine, coarse = (scenario.common.forms[device].x for device in ("gen2", "gen1"))
    pooled = nn.functional.avg_pool2d(fine, 2)
    assert float((pooled - coarse).abs().mean()) < 0.15  # the same digits, but for the sensors' noise
    result = fq.run(scenario, method, rounds=3, engine="sequential", device="cpu", alone=False)
    assert result.summary["accuracy_mean"] > 0.15
