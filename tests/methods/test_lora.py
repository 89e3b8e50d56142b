"""FedIT, FFA-LoRA and FedSA-LoRA beside plain loops over A, B and the head; adapters of our own and of peft."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import pytest
import torch
from plain import close, federation, mean, scenario
from torch import Tensor, nn
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.methods import FedAvg, FedIT, FedSALora, FFALora
from fedquilt.models import LoraLinear, adapter_units, with_lora

ENGINES = ("sequential", "vectorised")
SIZES = [6.0, 9.0, 4.0]
RANK, ALPHA, LR = 2, 3.0, 0.3
UNITS = {"0.lora_A": RANK * 3, "0.lora_B": 4 * RANK, "2.lora_A": RANK * 4, "2.lora_B": 5 * RANK, "head": 5 * 3 + 3}
Matrices = dict[str, Tensor]


def base() -> nn.Module:
    """What was trained elsewhere: the same numbers whoever builds it."""
    draw = torch.Generator().manual_seed(8)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    for parameter in net.parameters():
        nn.init.normal_(parameter, generator=draw)
    return net


def adapted() -> nn.Module:
    return with_lora(base(), ["0", "2"], RANK, ALPHA, head=["4"])


def with_models(of: fq.Scenario, model: Callable[[], nn.Module] = adapted) -> fq.Scenario:
    clients = [fq.Client(c.name, model, c.train, c.validation, c.test) for c in of.clients]
    return fq.Scenario(of.name, clients, of.training, label_names=of.label_names)


def scores(own: Matrices, x: Tensor) -> Tensor:
    """The adapted network by hand, each layer as one matrix."""
    w = dict(base().named_parameters())
    for layer in ("0", "2"):
        whole = w[f"{layer}.weight"].detach() + ALPHA / RANK * own[f"{layer}.lora_B"] @ own[f"{layer}.lora_A"]
        x = torch.tanh(x @ whole.T + w[f"{layer}.bias"].detach())
    return x @ own["head.weight"].T + own["head.bias"]


def stepped(own: Matrices, client: fq.Client, rest: tuple[str, ...] = ()) -> Matrices:
    """One step of gradient descent on all of a client's samples."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in own.items()}
    F.cross_entropy(scores(leaves, client.train.x), client.train.y).backward()
    return {
        name: value if name.endswith(rest or "nothing") else value - LR * leaves[name].grad  # type: ignore[operator]
        for name, value in own.items()
    }


def matrices(model: nn.Module) -> Matrices:
    found = {}
    for layer in ("0", "2"):
        for which in ("lora_A", "lora_B"):
            found[f"{layer}.{which}"] = model.get_parameter(f"{layer}.{which}.weight").detach().clone()
    head = {f"head.{name}": value.detach().clone() for name, value in model.get_submodule("4").named_parameters()}
    return found | head


def shared(own: list[Matrices], home: tuple[str, ...] = ()) -> list[Matrices]:
    merged = mean(own, SIZES)
    return [
        {name: w[name] if name.startswith(home) or name.endswith(home) else merged[name] for name in w} for w in own
    ]


PLANS: dict[type[FedIT], tuple[tuple[str, ...], tuple[str, ...]]] = {  # what rests, what stays home
    FedIT: ((), ("nothing",)),
    FFALora: (("lora_A",), ("nothing",)),
    FedSALora: ((), ("lora_B", "head")),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", PLANS)
def test_rounds_by_hand(kind: type[FedIT], engine: str) -> None:
    of = with_models(scenario(rounds=3))
    fed = federation(of, kind(), engine)
    own = [matrices(fed.model(client.name)) for client in of.clients]
    assert not any(bool(w["0.lora_B"].any() or w["2.lora_B"].any()) for w in own)  # at first the base as it is
    rests, home = PLANS[kind]
    sent = sum(n for unit, n in UNITS.items() if not unit.endswith((*rests, *home)))
    for _ in range(3):
        own = shared([stepped(w, client, rests) for w, client in zip(own, of.clients, strict=True)], home)
        report = fed.step(evaluate=False)
        assert report.traffic.total_up == report.traffic.total_down == 4 * len(SIZES) * sent
        for client, w in zip(of.clients, own, strict=True):
            close(matrices(fed.model(client.name)), w)
    for client in of.clients:  # no bit of the base has moved
        model, first = fed.model(client.name), base()
        for layer in ("0", "2"):
            assert torch.equal(model.get_parameter(f"{layer}.base.weight"), first.get_parameter(f"{layer}.weight"))
    assert (own[0]["0.lora_B"] - own[1]["0.lora_B"]).abs().max().gt(0) == (kind is FedSALora)


def test_rows_are_as_wide_as_what_learns() -> None:
    widths = {}
    for kind in PLANS:
        fed = federation(with_models(scenario()), kind())
        widths[kind] = fed.simulation.family_states[0].family.layout.width
    everything = sum(UNITS.values())
    assert widths == {FedIT: everything, FedSALora: everything, FFALora: everything - RANK * 3 - RANK * 4}


def test_the_mean_of_products_is_that_of_ffa_alone() -> None:
    """What the server has after a round is the mean of clients' updates in FFA-LoRA, and is not in FedIT."""
    gaps = {}
    for kind in (FedIT, FFALora):
        of = with_models(scenario(rounds=6))
        fed = federation(of, kind())
        for _ in range(5):
            fed.step(evaluate=False)
        before = [matrices(fed.model(client.name)) for client in of.clients]
        rests = PLANS[kind][0]
        after = [stepped(w, client, rests) for w, client in zip(before, of.clients, strict=True)]
        products = mean([{"BA": w["0.lora_B"] @ w["0.lora_A"]} for w in after], SIZES)["BA"]
        fed.step(evaluate=False)
        now = matrices(fed.model("c0"))
        gaps[kind] = float((now["0.lora_B"] @ now["0.lora_A"] - products).abs().max())
    assert gaps[FFALora] < 1e-6 < 1e-5 < gaps[FedIT], gaps


def test_ffa_draws_one_matrix_for_all_and_another_for_another_seed() -> None:
    """Builders that draw something else beforehand would have an A each."""

    def late() -> nn.Module:
        torch.randn(7)
        return adapted()

    of = scenario()
    clients = [fq.Client(c.name, m, c.train, c.validation, c.test)
               for c, m in zip(of.clients, (adapted, late, adapted), strict=True)]  # fmt: skip
    mixed = fq.Scenario(of.name, clients, of.training, label_names=of.label_names)
    first = [matrices(federation(mixed, FFALora()).model(f"c{i}")) for i in range(3)]
    assert torch.equal(first[0]["0.lora_A"], first[1]["0.lora_A"])
    other = matrices(federation(mixed, FFALora(), seed=1).model("c0"))
    assert not torch.equal(first[0]["0.lora_A"], other["0.lora_A"])
    apart = [matrices(federation(mixed, fq.methods.Local()).model(f"c{i}")) for i in range(2)]
    assert not torch.equal(apart[0]["0.lora_A"], apart[1]["0.lora_A"])  # the trap


def test_a_model_without_adapters_gets_them_below_its_head() -> None:
    fed = federation(with_models(scenario(), base), FedIT(rank=4))
    assert list(fed.server.plan.units) == ["base", *UNITS]
    model = fed.model("c0")
    ranks = [layer.lora_A.out_features for layer in model.modules() if isinstance(layer, LoraLinear)]
    assert ranks == [3, 4]  # as wide as the layer where that is narrower
    learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learns == {f"{layer}.lora_{which}.weight" for layer in "02" for which in "AB"} | {"4.weight", "4.bias"}
    with pytest.raises(ValueError, match=r"Linear has no linear layer below its last unit, 'model', for an adapter"):
        federation(with_models(scenario(), lambda: nn.Linear(3, 3)), FedIT())


def test_what_cannot_be_adapted_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing of the model fits 'q'; there are 0, 1"):
        with_lora(base(), ["q"])
    with pytest.raises(ValueError, match="an adapter goes on a linear layer, and '1' is a Tanh"):
        with_lora(base(), ["1"])
    with pytest.raises(ValueError, match="rank=9 does not go with a layer of 3 x 4"):
        with_lora(base(), ["0"], rank=9)
    with pytest.raises(ValueError, match="Sequential has no adapters; make some"):
        adapter_units(base())
    with pytest.raises(ValueError, match=r"fedsa-lora: adapters of rank=0 with alpha=16\.0 change nothing"):
        FedSALora(rank=0)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_transformer_with_adapters(engine: str) -> None:
    """PyTorch's own encoder looks at the weights of its linear layers where it does not train."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.encoder(x[:, :, None].expand(-1, -1, 4)).mean(1))
            return out

    def build() -> nn.Module:
        return with_lora(Net(), ["encoder.layers.*.linear?"], RANK, head=["head"])

    of = with_models(scenario(rounds=2), build)
    fed = federation(of, FedAvg(), engine)
    fed.step()
    fed.step()
    model, x = fed.model("c0"), of.clients[0].train.x
    assert model.get_parameter("encoder.layers.0.linear1.lora_B.weight").abs().max() > 0
    with torch.no_grad():
        quick = model.eval()(x)
        torch.testing.assert_close(model.train()(x), quick, atol=1e-5, rtol=1e-4)  # there is no dropout
    assert fed.simulation.family_states[0].family.layout.width == 2 * 2 * RANK * (4 + 8) + 4 * 3 + 3


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", PLANS)
def test_models_of_peft_are_cut_alike(kind: type[FedIT]) -> None:
    peft = importlib.import_module("peft")

    def build() -> nn.Module:
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["0", "2"], modules_to_save=["4"])
        made: nn.Module = peft.get_peft_model(base(), config)
        return made

    names = [f"base_model.model.{unit}" if unit != "head" else unit for unit in UNITS]
    assert list(adapter_units(build())) == ["base", *names]
    ours, theirs = with_models(scenario(rounds=2)), with_models(scenario(rounds=2), build)
    for engine in ENGINES:
        fed, other = federation(ours, kind(), engine), federation(theirs, kind(), engine)
        widths = [each.simulation.family_states[0].family.layout.width for each in (fed, other)]
        assert widths[0] == widths[1]
        reports = [(fed.step(evaluate=False), other.step(evaluate=False)) for _ in range(2)]
        assert all(one.traffic.total_up == two.traffic.total_up for one, two in reports)
        frozen = dict(other.model("c1").named_parameters())
        kept = frozen["base_model.model.0.base_layer.weight"]
        assert torch.equal(kept, base().get_parameter("0.weight"))
