"""pFedHN beside a plain loop: ordinary autograd and PyTorch's own optimiser on the server's side."""

from __future__ import annotations

import pytest
import torch
from plain import Weights, close, federation, flat, gradient, loss_of, moved, net, scenario
from torch import Tensor, nn
from torch.func import functional_call

import fedquilt as fq
from fedquilt.core.evaluation import look_at
from fedquilt.interface.messages import Updates
from fedquilt.methods import FedAvg, PFedHN
from fedquilt.testing import check_method, small_scenario

ENGINES = ("sequential", "vectorised")


def hyper_network(fed: fq.Federation, depth: int) -> tuple[nn.Sequential, nn.Embedding]:
    """The server's network and embeddings as ordinary modules of their own."""
    state = fed.server.state
    layers: list[nn.Module] = []
    for number in range(depth + 1):
        weight = state["phi"][f"{number}.weight"]
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight.clone(), "bias": state["phi"][f"{number}.bias"].clone()})
        layers += [layer, nn.ReLU()]
    embedding = nn.Embedding(*state["e"].shape)
    embedding.load_state_dict({"weight": state["e"].clone()})
    return nn.Sequential(*layers[:-1]), embedding


def as_weights(vector: Tensor) -> Weights:
    shapes = {name: value.shape for name, value in net().named_parameters()}
    parts = vector.split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


@pytest.mark.parametrize("engine", ENGINES)
def test_pfedhn_by_hand_with_one_client_a_round(engine: str) -> None:
    of = scenario((6, 9, 4, 7), rounds=5, epochs=2, share=0.25)
    fed = federation(of, PFedHN(rate=0.05, width=6, depth=2), engine)
    network, embedding = hyper_network(fed, 2)
    parameters = [*network.parameters(), *embedding.parameters()]
    optimiser = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)
    size = 4 * sum(value.numel() for value in net().parameters())
    for round_ in range(1, 6):
        (i,) = fed.sample_clients(round_)
        made = network(embedding(torch.tensor([i])))[0]
        theta = as_weights(made.detach())
        for _ in range(2):
            theta = moved(theta, gradient(loss_of(of.clients[i]), theta), -0.3)
        optimiser.zero_grad()
        made.backward(made.detach() - flat(theta))  # down the way that the client went, not up
        torch.nn.utils.clip_grad_norm_(parameters, 50)
        optimiser.step()
        report = fed.step(evaluate=False)
        assert report.traffic.total_up == report.traffic.total_down == size  # a model's worth each way
        ours, e = hyper_network(fed, 2)
        close(dict(ours.named_parameters()), dict(network.named_parameters()))
        torch.testing.assert_close(e.weight, embedding.weight, atol=1e-5, rtol=1e-4)
    look = look_at(fed.simulation, fed.server.instructions([2]))
    with torch.no_grad():
        said = functional_call(net(), as_weights(network(embedding(torch.tensor([2])))[0]), (of.clients[2].test.x,))
    torch.testing.assert_close(look.scores("received", "test")[0], said, atol=1e-4, rtol=1e-3)


def test_of_several_clients_the_network_takes_the_mean_and_each_vector_its_own() -> None:
    of = scenario((6, 9, 4), rounds=2)
    fed = federation(of, PFedHN(rate=0.05, width=6, depth=2))
    network, embedding = hyper_network(fed, 2)
    optimiser = torch.optim.SGD(
        [*network.parameters(), *embedding.parameters()], lr=0.05, momentum=0.9, weight_decay=1e-3
    )
    for _ in range(2):
        made = network(embedding.weight)
        starts = [as_weights(row) for row in made.detach()]
        ends = [moved(w, gradient(loss_of(c), w), -0.3) for w, c in zip(starts, of.clients, strict=True)]
        optimiser.zero_grad()
        made.backward((made.detach() - torch.stack([flat(end) for end in ends])) / 3)
        assert embedding.weight.grad is not None
        embedding.weight.grad *= 3  # no other client has a part in it
        optimiser.step()
        fed.step(evaluate=False)
        ours, e = hyper_network(fed, 2)
        close(dict(ours.named_parameters()), dict(network.named_parameters()))
        torch.testing.assert_close(e.weight, embedding.weight, atol=1e-5, rtol=1e-4)


def test_gradients_are_clipped() -> None:
    of = scenario((6, 9), rounds=1, share=0.5)
    fed = federation(of, PFedHN(rate=1.0, width=4, depth=1))
    (i,) = fed.sample_clients(1)
    state = fed.server.state
    up = fed.simulation.run(fed.server.instructions([i]))
    for far in (1e6, 1.0):
        further = type(up)(up.round, up.ids, (), {"change": up.reports["change"] * far})
        after = fed.method.learn(state, Updates(1, (further,)), fed.server.roster)
        before = state["phi"] | {"e": state["e"]}
        norm = float(torch.cat([(after["m"][n] - 1e-3 * before[n]).flatten() for n in before]).norm())
        assert norm == pytest.approx(50.0, rel=1e-4) if far > 1 else norm < 49


@pytest.mark.parametrize("personal", [0, 1])
def test_heads_stay_home_and_each_client_has_a_model_of_its_own(personal: int) -> None:
    of = scenario((6, 9, 4), rounds=2)
    fed, plain = federation(of, PFedHN(personal=personal)), federation(of, FedAvg())
    told = [fed.server.instructions([i]).told for i in range(3)]
    assert list(told[0]) == (["0"] if personal else ["0", "2"])
    assert not torch.equal(told[0]["0"], told[1]["0"])
    one, other = fed.step(evaluate=False), plain.step(evaluate=False)
    head = 3 * 4 * 15 if personal else 0  # of three clients
    assert one.traffic.total_up == other.traffic.total_up - head
    assert all(not bool(fed.server.plan.sends(unit).any()) for unit in ("0", "2"))


def test_groups_that_name_classes_otherwise_get_models_of_their_own() -> None:
    of = scenario((30, 30, 30, 30), rounds=60, groups=2, batch=10)
    accuracies = {}
    for method in (PFedHN(rate=0.1, width=20), FedAvg()):
        fed = federation(of, method, "vectorised", evaluate_every=60)
        seen = [e for _ in range(60) for e in fed.step().evaluations if (e.readout, e.split) == ("received", "test")]
        accuracies[method.name] = seen[0].score
    assert accuracies["pfedhn"] > accuracies["fedavg"] + 0.2


def test_refusals() -> None:
    with pytest.raises(ValueError, match="use the method 'local'"):
        PFedHN(rate=0)
    with pytest.raises(ValueError, match="leaves nothing to make: use the method 'local'"):
        federation(scenario(rounds=1), PFedHN(personal=2))
    with pytest.raises(ValueError, match=r"is another one than that of .* use the method 'fedavg'"):
        federation(small_scenario(unlike=True), PFedHN())


@pytest.mark.parametrize("method", [PFedHN(width=8), PFedHN(width=8, personal=1)])
def test_checked(method: fq.Method) -> None:
    assert len(check_method(method)) >= 7
