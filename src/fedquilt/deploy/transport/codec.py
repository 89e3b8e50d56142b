"""The messages of the core, `Instructions` and `Update`, for one client each, as arrays and plain text and back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedquilt.deploy.transport.packed import pack_code, unpack_code
from fedquilt.deploy.transport.wire import Refused, check_values
from fedquilt.interface.messages import Instructions, Roster, UnitValues, Update
from fedquilt.interface.passed import start_of
from fedquilt.sharing import Compression

Arrays = dict[str, NDArray[Any]]
Text = dict[str, Any]
Form = tuple[tuple[str, tuple[int, ...], str], ...]  # of reports: each one's name, shape and dtype
LOOK = "look/"  # before the names of arrays of a second message in a letter
_LARGEST_REPORT = 1e18  # so that squares and sums of them are numbers still
_VALUE, _TOLD, _REPORT, _OFFER, _COPY = "value/", "told/", "report/", "offer/", "copy/"
_REST = "rest/"  # before the names of numbers that are not compressed, where others of the same array are
_CODE = ("scale", "where", "rest")  # what goes with the values of a unit that is compressed


def write_down(down: Instructions, halves: Mapping[str, int]) -> tuple[Arrays, Text]:
    """A message to one client; of each unit the first so many of `halves` in half precision, which they are rounded to.

    What is among its offers does not travel twice.
    """
    offered = [_among_offers(block, down.offers) for block in down.blocks]
    sent = [(i, block) for i, (block, at) in enumerate(zip(down.blocks, offered, strict=True)) if at is None]
    values: Arrays = {}
    for i, block in sent:
        values |= _halved(f"{_VALUE}{i}", block.value[0], _first(block.units, block.sizes, halves))
    for name, unit, value in _beside(down):
        values |= _halved(name, value, _first((unit,), (value.shape[-1],), halves))
    told = {_TOLD + name: value[0].numpy(force=True) for name, value in down.told.items()}
    text: Text = {
        "round": down.round,
        "number": down.ids[0],
        "units": [list(block.units) for block in down.blocks],
        "sizes": [list(block.sizes) for block in down.blocks],
        "pulls": [None if pull is None else float(pull[0]) for pull in down.pulls],
        "send": [unit for unit, sends in down.send.items() if bool(sends[0])],
        "everyone": down.everyone,
        "offered": offered,
        **({"halves": dict(halves)} if halves else {}),
    }
    return {**values, **told}, text


def _beside(down: Instructions) -> list[tuple[str, str, Tensor]]:
    """What a client may choose from, or mix: the names of arrays, their units and values (..., size)."""
    offers = [(_OFFER + unit, unit, value) for unit, value in down.offers.items()]
    return offers + [(_COPY + unit, unit, value[0]) for unit, value in down.copies.items()]


def _first(units: Sequence[str], sizes: Sequence[int], halves: Mapping[str, int]) -> NDArray[np.bool_]:
    """(size,) which of the numbers of some units are the first of their unit, as many as `halves` says."""
    parts = [np.arange(size) < halves.get(unit, 0) for unit, size in zip(units, sizes, strict=True)]
    return np.concatenate(parts)


def _halved(name: str, value: Tensor, half: NDArray[np.bool_]) -> Arrays:
    """Values (..., size) as an array; where some are in half precision, as one of these and one of the rest."""
    array = value.numpy(force=True)
    if not half.any():
        return {name: array}
    return {name: array[..., half].astype(np.float16), _REST + name: array[..., ~half]}


def _put_together(arrays: Mapping[str, NDArray[Any]], name: str, half: NDArray[np.bool_]) -> NDArray[Any]:
    """What `_halved` was given."""
    if not half.any():
        return arrays[name]
    found = np.empty((*arrays[name].shape[:-1], len(half)), np.float32)
    found[..., half], found[..., ~half] = arrays[name], arrays[_REST + name]
    return found


def _among_offers(block: UnitValues, offers: Mapping[str, Tensor]) -> int | None:
    """The number of the circle whose values, all of them offered, a block holds; None where they are not."""
    if not all(unit in offers for unit in block.units):
        return None
    same = (torch.cat([offers[unit] for unit in block.units], 1) == block.value[0]).all(1).nonzero()[:, 0]
    return int(same[0]) if len(same) else None


def read_down(arrays: Mapping[str, NDArray[Any]], text: Mapping[str, Any]) -> Instructions:
    """The message that `write_down` wrote."""
    halves = text.get("halves", {})

    def beside(prefix: str) -> Arrays:
        found = {}
        for name, array in arrays.items():
            if name.startswith(prefix):
                unit, rest = name.removeprefix(prefix), arrays.get(_REST + name)
                size = array.shape[-1] + (0 if rest is None else rest.shape[-1])
                found[unit] = _put_together(arrays, name, _first((unit,), (size,), halves))
        return found

    offers, copies = beside(_OFFER), beside(_COPY)

    def value(i: int, units: Sequence[str], sizes: Sequence[int]) -> Tensor:
        circle = text["offered"][i]
        if circle is not None:
            return _row(np.concatenate([offers[unit][circle] for unit in units]))
        return _row(_put_together(arrays, f"{_VALUE}{i}", _first(units, sizes, halves)))

    blocks = tuple(
        UnitValues(tuple(units), tuple(sizes), None, value(i, units, sizes))
        for i, (units, sizes) in enumerate(zip(text["units"], text["sizes"], strict=True))
    )
    return Instructions(
        round=text["round"],
        ids=(text["number"],),
        blocks=blocks,
        pulls=tuple(None if pull is None else torch.tensor([pull]) for pull in text["pulls"]),
        send={unit: torch.tensor([True]) for unit in text["send"]},
        everyone=text["everyone"],
        told={name.removeprefix(_TOLD): _row(a) for name, a in arrays.items() if name.startswith(_TOLD)},
        offers={unit: torch.from_numpy(array) for unit, array in offers.items()},
        copies={unit: _row(array) for unit, array in copies.items()},
    )


def write_up(up: Update, down: Instructions, learned: Mapping[str, int], how: Compression) -> tuple[Arrays, Text]:
    """A message from one client: each unit by its name, so that the server checks each. Those that are compressed are
    a code of as many numbers as are `learned` in them, and the rest."""
    values: Arrays = {}
    for block in up.blocks:
        row = block.value[0].numpy(force=True)
        for unit, part in zip(block.units, np.split(row, np.cumsum(block.sizes)[:-1]), strict=True):
            values[unit] = part
    named: Arrays = {}
    for unit, value in values.items():
        n = learned.get(unit, 0)
        if not sends_code(down, unit, n, how):
            named[_VALUE + unit] = value
            continue
        code = pack_code(up.codes[unit], how, n)
        named |= {f"{part}/{unit}": array for part, array in code.items()}
        named |= {_REST + unit: value[n:]} if len(value) > n else {}
    reports = {_REPORT + name: value[0].numpy(force=True) for name, value in up.reports.items()}
    return {**named, **reports}, {"round": up.round}


def sends_code(down: Instructions, unit: str, learned: int, how: Compression) -> bool:
    """Whether a client sends a code of a unit: where it started from the unit as it was sent to it."""
    found = start_of(down, unit) if how.codes and learned else None
    return found is not None and (found[1] is None or bool(found[1][0]))


def senders(downs: Mapping[int, Instructions], roster: Roster, how: Compression) -> Callable[[int, str], bool]:
    """Says of a client and a unit whether it sends a code of it."""
    return lambda i, unit: sends_code(downs[i], unit, roster.members[i].parameters.get(unit, 0), how)


def read_up(
    arrays: Mapping[str, NDArray[Any]],
    down: Instructions,
    sizes: Mapping[str, int],
    learned: Mapping[str, int],
    how: Compression,
    largest_change: float,
    chooses: bool,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values by unit and reports by name of one client's answer; `Refused` where a merge must not see them.

    A client that `chooses` what it sends may leave out units that it was asked for. What came as codes is read as what
    they say.
    """
    values = {name.removeprefix(_VALUE): a for name, a in arrays.items() if name.startswith(_VALUE)}
    asked = {unit: sizes[unit] for unit, sends in down.send.items() if bool(sends[0])}
    expected = {unit: size for unit, size in asked.items() if unit in values or not chooses}
    sent: Arrays = {}
    for block in down.blocks:
        for unit, part in zip(block.units, torch.split(block.value[0], list(block.sizes)), strict=True):
            sent[unit] = part.numpy(force=True)
    coded = {unit for unit in expected if unit in values and sends_code(down, unit, learned.get(unit, 0), how)}
    for name in arrays:
        kind, _, unit = name.partition("/")
        if kind in _CODE and unit not in coded:
            raise Refused("unknown-unit", unit[:60])
    for unit in coded:
        values[unit] = _read_code(arrays, unit, sizes[unit], learned[unit], how, sent[unit])
    check_values(values, expected, sent, largest_change)
    reports = {name.removeprefix(_REPORT): a for name, a in arrays.items() if name.startswith(_REPORT)}
    for name, report in reports.items():
        if report.dtype.kind not in "fiub":
            raise Refused("wrong-dtype", name[:60])
        with np.errstate(invalid="ignore"):  # a NaN may be such that computing with it warns
            if report.dtype.kind == "f" and not bool((np.abs(report.astype(np.float64)) < _LARGEST_REPORT).all()):
                raise Refused("not-finite", name[:60])
    return {u: torch.from_numpy(values[u].copy()) for u in expected}, {n: torch.tensor(r) for n, r in reports.items()}


def _read_code(
    arrays: Mapping[str, NDArray[Any]], unit: str, size: int, n: int, how: Compression, sent: NDArray[Any]
) -> NDArray[Any]:  # fmt: skip
    """(size,) a unit as a client's code says that it has become, from what it was sent."""
    parts = {part: arrays[f"{part}/{unit}"] for part in ("value", "scale", "where") if f"{part}/{unit}" in arrays}
    said = how.decode(unpack_code(parts, how, n, unit), n)[0]
    rest = arrays.get(_REST + unit, np.zeros(0, np.float32))
    if rest.dtype != np.float32:
        raise Refused("wrong-dtype", unit)
    if rest.shape != (size - n,) or (_REST + unit in arrays) != (size > n):
        raise Refused("wrong-shape", unit)
    return np.concatenate([(torch.from_numpy(sent[:n].copy()) + said).numpy(), rest])


def stack(
    round_: int, answers: Mapping[int, tuple[dict[str, Tensor], dict[str, Tensor]]], family: Mapping[int, int],
    coded: Callable[[int, str], bool] = lambda number, unit: False,
) -> list[Update]:  # fmt: skip
    """Single clients' answers as the messages a simulation would have: one for each family and set of sent units.

    `coded` says whether a client sent a code of a unit.
    """
    groups: dict[tuple[int, tuple[str, ...], tuple[str, ...]], list[int]] = {}
    for number in sorted(answers):
        values, reports = answers[number]
        groups.setdefault((family[number], tuple(values), tuple(sorted(reports))), []).append(number)
    ups = []
    for (_, units, names), ids in groups.items():
        blocks: tuple[UnitValues, ...] = ()
        if units:
            sizes = tuple(len(answers[ids[0]][0][unit]) for unit in units)
            value = torch.stack([torch.cat(list(answers[i][0].values())) for i in ids])
            blocks = (UnitValues(units, sizes, None, value),)
        reports = {name: torch.stack([answers[i][1][name] for i in ids]) for name in names}
        by = {unit: torch.tensor([coded(i, unit) for i in ids]) for unit in units}
        ups.append(
            Update(round_, tuple(ids), blocks, reports, coded={u: who for u, who in by.items() if bool(who.any())})
        )
    return ups


def agree(
    answers: Mapping[int, tuple[dict[str, Tensor], dict[str, Tensor]]], before: Form | None, names: Collection[str]
) -> tuple[set[int], Form | None]:
    """Clients whose reports have other `names` than the method's, or other shapes or dtypes than most, so that they
    cannot be stacked; and what most have. Where as many have one form as another, that of the rounds `before` is right;
    else the one with more of the names, and of these the one with fewer numbers.
    """
    forms = {
        i: tuple(sorted((name, tuple(r.shape), str(r.dtype)) for name, r in reports.items()))
        for i, (_, reports) in answers.items()
    }
    if not forms:
        return set(), before
    many, all_forms = Counter(forms.values()), sorted(set(forms.values()))
    known = {form: {name for name, *_ in form} <= set(names) for form in all_forms}
    numbers = {form: sum(math.prod(shape) for _, shape, _ in form) for form in all_forms}
    usual = max(all_forms, key=lambda form: (known[form], many[form], form == before, len(form), -numbers[form]))
    return {i for i, form in forms.items() if form != usual}, usual


def has_form(reports: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a client's reports are those that it should make, in these shapes.

    >>> has_form({"loss": torch.zeros(2)}, {"loss": (2,)}), has_form({"loss": torch.zeros(2)}, {"loss": (3,)})
    (True, False)
    """
    alike = all(name in reports and tuple(reports[name].shape) == shape for name, shape in shapes.items())
    return alike and len(reports) == len(shapes) and all(r.dtype == torch.float32 for r in reports.values())


def _row(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.array(array))[None]
