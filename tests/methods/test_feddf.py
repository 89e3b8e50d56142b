"""FedDF beside a plain loop: PyTorch's own Adam, schedule and divergence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain import Weights, close, federation, gradient, mean, moved, net, scenario, served
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import fedquilt as fq
from fedquilt._util.randomness import key_of
from fedquilt.interface.server_training import ServerTraining
from fedquilt.methods import FedAvg, FedDF
from fedquilt.methods.feddf import _ensemble

SIZES = [6.0, 9.0, 4.0]
LESSONS = {"rate": 0.01, "steps": 40, "patience": 10, "batch": 100}


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))


def taught(builders: Sequence[Callable[[], nn.Module]] = (net, net, net), share: float = 1.0) -> fq.Scenario:
    """Three clients that name classes each its own way, and eleven samples of the server's."""
    plain = scenario(rounds=2, groups=3, epochs=12, lr=0.5, share=share)
    clients = [
        fq.Client(c.name, build, c.train, c.validation, c.test)
        for c, build in zip(plain.clients, builders, strict=True)
    ]
    common = torch.randn(11, 3, generator=torch.Generator().manual_seed(8)) * 2, torch.arange(11) % 3
    return fq.Scenario("taught", clients, plain.training, common, label_names=plain.label_names)


def scores(build: Callable[[], nn.Module], weights: Weights, x: Tensor) -> Tensor:
    out: Tensor = functional_call(build(), weights, (x,))
    return out


def trained(build: Callable[[], nn.Module], weights: Weights, client: fq.Client) -> Weights:
    """Twelve steps on all samples of a client."""
    for _ in range(12):
        slope = gradient(lambda at: F.cross_entropy(scores(build, at, client.train.x), client.train.y), weights)
        weights = moved(weights, slope, -0.5)
    return weights


def lessons(build: Callable[[], nn.Module], start: Weights, goal: Tensor, x: Tensor, round_: int) -> Weights:
    """The best weights on the samples aside, of forty steps of PyTorch's Adam at most."""
    order = torch.randperm(11, generator=torch.Generator().manual_seed(key_of("distil", 0, round_)))
    aside, own = order[:3], order[3:]

    def apart(weights: Weights, some: Tensor) -> Tensor:
        return F.kl_div(scores(build, weights, x[some]).log_softmax(1), goal[some], reduction="batchmean")

    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    adam = torch.optim.Adam(leaves.values(), lr=0.01)
    falls = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=40)
    best, since, least = start, 0, float(apart(start, aside))
    for step in range(1, 41):
        adam.zero_grad()
        apart(leaves, own).backward()
        adam.step()
        falls.step()
        now = float(apart(leaves, aside).detach())
        if now < least - 1e-6:
            best, since, least = {n: v.detach().clone() for n, v in leaves.items()}, step, now
        elif step - since >= 10:
            break
    return best


def value(fed: fq.Federation, client: int) -> Weights:
    """The server's model of a client's architecture."""
    layout = fed.simulation.family_states[fed.simulation.home[client][0]].family.layout
    found: Weights = {}
    for unit in layout.units:
        found |= layout.named(unit.name, fed.server.held(unit.name, torch.tensor([client]))[0])
    return found


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("builders", [(net, net, net), (net, wide, net)])
def test_feddf_by_hand(builders: Sequence[Callable[[], nn.Module]], engine: str) -> None:
    of = taught(builders)
    fed = federation(of, FedDF(**LESSONS), engine)  # type: ignore[arg-type]
    now = [value(fed, i) for i in range(3)]
    assert of.common is not None
    x = of.common.x  # type: ignore[union-attr]
    for round_ in (1, 2):
        report = fed.step(evaluate=False)
        numbers = sum(v.numel() for weights in now for v in weights.values())
        assert report.traffic.total_up == report.traffic.total_down == 4 * numbers  # as FedAvg, and the lone one too
        sent = [trained(build, weights, c) for build, weights, c in zip(builders, now, of.clients, strict=True)]
        logits = torch.stack([scores(build, weights, x) for build, weights in zip(builders, sent, strict=True)])
        for i, build in enumerate(builders):
            same = [k for k in range(3) if builders[k] is build]
            merged = mean([sent[k] for k in same], [SIZES[k] for k in same])
            now[i] = lessons(build, merged, logits.mean(0).softmax(1), x, round_)
            close(value(fed, i), now[i], atol=2e-4)
            # the traps, which are other models: probabilities averaged, taught by one's own kind alone, not taught
            by_answers = lessons(build, merged, logits.softmax(2).mean(0), x, round_)
            for wrong in [
                merged,
                by_answers,
                *([] if len(same) == 3 else [_own_kind(build, merged, logits, same, x, round_)]),
            ]:
                assert max(float((wrong[n] - now[i][n]).abs().max()) for n in wrong) > 2e-3


def _own_kind(
    build: Callable[[], nn.Module], merged: Weights, logits: Tensor, same: Sequence[int], x: Tensor, round_: int
) -> Weights:
    return lessons(build, merged, logits[list(same)].mean(0).softmax(1), x, round_)


@pytest.mark.parametrize("rule", [fq.sharing.mean, fq.sharing.median])
def test_without_a_lesson_it_is_fedavg_whatever_merges(rule: Any) -> None:
    of, method = taught(share=0.7), FedDF()
    object.__setattr__(method, "steps", 0)  # which a user cannot say
    fed, fedavg = (federation(of, each, rule=rule) for each in (method, FedAvg()))
    for each in (fed, fedavg):
        each.run()
    close(served(fed), served(fedavg), atol=0.0)


def test_without_a_lesson_architectures_are_averaged_by_themselves() -> None:
    of, method = taught((net, wide, net)), FedDF()
    object.__setattr__(method, "steps", 0)
    fed = federation(of, method)
    start = value(fed, 0)
    fed.step(evaluate=False)
    apart = [trained(net, start, of.clients[i]) for i in (0, 2)]
    close(value(fed, 0), mean(apart, [6.0, 4.0]))
    assert fed.server.plan["0"].circle.tolist() == [0, 1, 0]  # type: ignore[union-attr]


def test_no_label_of_the_server_s_samples_is_looked_at() -> None:
    of = taught()
    assert isinstance(of.common, fq.client.Split)
    other = replace(of, common=fq.client.Split(of.common.x, of.common.y.flip(0)))
    found = []
    for each in (of, other):
        fed = federation(each, FedDF(**LESSONS))  # type: ignore[arg-type]
        fed.run()
        found.append(served(fed))
    close(found[0], found[1], atol=0.0)


def test_running_statistics_are_averaged_and_no_more() -> None:
    fed, fedavg = (federation(taught((normed,) * 3), m) for m in (FedDF(**LESSONS), FedAvg()))  # type: ignore[arg-type]
    for each in (fed, fedavg):
        each.step(evaluate=False)
    mine, theirs = value(fed, 0), value(fedavg, 0)
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=0)
    assert float((mine["0.weight"] - theirs["0.weight"]).abs().max()) > 1e-3


def test_what_teaches_is_finite_and_knows_the_class() -> None:
    def models(*said: list[float]) -> Any:
        return SimpleNamespace(scores=lambda: torch.tensor(said)[:, None], classes=3)

    told = _ensemble([models([1.0, 2.0, 3.0], [torch.nan, 5.0, 6.0]), models([3.0, 4.0])])
    assert told is not None
    torch.testing.assert_close(told, torch.tensor([[2.0, 3.0, 3.0]]))
    assert _ensemble([models([torch.inf, 0.0, 0.0])]) is None
    assert _ensemble([]) is None


def test_the_server_takes_the_best_that_it_saw_and_stops_where_nothing_gets_better() -> None:
    seen: list[int] = []

    def loss(now: Any, some: Tensor) -> Tensor:
        seen.append(len(some))
        bump = 100.0 if len(some) == 2 else 0.0  # aside, it only gets worse after a while
        apart: Tensor = (now["w"] - 3).square().sum() + bump * (now["w"] - 0.5).clamp(min=0).square().sum()
        return apart

    best, (first, least) = ServerTraining(0.1, 500, 7, 100)(loss, {"w": torch.zeros(1)}, 10, seed=0)
    assert 0.3 < float(best["w"]) < 0.8
    assert least < first
    assert seen.count(8) < 30  # steps, of 500


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "teaches nothing: use the method 'fedavg'"),
        ({"rate": 0.0}, "teaches nothing: use the method 'fedavg'"),
        ({"patience": 0}, "must be at least 1"),
        ({"batch": 0}, "must be at least 1"),
    ],
)
def test_what_switches_it_off_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FedDF(**settings)


def test_without_samples_of_the_server_s_it_says_so() -> None:
    with pytest.raises(ValueError, match=r"give the scenario common=\(x, y\)"):
        federation(scenario(), FedDF())
