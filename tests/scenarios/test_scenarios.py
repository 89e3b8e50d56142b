"""Every scenario on tiny data: it builds, nothing is on two clients, sizes can be set, wrong names are caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_data import tiny_load

import fedquilt as fq
from fedquilt.client import Split
from fedquilt.data import DataMissing
from fedquilt.data.label_table import label_table
from fedquilt.families.units import cut
from fedquilt.scenario import Scenario
from fedquilt.scenarios import SCENARIOS, build, describe, settings_of

MODULES = ("animals", "feddl", "fedem", "fedrep", "modfl_images", "modfl_signals", "thesis")
SMALL: dict[str, dict[str, Any]] = {
    "digits": {},
    "modfl-images": {"clients": 6, "cohorts": 3, "labels": 3},
    "modfl-cameras": {"clients": 6, "cohorts": 3, "labels": 3},
    "modfl-har": {"clients": 9, "cohorts": 3, "labels": 2},
    "modfl-wearables": {"clients": 6, "cohorts": 3, "labels": 2},
    "feddl-har": {"clients": 4, "donors": 2},
    "feddl-harbox": {"clients": 4, "donors": 1},
    "fedem-cifar10": {"clients": 8, "width": 0.25},
    "fedem-cifar100": {"clients": 8, "width": 0.25},
    "fedem-emnist": {"clients": 8},
    "femnist": {"clients": 5},
    "fedrep-cifar10": {"clients": 20},
    "thesis-mnist": {},
    "thesis-cifar10": {"clients": 4},
    "animals-labels": {"per_label": 4, "public": 20},
}


@pytest.fixture(autouse=True)
def no_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.setattr(f"fedquilt.scenarios.{module}.load", tiny_load)


def small(name: str, seed: int = 0, **more: Any) -> Scenario:
    return build(name, seed, **SMALL[name], **more)


@pytest.mark.parametrize("name", SMALL)
def test_it_builds_with_models_that_fit_its_data(name: str) -> None:
    scenario = small(name)
    assert scenario.name == name
    assert SMALL[name].get("clients", len(scenario.clients)) == len(scenario.clients)
    for client in scenario.clients:
        assert len(client.test) > 0, client.name
        assert set(client.test.y.tolist()) <= set(client.labels)
        for when in (1, *client.changes):
            now = client.at(when)
            logits = now.model().eval()(now.train.x[:2])
            assert logits.shape == (min(2, len(now.train)), scenario.classes)
            assert len(cut(now.model())) >= 2
    table = label_table(scenario)
    assert table.counts.shape == (len(scenario.clients), scenario.classes)
    assert (table.counts.sum(1) > 0).all()


@pytest.mark.parametrize("name", SMALL)
def test_no_sample_is_on_two_clients_or_in_two_splits(name: str) -> None:
    scenario = small(name)
    seen: set[bytes] = set()
    held = [s.x for c in scenario.clients for s in (c.train, c.validation, c.test)]
    public = [s.x for s in (scenario.common, scenario.public_test) if isinstance(s, Split)]
    held += public
    if name == "animals-labels":  # a stream may bring a photograph again, and users are tested on public ones
        held = public
        for client in scenario.clients:
            stream = torch.cat([client.at(r).train.x for r in range(1, 16)])
            once = {row.tobytes(): row for row in stream.numpy()}
            held += [torch.as_tensor(np.stack(list(once.values()))), client.validation.x]
    for x in held:
        for row in x.numpy():
            key = row.tobytes()
            assert key not in seen
            seen.add(key)


@pytest.mark.parametrize("name", SMALL)
def test_the_seed_decides(name: str) -> None:
    a, b, c = small(name), small(name), small(name, seed=1)
    same = [torch.equal(x.train.x, y.train.x) for x, y in zip(a.clients, b.clients, strict=True)]
    assert all(same)
    assert any(
        x.train.x.shape != y.train.x.shape or not torch.equal(x.train.x, y.train.x)
        for x, y in zip(a.clients, c.clients, strict=True)
    )


@pytest.mark.parametrize("name", SMALL)
def test_it_says_what_it_is_in_one_line(name: str) -> None:
    line = describe(SCENARIOS[name])
    assert line.endswith(".")
    assert len(line) < 130
    assert "fraction" in settings_of(SCENARIOS[name])


@pytest.mark.parametrize("name", SMALL)
def test_a_fraction_makes_it_smaller(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, amount in (("modfl_images", 30), ("modfl_signals", 60)):  # what tiny data have, not what the paper has
        monkeypatch.setattr(f"fedquilt.scenarios.{module}.PER_LABEL", amount)
    whole, half = small(name), small(name, fraction=0.5)

    def size(scenario: Scenario) -> int:
        return sum(c.samples for c in scenario.clients)

    assert 0.3 * size(whole) < size(half) < 0.75 * size(whole)


def test_modfl_scenarios_cross_devices_and_cohorts() -> None:
    for name in ("modfl-images", "modfl-cameras", "modfl-har", "modfl-wearables"):
        scenario = small(name)
        pairs = {(c.traits["device"], c.traits["cohort"]) for c in scenario.clients}
        devices, cohorts = ({p[k] for p in pairs} for k in (0, 1))
        assert len(pairs) == len(devices) * len(cohorts)
        for client in scenario.clients:  # the same amount of each label
            assert len(set(np.bincount(client.train.y)[list(client.labels)])) == 1
        for cohort in cohorts:
            assert len({c.labels for c in scenario.clients if c.traits["cohort"] == cohort}) == 1
        models = {c.traits["device"]: c.model() for c in scenario.clients}
        operations = {tuple(tuple(p.shape) for p in m.get_submodule("operation").parameters()) for m in models.values()}
        assert len(operations) == 1


def test_all_labels_make_one_cohort() -> None:
    scenario = build("modfl-cameras", clients=4, labels=9)
    assert {c.traits["cohort"] for c in scenario.clients} == {"cohort1"}


def test_the_digits_are_as_promised() -> None:
    scenario = build("digits")
    assert len(scenario.clients) == 24
    assert {tuple(c.train.x.shape[1:]) for c in scenario.clients} == {(1, 4, 4), (1, 8, 8)}
    assert all(len(c.labels) == 6 for c in scenario.clients)
    pairs = [(c.traits["device"], c.traits["cohort"]) for c in scenario.clients]
    assert {pairs.count(p) for p in pairs} == {3}
    assert label_table(scenario).counts.sum() == 1797


def test_renamed_digits_exchange_names_inside_a_cohort_only() -> None:
    plain, renamed = build("digits"), build("digits", renamed=1)
    for a, b in zip(plain.clients, renamed.clients, strict=True):
        assert a.labels == b.labels
    north = [label_table(s).counts[0] for s in (plain, renamed)]
    assert north[0][0] == north[1][5]
    assert north[0][5] == north[1][0]


def test_feddl_donors_are_nobody_who_takes_part() -> None:
    scenario = small("feddl-har")
    assert scenario.common is not None
    assert len(scenario.common) == 2 * 6 * 20
    assert build("feddl-har", clients=6, donors=0).common is None
    with pytest.raises(ValueError, match="6 people for clients=6 and donors=3"):
        build("feddl-har", clients=6)


def test_animals_follow_table_2() -> None:
    scenario = small("animals-labels")
    kinds = {c.name: [type(c.at(r).model()).__name__ for r in (1, 10, 14)] for c in scenario.clients}
    assert kinds["user-1"] == ["SmallCNN", "MLP", "SmallCNN"]
    user3 = scenario.clients[2]
    assert [sum(p.ndim == 4 for p in user3.at(r).model().parameters()) for r in (4, 5)] == [2, 4]
    assert [c.labels for c in scenario.clients] == [(0, 1), (1, 2), (2, 3)]
    assert not any(change.model for c in build("animals-labels", per_label=4, public=20, model_changes=False).clients
                   for change in c.changes.values())  # fmt: skip
    assert scenario.common is not None
    assert np.bincount(scenario.common.y).tolist() == [10, 10, 10, 10]
    assert isinstance(scenario.public_test, Split)
    mine = torch.isin(scenario.public_test.y, torch.tensor(user3.labels))
    assert torch.equal(user3.test.x, scenario.public_test.x[mine])


def test_thesis_specialists_have_their_extra_fragments_in_train_and_test() -> None:
    scenario = small("thesis-mnist")
    for c, (client, extra) in enumerate(zip(scenario.clients, (4, 1, 4, 1, 3, 2, 2, 3, 4, 3), strict=True)):
        for split in (torch.cat([client.train.y, client.validation.y]), client.test.y):
            counts = np.bincount(split, minlength=10)
            others = np.delete(counts, c)
            assert counts[c] > 0.7 * (1 + extra) * others.mean()


def test_fedrep_clients_have_two_classes_each_and_each_class_the_same_number_of_clients() -> None:
    scenario = small("fedrep-cifar10")
    for split in ("train", "test"):
        counts = label_table(scenario, split).counts
        assert (np.count_nonzero(counts, axis=1) == 2).all()
        assert (np.count_nonzero(counts, axis=0) == 4).all()
    assert len({c.labels for c in scenario.clients}) > 5  # pairs at random, not the same five for all
    held = torch.cat([torch.cat([c.train.y, c.validation.y, c.test.y]) for c in scenario.clients])
    assert len(held) == 600  # every image is somewhere


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("modfl_camera", {}, "did you mean 'modfl-cameras'"),
        ("digits", {"client": 3}, "scenario 'digits': there is no setting 'client'; did you mean 'clients'"),
        ("digits", {"renamed": 4}, "0 to 3 pairs"),
        ("digits", {"clients": 0}, "give at least 1"),
        ("digits", {"clients": 30_000_000}, "has 1797 samples for clients=30000000; give fewer"),
        ("modfl-cameras", {"clients": 30_000_000}, "samples to train on for clients=30000000; take fewer clients"),
        ("modfl-cameras", {"clients": 1}, "at least one for each generation"),
        ("modfl-cameras", {"clients": 900}, "take fewer clients or a larger fraction"),
        ("thesis-mnist", {"clients": 11}, "give 1 to 10"),
        ("femnist", {"clients": 500}, "8 writers for clients=500"),
        ("fedem-cifar10", {"fraction": 0}, "fraction=0"),
        ("fedrep-cifar10", {"labels": 11}, "give at least 1 client, and 1 to 10 labels"),
        ("animals-labels", {"rounds": 0}, "1 round or more"),
    ],
)
def test_wrong_settings_are_refused_with_a_sentence(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(name, **settings)


def test_missing_data_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    with pytest.raises(DataMissing, match=r"stl10\.npz|cifar10\.npz"):
        build("modfl-images", data_dir=str(tmp_path / "file" / "nothing"))


def test_feddl_has_one_scale_for_all_and_so_many_windows_on_wish() -> None:
    own, one = small("feddl-har"), small("feddl-har", scale="all")
    for client in own.clients:
        assert float(client.train.x.mean(dim=(0, 2)).abs().max()) < 1e-4  # each by its own windows
    means = torch.stack([client.train.x.mean(dim=(0, 2)) for client in one.clients])  # (people, channels)
    assert float(means.abs().max()) > 1e-3
    together = torch.cat([client.train.x for client in one.clients])
    assert float(together.mean(dim=(0, 2)).abs().max()) < 1e-4
    few = small("feddl-har", windows=8)
    assert max(c.samples for c in few.clients) < min(c.samples for c in own.clients)
    with pytest.raises(ValueError, match=r"scale is own \(each person's\) or all"):
        small("feddl-har", scale="none")
    with pytest.raises(ValueError, match=r"windows=0 leaves nobody any"):
        small("feddl-har", windows=0)


@pytest.mark.parametrize(("name", "lead"), [("diabetes", "rmse"), ("characters", "accuracy")])
def test_other_tasks_are_learnt_and_sharing_helps(name: str, lead: str) -> None:
    run = fq.run(build(name), "fedavg", rounds=10, engine="vectorised")
    assert run.trouble is None
    assert run.federation.scenario.task.lead == lead
    assert run.summary["gain_over_alone"] > 0


def test_every_scenario_is_tried_here() -> None:
    assert set(SCENARIOS) == {*SMALL, "diabetes", "characters", "har-forecast"}
