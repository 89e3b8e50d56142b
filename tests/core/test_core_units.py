"""Cutting modules into units, laying them into rows, and telling architectures apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.client import Split
from fedquilt.families.architecture import describe_architecture
from fedquilt.families.family import Family
from fedquilt.families.kinds import Kinds, families
from fedquilt.families.layout import Layout
from fedquilt.families.parts import Parts
from fedquilt.families.units import Cut, cut

LAYERS: list[Callable[[], nn.Module]] = [
    partial(nn.Linear, 3, 3),
    partial(nn.Linear, 3, 3, bias=False),
    partial(nn.BatchNorm1d, 3),
    partial(nn.BatchNorm1d, 3, affine=False),  # buffers only
    partial(nn.LayerNorm, 3),
    nn.ReLU,
    partial(nn.PReLU),
]

some_layers = st.lists(st.sampled_from(LAYERS), min_size=1, max_size=6).filter(
    lambda layers: any(layer not in (LAYERS[5],) for layer in layers)
)


@settings(max_examples=60, deadline=None)
@given(some_layers)
def test_every_tensor_is_in_one_unit_and_one_place(layers: list[Callable[[], nn.Module]]) -> None:
    net = nn.Sequential(*(layer() for layer in layers))
    units = cut(net)
    tensors = dict(net.named_parameters()) | dict(net.named_buffers())
    named = [name for unit in units for name in (*unit.parameters, *unit.buffers)]
    assert sorted(named) == sorted(tensors)
    layout = Layout(net, units)
    assert layout.width == sum(t.numel() for t in tensors.values())
    assert layout.parameters == sum(p.numel() for p in net.parameters())
    assert sum(layout.size(unit.name) for unit in units) == layout.width
    covered = sorted(at for ranges in layout.ranges.values() for start, stop in ranges for at in range(start, stop))
    assert covered == list(range(layout.width))


@settings(max_examples=60, deadline=None)
@given(some_layers, st.data())
def test_there_and_back(layers: list[Callable[[], nn.Module]], data: st.DataObject) -> None:
    net = nn.Sequential(*(layer() for layer in layers))
    units = cut(net)
    layout = Layout(net, units)
    rows = torch.randn(2, layout.width).round(decimals=3)
    for name in layout.buffer_names:  # counters are whole numbers
        if name.endswith("num_batches_tracked"):
            layout.tensor(rows, name).copy_(torch.tensor([3.0, 4.0]))
    model = layout.fill(nn.Sequential(*(layer() for layer in layers)), rows[1])
    assert torch.equal(layout.row(model), rows[1])
    chosen = data.draw(st.permutations([unit.name for unit in units]))
    some = tuple(chosen[: data.draw(st.integers(1, len(chosen)))])
    value = layout.take(rows, *some)
    assert value.shape == (2, layout.size(*some))
    other = torch.zeros_like(rows)
    for own, part in layout.pieces(other, value, *some):
        own.copy_(part)
    assert torch.equal(layout.take(other, *some), value)
    rest = [unit.name for unit in units if unit.name not in some]
    assert not rest or not layout.take(other, *rest).any()
    parameters, buffers = layout.split(rows[0])
    for name, tensor in (dict(net.named_parameters()) | dict(net.named_buffers())).items():
        found = (parameters | buffers)[name]
        assert found.shape == tensor.shape
        assert found.dtype == tensor.dtype
        assert torch.equal(layout.tensor(rows, name)[0].to(tensor.dtype), found)


def test_the_wire_is_parameters_then_buffers_of_each_unit() -> None:
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    layout = Layout(net, cut(net))
    row = torch.arange(6.0)[None]  # weight, scale, shift | mean, variance, count
    assert layout.take(row, "1").tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0]]
    assert layout.take(row, "1", "0").tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0, 0.0]]
    assert layout.take(row, "0", "1").tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]
    assert layout.signatures["1"] == ((1,), (1,), (1,), (1,), ())


def test_writing_through_a_view() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    layout = Layout(net, cut(net))
    rows = torch.zeros(3, layout.width)
    for name in layout.places:  # the counter has no dimensions of its own
        layout.tensor(rows, name).fill_(7.0)
    assert bool((rows == 7.0).all())


# --- cutting ---------------------------------------------------------------------------------------------------------


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_a_mapping_keeps_its_order_and_takes_patterns() -> None:
    units = cut(net(), {"top": ["2"], "rest": ["[01]"]})
    assert [unit.name for unit in units] == ["top", "rest"]
    assert units[1].parameters == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert units[1].buffers == ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    by_tensor = cut(net(), {"biases": ["*.bias"], "others": ["*.weight", "*.running_*", "*.num_*"]})
    assert by_tensor[0].parameters == ("0.bias", "1.bias", "2.bias")


@pytest.mark.parametrize(
    ("mapping", "sentence"),
    [
        ({"base": ["0", "1"]}, "'2.weight' is in no unit; add a pattern for it to one of base"),
        ({"base": ["*"], "head": ["2"]}, r"'2.weight' is in 2 units \(base, head\)"),
        ({"base": ["*"], "head": ["fc*"]}, "the pattern 'fc\\*' matches nothing; modules here: 0, 1, 2"),
        ({"base": ["*"], "head": []}, "unit 'head' has no patterns"),
    ],
)
def test_mappings_that_do_not_cut(mapping: Cut, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        cut(net(), mapping)


def test_a_part_of_the_model_with_the_name_of_what_a_method_keeps_is_refused() -> None:
    """SCAFFOLD keeps `c`; both under one name would be read as one."""
    model = nn.Sequential()
    model.add_module("c", nn.Linear(2, 2))
    model.add_module("d", nn.Linear(2, 2))
    with pytest.raises(ValueError, match="the model has a part 'c', and the method keeps something of that name"):
        Parts(model, state={"c": torch.zeros(3)}).cut()


def test_nothing_to_cut() -> None:
    with pytest.raises(ValueError, match="ReLU has neither parameters nor buffers"):
        cut(nn.ReLU())


class Around(nn.Module):
    """A module with a number of its own around one called `model`, and an attribute that only sounds like a cut."""

    units = 5

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x) * self.scale
        return out


def test_what_a_module_holds_itself_is_a_unit_of_its_own() -> None:
    assert [unit.name for unit in cut(nn.Linear(1, 1))] == ["model"]
    assert [unit.name for unit in cut(Around())] == ["top", "model"]
    Layout(Around(), cut(Around()))


def test_a_module_may_declare_its_cut() -> None:
    module = Around()
    module.units = {"all": ["*"]}  # type: ignore[assignment]
    assert [unit.name for unit in cut(module)] == ["all"]


def test_tied_parameters_are_one() -> None:
    pair = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    pair[1].weight = pair[0].weight
    assert [unit.name for unit in cut(pair)] == ["0", "2"]
    layout = Layout(pair, cut(pair))
    assert layout.width == 4 + 6


def test_numbers_that_rows_cannot_hold() -> None:
    double = nn.Linear(1, 1).double()
    with pytest.raises(ValueError, match=r"parameter 'weight' is torch\.float64; build the model in float32"):
        Layout(double, cut(double))
    big = nn.Linear(1, 1)
    big.register_buffer("seen", torch.tensor(2**24 + 1))
    with pytest.raises(ValueError, match="buffer 'seen' holds values that float32 cannot"):
        Layout(big, cut(big))


def test_empty_tensors_and_buffers_of_truth() -> None:
    odd = nn.Linear(1, 1)
    odd.register_buffer("nothing", torch.zeros(0, 3))
    odd.register_buffer("mask", torch.tensor([True, False]))
    layout = Layout(odd, cut(odd))
    row = layout.row(odd)
    _, buffers = layout.split(row)
    assert buffers["mask"].tolist() == [True, False]
    assert buffers["nothing"].shape == (0, 3)


# --- telling architectures apart -------------------------------------------------------------------------------------


class Own(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for key, value in attributes.items():
            setattr(self, key, value)


def times(k: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * k


class Plain:
    def __init__(self, k: int) -> None:
        self.k = k


def with_one_changed(n: int) -> Tensor:
    table = torch.zeros(5000)
    table[n] = 1.0
    return table


ALIKE: list[Callable[[], nn.Module]] = [
    partial(nn.GRU, 2, 3),
    partial(nn.TransformerEncoderLayer, 4, 2, 8),
    lambda: Own(act=times(2.0)),
    lambda: Own(act=partial(torch.add, torch.ones(3))),
    lambda: Own(config=Plain(3), table={"a": [1, (2.0, None)]}),
    lambda: Own(kind=nn.Linear, fn=torch.relu),
]


@pytest.mark.parametrize("build", ALIKE)
def test_built_twice_is_one_architecture(build: Callable[[], nn.Module]) -> None:
    assert describe_architecture(build()) == describe_architecture(build())


UNLIKE: list[tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = [
    (lambda: Own(_private=1), lambda: Own(_private=2)),
    (lambda: Own(act=times(2.0)), lambda: Own(act=times(3.0))),
    (lambda: Own(act=partial(torch.add, torch.ones(3))), lambda: Own(act=partial(torch.add, torch.zeros(3)))),
    (lambda: Own(config=Plain(3)), lambda: Own(config=Plain(4))),
    (lambda: Own(table=with_one_changed(2500)), lambda: Own(table=with_one_changed(2501))),  # print alike
    (lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.2)),
    (partial(nn.BatchNorm1d, 2), partial(nn.BatchNorm1d, 2, momentum=None)),
    (lambda: Own(fn=torch.relu), lambda: Own(fn=torch.tanh)),
]


@pytest.mark.parametrize("pair", UNLIKE)
def test_what_computes_otherwise_is_another(pair: tuple[Callable[[], nn.Module], Callable[[], nn.Module]]) -> None:
    assert describe_architecture(pair[0]()) != describe_architecture(pair[1]())


def test_frozen_and_tied_ones_are_others() -> None:
    def pair(freeze: bool = False, tie: bool = False) -> nn.Module:
        made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        made[0].weight.requires_grad_(not freeze)
        if tie:
            made[1].weight = made[0].weight
        return made

    assert (
        len(
            {
                describe_architecture(pair()),
                describe_architecture(pair(freeze=True)),
                describe_architecture(pair(tie=True)),
            }
        )
        == 3
    )


def test_families() -> None:
    modules = {0: net(), 3: Own(_k=1), 5: net(), 7: Own(_k=2)}

    def found(shapes: dict[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
        kinds = Kinds()
        data = {i: Split(torch.zeros(1, *shapes.get(i, (2,))), torch.zeros(1).long()) for i in modules}
        return [family.ids for family in families({i: kinds.of(m, cut, data[i]) for i, m in modules.items()})]

    assert found({}) == [(0, 5), (3,), (7,)]
    assert len(found({5: (4, 2)})) == 4  # samples of another shape


def test_a_model_of_a_row_is_its_own() -> None:
    module = net()
    family = Family((0,), module, Layout(module, cut(module)))
    row = family.layout.row(module)
    one, two = family.model(row), family.model(row + 1)
    with torch.no_grad():
        next(one.parameters()).zero_()
    assert not torch.equal(next(one.parameters()), next(two.parameters()))
    assert torch.equal(family.layout.row(module), row)
    assert not one.training


class Backwards(nn.Module):
    """Registered from the top down, called from the bottom up."""

    def __init__(self, asks: bool = False, counts: bool = True) -> None:
        super().__init__()
        self.asks, self.counts, self.calls = asks, counts, 0
        self.head = nn.Linear(4, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 4), nn.ReLU()), nn.Linear(6, 5)])
        self.spare = nn.Linear(1, 1)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.counts
        if self.asks and x.sum() > 0:
            x = -x
        x = self.blocks[1](x * self.scale)
        scores: Tensor = self.head(self.blocks[0](x))
        return scores


def test_units_are_in_the_order_of_forward() -> None:
    net = Backwards()
    before = torch.get_rng_state()
    assert [unit.name for unit in cut(net)] == ["model", "blocks.1", "spare", "blocks.0.0", "head"]
    assert net.calls == 0  # the module itself was not called
    assert torch.equal(torch.get_rng_state(), before)


def test_units_are_in_the_order_of_registration_where_forward_asks_its_data() -> None:
    names = ["model", "head", "blocks.0.0", "blocks.1", "spare"]
    assert [unit.name for unit in cut(Backwards(asks=True))] == names


def test_the_head_that_fedper_keeps_is_what_is_called_last() -> None:
    x, y = torch.randn(6, 6), torch.arange(6) % 3
    made = [fq.Client(name, partial(Backwards, counts=False), (x, y), test=(x, y)) for name in ("a", "b")]
    run = fq.run(fq.Scenario("two", made), "fedper", rounds=1, engine="sequential", device="cpu", alone=False)
    assert [unit for unit in run.plan.units if not run.plan.receives(unit).any()] == ["head"]
