"""FedAvgM, FedAdagrad, FedAdam, FedYogi: the server's steps by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from crossed import crossed
from plain import close, federation, first_weights, gradient, loss_of, mean, moved, scenario, served
from torch import nn

import fedquilt as fq
from fedquilt.methods import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi, ModFL

BETA_1, BETA_2, TAU = 0.9, 0.99, 1e-2


@pytest.mark.parametrize("kind", ["avgm", "adagrad", "adam", "yogi"])
def test_three_rounds_by_hand(kind: str) -> None:
    of = scenario()
    method: FedAvg = {
        "avgm": FedAvgM(beta=0.5, rate=0.7),
        "adagrad": FedAdagrad(rate=0.05, tau=TAU),
        "adam": FedAdam(rate=0.05, tau=TAU),
        "yogi": FedYogi(rate=0.05, tau=TAU),
    }[kind]
    fed = federation(of, method)
    w = first_weights(of)
    m = {name: torch.zeros_like(value) for name, value in w.items()}
    v = {name: torch.full_like(value, TAU**2) for name, value in w.items()}  # not 0, and never corrected for a bias
    for _ in range(3):
        fed.step(evaluate=False)
        copies = [moved(w, gradient(loss_of(client), w), -0.3) for client in of.clients]
        delta = moved(mean(copies, [6, 9, 4]), w, -1)
        for name, d in delta.items():
            if kind == "avgm":
                m[name] = 0.5 * m[name] + d
                w[name] = w[name] + 0.7 * m[name]
                continue
            beta = 0.0 if kind == "adagrad" else BETA_1
            m[name] = beta * m[name] + (1 - beta) * d
            if kind == "adagrad":
                v[name] = v[name] + d * d
            elif kind == "adam":
                v[name] = BETA_2 * v[name] + (1 - BETA_2) * d * d
            else:
                v[name] = v[name] - (1 - BETA_2) * d * d * torch.sign(v[name] - d * d)
            w[name] = w[name] + 0.05 * m[name] / (v[name].sqrt() + TAU)
        close(served(fed), w, atol=2e-5)


def test_rate_one_and_hardly_any_momentum_is_fedavg() -> None:
    one, other = (federation(scenario(), method) for method in (FedAvgM(beta=1e-9), FedAvg()))
    for fed in (one, other):
        fed.run()
    close(served(one), served(other))


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def test_running_statistics_are_averaged_and_never_optimised() -> None:
    plain = scenario()
    clients = [fq.Client(c.name, with_norm, c.train, c.validation, c.test) for c in plain.clients]
    of = fq.Scenario("norms", clients, plain.training, label_names=plain.label_names)
    held = {}
    for method in (FedAdam(rate=0.1), FedAvg()):
        fed = federation(of, method)
        fed.step(evaluate=False)  # from one start, clients go one way whatever the server does with it
        held[method.name] = fed.model("c0").state_dict()
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(held["fedadam"][name], held["fedavg"][name])
    assert not torch.equal(held["fedadam"]["1.weight"], held["fedavg"]["1.weight"])


@dataclass(frozen=True)
class ModFLM(ModFL):
    """ModFL with a server's momentum in each of its circles."""

    name: ClassVar[str] = "modflm"

    def update(self, *what: Any) -> Any:
        return FedAvgM(beta=0.5).update(*what)


def test_momentum_goes_with_its_circle() -> None:
    """Every circle has a memory of its own: what a circle's server does, it does as if the others were not there."""
    of = crossed(each=2)
    fed = fq.Federation(of, ModFLM(), engine="sequential", device="cpu")
    values, memory = {}, {}
    for _ in range(3):
        circle_values = next(s for s in fed.server.all_values if "operation" in s.units)
        values["before"] = circle_values.value.clone()
        memory["before"] = circle_values.memory.get("m", torch.zeros_like(circle_values.value)).clone()
        fed.step(evaluate=False)
        circle_values = next(s for s in fed.server.all_values if "operation" in s.units)
        assert circle_values.value.shape[0] == 2
        torch.testing.assert_close(circle_values.value, values["before"] + circle_values.memory["m"])
        assert not torch.equal(circle_values.memory["m"][0], circle_values.memory["m"][1])
    assert float(memory["before"].abs().sum()) > 0


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="is FedAvg: use the method 'fedavg'"):
        FedAvgM(beta=0)
    with pytest.raises(ValueError, match="never learns"):
        FedAdam(rate=0)
    with pytest.raises(ValueError, match="tau=0"):
        FedYogi(tau=0)
