"""FML beside a plain loop."""

from __future__ import annotations

import pytest
import torch
from plain import (
    Weights,
    close,
    federation,
    first_weights,
    gradient,
    mean,
    moved,
    net,
    order_of,
    scenario,
    weights_of,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.methods import FML, FedAvg, Local

ENGINES = ("sequential", "vectorised")
SIZES = [6.0, 9.0, 4.0]


def run(weights: Weights, x: Tensor) -> Tensor:
    out: Tensor = functional_call(net(), weights, (x,))
    return out


def mutual(part: float, learner: Weights, teacher: Weights, x: Tensor, y: Tensor) -> Weights:
    """The gradient of one model's loss; PyTorch's own divergence, and the teacher a constant."""
    told = run(teacher, x).softmax(1)

    def loss(at: Weights) -> Tensor:
        scores = run(at, x)
        listening = F.kl_div(scores.log_softmax(1), told, reduction="batchmean")
        return part * F.cross_entropy(scores, y) + (1 - part) * listening

    return gradient(loss, learner)


def memes(fed: fq.Federation, client: int = 0) -> Weights:
    """The server's meme for a client."""
    family_state = fed.simulation.family_states[fed.simulation.home[client][0]]
    found: Weights = {}
    for unit in family_state.family.layout.units:
        if unit.name.startswith("meme/"):
            held = fed.server.held(unit.name, torch.tensor([client]))[0]
            found |= {n.removeprefix("meme."): v for n, v in family_state.family.layout.named(unit.name, held).items()}
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_fml_by_hand(engine: str) -> None:
    of = scenario(rounds=3, batch=3, groups=3)
    fed = federation(of, FML(alpha=0.3, beta=0.6), engine)
    meme = first_weights(of)
    own = [dict(meme) for _ in of.clients]
    for round_ in range(1, 4):
        copies = []
        for i, client in enumerate(of.clients):
            mine = dict(meme)
            for part in order_of(fed, i, round_).split(3):
                x, y = client.train.x[part], client.train.y[part]
                for_own, for_meme = mutual(0.3, own[i], mine, x, y), mutual(0.6, mine, own[i], x, y)  # both at once
                own[i], mine = moved(own[i], for_own, -0.3), moved(mine, for_meme, -0.3)
            copies.append(mine)
        meme = mean(copies, SIZES)
        report = fed.step(evaluate=False)
        numbers = sum(value.numel() for value in meme.values())
        assert report.traffic.total_up == report.traffic.total_down == 3 * 4 * numbers
        close(memes(fed), meme)
        for client, weights in zip(of.clients, own, strict=True):
            close(weights_of(fed.model(client.name)), weights)  # what predicts


def test_a_meme_that_listens_to_nobody_is_fedavg_s() -> None:
    of = scenario(rounds=3, batch=2)
    fml, fedavg = federation(of, FML(beta=1.0)), federation(of, FedAvg())
    for fed in (fml, fedavg):
        fed.run()
    for unit in ("0", "2"):
        held = fml.server.held(f"meme/{unit}", torch.tensor([0])), fedavg.server.held(unit, torch.tensor([0]))
        torch.testing.assert_close(*held)


def test_own_models_that_hardly_listen_are_alone_and_those_that_listen_are_not() -> None:
    of = scenario(rounds=3, batch=2, groups=3)
    local = federation(of, Local())
    local.run()
    for alpha, alike in ((1 - 1e-9, True), (0.5, False)):
        fed = federation(of, FML(alpha=alpha))
        fed.run()
        one, other = (weights_of(each.model("c0"))["2.weight"] for each in (fed, local))
        assert torch.allclose(one, other, atol=1e-5) == alike


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))


def test_unlike_models_have_one_meme() -> None:
    plain = scenario(rounds=2)
    clients = [
        fq.Client(c.name, wide if i == 1 else net, c.train, c.validation, c.test) for i, c in enumerate(plain.clients)
    ]
    of = fq.Scenario("unlike", clients, plain.training, label_names=plain.label_names)
    meme = {"input_shape": (3,), "sizes": (4,)}
    fed = federation(of, FML(meme="mlp", meme_settings=meme))
    assert len(fed.simulation.family_states) == 2
    before = memes(fed)
    copies = []
    for client, build in zip(clients, (net, wide, net), strict=True):
        network = fq.models.MODELS["mlp"](**meme, classes=3)
        own = build()
        own.load_state_dict(fed.model(client.name).state_dict())
        network.load_state_dict(before)
        x, y = client.train.x, client.train.y
        loss = 0.5 * F.cross_entropy(network(x), y) + 0.5 * F.kl_div(
            network(x).log_softmax(1), own(x).detach().softmax(1), reduction="batchmean"
        )
        loss.backward()
        copies.append({n: p.detach() - 0.3 * p.grad for n, p in network.named_parameters() if p.grad is not None})
    report = fed.step(evaluate=False)
    for number in range(3):
        close(memes(fed, number), mean(copies, SIZES))
    assert report.traffic.total_up == 3 * 4 * sum(value.numel() for value in before.values())  # whatever is at home


def test_fml_rests_with_who_is_not_chosen() -> None:
    of = scenario((6, 9, 4, 5), rounds=2, share=0.5)
    fed = federation(of, FML())
    for _ in range(2):
        before = [weights_of(fed.model(client.name)) for client in of.clients]
        held = memes(fed)
        report = fed.step(evaluate=False)
        for i, client in enumerate(of.clients):
            same = torch.equal(weights_of(fed.model(client.name))["0.weight"], before[i]["0.weight"])
            assert same == (i not in report.participants)
        copies = []
        for i in report.participants:
            x, y = of.clients[i].train.x, of.clients[i].train.y
            copies.append(moved(held, mutual(0.5, held, before[i], x, y), -0.3))
        close(memes(fed), mean(copies, [float(of.clients[i].samples) for i in report.participants]))


def test_fml_that_exchanges_nothing() -> None:
    with pytest.raises(ValueError, match="alpha=1 has own models that learn from nobody: use the method 'local'"):
        FML(alpha=1)
    with pytest.raises(ValueError, match="never looks at a label"):
        FML(alpha=0, beta=0)
    with pytest.raises(ValueError, match="from 0 to 1"):
        FML(beta=1.5)
    with pytest.raises(ValueError, match="mlp"):
        FML(meme="mpl")
