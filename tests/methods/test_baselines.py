"""SCAFFOLD, FedRep, Ditto, Per-FedAvg and IFCA, each beside a plain loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plain import (
    Weights,
    close,
    federation,
    first_weights,
    flat,
    gradient,
    loss_of,
    mean,
    moved,
    net,
    order_of,
    scenario,
    served,
    state,
    weights_of,
)
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.methods import IFCA, Ditto, FedAvg, FedPer, FedRep, Local, PerFedAvg, Scaffold

ENGINES = ("sequential", "vectorised")


# --- SCAFFOLD ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_scaffold_by_hand_with_half_the_clients_and_a_rate_that_decays(engine: str) -> None:
    of = scenario((6, 6, 6, 6), rounds=4, epochs=2, share=0.5, decay_at=(0.5,), decay=0.1)
    fed = federation(of, Scaffold(rate=0.8), engine)
    x = first_weights(of)
    nothing = {name: torch.zeros_like(value) for name, value in x.items()}
    c, own = dict(nothing), [dict(nothing) for _ in of.clients]
    for round_ in range(1, 5):
        lr, steps = of.training.rate(round_), 2  # whole batches: an epoch is a step
        chosen = fed.sample_clients(round_)
        assert len(chosen) == 2
        copies, changes = [], []
        for i in chosen:
            y = dict(x)
            for _ in range(steps):
                g = gradient(loss_of(of.clients[i]), y)
                y = {n: y[n] - lr * (g[n] - own[i][n] + c[n]) for n in y}
            new = {n: own[i][n] - c[n] + (x[n] - y[n]) / (steps * lr) for n in y}
            copies.append(y)
            changes.append(moved(new, own[i], -1))
            own[i] = new
        x = moved(x, moved(mean(copies, [1, 1]), x, -1), 0.8)
        c = moved(c, mean(changes, [1, 1]), 2 / 4)  # |S| / N
        report = fed.step(evaluate=False)
        close(served(fed), x)
        torch.testing.assert_close(fed.server.held("c", torch.tensor([0]))[0], flat(c), atol=1e-5, rtol=1e-4)
        for i in range(4):  # those who were not chosen keep theirs
            torch.testing.assert_close(state(fed, i, "c_i"), flat(own[i]), atol=1e-5, rtol=1e-4)
        model = 4 * sum(value.numel() for value in x.values())
        assert report.traffic.total_up == report.traffic.total_down == 2 * 2 * model  # twice FedAvg's


def test_scaffold_counts_each_client_s_own_steps() -> None:
    of = scenario((8, 2), rounds=1, batch=2)  # four steps and one
    fed = federation(of, Scaffold())
    x = first_weights(of)
    fed.step(evaluate=False)
    # With c and c_i at 0, c_i' is the mean gradient along the way, (x - y) / (K eta): of one step, the gradient.
    torch.testing.assert_close(state(fed, 1, "c_i"), flat(gradient(loss_of(of.clients[1]), x)), atol=1e-5, rtol=1e-4)
    layout, rows = fed.simulation.family_states[0].family.layout, fed.simulation.family_states[0].store.all()
    way = (flat(x) - rows[0, : layout.parameters]) / (4 * 0.3)
    torch.testing.assert_close(state(fed, 0, "c_i"), way, atol=1e-5, rtol=1e-4)


def test_scaffold_weighs_clients_alike_whatever_they_have() -> None:
    of = scenario((8, 2), rounds=1)
    fed = federation(of, Scaffold())
    x = first_weights(of)
    fed.step(evaluate=False)
    close(served(fed), mean([moved(x, gradient(loss_of(client), x), -0.3) for client in of.clients], [1, 1]))


def test_scaffold_wants_plain_sgd() -> None:
    for how in ({"momentum": 0.9}, {"optimiser": "adam"}):
        with pytest.raises(ValueError, match=r"'scaffold' reads gradients off the way .* momentum=0"):
            federation(scenario(rounds=1, **how), Scaffold())


# --- FedRep -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_fedrep_trains_the_head_first_then_the_body(engine: str) -> None:
    of = scenario(rounds=2)
    fed = federation(of, FedRep(head_epochs=3, body_epochs=2), engine)
    start = first_weights(of)
    body = {n: v for n, v in start.items() if n.startswith("0.")}
    heads = [{n: v for n, v in start.items() if n.startswith("2.")} for _ in of.clients]
    for _ in range(2):
        bodies = []
        for i, client in enumerate(of.clients):
            now = body | heads[i]
            for names, epochs in (("2.", 3), ("0.", 2)):
                for _ in range(epochs):
                    g = gradient(loss_of(client), now)
                    now = {n: v - 0.3 * g[n] if n.startswith(names) else v for n, v in now.items()}
            heads[i] = {n: now[n] for n in heads[i]}
            bodies.append({n: now[n] for n in body})
        body = mean(bodies, [6, 9, 4])
        fed.step(evaluate=False)
        for i, client in enumerate(of.clients):
            close(weights_of(fed.model(client.name)), body | heads[i])


def test_fedrep_moves_what_fedper_moves() -> None:
    of = scenario(rounds=1)
    reports = [federation(of, method).step(evaluate=False) for method in (FedRep(), FedPer())]
    assert reports[0].traffic.total_up == reports[1].traffic.total_up
    assert reports[0].plan == reports[1].plan


# --- Ditto ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_ditto_by_hand(engine: str) -> None:
    of = scenario(rounds=3)
    fed = federation(of, Ditto(lam=0.5), engine)
    w = first_weights(of)
    v = [dict(w) for _ in of.clients]
    for _ in range(3):
        copies = [moved(w, gradient(loss_of(client), w), -0.3) for client in of.clients]
        for i, client in enumerate(of.clients):
            g = gradient(loss_of(client), v[i])
            v[i] = {n: v[i][n] - 0.3 * (g[n] + 0.5 * (v[i][n] - w[n])) for n in w}  # to what was received
        w = mean(copies, [6, 9, 4])
        fed.step(evaluate=False)
        for i, client in enumerate(of.clients):
            close(weights_of(fed.model(client.name)), v[i])  # the user's own module, and the personal one


def test_ditto_s_shared_model_is_fedavg_s_and_its_twin_stays_home() -> None:
    of = scenario(rounds=3, batch=2, epochs=2)
    ditto, fedavg = federation(of, Ditto(lam=2.0)), federation(of, FedAvg())
    for _ in range(3):
        one, other = ditto.step(evaluate=False), fedavg.step(evaluate=False)
        assert one.traffic.total_up == other.traffic.total_up
    layout = ditto.simulation.family_states[0].family.layout
    for unit in ("0", "2"):
        shared = ditto.server.held(f"shared/{unit}", torch.tensor([0]))
        assert torch.equal(shared, fedavg.server.held(unit, torch.tensor([0])))
    assert all(not bool(ditto.server.plan.sends(f"personal/{unit}").any()) for unit in ("0", "2"))
    assert layout.span("personal")[0] == layout.span("shared")[1]


def test_a_ditto_hardly_drawn_to_the_others_is_alone() -> None:
    of = scenario(rounds=3, batch=2)
    ditto, local = federation(of, Ditto(lam=1e-9)), federation(of, Local())
    for fed in (ditto, local):
        fed.run()
    for client in of.clients:
        close(weights_of(ditto.model(client.name)), weights_of(local.model(client.name)))
    with pytest.raises(ValueError, match="use the method 'local'"):
        Ditto(lam=0)


# --- Per-FedAvg -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", ["first", "hessian-free"])
def test_per_fedavg_by_hand(engine: str, order: str) -> None:
    alpha, delta, module = 0.4, 1e-2, net()
    of = scenario((6, 6), rounds=2, batch=100)
    fed = federation(of, PerFedAvg(order=order, alpha=alpha, delta=delta), engine)  # type: ignore[arg-type]
    w = first_weights(of)
    for round_ in (1, 2):
        copies = []
        for i, client in enumerate(of.clients):
            places = order_of(fed, i, round_)
            parts = [places[at :: 2 if order == "first" else 3] for at in range(2 if order == "first" else 3)]

            def loss(at: Weights, part: Tensor, client: fq.Client = client) -> Tensor:
                return F.cross_entropy(functional_call(module, at, (client.train.x[part],)), client.train.y[part])

            stepped = moved(w, gradient(lambda at, p=parts[0]: loss(at, p), w), -alpha)  # type: ignore[misc]
            g = gradient(lambda at, p=parts[1]: loss(at, p), stepped)  # type: ignore[misc]
            if order == "hessian-free":
                ahead, back = (
                    gradient(lambda at, p=parts[2]: loss(at, p), moved(w, g, s * delta))  # type: ignore[misc]
                    for s in (1, -1)
                )
                g = {n: g[n] - alpha * (ahead[n] - back[n]) / (2 * delta) for n in g}
            copies.append(moved(w, g, -0.3))
        w = mean(copies, [6, 6])
        fed.step(evaluate=False)
        close(served(fed), w, atol=3e-5)


def test_per_fedavg_predicts_after_an_epoch_of_plain_steps() -> None:
    of = scenario((6, 6), rounds=1)
    fed = federation(of, PerFedAvg(alpha=0.2))
    fed.step(evaluate=False)
    ids = fed.simulation.family_states[0].family.ids
    ((received, _),) = fed.simulation.looks({ids: fed.server.instructions(ids)})
    tuned = fed.simulation.fine_tune(ids, received.rows, 2)
    layout = fed.simulation.family_states[0].family.layout
    for i, client in enumerate(of.clients):
        start = layout.split_parameters(received.rows[i, : layout.parameters])
        by_hand = moved(start, gradient(loss_of(client), start), -0.2)  # whole batches: an epoch is a step
        close(layout.split_parameters(tuned[i, : layout.parameters]), by_hand)


def test_a_method_s_own_read_out_is_what_its_results_are_reported_with() -> None:
    done = fq.run(scenario((6, 6), rounds=2), PerFedAvg(), alone=False, engine="sequential")
    assert [readout.name for readout in done.federation.readouts] == ["received", "adapted", "fine-tuned"]
    assert done.summary["readout"] == "fine-tuned"
    done = fq.run(scenario((6, 6), rounds=1), FedAvg(), readouts="adapted", alone=False, engine="sequential")
    assert done.summary["readout"] == "adapted"  # nothing is added where a method has none of its own


# --- IFCA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_ifca_by_hand(engine: str) -> None:
    of = scenario((6, 9, 4, 8), rounds=4, groups=2, lr=1.0)
    # Everybody's validation samples are of the other group: whoever chose by these would choose otherwise.
    crossed = [replace(c, validation=of.clients[i ^ 1].validation) for i, c in enumerate(of.clients)]
    of = fq.Scenario(of.name, crossed, of.training, label_names=of.label_names)
    fed = federation(of, IFCA(clusters=2), engine)
    clusters = [value_of(fed, j) for j in range(2)]
    assert not torch.equal(clusters[0]["0.weight"], clusters[1]["0.weight"])  # each its own draw
    close(clusters[0], first_weights(of))
    model = 4 * sum(value.numel() for value in clusters[0].values())
    for _ in range(4):
        losses = torch.tensor([[float(loss_of(client)(w)) for w in clusters] for client in of.clients])
        choice = losses.argmin(1).tolist()
        copies = [
            moved(clusters[j], gradient(loss_of(c), clusters[j]), -1.0) for c, j in zip(of.clients, choice, strict=True)
        ]
        sizes = [client.samples for client in of.clients]
        for j in range(2):
            mine = [i for i in range(4) if choice[i] == j]
            if mine:  # else it keeps its value
                clusters[j] = mean([copies[i] for i in mine], [sizes[i] for i in mine])
        report = fed.step(evaluate=False)
        assert fed.server.state["choice"].tolist() == choice
        for j in range(2):
            close(value_of(fed, j), clusters[j])
        assert report.traffic.total_up == 4 * (model + 8)  # one model, and the number of the one it was
        assert report.traffic.total_down == 4 * 2 * model
    assert fed.method.describe(fed.server.state, fed.server.plan, fed.server.roster) == {
        "clients_in_clusters": torch.bincount(torch.tensor(choice), minlength=2).tolist()
    }


def value_of(fed: fq.Federation, cluster: int) -> Weights:
    layout = fed.simulation.family_states[0].family.layout
    found: Weights = {}
    for unit in layout.units:
        circle_values = next(
            circle_values for circle_values in fed.server.all_values if unit.name in circle_values.units
        )
        key = next(key for key in circle_values.keys if key[0] == unit.name)
        found |= layout.named(unit.name, circle_values.column(key)[cluster])
    return found


def test_ifca_finds_groups_that_name_classes_otherwise() -> None:
    of = scenario((30, 30, 30, 30, 30, 30), rounds=15, groups=2, lr=0.5, batch=10)
    fed = federation(of, IFCA(clusters=2), "vectorised")
    fed.run()
    choice = fed.server.state["choice"].tolist()
    assert choice in ([0, 1] * 3, [1, 0] * 3)
