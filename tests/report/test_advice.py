"""Advice from runs that are made up: chosen on validation samples, told by test samples, with everybody who loses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedquilt._util.metric import Metric
from fedquilt.report.advice import VOTE, advise, hopeless
from fedquilt.report.comparison_data import Group
from fedquilt.report.read_runs import Floats, RunFiles, Series, Traffic

CLIENTS = tuple(f"phone-{i}" for i in range(12))
NOISE = np.random.default_rng(0).normal(0, 0.01, size=(3, 12))
NOISE -= NOISE.mean(axis=1, keepdims=True)


def group(
    name: str, validation: float, test: float | Floats, megabytes: float = 10.0, seeds: int = 2, **summary: object
) -> Group:
    """Runs whose clients score so much, up to a little noise that differs by seed."""

    def series(score: float | Floats, seed: int) -> Series:
        return Series((1, 2), np.stack([np.zeros(12), score + NOISE[seed]]))

    runs = []
    for seed in range(seeds):
        found = {
            (readout, split): series(score - (0.05 if readout == "received" else 0.0), seed)
            for readout in ("received", VOTE)
            for split, score in (("validation", validation), ("test", test))
        }
        moved = np.full((2, 12), megabytes / 48)
        traffic = Traffic((1, 2), moved, moved)
        runs.append(RunFiles(
            folder=__file__, scenario="phones", method=name, seed=seed, reading=("received", "test"),  # type: ignore[arg-type]
            clients=CLIENTS, series=found, traffic=traffic, summary=summary,
        ))  # fmt: skip
    return Group(name, runs)


def test_what_is_best_on_validation_samples_is_advised_whatever_test_samples_say() -> None:
    race = [group("local", 0.60, 0.60, 0.0), group("fedavg", 0.70, 0.90), group("auto", 0.80, 0.75, 11.0)]
    advice = advise(race, "phones", seeds=2)
    assert (advice.method, advice.readout) == ("auto", VOTE)
    use, good, sure, cost, *_ = advice.sentences
    assert use.startswith("Use 'auto'")
    assert "12 clients, 2 seeds" in use
    assert "clients score 75.0 %" in good
    assert "+20.0 points over training alone" in good  # alone is the model that clients train, 5 points below its vote
    assert "'fedavg', it is -15.0 points on test samples" in sure  # told, though it speaks against the choice
    assert "that is real" in sure
    assert cost == "It moves 0.917 MB a client in the whole run, sent and received, 1.10 times what FedAvg moves."


def test_whoever_loses_is_named_and_cheaper_methods_that_are_level_too() -> None:
    scores = np.full(12, 0.75)
    scores[3], scores[7] = 0.40, 0.50
    race = [group("local", 0.6, 0.6, 0.0), group("fedavg", 0.7, scores, 10.0), group("fedper", 0.69, scores, 7.0)]
    advice = advise(race, "phones", {"ditto": 0.31}, 2)
    told = "\n".join(advice.sentences)
    assert "Who gains: 10 of 12 clients over training alone; 2 lose: phone-3 (-15.0), phone-7 (-5.0)." in told
    assert "with 70 % of its bytes: 'fedper'" in told
    assert "'ditto' (31.0 points behind)" in told
    assert advice.facts["gains"]["phone-3"] == pytest.approx(-0.15)
    assert any(command.startswith("fedquilt advise phones --seeds 4") for command in advice.next)  # not sure


def test_where_nothing_helps_clients_are_left_alone() -> None:
    advice = advise([group("local", 0.9, 0.9, 0.0), group("fedavg", 0.7, 0.95)], "phones", seeds=2)
    assert advice.sentences[0].startswith("Let clients train alone")
    assert not any("Who gains" in sentence for sentence in advice.sentences)


def test_only_what_is_surely_far_behind_is_hopeless_and_alone_never_is() -> None:
    wild = group("wild", 0.72, 0.72)
    for run in wild.runs:  # behind by 8 points in the mean, but by no means for everybody
        run.series[VOTE, "validation"].score[-1] += np.where(np.arange(12) % 2, 0.3, -0.3)
    race = [
        group("auto", 0.8, 0.1),
        group("local", 0.2, 0.9),
        group("fedavg", 0.79, 0.1),
        group("ifca", 0.7, 0.9),
        wild,
    ]
    assert hopeless(race) == {"ifca": pytest.approx(0.1)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([], "no evidence that any unit should be shared by fewer than all."),
        (
            ["round 9: unit head, split in 3 circles; rejected: each by itself"],
            "round 9: unit head, split in 3 circles.",
        ),
    ],
)
def test_what_auto_found_is_told(changes: list[str], says: str) -> None:
    race = [group("local", 0.6, 0.6, 0.0), group("auto", 0.8, 0.8, changes=changes)]
    assert advise(race, "phones").sentences[-1].endswith(says)


def test_where_less_is_better_the_least_is_advised_and_gains_are_above_0() -> None:
    metric = Metric("rmse", higher=False, low=0.0)
    race = [group("local", 1.0, 1.0, 0.0), group("fedavg", 0.8, 0.7), group("auto", 0.6, 0.75, 11.0)]
    race = [Group(g.name, [replace(run, metric=metric) for run in g.runs]) for g in race]
    assert set(hopeless(race)) == {"fedavg"}  # a third above the best; clients alone stay
    assert hopeless(race)["fedavg"] == pytest.approx(0.2)
    advice = advise(race, "phones", {"ifca": 0.5}, seeds=2)
    assert advice.method == "auto"
    told = "\n".join(advice.sentences)
    assert "clients score rmse 0.75 with it, +0.2 over training alone" in told  # alone is read out as it is: 0.95
    assert "Lower is better" in told
    assert "'fedavg', it is -0.05 on test samples" in told
    assert "'ifca' (0.5 behind)" in told
    assert "12 of 12 clients over training alone; nobody loses" in told
    assert "points" not in told
