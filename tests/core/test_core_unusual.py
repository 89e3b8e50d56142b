"""Models and data that are unusual but reasonable: every engine takes them, and all engines agree."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedquilt as fq

ENGINES = ("sequential", "vectorised", "parallel-stacks")
Draw = Callable[[int], Tensor]


def clients(
    build: Callable[[], nn.Module], sizes: Sequence[int] = (22, 9, 15), tests: Sequence[int] = (7, 12, 5),
    shape: tuple[int, ...] = (6,), draw: Draw | None = None,
) -> fq.Scenario:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    take = draw or (lambda n: torch.randn(n, *shape, generator=generator))
    made = [
        fq.Client(f"c{i}", build, (take(n), torch.arange(n) % 3), test=(take(m), torch.arange(m) % 3), labels=(0, 1, 2))
        for i, (n, m) in enumerate(zip(sizes, tests, strict=True))
    ]
    return fq.Scenario("unusual", made, fq.Training(rounds=2, batch=4, lr=0.1))


def go(scenario: fq.Scenario, method: str = "fedavg", engine: str = "sequential", **more: Any) -> fq.Run:
    return fq.run(scenario, method, engine=engine, device="cpu", alone=False, **more)


class OwnNorm(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class Functional(nn.Module):
    """Mixes the samples of a batch, or drops some numbers, by a function instead of a layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.into(x)
        if self.how == "norm":
            inside = F.batch_norm(inside, None, None, training=True)
        elif self.how == "mean":
            inside = inside - inside.mean(0)
        elif self.how == "dropout":
            inside = F.dropout(inside, 0.5, self.training)
        scores: Tensor = self.out(inside)
        return scores


MIXING: dict[str, Callable[[], nn.Module]] = {
    "own norm": lambda: nn.Sequential(nn.Linear(6, 8), OwnNorm(8), nn.Linear(8, 3)),
    "function": lambda: Functional("norm"),
    "mean": lambda: Functional("mean"),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(6, 3)
    ),
}


@pytest.mark.parametrize("engine", ["auto", "vectorised", "parallel-stacks"])
@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_would_see_padding_is_not_stacked(name: str, engine: str) -> None:
    scenario = clients(MIXING[name], (22, 30, 42))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        run = go(scenario, engine=engine)
    if engine != "auto":  # which may have found that one by one is faster anyway
        assert "it mixes the samples of a batch" in str(told[0].message)
    assert run.summary["engine"] in ("parallel", "sequential")
    expected = go(scenario).model("c0").state_dict()
    for key, value in run.model("c0").state_dict().items():
        torch.testing.assert_close(value, expected[key])


@pytest.mark.parametrize("name", MIXING)
def test_clients_of_one_size_have_no_padding(name: str) -> None:
    scenario = clients(MIXING[name], (22, 22, 22))
    run, expected = go(scenario, engine="vectorised"), go(scenario).model("c0").state_dict()
    assert run.summary["engine"] == "vectorised"
    for key, value in run.model("c0").state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)


def test_what_a_model_draws_itself_is_no_mixing() -> None:
    assert go(clients(lambda: Functional("dropout")), engine="vectorised").summary["engine"] == "vectorised"


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.recurrent, self.head = kind(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.recurrent(x)[0][:, -1])
        return scores


class Tempered(nn.Module):
    """Scores over a temperature, a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.temperature = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.scores(x) / self.temperature
        return scaled


class Masked(nn.Module):
    """Attention over the past alone, by a mask of -inf that is a buffer."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(2, 4), nn.Linear(4, 3)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.into(x)
        seen = (inside @ inside.transpose(-1, -2) + self.mask).softmax(-1) @ inside
        scores: Tensor = self.out(seen[:, -1])
        return scores


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gru": (lambda: Recurrent(nn.GRU), (4, 2)),
    "rnn": (lambda: Recurrent(nn.RNN), (4, 2)),
    "scalar": (Tempered, (6,)),
    "mask": (Masked, (3, 2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_engines_agree(name: str) -> None:
    build, shape = MODELS[name]
    scenario = clients(build, shape=shape)
    first = fq.Federation(scenario, fq.methods.FedAvg(), engine="sequential", device="cpu").model("c0").state_dict()
    runs = {engine: go(scenario, engine=engine) for engine in ENGINES}
    expected = runs["sequential"].model("c0").state_dict()
    assert any(not torch.equal(first[key], value) for key, value in expected.items())
    for run in runs.values():
        assert run.summary["refused_updates"] == 0
        for key, value in run.model("c0").state_dict().items():
            torch.testing.assert_close(value, expected[key])
        assert [row["accuracy"] for row in run.rows] == [row["accuracy"] for row in runs["sequential"].rows]


def norm_of_the_batch() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("engine", ENGINES)
def test_scores_do_not_depend_on_how_many_samples_others_have(engine: str) -> None:
    scores = []
    for most in (20, 200):
        run = go(clients(norm_of_the_batch, (40, 20), (19, most)), "local", engine)
        row = run.rows[-2]
        assert (row["client"], row["split"], row["round"]) == ("c0", "test", 2)
        split = run.federation.scenario.clients[0].test
        right = (run.model("c0")(split.x).argmax(1) == split.y).float().mean()
        assert row["accuracy"] == pytest.approx(float(right))
        scores.append(row["accuracy"])
    assert scores[0] == scores[1]


class Words(nn.Module):
    """Texts of words, 0 after their end; a text has one word at least."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.recurrent, self.head = nn.Embedding(9, 4), nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        long = (x > 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), long, batch_first=True, enforce_sorted=False)
        scores: Tensor = self.head(self.recurrent(packed)[1][-1])
        return scores


def test_padding_is_a_sample_that_the_model_takes() -> None:
    def texts(n: int) -> Tensor:
        long = torch.arange(n)[:, None] % 4 + 1
        return torch.where(torch.arange(5) < long, torch.arange(n)[:, None] % 8 + 1, 0)

    run = go(clients(Words, tests=(3, 8, 0), draw=texts))
    assert {row["client"] for row in run.rows if row["split"] == "test"} == {"c0", "c1"}
    assert run.summary["clients_measured"] == 2


class Lenient(nn.Module):
    """Takes whole numbers as well."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(x.float())
        return scores


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_with_other_types_of_samples_are_of_another_family(engine: str) -> None:
    whole, parts, y = torch.randint(0, 3, (30, 6)), torch.rand(30, 6) - 0.5, torch.arange(30) % 3
    made = [
        fq.Client("whole", Lenient, (whole, y), test=(whole, y)),
        fq.Client("parts", Lenient, (parts, y), test=(parts, y)),
    ]
    run = go(fq.Scenario("types", made, fq.Training(rounds=2, lr=0.5, batch=8)), engine=engine)
    row = run.rows[-1]
    assert (row["client"], row["readout"], row["split"]) == ("parts", "adapted", "test")
    own = run.federation.simulation.model(1)
    assert row["accuracy"] == pytest.approx(float((own(parts).argmax(1) == y).float().mean()))


@pytest.mark.parametrize("method", ["local", "fedavg"])
def test_the_adapted_read_out_alone(method: str) -> None:
    run = fq.run(clients(Tempered), method, engine="sequential", readouts=("adapted",))
    assert run.summary["readout"] == "adapted"
    assert run.summary["gain_over_alone"] == pytest.approx(0.0 if method == "local" else run.summary["gain_over_alone"])


def test_heads_of_one_client_may_be_the_base_of_another() -> None:
    def shallow() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))

    def deep() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 3))

    given = clients(shallow, (8, 8), (3, 3)).clients, clients(deep, (8, 8), (3, 3)).clients
    made = [
        fq.Client(f"{kind}{i}", c.model, c.train, test=c.test, labels=c.labels)
        for kind, some in zip("ab", given, strict=True)
        for i, c in enumerate(some)
    ]
    plan = go(fq.Scenario("two depths", made, fq.Training(rounds=1)), "fedper").plan
    assert plan["0"].receives.tolist() == [True] * 4
    assert plan["2"].receives.tolist() == [False, False, True, True]
    assert plan["4"].receives.tolist() == [False, False, False, False]


def test_left_out_updates_are_counted_in_rounds_without_a_look() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.scores(x) * (torch.inf if self.training else 1.0)
            return scores

    federation = fq.Federation(
        clients(Odd), fq.methods.FedAvg(), fq.Training(rounds=4), engine="sequential", device="cpu", evaluate_every=2
    )
    assert [federation.step().refused for _ in range(4)] == [3, 6, 9, 12]
