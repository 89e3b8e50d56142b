"""What goes together with privacy, and what is refused in a sentence: every method at every level."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

pytest.importorskip("dp_accounting")

from privacy_help import by_hand, changes, learnable, run, shared, still, unrelated

import fedquilt as fq
from fedquilt.core.protection import received
from fedquilt.interface.messages import Instructions, Roster, Update
from fedquilt.methods import METHODS
from fedquilt.readouts import Vote

SETTINGS: dict[str, dict[str, Any]] = {
    "modfl": {"by": {"*": "cohort"}},
    "fedmn": {"blocks": (2, 2), "width": 6},
    "feddl": {"interval": 0},
}
NO_UNITS_ALONE = "its server half finds something in what single clients send"
REPORTS = "its clients send reports beside units"
NO_SUM = r"is mixed from single copies, and no sum hides them; take dp\.level=local"
WHY_NOT = {  # why not
    "fednova": REPORTS,
    "ifca": REPORTS,
    "clustered": NO_UNITS_ALONE,
    "fedamp": NO_UNITS_ALONE,
    "fedfomo": REPORTS,
    "fedpac": REPORTS,
    "pfedhn": REPORTS,
    "auto": REPORTS,
    "feddf": NO_UNITS_ALONE,
    "feddl": NO_UNITS_ALONE,
    "fedmn": REPORTS,
    "score-sharing": NO_UNITS_ALONE,
    "fedproto": REPORTS,
    "local": "clients of the method 'local' share nothing here",
}
UNSUITED = {"fedbn", "fedit", "ffa-lora", "fedsa-lora"}  # they want other models than these


def made(name: str) -> Any:
    return METHODS[name](**SETTINGS.get(name, {}))


def with_public(clients: int = 6) -> fq.Scenario:
    scenario = learnable(clients, rounds=1)
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    public = (x, torch.arange(12) % 3)
    return fq.Scenario("public", scenario.clients, scenario.training, common=public, public_test=public)


@pytest.mark.parametrize("level", ["client", "local"])
@pytest.mark.parametrize("name", sorted(METHODS.keys() - UNSUITED))
def test_every_method_runs_or_says_why_not(name: str, level: str) -> None:
    smallest = {"smallest": 2} if level == "client" else {}
    privacy = fq.Privacy(noise=1.0, clip=0.1, level=level, **smallest)  # type: ignore[arg-type]
    why = WHY_NOT.get(name, NO_SUM if name == "gossip" and level == "client" else None)
    if why is None:
        result = run(with_public(), made(name), privacy)
        assert result.summary["epsilon"] > 0
        assert all(up > 0 for up in result.bytes_up)
    else:
        with pytest.raises(ValueError, match=why):
            run(with_public(), made(name), privacy)


def test_circles_that_are_found_are_a_release_and_declared_ones_are_not() -> None:
    privacy = fq.Privacy(noise=1.0, smallest=2)
    for by, why in (("found", REPORTS), ("affinity", NO_UNITS_ALONE)):
        with pytest.raises(ValueError, match=why):
            run(with_public(), "modfl", privacy, settings={"by": {"*": by}})
    run(with_public(), "modfl", privacy, settings={"by": {"*": "cohort"}})


def test_a_circle_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has a circle of 3 clients, .* dp\.smallest=5; share it more widely"):
        run(learnable(6), "modfl", fq.Privacy(noise=1.0), settings={"by": {"*": "cohort"}})


@pytest.mark.parametrize("merge", ["median", "trimmed-mean", "krum"])
def test_merges_that_make_no_sum_go_with_local_noise_only(merge: str) -> None:
    with pytest.raises(ValueError, match="adds noise to sums"):
        run(learnable(), privacy=fq.Privacy(noise=1.0), merge=merge)
    run(learnable(12, rounds=1), privacy=fq.Privacy(noise=1.0, level="local"), merge=merge)


def test_noise_of_one_client_unit_or_round_says_nothing_of_anothers() -> None:
    privacy = fq.Privacy(noise=2.0, clip=0.5, level="local")
    federation = fq.Federation(still(4), fq.methods.FedAvg(), engine="sequential", device="cpu", privacy=privacy)
    found: list[torch.Tensor] = []
    run_them = federation.simulation.run

    def watched(down: Instructions) -> Update:
        up = run_them(down)
        for block in up.blocks:
            found.extend((block.value - received(block, down)).view(-1, 1000))
        return up

    federation.simulation.run = watched  # type: ignore[method-assign]
    for _ in range(3):
        federation.step(evaluate=False)
    assert len(found) == 4 * 2 * 3  # clients, units, rounds
    noises = torch.stack(found)
    unrelated(noises)
    assert float(noises.std()) == pytest.approx(2.0 * 0.5, rel=0.02)


@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_under_local_noise_that_numbers_are_not_finite_is_nobodys_to_know(noise: float) -> None:
    """Training that goes beyond all numbers tells of a client's data: it sends what it received, with its noise."""
    scenario = by_hand([(0.4, 0), (3e38, 0), (0.8, 0)], lr=4.0)
    result = run(scenario, privacy=fq.Privacy(noise=noise, clip=10.0, level="local"))
    assert int(result.federation.server.refused.sum()) == 0
    moved = 4 * changes([(0.4, 0), (0.0, 0), (0.8, 0)]).mean(0)
    assert shared(result).tolist() == pytest.approx(moved.tolist(), abs=1e-4)


def test_only_poisson_samples_count_as_samples() -> None:
    with pytest.raises(ValueError, match="set sampling=poisson"):
        run(learnable(share=0.5), privacy=fq.Privacy(noise=1.0))


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ({"level": "sample", "smallest": 3}, r"dp\.smallest is of dp\.level=client and distributed"),
        ({"level": "client", "honest": 0.9}, r"dp\.honest is of dp\.level=distributed"),
        ({"quantile": 0.7}, r"dp\.quantile is of dp\.adaptive=true"),
        ({"clip_rate": 0.1}, r"dp\.clip_rate is of dp\.adaptive=true"),
    ],
)
def test_a_setting_of_another_level_is_refused(setting: dict[str, Any], where: str) -> None:
    with pytest.raises(ValueError, match=f"^{where} and would do nothing here; leave it out"):
        fq.Privacy(noise=1.0, **setting)


def unlike(**training: Any) -> fq.Scenario:
    """Clients of which each is slower than the one before."""
    scenario = learnable(6, rounds=2, epochs=1, **training)
    for number, client in enumerate(scenario.clients):
        client.traits["speed"] = str(100 / (1 + number))  # type: ignore[index]
    return scenario


def test_whose_answers_are_late_is_no_chance_that_counts_and_a_clip_of_then_is_not_one_of_now() -> None:
    """The slow come in where no faster one was chosen, so that one client's absence brings another one in; and changes
    that come rounds later were clipped to what the clip was then."""
    with pytest.raises(ValueError, match=r"^deadline=0\.5 with dp\.level=client and share=0\.5: who is in time"):
        run(unlike(share=0.5, sampling="poisson", deadline=0.5), privacy=fq.Privacy(noise=1.0))
    with pytest.raises(ValueError, match=r"^arrivals=2 with dp\.adaptive: changes that come late"):
        run(unlike(arrivals=2), privacy=fq.Privacy(noise=1.0, adaptive=True))
    for how in ({"deadline": 0.5}, {"arrivals": 2}):
        assert run(unlike(**how), privacy=fq.Privacy(noise=1.0)).summary["epsilon"] > 0
    run(unlike(share=0.5, sampling="poisson"), privacy=fq.Privacy(noise=1.0, adaptive=True))


def test_liars_who_know_the_honest_copies_and_clip_nothing_are_refused() -> None:
    """What they send tells of others' changes, as often as they like."""
    with pytest.raises(ValueError, match=r"^the attack 'mimic' with dp\.level=client: liars know what the honest send"):
        run(learnable(), privacy=fq.Privacy(noise=1.0), attack="mimic")
    assert run(learnable(), privacy=fq.Privacy(noise=1.0), attack="label-flip").summary["epsilon"] > 0
    run(learnable(rounds=1), privacy=fq.Privacy(noise=1.0, level="local"), attack="mimic")


def test_a_delta_that_allows_to_give_away_a_client_is_refused() -> None:
    with pytest.raises(ValueError, match="give away one of 8 clients"):
        run(learnable(8), privacy=fq.Privacy(noise=1.0, delta=0.2))


@pytest.mark.parametrize("level", ["client", "local", "sample"])
def test_read_outs_pool_no_evidence(level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What validation samples say together leaves their clients, and no noise covers it: each chooses by itself."""

    def evidence(self: Vote, look: Any) -> torch.Tensor:
        raise AssertionError("a client said what its validation samples say")

    monkeypatch.setattr(Vote, "evidence", evidence)
    with pytest.raises(AssertionError):
        run(learnable(rounds=1), readouts=("vote",))
    smallest: dict[str, Any] = {"smallest": 2} if level == "client" else {}
    result = run(learnable(rounds=1), privacy=fq.Privacy(noise=1.0, level=level, **smallest), readouts=("vote",))
    assert {row["readout"] for row in result.rows} == {"vote"}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.norm(self.body(x)).relu())
        return y


def normed() -> fq.Scenario:
    plain = learnable(6, rounds=1)
    clients = [fq.Client(c.name, Normed, c.train, c.validation, c.test, c.traits) for c in plain.clients]
    return fq.Scenario("normed", clients, plain.training)


def test_running_statistics_stay_home_or_are_refused() -> None:
    privacy = fq.Privacy(noise=1.0)
    with pytest.raises(ValueError, match="has running statistics"):
        run(normed(), privacy=privacy)
    assert run(normed(), "fedbn", privacy).plan["norm"].describe() == "private"


class Told(fq.methods.FedAvg):
    """FedAvg of which one client takes over nothing of what it receives, or from which copies are asked besides."""

    deaf: ClassVar[bool] = False

    def plan(self, state: fq.methods.State, roster: Roster) -> fq.Plan:
        circle, everybody = [0] * len(roster), torch.ones(len(roster))
        pull = [0.0 if self.deaf else 1.0, *[1.0] * (len(roster) - 1)]
        units = {unit: fq.UnitPlan(circle, pull=pull) for unit in roster.units}
        return fq.Plan(units, {} if self.deaf else dict.fromkeys(roster.units, everybody))


class Deaf(Told):
    deaf: ClassVar[bool] = True


def test_whose_change_has_no_bound_and_what_no_sum_hides_is_refused() -> None:
    for level in ("client", "local"):
        with pytest.raises(
            ValueError, match=r"^client 'c0' sends unit '0' and receives none, so its change has no bound"
        ):
            run(learnable(), Deaf(), fq.Privacy(noise=1.0, level=level))
    with pytest.raises(ValueError, match=r"^unit '0' is asked for by itself, and no sum hides it"):
        run(learnable(), Told(), fq.Privacy(noise=1.0))
    run(learnable(rounds=1), Told(), fq.Privacy(noise=1.0, level="local"))


class Remembering(nn.Module):
    """A model that keeps the mean of what it saw last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = x.detach().mean(0)
        y: torch.Tensor = self.head(x - self.seen)
        return y


def test_at_the_level_sample_what_a_model_writes_and_samples_that_change_are_refused() -> None:
    plain, privacy = learnable(4, rounds=2), fq.Privacy(noise=1.0, level="sample")
    clients = [fq.Client(c.name, Remembering, c.train, c.validation, c.test, c.traits) for c in plain.clients]
    with pytest.raises(
        ValueError, match=r"^dp\.level=sample: the model of client 'c0' writes to buffers while it trains"
    ):
        run(fq.Scenario("remembering", clients, plain.training), privacy=privacy)
    first, *others = plain.clients
    new = {2: fq.Change(train=others[0].train)}
    moving = fq.Client("c0", first.model, first.train, first.validation, first.test, first.traits, changes=new)
    with pytest.raises(ValueError, match=r"^dp\.level=sample: clients whose samples change in mid-run"):
        run(fq.Scenario("moving", (moving, *others), plain.training), privacy=privacy)


def test_a_promise_needs_the_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fedquilt\[dp\]'"):
        run(learnable(), privacy=fq.Privacy(epsilon=3.21))
