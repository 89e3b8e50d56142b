"""FedProto beside a plain loop."""

from __future__ import annotations

import pytest
import torch
from plain import Weights, close, federation, first_weights, gradient, moved, net, order_of, scenario, state, weights_of
from torch import Tensor, nn
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.methods import FedProto, Local

ENGINES = ("sequential", "vectorised")
Prototypes = dict[int, Tensor]


def body(weights: Weights, x: Tensor) -> Tensor:
    return torch.tanh(x @ weights["0.weight"].T + weights["0.bias"])


def run(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    z = body(weights, x)
    return z, z @ weights["2.weight"].T + weights["2.bias"]


def trained(weights: Weights, client: fq.Client, known: Prototypes, lam: float, parts: list[Tensor]) -> Weights:
    for part in parts:
        x, y = client.train.x[part], client.train.y[part]

        def loss(at: Weights, x: Tensor = x, y: Tensor = y) -> Tensor:
            z, scores = run(at, x)
            # a sample whose label has no prototype has itself as target, as in the authors' code
            target = torch.stack([known.get(int(label), z[i].detach()) for i, label in enumerate(y)])
            return F.cross_entropy(scores, y) + lam * F.mse_loss(z, target)

        weights = moved(weights, gradient(loss, weights), -0.3)
    return weights


def own_prototypes(weights: Weights, client: fq.Client) -> dict[int, tuple[Tensor, int]]:
    found = {}
    for label in sorted(set(client.train.y.tolist())):
        x = client.train.x[client.train.y == label]
        found[label] = (body(weights, x).mean(0), len(x))
    return found


def few_labels(sizes: tuple[int, ...], **training: object) -> fq.Scenario:
    """Client i never saw label i % 3, so labels have unlike owners and counts."""
    plain = scenario(sizes, **training)  # type: ignore[arg-type]
    clients = []
    for i, c in enumerate(plain.clients):
        y = torch.where(c.train.y == i % 3, (i + 1) % 3, c.train.y)
        clients.append(fq.Client(c.name, net, (c.train.x, y), c.validation, c.test))
    return fq.Scenario("few labels", clients, plain.training, label_names=plain.label_names)


@pytest.mark.parametrize("engine", ENGINES)
def test_fedproto_by_hand(engine: str) -> None:
    of = few_labels((6, 9, 4), rounds=4, batch=3, lr=0.3)
    fed = federation(of, FedProto(lam=0.8), engine)
    own = [first_weights(of) for _ in of.clients]
    known: Prototypes = {}
    for round_ in range(1, 5):
        heard: dict[int, list[tuple[Tensor, int]]] = {}
        for i, client in enumerate(of.clients):
            parts = list(order_of(fed, i, round_).split(3))
            own[i] = trained(own[i], client, known, 0.8, parts)
            for label, said in own_prototypes(own[i], client).items():
                heard.setdefault(label, []).append(said)
        report = fed.step(evaluate=False)
        down = 3 * len(known) * 4 * 4  # every global prototype to everyone, and nothing at first
        labels = sum(len(said) for said in heard.values())
        counts = 3 * 3 * 4  # with how many samples each label has
        assert (report.traffic.total_up, report.traffic.total_down) == (labels * 4 * 4 + counts, down)
        for label, all_said in heard.items():
            total = sum(n for _, n in all_said)
            known[label] = sum((n / total * value for value, n in all_said), torch.zeros(4))
            held = fed.server.held(f"label-{label}", torch.tensor([0]))[0]
            torch.testing.assert_close(held, known[label], atol=1e-5, rtol=1e-4)
        for i, client in enumerate(of.clients):
            close(weights_of(fed.model(client.name)), own[i])  # the user's own module, which never left
    assert known.keys() == {0, 1, 2}
    assert not any(bool(fed.server.plan.sends(unit).any()) for unit in ("0", "2", "counts"))
    ids = fed.simulation.family_states[0].family.ids
    ((received, _),) = fed.simulation.looks({ids: fed.server.instructions(ids)})
    look = fq.readouts.EvaluationContext(received, received, predict=fed.method.predicts)
    found = look.scores("received", "test").argmax(2)
    for i, client in enumerate(of.clients):
        distances = torch.stack([(body(own[i], client.test.x) - known[label]).norm(dim=1) for label in range(3)], 1)
        assert found[i, : len(client.test)].tolist() == distances.argmin(1).tolist()  # all labels, not its own alone


def test_each_client_s_score_is_its_own() -> None:
    """Per-user accuracies must not run on from user to user, nor mix what head and prototypes say."""
    of = few_labels((6, 9, 4), rounds=2)
    for by in ("prototypes", "head"):
        fed = federation(of, FedProto(by=by))
        fed.step(evaluate=False)
        evaluations = {(e.readout, e.split): e for e in fed.step().evaluations}
        rows = {row["client"]: row["accuracy"] for row in evaluations["received", "test"].rows()}
        for client in of.clients:
            w = weights_of(fed.model(client.name))
            z, scores = run(w, client.test.x)
            known = torch.stack([fed.server.held(f"label-{j}", torch.tensor([0]))[0] for j in range(3)])
            guess = scores.argmax(1) if by == "head" else torch.cdist(z, known).argmin(1)
            assert rows[client.name] == pytest.approx(float((guess == client.test.y).float().mean()))


def test_unlike_architectures_with_features_of_one_width() -> None:
    plain = scenario((6, 9, 4, 7), rounds=2)

    def deep() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))

    clients = [
        fq.Client(c.name, deep if i % 2 else net, c.train, c.validation, c.test) for i, c in enumerate(plain.clients)
    ]
    of = fq.Scenario("unlike", clients, plain.training, label_names=plain.label_names)
    fed = federation(of, FedProto())
    fed.run()
    assert len(fed.simulation.family_states) == 2
    for label in range(3):
        plan = fed.server.plan[f"label-{label}"]
        assert isinstance(plan, fq.UnitPlan)
        assert plan.circle.tolist() == [0] * 4
        counts = [int((c.train.y == label).sum()) for c in clients]
        assert plan.weight.tolist() == counts
        total, expected = sum(counts), torch.zeros(4)
        for client, n in zip(clients, counts, strict=True):
            x = client.train.x[client.train.y == label]
            if n:
                expected += n / total * fed.model(client.name)[:-1](x).detach().mean(0)  # type: ignore[index]
        torch.testing.assert_close(fed.server.held(f"label-{label}", torch.tensor([1]))[0], expected)


def test_hardly_drawn_to_prototypes_is_alone() -> None:
    of = scenario(rounds=3, batch=2)
    proto, local = federation(of, FedProto(lam=1e-9)), federation(of, Local())
    for fed in (proto, local):
        fed.run()
    for client in of.clients:
        close(weights_of(proto.model(client.name)), weights_of(local.model(client.name)))


def test_with_some_clients_a_label_keeps_what_was_heard_of_it() -> None:
    of = few_labels((6, 9, 4, 5), rounds=6, share=0.25)
    fed = federation(of, FedProto())
    known: Prototypes = {}
    for _ in range(6):
        (who,) = fed.step(evaluate=False).participants
        client = of.clients[who]
        for label, (value, _) in own_prototypes(weights_of(fed.model(client.name)), client).items():
            known[label] = value
        for label, value in known.items():
            held = fed.server.held(f"label-{label}", torch.tensor([0]))[0]
            torch.testing.assert_close(held, value, atol=1e-5, rtol=1e-4)
        counts = [int((client.train.y == label).sum()) for label in range(3)]
        assert state(fed, who, "counts").tolist() == counts


def test_fedproto_refuses_what_is_alone_and_what_has_no_known_width() -> None:
    with pytest.raises(ValueError, match="use the method 'local'"):
        FedProto(lam=0)
    plain = scenario(rounds=1)
    layers = lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))  # noqa: E731
    clients = [fq.Client(c.name, layers, c.train, c.validation, c.test) for c in plain.clients]
    with pytest.raises(ValueError, match="the head of its model begins with a LayerNorm"):
        federation(fq.Scenario("norm", clients, plain.training, label_names=plain.label_names), FedProto())
