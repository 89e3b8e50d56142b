"""What passes in looks and ballots, as the server half reads and writes it: sketches, candidates, what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedquilt.interface.messages import Roster, Updates
from fedquilt.methods.ballots import BALLOT, LOOK, PATCH, sketched
from fedquilt.methods.fedavg import circles_of_shape
from fedquilt.methods.hypotheses import different, joined, tidy
from fedquilt.sharing import PRIVATE, mean


def sketch_sizes(roster: Roster, size: int) -> dict[str, float]:
    """How many numbers a unit is sketched to, in the mean over all clients."""
    counts = {unit: sum(sketched(size, n) for n in numbers if n) for unit, numbers in _trained(roster).items()}
    return {unit: count / len(roster) for unit, count in counts.items()}


def _trained(roster: Roster) -> dict[str, list[int]]:
    """By unit, how many numbers each client trains of it; 0 where it lacks the unit."""
    sizes = roster.sizes()
    return {
        unit: [int(sizes[unit][i]) - m.statistics.get(unit, 0) for i, m in enumerate(roster.members)]
        for unit in roster.units
    }


def measured(unit: str, updates: Updates, roster: Roster, size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each width that a unit's sketches come in: whose they are, and what was measured on either half."""
    trained, found = _trained(roster), dict[int, list[tuple[Tensor, Tensor, Tensor]]]()
    for up in updates.ups:
        units = roster.members[up.ids[0]].units
        if "half-0" in up.reports and unit in units:
            widths = {u: sketched(size, trained[u][up.ids[0]]) for u in units}
            start = sum(widths[u] for u in list(units)[: list(units).index(unit)])
            one, other = (up.reports[f"half-{which}"][:, start : start + widths[unit]].cpu() for which in (0, 1))
            found.setdefault(widths[unit], []).append((torch.tensor(up.ids), one, other))
    return [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in found.values()]  # type: ignore[misc]


def shapes_told(roster: Roster, number: int, told: Mapping[str, Tensor], size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a client's answers to what it is told, (1, ...) each."""
    found: dict[str, tuple[int, ...]] = {}
    if LOOK in told:
        trained = _trained(roster)
        numbers = sum(sketched(size, trained[unit][number]) for unit in roster.members[number].units)
        found |= {"half-0": (numbers,), "half-1": (numbers,)}
    for name, value in told.items():
        if name.startswith(BALLOT):
            found |= {"losses": (2, value.shape[1] + 2), "judged": (2,)}
        elif name.startswith(PATCH):
            found |= {"fits": tuple(value.shape[1:]), "errors": tuple(value.shape[1:])}
    return found


def new_ballot(
    unit: str, options: Mapping[str, Tensor], back: Mapping[str, Tensor], updates: Updates, roster: Roster
) -> dict[str, Any]:
    """What clients are asked about a unit, and room for their answers."""
    circles = torch.stack([*options.values(), *back.values()])
    clients, candidates = len(roster), len(circles) + 2
    return {
        "unit": unit,
        "names": list(options),
        "back": list(back),
        "circles": circles,
        "losses": torch.zeros(clients, 2, candidates, dtype=torch.float64),
        "judged": torch.zeros(clients, 2, dtype=torch.float64),
        "heard": torch.zeros(clients, dtype=torch.bool),
    } | values_of(circles, unit, updates, roster, {})


def with_answers(ballot: Mapping[str, Any], updates: Updates) -> dict[str, Any]:
    """A ballot with what clients have answered in a round."""
    asked = dict(ballot)
    for up in updates.ups:
        if "judged" in up.reports:
            ids = torch.tensor(up.ids)
            asked["losses"] = asked["losses"].index_copy(0, ids, up.reports["losses"].double().cpu())
            asked["judged"] = asked["judged"].index_copy(0, ids, up.reports["judged"].double().cpu())
            asked["heard"] = asked["heard"].index_fill(0, ids, True)
    return asked


def values_of(
    circles: Tensor, unit: str, updates: Updates, roster: Roster, before: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of candidate circles (H, K), merged from what was just sent.

    Of each shape a table, and for each hypothesis and client its row there, (H, K). A circle of which nobody was heard
    keeps the value that it had `before`, as it would if it were one; at first, that is the mean of all.
    """
    shapes, samples = circles_of_shape(roster, unit), roster.samples
    rows, values = before.get("rows", torch.zeros_like(circles)).clone(), dict(before.get("values", {}))
    parts: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for ids, copies in updates.parts(unit):
        parts.setdefault(int(shapes[ids[0]]), []).append((ids, copies))
    for shape, sent in parts.items():
        ids, copies = torch.cat([who for who, _ in sent]), torch.cat([value for _, value in sent])
        everybody = mean(copies, torch.zeros_like(ids).to(copies.device), samples[ids].to(copies.device), 1).value
        table, heard, here = list[Tensor](), list[Tensor](), shapes == shape
        for h, circle in enumerate(circles):
            alone = torch.where(circle == PRIVATE, -2 - torch.arange(len(circle)), circle)  # a circle of one's own
            kinds, place = alone[here].unique(return_inverse=True)
            whole = torch.zeros(len(circle), dtype=torch.int64).index_copy(0, here.nonzero()[:, 0], place)
            merged = mean(copies, whole[ids].to(copies.device), samples[ids].to(copies.device), len(kinds))
            rows[h] = torch.where(here, sum(len(each) for each in table) + whole, rows[h])
            table.append(merged.value.float().cpu())
            heard.append(merged.heard.cpu())
        held = values.get(str(shape), everybody.float().cpu())
        values[str(shape)] = torch.where(torch.cat(heard)[:, None], torch.cat(table), held)
    return {"rows": rows, "values": values}


def backwards(
    unit: str, circle: Tensor, decisions: Sequence[Mapping[str, Any]], updates: Updates, roster: Roster
) -> dict[str, Tensor]:
    """Once after each split of a unit, the reverse: circles joined with the nearest, and everybody together again."""
    split = [d["round"] for d in decisions if d["unit"] == unit and d["changed"]]
    asked = [d["round"] for d in decisions if d["unit"] == unit and d["backwards"]]
    if not split or max(asked, default=0) > max(split):
        return {}
    values: dict[int, dict[int, Tensor]] = {}
    shapes = circles_of_shape(roster, unit)
    for ids, copies in updates.parts(unit):
        for group in circle[ids].unique().tolist():
            here = (circle[ids] == group).to(copies.device)
            values.setdefault(int(shapes[ids[0]]), {})[group] = copies[here].double().mean(0).cpu()
    nearest = circle
    for of_shape in values.values():
        nearest = joined(nearest, {g: v for g, v in of_shape.items() if g != PRIVATE})
    return different({"joined with the nearest": tidy(nearest), "everybody together": tidy(shapes)}, circle)
