"""The messages of the core, `Instructions` and `Update`, for one client each, as arrays and plain text and back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedquilt._util.toml import values_of
from fedquilt.core.terms import Terms
from fedquilt.deploy.device.client_folder import Allowed
from fedquilt.deploy.transport.wire import Refused, check_values, grow, shrink
from fedquilt.engines.settings import Training
from fedquilt.interface.messages import ClientInfo, Instructions, UnitValues, Update
from fedquilt.methods import Method
from fedquilt.methods.find import address_of, in_library, source_of
from fedquilt.privacy import Privacy
from fedquilt.runs.settings import method_to
from fedquilt.tasks import task_from

Arrays = dict[str, NDArray[Any]]
Text = dict[str, Any]
Form = tuple[tuple[str, tuple[int, ...], str], ...]  # of reports: each one's name, shape and dtype
LOOK = "look/"  # before the names of arrays of a second message in a letter
_LARGEST_REPORT = 1e18  # so that squares and sums of them are numbers still
_VALUE, _TOLD, _REPORT, _OFFER, _COPY = "value/", "told/", "report/", "offer/", "copy/"


def write_down(down: Instructions, dtype: str) -> tuple[Arrays, Text]:
    """A message to one client; its values in the transfer's format. What is among its offers does not travel twice."""
    offered = [_among_offers(block, down.offers) for block in down.blocks]
    sent = [(i, block) for i, (block, at) in enumerate(zip(down.blocks, offered, strict=True)) if at is None]
    values = {f"{_VALUE}{i}": block.value[0].numpy(force=True) for i, block in sent}
    values |= {_OFFER + unit: value.numpy(force=True) for unit, value in down.offers.items()}
    values |= {_COPY + unit: value[0].numpy(force=True) for unit, value in down.copies.items()}
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
    }
    return {**shrink(values, dtype), **told}, text


def _among_offers(block: UnitValues, offers: Mapping[str, Tensor]) -> int | None:
    """The number of the circle whose values, all of them offered, a block holds; None where they are not."""
    if not all(unit in offers for unit in block.units):
        return None
    same = (torch.cat([offers[unit] for unit in block.units], 1) == block.value[0]).all(1).nonzero()[:, 0]
    return int(same[0]) if len(same) else None


def read_down(arrays: Mapping[str, NDArray[Any]], text: Mapping[str, Any]) -> Instructions:
    """The message that `write_down` wrote."""
    whole = grow(arrays)

    def value(i: int, units: Sequence[str]) -> Tensor:
        circle = text["offered"][i]
        row = np.concatenate([whole[_OFFER + unit][circle] for unit in units]) if circle is not None else None
        return _row(whole[f"{_VALUE}{i}"] if row is None else row)

    blocks = tuple(
        UnitValues(tuple(units), tuple(sizes), None, value(i, units))
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
        offers={name.removeprefix(_OFFER): torch.from_numpy(a) for name, a in whole.items() if name.startswith(_OFFER)},
        copies={name.removeprefix(_COPY): _row(a) for name, a in whole.items() if name.startswith(_COPY)},
    )


def write_up(up: Update, dtype: str) -> tuple[Arrays, Text]:
    """A message from one client: one array for each unit, so that the server checks each by its name."""
    values: Arrays = {}
    for block in up.blocks:
        row = block.value[0].numpy(force=True)
        for unit, part in zip(block.units, np.split(row, np.cumsum(block.sizes)[:-1]), strict=True):
            values[unit] = part
    reports = {_REPORT + name: value[0].numpy(force=True) for name, value in up.reports.items()}
    named = {_VALUE + unit: value for unit, value in shrink(values, dtype).items()}
    return {**named, **reports}, {"round": up.round}


def read_up(
    arrays: Mapping[str, NDArray[Any]],
    down: Instructions,
    sizes: Mapping[str, int],
    largest_change: float,
    chooses: bool,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values by unit and reports by name of one client's answer; `Refused` where a merge must not see them.

    A client that `chooses` what it sends may leave out units that it was asked for.
    """
    values = {name.removeprefix(_VALUE): a for name, a in arrays.items() if name.startswith(_VALUE)}
    asked = {unit: sizes[unit] for unit, sends in down.send.items() if bool(sends[0])}
    expected = {unit: size for unit, size in asked.items() if unit in values or not chooses}
    sent: Arrays = {}
    for block in down.blocks:
        for unit, part in zip(block.units, torch.split(block.value[0], list(block.sizes)), strict=True):
            sent[unit] = part.numpy(force=True)
    check_values(values, expected, sent, largest_change)
    reports = {name.removeprefix(_REPORT): a for name, a in arrays.items() if name.startswith(_REPORT)}
    for name, report in reports.items():
        if report.dtype.kind not in "fiub":
            raise Refused("wrong-dtype", name[:60])
        with np.errstate(invalid="ignore"):  # a NaN may be such that computing with it warns
            if report.dtype.kind == "f" and not bool((np.abs(report.astype(np.float64)) < _LARGEST_REPORT).all()):
                raise Refused("not-finite", name[:60])
    whole = grow(values)
    return {u: torch.from_numpy(whole[u].copy()) for u in expected}, {n: torch.tensor(r) for n, r in reports.items()}


def stack(
    round_: int, answers: Mapping[int, tuple[dict[str, Tensor], dict[str, Tensor]]], family: Mapping[int, int]
) -> list[Update]:
    """Single clients' answers as the messages a simulation would have: one for each family and set of sent units."""
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
        ups.append(Update(round_, tuple(ids), blocks, reports))
    return ups


def agree(
    answers: Mapping[int, tuple[dict[str, Tensor], dict[str, Tensor]]], before: Form | None
) -> tuple[set[int], Form | None]:
    """Clients whose reports have other names, shapes or dtypes than most, so that they cannot be stacked, and what most
    have. Where as many have one form as another, that of the rounds `before` is right; else the one with fewer numbers.
    """
    forms = {
        i: tuple(sorted((name, tuple(r.shape), str(r.dtype)) for name, r in reports.items()))
        for i, (_, reports) in answers.items()
    }
    if not forms:
        return set(), before
    many, all_forms = Counter(forms.values()), sorted(set(forms.values()))
    numbers = {form: sum(math.prod(shape) for _, shape, _ in form) for form in all_forms}
    usual = max(all_forms, key=lambda form: (many[form], form == before, -numbers[form]))
    return {i for i, form in forms.items() if form != usual}, usual


def write_terms(terms: Terms) -> Text:
    """What everyone agrees on, as text; the samples that the server holds are files on every device.

    A method that is not the library's is named by its address (a file without its folder, which is nobody's business)
    and a checksum of its source.
    """
    kind, method = type(terms.method), method_to(terms.method)
    if in_library(terms.method.name) is not kind:
        source, _, name = address_of(kind).rpartition(":")
        where = Path(source).name if source.endswith(".py") else source
        told = {"name": method["name"], "settings": method["settings"]}
        method = told | {"class": f"{where}:{name}", "source": source_of(kind)}
    return {
        "method": method,
        "training": asdict(terms.training),
        "classes": terms.classes,
        "seed": terms.seed,
        **({} if terms.privacy is None else {"dp": terms.privacy.text}),
        **terms.task.stated,
    }


def read_terms(text: Mapping[str, Any], common: Any, public_test: Any, allowed: Allowed) -> Terms:
    """The terms that `write_terms` wrote, with the public samples that the device holds."""
    training = Training(**values_of(text["training"]))
    method = read_method(text["method"], allowed)
    task, privacy = task_from(text.get("task", {})), Privacy.of(text.get("dp"))
    return Terms(method, training, text["classes"], text["seed"], common, public_test, privacy, task)


def read_method(text: Mapping[str, Any], allowed: Allowed) -> Method:
    """The method that a letter names: of the device's own library, or one that its owner allowed.

    Code that a server names is not looked for. An allowed method must be the very code that the server has.
    """
    shown = ascii(str(text.get("class", text["name"])))[:100]
    if "class" in text:
        found = allowed.get(str(text["class"]).rpartition(":")[2], ())
        kinds = [kind for kind, source in found if source == text.get("source")]
        if found and not kinds:
            raise Refused("other-code", shown)
    else:
        known = in_library(str(text["name"]))
        kinds = [] if known is None else [known]
    if not kinds:
        raise Refused("unknown-method", shown)
    return kinds[0](**values_of(text["settings"]))


def write_member(member: ClientInfo) -> Text:
    """What a client declares, as text."""
    return {
        "name": member.name,
        "samples": member.samples,
        "traits": dict(member.traits),
        "labels": list(member.labels),
        "public": list(member.public),
        "constant": list(member.constant),
        "units": {unit: [list(shape) for shape in signature] for unit, signature in member.units.items()},
        "statistics": dict(member.statistics),
        "kinds": {unit: list(kinds) for unit, kinds in member.kinds.items()},
    }


def read_member(text: Mapping[str, Any]) -> ClientInfo:
    """The declaration that `write_member` wrote."""
    units = {str(u): tuple(tuple(int(n) for n in shape) for shape in s) for u, s in text["units"].items()}
    traits = {str(k): str(v) for k, v in text["traits"].items()}
    labels = tuple(int(n) for n in text["labels"])
    public, constant = tuple(int(n) for n in text["public"]), tuple(str(name) for name in text["constant"])
    kinds = {str(unit): tuple(str(kind) for kind in found) for unit, found in text["kinds"].items()}
    statistics = {str(unit): int(n) for unit, n in text["statistics"].items()}
    name, samples = str(text["name"]), int(text["samples"])
    return ClientInfo(name, samples, traits, labels, units, public, kinds, statistics, constant)


def _row(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.array(array))[None]
