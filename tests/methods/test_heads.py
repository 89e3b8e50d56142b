"""FedRoD beside a plain loop, and features in general: what a model's head is given."""

from __future__ import annotations

import pytest
import torch
from plain import Weights, close, federation, first_weights, gradient, mean, net, scenario, weights_of
from torch import Tensor, nn
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.families.heads import head_of, through
from fedquilt.methods import FedAvg, FedRoD

ENGINES = ("sequential", "vectorised")
SIZES = [6.0, 9.0, 4.0]


def two_heads(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of both heads of the plain network, layer by layer; `own.` are the weights of the own head."""
    z = torch.tanh(x @ weights["0.weight"].T + weights["0.bias"])
    return z @ weights["2.weight"].T + weights["2.bias"], z @ weights["own.weight"].T + weights["own.bias"]


def one_round(weights: Weights, client: fq.Client, gamma: float, epochs: int) -> Weights:
    """Shared weights by the balanced loss alone, those of the own head by the loss of the sum alone."""
    x, y = client.train.x, client.train.y
    counts = torch.tensor([float((y == label).sum()) for label in range(3)])

    def balanced(at: Weights) -> Tensor:
        # n_y^gamma e^g_y / sum_c n_c^gamma e^g_c, as the paper writes it
        loud = counts**gamma * two_heads(at, x)[0].exp()
        return -(loud[torch.arange(len(y)), y] / loud.sum(1)).log().mean()

    def personal(at: Weights) -> Tensor:
        return F.cross_entropy(sum(two_heads(at, x), torch.zeros(1)), y)

    for _ in range(epochs):
        for_shared, for_own = gradient(balanced, weights), gradient(personal, weights)
        weights = {n: v - 0.3 * (for_own if n.startswith("own.") else for_shared)[n] for n, v in weights.items()}
    return weights


def with_few_labels(of: fq.Scenario) -> fq.Scenario:
    """The second client has no sample of the last label."""
    clients = list(of.clients)
    x, y = clients[1].train.x, clients[1].train.y
    clients[1] = fq.Client("c1", net, (x, y % 2), clients[1].validation, clients[1].test)
    return fq.Scenario(of.name, clients, of.training, label_names=of.label_names)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_fedrod_by_hand(gamma: float, engine: str) -> None:
    of = with_few_labels(scenario(rounds=3, epochs=2, groups=3))
    fed = federation(of, FedRoD(gamma=gamma), engine)
    shared = first_weights(of)
    own = [{"own.weight": shared["2.weight"], "own.bias": shared["2.bias"]} for _ in of.clients]
    for _ in range(3):
        trained = [one_round(shared | mine, client, gamma, 2) for client, mine in zip(of.clients, own, strict=True)]
        own = [{n: w[n] for n in own[0]} for w in trained]
        shared = mean([{n: w[n] for n in shared} for w in trained], SIZES)
        report = fed.step(evaluate=False)
        numbers = sum(value.numel() for value in shared.values())
        assert report.traffic.total_up == report.traffic.total_down == 3 * 4 * numbers  # FedAvg's: no own head
        for client, mine in zip(of.clients, own, strict=True):
            model = fed.model(client.name)
            names = {f"model.{n}": v for n, v in shared.items()}
            close(weights_of(model), names | {n.replace("own.", "personal."): v for n, v in mine.items()})
            x = client.test.x  # and it predicts with the sum of both, not with its own alone
            torch.testing.assert_close(model(x), sum(two_heads(shared | mine, x), torch.zeros(1)), atol=1e-5, rtol=1e-4)


def test_the_own_head_moves_nothing_that_is_shared() -> None:
    """Also with batches and an optimiser of its own mind: where labels are balanced, what is shared is FedAvg's."""
    plain = scenario(sizes=(6, 9), rounds=3, batch=2, epochs=2, optimiser="adam", lr=0.01)
    clients = []
    for client in plain.clients:
        y = torch.arange(len(client.train)) % 3
        clients.append(fq.Client(client.name, net, (client.train.x, y), client.validation, client.test))
    of = fq.Scenario("balanced", clients, plain.training, label_names=plain.label_names)
    rod, fedavg = federation(of, FedRoD()), federation(of, FedAvg())
    for fed in (rod, fedavg):
        fed.run()
    for unit in ("0", "2"):
        held = [fed.server.held(unit, torch.tensor([0])) for fed in (rod, fedavg)]
        torch.testing.assert_close(*held)


def test_balancing_takes_label_frequencies_out_of_what_is_shared() -> None:
    """Clients that see one label far more often: FedAvg's scores lean to it, those of FedRoD's shared head do not."""
    draw = torch.Generator().manual_seed(0)

    def samples(n: int, often: int) -> tuple[Tensor, Tensor]:
        y = torch.where(torch.rand(n, generator=draw) < 0.9, often, 1 - often)
        return torch.randn(n, 3, generator=draw) * 0.01, y  # the samples tell nothing: only frequencies can be learnt

    clients = [fq.Client(f"c{i}", net, samples(200, 0), samples(5, 0), samples(50, 0)) for i in range(2)]
    of = fq.Scenario("skewed", clients, fq.Training(rounds=40, batch=50, lr=0.5), label_names=("a", "b", "c"))
    fed, fedavg = federation(of, FedRoD()), federation(of, FedAvg())
    for each in (fed, fedavg):
        each.run()
    x = clients[0].test.x
    leaning = fedavg.model("c0")(x).detach()
    shared, own = fed.model("c0")(x, apart=True).detach()
    assert float((leaning[:, 0] - leaning[:, 1]).mean()) > 1.5  # log 9 is 2.2
    assert abs(float((shared[:, 0] - shared[:, 1]).mean())) < 0.3
    assert float(((shared + own)[:, 0] - (shared + own)[:, 1]).mean()) > 1.5  # and the sum knows how often


def test_own_heads_rest_with_who_is_not_chosen() -> None:
    of = scenario((6, 9, 4, 5), rounds=3, share=0.5)
    fed = federation(of, FedRoD())
    for _ in range(3):
        before = [weights_of(fed.model(client.name)) for client in of.clients]
        report = fed.step(evaluate=False)
        for i, client in enumerate(of.clients):
            now = weights_of(fed.model(client.name))
            moved = not torch.equal(now["personal.weight"], before[i]["personal.weight"])
            assert moved == (i in report.participants)
            assert not torch.equal(now["model.2.weight"], before[i]["model.2.weight"])  # all receive what is shared


def test_fedrod_refuses_what_has_no_head_and_what_balances_nothing() -> None:
    of = scenario(rounds=1)
    clients = [fq.Client(c.name, lambda: nn.Linear(3, 3), c.train, c.validation, c.test) for c in of.clients]
    with pytest.raises(ValueError, match=r"client 'c0': the last unit of its model, 'model', is no layer"):
        federation(fq.Scenario("one unit", clients, of.training, label_names=of.label_names), FedRoD())
    with pytest.raises(ValueError, match=r"gamma=0 does not balance labels.* 'fedavg'"):
        FedRoD(gamma=0)


# --- heads ------------------------------------------------------------------------------------------------------------


class Tall(nn.Module):
    """Its last unit is a module of several layers; it is registered first."""

    units = {"body": ["body"], "top": ["top"]}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        self.body = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.top(self.body(x))
        return out


def test_a_head_of_several_layers_is_given_what_the_body_makes() -> None:
    model, x = Tall(), torch.randn(5, 3)
    assert head_of(model, "a") == "top"
    features, scores = through(model, "top", x)
    assert torch.equal(features, model.body(x))  # as it is given, though the head writes on it
    assert torch.equal(scores, model(x))
    assert not model.top._forward_pre_hooks  # nothing is left behind
    under = torch.func.vmap(lambda row: through(model, "top", row[None])[0][0])(x)
    torch.testing.assert_close(under, features)


def test_a_head_that_runs_twice_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.head(self.body(x)))
            return out

    with pytest.raises(ValueError, match="ran 2 times"):
        through(Twice(), "head", torch.zeros(1, 3))


def test_units_that_are_no_layer_have_no_features() -> None:
    class Flat(nn.Sequential):
        units = {"bottom": ["0"], "top": ["1", "2"]}  # noqa: RUF012

    with pytest.raises(ValueError, match=r"'top', is no layer or module by itself"):
        head_of(Flat(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)), "a")
