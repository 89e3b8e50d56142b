"""Central privacy: rounds by hand, joint clipping, the noise's length, Poisson sampling, and the same bits again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("dp_accounting")

from privacy_help import by_hand, changes, learnable, run, shared, still, unrelated

import fedquilt as fq
from fedquilt._util.randomness import each_of
from fedquilt.core.federation import Federation
from fedquilt.core.guard import Guard
from fedquilt.core.protection import CLIP, WITHIN, protect
from fedquilt.interface.messages import Instructions, UnitValues, Update
from fedquilt.methods import FedAvg
from fedquilt.report.page import data_json
from fedquilt.report.page_content import page_data

SAMPLES = [(0.4, 0), (2.0, 0), (10.0, 1)]


def test_a_round_by_hand_without_noise_is_the_mean_of_clipped_changes() -> None:
    result = run(by_hand(SAMPLES), privacy=fq.Privacy(noise=0.0, clip=1.0, smallest=2))
    change = changes(SAMPLES)  # lengths 0.4, 2 and 10 over both units together
    assert change.norm(dim=1).tolist() == pytest.approx([0.4, 2.0, 10.0])
    clipped = change / change.norm(dim=1, keepdim=True).clamp(min=1.0)
    assert shared(result).tolist() == pytest.approx(clipped.mean(0).tolist(), abs=1e-6)


def test_one_clip_for_all_units_together() -> None:
    """Clipped unit by unit, each of two units could be as long as the clip, and both together 1.4 times that."""
    result = run(by_hand([(10.0, 0), (10.0, 0)]), privacy=fq.Privacy(noise=0.0, clip=1.0, smallest=2))
    assert float(shared(result).norm()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("clip", [1e-6, 1e-4, 1e-3, 1.0])
def test_no_change_is_longer_than_the_clip_by_the_rounding_of_large_weights(clip: float) -> None:
    """Last places of weights that are 900 long together are 3e-5; what is less than that is not sent, and not more."""
    start, way = torch.randn(2, 2, 100_000, generator=torch.Generator().manual_seed(0))
    start = 3 * start
    down = Instructions(1, (0, 1), (UnitValues(("u",), (100_000,), None, start),), (None,), {})
    up = Update(1, down.ids, (UnitValues(("u",), (100_000,), None, start + way),))
    sent = protect(up, down, fq.Privacy(noise=1.0, clip=clip), range(2)).blocks[0].value
    lengths = (sent.double() - start.double()).norm(dim=1)
    assert float(lengths.max()) <= clip
    assert float(lengths.min()) >= (0.95 * clip if clip >= 1e-3 else 0)


def test_one_clip_for_units_in_other_circles_too() -> None:
    """One unit is shared by all and one in cohorts, where a client is alone: they travel and are summed apart."""
    apart, cohorts = by_hand([(10.0, 0)] * 5), ("k0", "k1", "k0", "k1", "k2")
    clients = [
        fq.Client(c.name, c.model, c.train, c.validation, c.test, {"cohort": cohort, "device": "d"}, c.labels)
        for c, cohort in zip(apart.clients, cohorts, strict=True)
    ]
    scenario = fq.Scenario("apart", clients, apart.training)
    how = {"by": {"a": "everyone", "b": "cohort"}}
    for privacy in (fq.Privacy(noise=0.0, clip=1.0, smallest=2), fq.Privacy(noise=0.0, clip=1.0, level="local")):
        result = run(scenario, "modfl", privacy, settings=how)
        held = {key[0]: values.column(key) for values in result.federation.server.all_values for key in values.keys}
        assert (len(held["a"]), len(held["b"])) == (1, 3)
        # of four clients each has half of its way in either unit; the fifth sends one of them, and all of its way in it
        assert held["a"].norm() == pytest.approx((4 * 0.5**0.5 + 1) / 5, rel=1e-5)
        assert held["b"].norm(dim=1).tolist() == pytest.approx([0.5**0.5, 0.5**0.5, 0.0], rel=1e-5)


def test_with_a_clip_that_nobody_reaches_it_is_fedavg_of_equal_weights() -> None:
    scenario = learnable(uneven=True)
    private = run(scenario, privacy=fq.Privacy(noise=0.0, clip=1e6, smallest=2))
    state = {client.name: private.federation.model(client.name).state_dict() for client in scenario.clients}
    equal = Federation(scenario, Uniform(), engine="sequential", device="cpu")
    equal.run()
    for name, found in state.items():
        for key, value in equal.model(name).state_dict().items():
            assert torch.allclose(found[key], value, rtol=1e-4, atol=1e-6)


class Uniform(FedAvg):
    """FedAvg in which all count alike."""

    def plan(self, state: dict[str, object], roster: fq.authoring.Roster) -> fq.Plan:
        plan = super().plan(state, roster)
        return fq.Plan({unit: fq.UnitPlan(planned.circle) for unit, planned in plan.units.items()})  # type: ignore[union-attr]


def test_the_sum_is_divided_by_the_weight_expected_whoever_came() -> None:
    """With each of three clients at one half, the sum of changes is divided by 1.5, be they one, two or three."""
    scenario = by_hand(SAMPLES, share=0.5, sampling="poisson", rounds=1)
    for seed in range(8):
        result = run(scenario, privacy=fq.Privacy(noise=0.0, clip=100.0, smallest=2), seed=seed)
        came = list(result.federation.sample_clients(1))
        assert shared(result).tolist() == pytest.approx((changes(SAMPLES)[came].sum(0) / 1.5).tolist(), abs=1e-6)


def test_the_noise_of_every_number_has_the_promised_length() -> None:
    """Clients that do not move, 4000 numbers in two circles: what is left is noise of z C over the senders."""
    noise, clip, clients = 3.0, 0.5, 6
    still = (torch.zeros(1, 1000), torch.tensor([0]))
    made = [
        fq.Client(f"c{i}", Wide, still, still, still, {"cohort": f"k{i % 2}", "device": "d"}, (0, 1))
        for i in range(clients)
    ]
    scenario = fq.Scenario("still", made, fq.Training(rounds=1, batch=1))
    how = {"by": {"*": "cohort"}}
    result = run(scenario, "modfl", fq.Privacy(noise=noise, clip=clip, smallest=3), settings=how)
    values = shared(result)
    assert len(values) == 4000
    expected = noise * clip / (clients / 2)
    assert float(values.std()) == pytest.approx(expected, rel=0.04)
    assert abs(float(values.mean())) < 4 * expected / math.sqrt(len(values))
    kurtosis = float((values / values.std()).pow(4).mean())
    assert kurtosis == pytest.approx(3.0, abs=0.3)
    half = values.view(2, -1)  # the circles' noises have nothing to do with each other
    assert abs(float(torch.corrcoef(half)[0, 1])) < 0.1


class Wide(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(1000, 2, bias=False)
        torch.nn.init.zeros_(self.weight)


def test_noise_of_one_unit_circle_round_or_seed_says_nothing_of_anothers() -> None:
    """Of noise that comes twice a difference is rid: rounds, circles and units must have their own."""
    found, method = [], fq.methods.ModFL(by={"a": "everyone", "b": "cohort"})
    for seed in (0, 1):
        privacy = fq.Privacy(noise=2.0, smallest=3)
        federation = Federation(still(), method, engine="sequential", device="cpu", seed=seed, privacy=privacy)
        for _ in range(3):
            before = [values.value.clone() for values in federation.server.all_values]
            federation.step(evaluate=False)
            after = [values.value for values in federation.server.all_values]
            found += [row for now, then in zip(after, before, strict=True) for row in now - then]
    assert len(found) == 2 * 3 * 3  # seeds, rounds, circles
    unrelated(torch.stack(found))


def test_noise_also_comes_where_nobody_was_chosen() -> None:
    """That nobody came must not show either."""
    scenario = by_hand(SAMPLES, share=0.05, sampling="poisson")
    seed = next(seed for seed in range(50) if not each_of(3, 0.05, _key(seed)))
    result = run(scenario, privacy=fq.Privacy(noise=1.0, smallest=2), seed=seed)
    assert result.federation.sample_clients(1) == ()
    assert bool(shared(result).all())


def _key(seed: int) -> int:
    from fedquilt._util.randomness import key_of

    return key_of("participants", seed, 1)


def test_poisson_sampling_chooses_each_client_by_itself() -> None:
    scenario = learnable(6, share=0.3, sampling="poisson")
    federation = Federation(scenario, FedAvg(), engine="sequential", device="cpu")
    rounds = [federation.sample_clients(round_) for round_ in range(1, 2001)]
    for client in range(6):
        assert sum(client in chosen for chosen in rounds) / 2000 == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / 2000))
    both = sum(0 in chosen and 1 in chosen for chosen in rounds) / 2000
    assert both == pytest.approx(0.09, abs=4 * math.sqrt(0.09 * 0.91 / 2000))
    sizes = [len(chosen) for chosen in rounds]
    assert min(sizes) == 0
    assert max(sizes) >= 5


@pytest.mark.parametrize("method", ["fedavg", "fedper", "ditto", "modfl", "fedadam", "scaffold"])
def test_engines_agree(method: str) -> None:
    privacy = fq.Privacy(noise=0.5, clip=0.3, smallest=2)
    how = {"by": {"*": "cohort"}} if method == "modfl" else None
    here, there = (
        run(learnable(uneven=True), method, privacy, engine=e, settings=how) for e in ("sequential", "vectorised")
    )
    assert torch.allclose(shared(here), shared(there), rtol=1e-3, atol=1e-5)


def test_resumed_to_the_same_bits(tmp_path: Path) -> None:
    """With all that changes from round to round: sampling, noise, a clip that follows."""
    privacy = fq.Privacy(epsilon=20, clip=0.3, smallest=2, adaptive=True)
    scenario = learnable(share=0.7, sampling="poisson", rounds=5)

    class Stopped(Exception):
        pass

    def stop(federation: Federation, report: object) -> None:
        if federation.round == 3:
            raise Stopped

    whole = run(scenario, privacy=privacy, out=tmp_path / "whole", checkpoint_every=2)
    with pytest.raises(Stopped):
        run(scenario, privacy=privacy, out=tmp_path / "cut", checkpoint_every=2, callbacks=[stop])
    resumed = fq.resume(tmp_path / "cut", scenario)
    assert torch.equal(shared(whole), shared(resumed))
    for name in ("metrics.jsonl", "privacy.jsonl", "traffic.jsonl"):
        assert (tmp_path / "whole" / name).read_text() == (tmp_path / "cut" / name).read_text(), name


def test_what_was_spent_is_kept_and_told(tmp_path: Path) -> None:
    result = run(learnable(), privacy=fq.Privacy(epsilon=9, smallest=2), out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "privacy.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert lines[0]["epsilon"] < lines[1]["epsilon"] < lines[2]["epsilon"] <= 9
    assert lines[2]["epsilon"] == result.summary["epsilon"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["delta"] == 1e-5
    assert "Private with epsilon 9 at delta 1e-05, for each client as a whole" in summary["privacy"]
    assert summary["privacy"] in str(result)
    assert all(row["training_loss"] is None for row in result.rows)
    page = data_json(page_data([tmp_path / "run"]))
    assert summary["privacy"] in page
    assert json.dumps(summary["epsilon"])[:8] in page


def test_signal_to_noise_follows_from_the_plan() -> None:
    """Eight clients in one circle, of which half come, 83 numbers: changes of C each, noise of z C sqrt(83)."""
    scenario = learnable(8, share=0.5, sampling="poisson")
    result = run(scenario, privacy=fq.Privacy(noise=2.0, smallest=2))
    assert result.summary["signal_to_noise"] == pytest.approx(4 / (2.0 * math.sqrt(83)))


def test_the_clip_follows_the_median_change() -> None:
    """Changes of lengths 1 to 7: from far below and from far above, the clip goes to about the middle one."""
    samples = [(float(x), 0) for x in range(1, 8)]
    for start in (0.2, 60.0):
        lr_that_stays = by_hand(samples, rounds=60, lr=1e-4)  # so that changes stay what they are: 1e-4 to 7e-4
        privacy = fq.Privacy(noise=0.0, clip=start * 1e-4, smallest=2, adaptive=True)
        guard = run(lr_that_stays, privacy=privacy, evaluate_every=60).federation.server.guard
        assert guard is not None
        assert 3e-4 < guard.clip < 5e-4


def test_counting_for_the_clip_is_inside_the_promise() -> None:
    """Noise on the update and noise on the count come to the promised one: 1 / z^2 = 1 / z_u^2 + 1 / (2 s)^2."""
    guard = run(learnable(), privacy=fq.Privacy(noise=1.5, smallest=2, adaptive=True)).federation.server.guard
    assert guard is not None
    assert guard.noise > 1.5
    assert guard.noise**-2 + (2 * guard.count_noise) ** -2 == pytest.approx(1.5**-2)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_the_count_that_the_clip_follows_has_its_noise(rate: float) -> None:
    """All of 30 clients are within the clip: what it goes by, but for that, is noise of s / 30, anew in each round."""
    privacy = fq.Privacy(noise=3.0, adaptive=True, clip_rate=0.1)
    guard, clients = Guard(privacy, rate, int(30 / rate), secret=5), tuple(range(30))
    up, found = Update(1, clients, (), {WITHIN: torch.ones(30, 1)}), []
    for _ in range(500):
        assert guard.tells(30)[CLIP].tolist() == [[guard.clip]] * 30  # changes are cut to what noise is of
        before = guard.clip
        guard.next([up])
        found.append((-math.log(guard.clip / before) / 0.1 + 0.5 - 1.0) * 30 / guard.count_noise)
    assert guard.count_noise == 3.0
    assert torch.tensor(found).std() == pytest.approx(1.0, abs=0.1)
    assert abs(float(torch.tensor(found).mean())) < 0.15


def test_a_client_says_no_more_than_whether_it_was_within_the_clip() -> None:
    """Of changes of 0.5 to 3 times the clip, and one that is no number."""
    privacy = fq.Privacy(noise=1.0, clip=1.0, smallest=2, adaptive=True)
    down = Instructions(1, tuple(range(4)), (UnitValues(("u",), (2,), None, torch.zeros(4, 2)),), (None,), {})
    value = torch.tensor([[0.5, 0.0], [1.0, 0.0], [0.0, 3.0], [math.nan, 0.0]])
    up = protect(Update(1, down.ids, (UnitValues(("u",), (2,), None, value),)), down, privacy, range(4))
    assert up.reports[WITHIN].tolist() == [[1.0], [1.0], [0.0], [0.0]]
