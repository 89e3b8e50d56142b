"""LG-FedAvg, FedBN and FedBABU, each beside a plain loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plain import close, federation, first_weights, gradient, loss_of, mean, moved, scenario, weights_of
from torch import Tensor, nn
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.methods import FedAvg, FedBABU, FedBN, FedPer, LGFedAvg

ENGINES = ("sequential", "vectorised")
SIZES = [6.0, 9.0, 4.0]


def with_model(of: fq.Scenario, model: Callable[[], nn.Module]) -> fq.Scenario:
    clients = [fq.Client(c.name, model, c.train, c.validation, c.test) for c in of.clients]
    return fq.Scenario(of.name, clients, of.training, label_names=of.label_names)


def bytes_of(numbers: int) -> int:
    return 4 * numbers * len(SIZES)


# --- LG-FedAvg --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_lg_fedavg_averages_the_top_and_keeps_the_bottom(engine: str) -> None:
    of = scenario(rounds=3)
    fed = federation(of, LGFedAvg(), engine)
    own = [first_weights(of) for _ in of.clients]
    for _ in range(3):
        own = [moved(w, gradient(loss_of(client), w), -0.3) for client, w in zip(of.clients, own, strict=True)]
        top = {name: value for name, value in mean(own, SIZES).items() if name.startswith("2.")}  # and not the bottom
        own = [w | top for w in own]
        report = fed.step(evaluate=False)
        assert report.traffic.total_up == report.traffic.total_down == bytes_of(4 * 3 + 3)
        for client, w in zip(of.clients, own, strict=True):
            close(weights_of(fed.model(client.name)), w)


def test_lg_fedavg_shares_what_fedper_keeps() -> None:
    of = scenario(rounds=1)
    lg, per = (federation(of, method).step(evaluate=False) for method in (LGFedAvg(shared=1), FedPer(personal=1)))
    for unit in ("0", "2"):
        assert (lg.plan.sends(unit) != per.plan.sends(unit)).all()


def test_lg_fedavg_with_nothing_at_home_or_nothing_shared() -> None:
    with pytest.raises(ValueError, match="use the method 'local'"):
        LGFedAvg(shared=0)
    with pytest.raises(ValueError, match=r"client 'c0' has 2 unit\(s\), so shared=2 .* use the method 'fedavg'"):
        federation(scenario(), LGFedAvg(shared=2))


# --- FedBN ------------------------------------------------------------------------------------------------------------


def normed() -> nn.Module:
    """Its norm is called what norms are not called, and its first layer what they are."""
    parts = {"bn": nn.Linear(3, 4), "scale": nn.BatchNorm1d(4), "squash": nn.Tanh(), "head": nn.Linear(4, 3)}
    module = nn.Sequential()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def one_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.train()
    loss = F.cross_entropy(model(x), y)
    for parameter, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        parameter.data.sub_(0.3 * g)


@pytest.mark.parametrize("engine", ENGINES)
def test_fedbn_keeps_norms_and_their_statistics_home(engine: str) -> None:
    of = with_model(scenario(rounds=3), normed)
    fed = federation(of, FedBN(), engine)
    start = federation(of, FedAvg()).model("c0").state_dict()
    models = [normed() for _ in of.clients]
    for model in models:
        model.load_state_dict(start)
    for _ in range(3):
        for model, client in zip(models, of.clients, strict=True):
            one_step(model, client.train.x, client.train.y)
        copies = [{n: v.detach().clone() for n, v in m.named_parameters() if "scale" not in n} for m in models]
        merged = mean(copies, SIZES)
        for model in models:
            model.load_state_dict(merged, strict=False)
        report = fed.step(evaluate=False)
        assert report.traffic.total_up == report.traffic.total_down == bytes_of(3 * 4 + 4 + 4 * 3 + 3)
        for client, model in zip(of.clients, models, strict=True):
            mine, theirs = (
                {n: v.float() for n, v in m.state_dict().items()} for m in (fed.model(client.name), model)
            )  # fmt: skip
            close(mine, theirs)
    means = [model.get_buffer("scale.running_mean") for model in models]
    assert not torch.equal(means[0], means[1])


@pytest.mark.parametrize("norm", [nn.LayerNorm, lambda width: nn.GroupNorm(2, width)])
def test_fedbn_keeps_norms_without_a_batch_home_too(norm: Callable[[int], nn.Module]) -> None:
    of = with_model(scenario(), lambda: nn.Sequential(nn.Linear(3, 4), norm(4), nn.Linear(4, 3)))
    plan = federation(of, FedBN()).server.plan
    assert [unit for unit in plan.units if not bool(plan.sends(unit).any())] == ["1"]


class Mixed(nn.Sequential):
    """One unit holds a linear layer and a norm."""

    units = {"base": ["0", "1"], "head": ["2"]}  # noqa: RUF012


def test_fedbn_refuses_what_it_cannot_part() -> None:
    mixed = with_model(scenario(), lambda: Mixed(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)))
    with pytest.raises(ValueError, match=r"unit 'base' of client 'c0' .* \(linear\); give its model `units` that keep"):
        federation(mixed, FedBN())
    with pytest.raises(
        ValueError, match=r"without layers that normalise, as that of client 'c0', is FedAvg: use .*'fedavg'"
    ):
        federation(scenario(), FedBN())


def test_fedbn_where_some_models_have_no_norms() -> None:
    plain, norms = scenario(), with_model(scenario(), normed)
    clients = [norms.clients[0], *plain.clients[1:]]
    fed = federation(fq.Scenario("some", clients, plain.training, label_names=plain.label_names), FedBN())
    assert not bool(fed.server.plan.sends("scale").any())
    assert fed.server.plan.sends("2").tolist() == [False, True, True]


# --- FedBABU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_fedbabu_learns_a_body_under_a_head_that_rests(engine: str) -> None:
    of = scenario(rounds=3, weight_decay=0.1)  # which must not move the head either
    fed = federation(of, FedBABU(), engine)
    start = first_weights(of)
    head, body = ({n: v for n, v in start.items() if n.startswith(which)} for which in ("2.", "0."))
    for _ in range(3):
        bodies = []
        for client in of.clients:
            g = gradient(loss_of(client), body | head)
            bodies.append({n: v - 0.3 * (g[n] + 0.1 * v) for n, v in body.items()})
        body = mean(bodies, SIZES)
        report = fed.step(evaluate=False)
        assert report.traffic.total_up == report.traffic.total_down == bytes_of(3 * 4 + 4)  # and no head
        for client in of.clients:
            now = weights_of(fed.model(client.name))
            close(now, body | head)
            assert all(torch.equal(now[name], value) for name, value in head.items())


@pytest.mark.parametrize("tunes", ["all", "head"])
def test_fedbabu_predicts_after_fine_tuning(tunes: str) -> None:
    of = scenario(rounds=1)
    fed = federation(of, FedBABU(tunes=tunes, tuning_epochs=2))  # type: ignore[arg-type]
    fed.step(evaluate=False)
    ids = fed.simulation.family_states[0].family.ids
    ((received, _),) = fed.simulation.looks({ids: fed.server.instructions(ids)})
    tuned = fed.simulation.fine_tune(ids, received.rows, 2)
    layout = fed.simulation.family_states[0].family.layout
    for i, client in enumerate(of.clients):
        w = layout.split_parameters(received.rows[i, : layout.parameters])
        for _ in range(2):
            g = gradient(loss_of(client), w)
            w = {n: v - 0.3 * g[n] if tunes == "all" or n.startswith("2.") else v for n, v in w.items()}
        close(layout.split_parameters(tuned[i, : layout.parameters]), w)
    assert fq.run(of, FedBABU(), alone=False, engine="sequential").summary["readout"] == "fine-tuned"


def test_fedbabu_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="use the method 'fedavg'"):
        FedBABU(personal=0)
    with pytest.raises(ValueError, match="random head"):
        FedBABU(tuning_epochs=0)
