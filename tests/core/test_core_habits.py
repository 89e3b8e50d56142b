"""What a step may depend on, and what padding may do: models that keep, draw, count or mix are found out and told."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.families.habits import Habits, habits_of
from fedquilt.runs.checkpoint import federation_state, restore_federation

Builder = Callable[[], nn.Module]
STACKS = ("vectorised", "parallel-stacks")


def data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed)), torch.arange(n) % 3


def scenario(
    build: Builder, sizes: Sequence[int] = (22, 9, 15), tests: Sequence[int] = (7, 12, 5),
    changes: dict[int, fq.Change] | None = None,
) -> fq.Scenario:  # fmt: skip
    made = [
        fq.Client(f"c{i}", build, data(n, i), test=data(m, 70 + i), labels=(0, 1, 2),
                  changes=changes if i == 0 else None)
        for i, (n, m) in enumerate(zip(sizes, tests, strict=True))
    ]  # fmt: skip
    return fq.Scenario("s", made, fq.Training(rounds=4, batch=4, lr=0.1))


def federation(given: fq.Scenario, engine: str = "sequential", **more: Any) -> fq.Federation:
    return fq.Federation(given, fq.methods.Local(), engine=engine, device="cpu", **more)


def trained(given: fq.Scenario, engine: str = "sequential", rounds: int = 4) -> fq.Federation:
    """A federation after some rounds; what it says is not looked at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        fed = federation(given, engine)
        for _ in range(rounds):
            fed.step(evaluate=False)
        fed.close()
    return fed


def same(one: fq.Federation, other: fq.Federation, names: Sequence[str] = ("c0", "c1", "c2")) -> None:
    for name in names:
        pairs = zip(one.model(name).parameters(), other.model(name).parameters(), strict=True)
        for mine, yours in pairs:
            torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-5)


# --- state outside of parameters and buffers -------------------------------------------------------------------------


class Skipping(nn.Module):
    """Leaves a layer out now and then, as something that it keeps decides."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.base, self.more, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.number, self.items, self.table, self.array = 0, [0], {"calls": 0}, np.zeros(1, dtype=np.int64)
        self.plain = torch.zeros(6)
        self.python, self.numpy = random.Random(3), np.random.default_rng(3)
        self.torch = torch.Generator().manual_seed(3)

    def takes(self) -> bool:
        self.number += self.how == "number"
        self.items[0] += self.how == "list"
        self.table["calls"] += self.how == "dict"
        self.array += self.how == "array"
        counted = (self.number + self.items[0] + self.table["calls"] + int(self.array[0])) % 2 == 0
        draws: dict[str, Callable[[], float]] = {
            "python": self.python.random, "numpy": self.numpy.random, "global": random.random,
            "global numpy": np.random.random,
            "torch": lambda: float(torch.rand((), generator=self.torch)),
        }  # fmt: skip
        return draws[self.how]() < 0.5 if self.how in draws else counted

    def forward(self, x: Tensor) -> Tensor:
        inside = self.base(x).relu()
        if self.training:
            if self.how == "plain":
                self.plain = 0.9 * self.plain + 0.1 * inside.detach().mean(0)
            if self.takes():
                inside = inside + self.more(inside).relu() - self.plain
        scores: Tensor = self.head(inside)
        return scores


HOWS = ("number", "list", "dict", "array", "plain", "python", "numpy", "torch", "global", "global numpy")


@pytest.mark.parametrize("how", HOWS)
def test_a_model_that_keeps_or_draws_trains_from_a_fresh_copy(how: str) -> None:
    given = scenario(lambda: Skipping(how), (40, 40, 40))
    with pytest.warns(RuntimeWarning, match="draws from Python" if "global" in how else "it changes '"):
        federation(given).step(evaluate=False)
    state = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    alone = trained(fq.Scenario("one", given.clients[1:2], given.training))
    together = trained(given)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state  # type: ignore[index]  # noqa: NPY002
    same(alone, together, ["c1"])  # whoever else is there
    same(trained(given, "vectorised"), together)  # whatever the engine is
    kept: dict[str, Tensor] = {}
    text = federation_state(trained(given, rounds=2), kept)
    resumed = federation(given)
    restore_federation(resumed, kept, text)
    for _ in range(2):
        resumed.step(evaluate=False)
    for name in ("c0", "c1", "c2"):  # as if it had never been interrupted, to the last bit
        for one, other in zip(resumed.model(name).parameters(), together.model(name).parameters(), strict=True):
            assert torch.equal(one, other)


def test_a_model_without_a_finite_score_is_looked_at_as_others_are() -> None:
    samples = torch.full((5, 2), torch.inf)
    assert habits_of(nn.Linear(2, 3), samples, torch.zeros(5).long()) == Habits()


def test_by_hand_a_fresh_copy_for_each_round() -> None:
    given = scenario(lambda: Skipping("number"), (4, 4, 4))  # one batch a round
    fed = trained(given, rounds=0)
    model = copy.deepcopy(fed.model("c1"))
    numbers, (x, y) = model.state_dict(), data(4, 1)
    for _ in range(3):
        fresh = Skipping("number").train()
        fresh.load_state_dict(numbers)
        F.cross_entropy(fresh(x), y).backward()
        with torch.no_grad():
            for parameter in fresh.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
        numbers = fresh.state_dict()
    torch.testing.assert_close(trained(given, rounds=3).model("c1").state_dict(), numbers)


CALLS = [0]


class Global(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        scores: Tensor = self.scores(x) * CALLS[0]
        return scores


def test_a_model_that_depends_on_what_no_copy_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="client 'c0': its model gives two results for the same parameters"):
        federation(scenario(Global))


class Uncertain(nn.Module):
    """Drops numbers in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(F.dropout(x, 0.5))
        return scores


def test_chance_in_eval_mode_does_not_depend_on_others() -> None:
    given = scenario(Uncertain, (4, 4, 4), (40, 40, 40))
    rows = []
    for some in (given.clients, given.clients[1:2]):
        for engine in ("sequential", "vectorised"):
            fed = federation(fq.Scenario("s", some), engine)
            rows += [r for e in fed.evaluate() for r in e.rows() if r["client"] == "c1" and r["readout"] == "received"]
    assert len({row["accuracy"] for row in rows}) == 1


def test_what_is_only_buffers_is_no_habit() -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    found = habits_of(net, *data(5, 0))
    assert not found.apart
    assert not found.mixes
    assert not found.guesses
    assert found.constant == frozenset()


# --- padding ---------------------------------------------------------------------------------------------------------


class Centred(nn.Module):
    """Takes the mean of the batch off, beside buffers of great numbers."""

    def __init__(self, places: int = 1, raw: bool = False) -> None:
        super().__init__()
        self.into, self.out, self.raw = nn.Linear(6, 8), nn.Linear(8, 3), raw
        self.norm = nn.BatchNorm1d(6) if raw else nn.Identity()
        self.register_buffer("position_ids", torch.arange(places))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.into(self.norm(x * 255 if self.raw else x))
        scores: Tensor = self.out(inside - inside.mean(0))
        return scores


class PerHead(nn.Module):
    """Divides by how many samples there are: it sees that there is padding, not what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(x) / len(x)
        return scores


MIXING: dict[str, Builder] = {
    "positions": lambda: Centred(5000), "raw pixels": lambda: Centred(raw=True), "count": PerHead,
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_great_numbers_do_not_hide_what_padding_does(name: str) -> None:
    given = scenario(MIXING[name], (22, 30, 42))
    fed = federation(given, "vectorised")
    with pytest.warns(RuntimeWarning, match="it mixes the samples of a batch"):
        fed.step(evaluate=False)
    assert fed.simulation.engines == ["parallel"]
    same(fed, trained(given, rounds=1))
    fed.close()


@pytest.mark.parametrize("engine", STACKS)
def test_a_change_may_make_clients_uneven(engine: str) -> None:
    change = {3: fq.Change(train=data(31, 9))}
    given = scenario(Centred, (12, 12, 12), changes=change)
    fed = federation(given, engine)
    for _ in range(2):
        fed.step(evaluate=False)
    assert fed.simulation.engines == [engine]
    with pytest.warns(RuntimeWarning, match="it mixes the samples of a batch"):
        fed.step(evaluate=False)
    fed.step(evaluate=False)
    same(fed, trained(given))
    fed.close()


class Folded(nn.Module):
    """A batch norm over all times of all samples, or over two halves one after another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.norm, self.head = how, nn.BatchNorm1d(2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "times":
            inside = self.norm(x.reshape(-1, 2)).view(len(x), 6)
        else:
            both = self.norm(torch.cat([x[:, :2], x[:, 2:4]]))
            inside = torch.cat([both[: len(x)], both[len(x) :], x[:, 4:]], dim=1)
        scores: Tensor = self.head(inside)
        return scores


@pytest.mark.parametrize("engine", ["auto", *STACKS])
@pytest.mark.parametrize("how", ["times", "halves"])
def test_a_norm_over_a_folded_batch(how: str, engine: str) -> None:
    given = scenario(lambda: Folded(how), (22, 30, 42))
    same(trained(given, engine, 2), trained(given, rounds=2))


def test_a_norm_over_a_folded_batch_of_one_sample() -> None:
    made = scenario(lambda: Folded("times"), (3, 2, 4))
    given = fq.Scenario("s", made.clients, fq.Training(rounds=2, batch=1, lr=0.1))
    same(trained(given, "vectorised", 2), trained(given, rounds=2))


class Relative(nn.Module):
    """Looks at the batch in eval mode too, by code of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.scores = how, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        inside = F.normalize(x, dim=0) if self.how == "normalise" else x - x.mean(0)
        scores: Tensor = self.scores(inside)
        return scores


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("how", ["normalise", "mean"])
def test_scores_of_a_model_that_looks_at_the_batch(how: str, engine: str) -> None:
    for few, most in ((12, 7), (1, 40), (12, 400)):
        given = scenario(lambda: Relative(how), (few,) * 3, (7, most, 7))
        fed = federation(given, engine)
        (found,) = [e for e in fed.step().evaluations if (e.split, e.readout) == ("test", "received")]
        for i, client in enumerate(given.clients):
            right = (fed.model(client.name)(client.test.x).argmax(1) == client.test.y).float().mean()
            assert found.rows()[i]["accuracy"] == pytest.approx(float(right))
