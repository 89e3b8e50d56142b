"""One client as a step of a method sees it, and running a step on all clients of a stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedquilt._util.randomness import key_of, mix, streams
from fedquilt.engines.cuda_graph import captures
from fedquilt.engines.objective import Batch, Model
from fedquilt.families.copies import copy_of
from fedquilt.families.habits import seeded
from fedquilt.families.layout import Layout
from fedquilt.layers.prepare import stackable

if TYPE_CHECKING:
    from fedquilt.interface.client_stack import ClientStack, PaddedSplit

_DRAW_BITS = 24  # of a hash: as many as a float32 holds
_OF_A_ROUND = ("lr", "round")  # numbers that are not tensors, and change


class Values(Mapping[str, Tensor]):
    """A client's numbers by unit, each one vector, parameters before buffers; a tensor of state in its own shape."""

    def __init__(self, layout: Layout, row: Tensor) -> None:
        self._layout, self._row = layout, row

    def __getitem__(self, unit: str) -> Tensor:
        if unit not in self._layout.ranges:
            raise KeyError(f"a client here holds no unit '{unit}'; it has {', '.join(self._layout.ranges)}")
        flat = self._layout.take(self._row[None], unit)[0]
        shape = self._layout.state.get(unit)
        return flat if shape is None else flat.view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.ranges)

    def __len__(self) -> int:
        return len(self._layout.ranges)

    @property
    def held(self) -> tuple[Layout, Tensor]:
        """How a client's numbers lie, and they themselves."""
        return self._layout, self._row

    def trained(self, unit: str) -> Tensor:
        """The parameters of a unit as one vector, without its running statistics."""
        return self[unit][: self._layout.size(unit) - self._layout.statistics.get(unit, 0)]

    def parameters(self, part: str = "") -> Tensor:
        """All parameters as one vector, or those of one part."""
        start, stop = self._layout.span(part)
        return self._row[start:stop]

    def with_parameters(self, vector: Tensor) -> dict[str, Tensor]:
        """The units of all models with these parameters in the place of theirs, as `parameters` gives them."""
        models = [unit.name for unit in self._layout.units if not unit.state]
        pieces = vector.split([len(self.trained(unit)) for unit in models])
        return {u: torch.cat([piece, self[u][len(piece) :]]) for u, piece in zip(models, pieces, strict=True)}


@dataclass(frozen=True)
class Me:
    """One client in a round, written as if it were alone; nothing here is written to.

    `values` are its numbers now, `received` the same with what the server sent in their place, and `receives` says of
    which units it sent some; `offers` has for each unit that is offered the values of all circles, (circles, size),
    or those of single clients, as many as the plan says.
    `told` is what the method's server half told it.
    `model` is its module at its values, in eval mode. `data` is the split that the step asked for. `steps` counts the
    steps of its local training in a round, `owned` (classes,) says which labels are its own, `public` and `public_y`
    are the public samples: `common`, then `public_test`.
    """

    values: Values
    received: Values
    model: Model
    receives: Mapping[str, Tensor]
    told: Mapping[str, Tensor]
    offers: Mapping[str, Tensor]
    data: Batch | None
    samples: Tensor
    steps: Tensor
    owned: Tensor
    lr: float
    round: int
    rounds: int
    epochs: int
    batch: int
    classes: int
    installed: bool
    public: Tensor | None
    public_y: Tensor | None
    _layout: Layout = field(repr=False)
    _stream: Tensor = field(repr=False)

    def at(self, units: Mapping[str, Tensor]) -> Model:
        """The client's module with other values of some units, each a vector as in `values`."""
        named: dict[str, Tensor] = {}
        for unit, flat in units.items():
            named |= self._layout.named(unit, flat)
        return self.model.at(named)

    def number(self, value: float) -> Tensor:
        """A number as a tensor, where the client's tensors are."""
        return torch.full((), value, device=self._stream.device)  # made there: a graph holds no copy from elsewhere

    def draw(self, purpose: str, *shape: int) -> Tensor:
        """Uniform numbers from 0 to below 1: a function of the seed, the client, the round and the purpose alone."""
        size = int(torch.Size(shape).numel())
        start = mix(self._stream + key_of(purpose))
        bits = mix(start + torch.arange(1, size + 1, device=self._stream.device)) >> (64 - _DRAW_BITS)
        numbers: Tensor = (bits & (2**_DRAW_BITS - 1)).float() / 2**_DRAW_BITS
        return numbers.view(shape)


@dataclass(frozen=True)
class _Noting(Me):
    """A client that notes which numbers of the round it is asked for: what follows from them holds in that round."""

    _noted: set[str] = field(default_factory=set, repr=False)

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_A_ROUND:
            object.__getattribute__(self, "_noted").add(name)
        return object.__getattribute__(self, name)


def each(
    view: ClientStack,
    function: Callable[[Me], Mapping[str, Tensor]],
    table: PaddedSplit | None = None,
    padded: bool = False,
) -> dict[str, Tensor]:
    """function(me) for all clients of a stack: what it gives, by name, with the client first; `me.data` is the table's.

    Stacked where the engine stacks, as many clients at a time as there is room for their samples, else one client after
    another; then samples come without padding unless `padded`. Where the stack has `graphs`, what comes again is
    replayed on a GPU.
    """
    layout, device, habits = view.family.layout, view.rows.device, view.family.habits
    keys = np.array([key_of(view.seed, name) for name in view.names], dtype=np.uint64)
    count = torch.tensor(view.samples, device=device)
    of_each: dict[str, Any] = {
        "row": view.rows,
        "received": view.received_rows,
        "stream": torch.from_numpy(streams(keys, view.round, 1)[:, 0]).to(device),
        "samples": count.float(),
        "steps": ((count + view.batch - 1) // view.batch * view.passes).float(),
        "owned": torch.tensor([[c in own for c in range(view.classes)] for own in view.labels], device=device),
        "receives": {unit: who.to(device) for unit, who in view.receives.items()},
        "copies": {
            name: value.to(device) for name, value in (view.down.copies if view.down is not None else {}).items()
        },
        "told": {name: value.to(device) for name, value in (view.down.told if view.down is not None else {}).items()},
    }
    if table is not None:
        of_each["data"] = {"x": table.x.clone(), "y": table.y, "mask": table.mask}  # a model may write on its input
        if table.public is not None:
            of_each["data"]["public"] = table.public
    of_all: dict[str, Any] = {
        "offers": {} if view.down is None else {unit: v.to(device) for unit, v in view.down.offers.items()},
        "public": {name: v for name, v in (("x", view.public_x), ("y", view.public_y)) if v is not None},
    }

    def one(mine: dict[str, Any], ours: dict[str, Any], make: Callable[..., Me] = Me) -> dict[str, Tensor]:
        parameters, buffers = layout.split(mine["row"])
        module = view.family.evaluator(device)
        if habits.apart:  # what it keeps from call to call is no other client's
            module = copy_of(module)
        return dict(
            function(
                make(
                    values=Values(layout, mine["row"]),
                    received=Values(layout, mine["received"]),
                    model=Model(module, parameters | buffers),
                    receives=mine["receives"],
                    told=mine["told"],
                    offers=ours["offers"] | mine["copies"],
                    data=Batch(**mine["data"], task=view.task) if "data" in mine else None,
                    samples=mine["samples"],
                    steps=mine["steps"],
                    owned=mine["owned"],
                    lr=view.lr,
                    round=view.round,
                    rounds=view.rounds,
                    epochs=view.epochs,
                    batch=view.batch,
                    classes=view.classes,
                    installed=view.installed,
                    public=ours["public"].get("x"),
                    public_y=ours["public"].get("y"),
                    _layout=layout,
                    _stream=mine["stream"],
                )
            )
        )

    def stacked(given: Mapping[str, Any], noted: set[str] | None = None) -> dict[str, Tensor]:
        make = Me if noted is None else partial(_Noting, _noted=noted)
        run = vmap(partial(one, make=make), in_dims=(0, None), randomness="different")
        found: dict[str, Tensor] = run(given["each"], given["all"])
        return found

    def captured(given: Mapping[str, Any]) -> dict[str, Tensor]:
        if view.graphs is None or not captures(device):
            return stacked(given)
        numbers = {"lr": view.lr, "round": float(view.round)}
        return view.graphs.run((function, view.installed), stacked, given, numbers)

    with torch.no_grad():
        if view.vectorised and not (view.family.one_by_one or habits.apart or habits.guesses):
            try:
                with stackable(device):
                    seen = [len(x) for x in of_all["public"].values()] + ([] if table is None else [table.y.shape[1]])
                    some = stacks_of(len(view.ids), view.samples_at_once // max(1, *seen, 1))
                    return _joined([captured({"each": _of(of_each, which), "all": of_all}) for which in some])
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # recurrent layers, say, batch over clients while they train but not in eval mode
                view.family.one_by_one.append(True)
        results = []
        for i in range(len(view.ids)):
            mine = {name: _of(value, i) for name, value in of_each.items()}
            if table is not None and not padded:
                mine["data"] = {name: value[: int(table.count[i])] for name, value in mine["data"].items()}
            with seeded(0) if habits.apart or habits.guesses else nullcontext():
                results.append(one(mine, of_all))
        return {name: torch.stack([result[name] for result in results]) for name in results[0]}


def _of(value: Any, which: int | slice) -> Any:
    return {name: _of(part, which) for name, part in value.items()} if isinstance(value, dict) else value[which]


def stacks_of(clients: int, most: int) -> list[slice]:
    """Stacks of about one size of at most so many clients, but of one at least.

    >>> stacks_of(5, 4)
    [slice(0, 3, None), slice(3, 6, None)]
    """
    stacks = -(-clients // max(1, most))
    step = max(1, -(-clients // max(1, stacks)))
    return [slice(at, at + step) for at in range(0, clients, step)]


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
