"""Cohorts that nobody declared: found from what clients sent of a module, and kept from one time to the next.

What is known of a module's cohorts is a dict of tensors, part of a method's state: `circle` (K,), the circle of each
client, -1 for clients without the module; `decided` (K,), whether that circle was found, or is that of the clients not
heard yet; `first`, for each task the value that all its clients started from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

from fedquilt.families.layout import Signature
from fedquilt.interface.me import Me
from fedquilt.interface.messages import Updates
from fedquilt.sharing import (
    adjusted_rand,
    affinity,
    circles_by_trait,
    cluster_updates,
    cosine_distance,
    group_by_affinity,
    keep_ids,
)
from fedquilt.sharing.evidence import Evidence, agglomerate, evidence
from fedquilt.sharing.grouping import Linkage
from fedquilt.sharing.sketch import sketch
from fedquilt.sharing.weighted_sums import finite_rows

_LOOKED_AT, _SKETCH = 512, 256  # samples at most for a direction, and the numbers that it is sent as
_LAM = 1.0  # a disagreement counts in full: training by itself in a round makes up for none of it
_DOUBT = 1.5  # times the noise that was measured: that of few may be less than there is, and sharing is the rule
_TOGETHER = 4  # neighbours go to one half together: windows of a signal overlap those next to them

Known = dict[str, Any]
Task = tuple[tuple[str, Signature], ...]  # the units of a client's module with their shapes; clients of one may share


def nothing_known(tasks: Sequence[Task]) -> Known:
    """Before anything was sent: clients of one task are together.

    >>> nothing_known([(("head", ((2,),)),), (), (("head", ((2,),)),)])["circle"].tolist()
    [0, -1, 0]
    """
    circle = circles_by_trait([repr(task) if task else None for task in tasks])
    return {"circle": circle, "decided": torch.zeros(len(tasks), dtype=torch.bool), "first": {}}


def unheard(known: Known, tasks: Sequence[Task], client: int) -> bool:
    """Whether nobody who does what a client does has a cohort yet: they are all where they started."""
    return not any(bool(known["decided"][i]) for i, task in enumerate(tasks) if task == tasks[client])


def with_newcomer(known: Known, tasks: Sequence[Task]) -> Known:
    """The last of the tasks is a newcomer's: it waits, with others of its task that wait, until it is heard."""
    circle, decided = known["circle"], known["decided"]
    waiting = [int(circle[i]) for i, task in enumerate(tasks[:-1]) if task == tasks[-1] and not decided[i]]
    free = next(i for i in range(len(tasks)) if i not in circle.tolist())
    own = (waiting[0] if waiting else free) if tasks[-1] else -1
    more = torch.tensor([own]), torch.tensor([False])
    return {**known, "circle": torch.cat([circle, more[0]]), "decided": torch.cat([decided, more[1]])}


def by_updates(
    known: Known, tasks: Sequence[Task], sent: Updates, due: bool, number: int | None, hysteresis: float
) -> Known:
    """Cluster the clients that sent their module by their updates, task by task, where it is `due` and has a number.

    An update is a copy less one point for all: the mean of what these clients received. Whoever is heard for the first
    time when cohorts are there already started elsewhere: it joins the one that moved most in its own direction since
    the beginning, and is clustered with the others from the next time on.
    """
    circle, decided, first = known["circle"].clone(), known["decided"].clone(), dict(known["first"])
    for task in dict.fromkeys(tasks):
        ids, copies = _copies(task, tasks, sent)
        settled = decided & torch.tensor([other == task for other in tasks])
        fresh, due = not bool(settled.any()), due and number is not None
        if len(ids) == 0 or (fresh and not due):
            continue
        if fresh:
            first[repr(task)] = _received(task, sent, ids).mean(0).cpu()
        late = ~decided[ids] & (not fresh)
        if bool(late.any()):
            begun = first[repr(task)].to(copies.device)
            circles = sorted(set(circle[settled].tolist()))
            one_of_each = torch.tensor([int((settled & (circle == c)).nonzero()[0]) for c in circles])
            centres = _received(task, sent, one_of_each) - begun
            circle[ids[late]] = circle[one_of_each][nearest(copies[late] - begun, centres)]
        now = ids[~late]
        if due and len(now):
            updates = copies[~late] - _received(task, sent, now).mean(0)
            previous = torch.full_like(now, -1) if fresh else circle[now]
            circle[now] = cluster_updates(updates, number, previous, hysteresis, reserved=_outside(circle, now))
        decided[ids] = True
    return {"circle": circle, "decided": decided, "first": first}


def by_affinity(known: Known, tasks: Sequence[Task], ids: Tensor, probabilities: Tensor, linkage: Linkage) -> Known:
    """Group the clients `ids` by how alike their models answer, (k, samples, classes), task by task."""
    circle, decided = known["circle"].clone(), known["decided"].clone()
    parents = circles_by_trait([repr(task) if task else None for task in tasks])[ids]
    groups, _ = group_by_affinity(affinity(probabilities), parents, linkage)
    now, groups = ids[groups >= 0], groups[groups >= 0]
    circle[now] = keep_ids(groups, torch.where(decided[now], circle[now], -1), _outside(circle, now))
    decided[now] = True
    return {**known, "circle": circle, "decided": decided}


def directions(me: Me, units: Sequence[str], name: str) -> Tensor:
    """(2, size) which way a client's loss pulls its module, on either half of its training samples, sketched."""
    data = me.data
    assert data is not None
    assert data.mask is not None
    few, real = replace(data, x=data.x[:_LOOKED_AT], y=data.y[:_LOOKED_AT]), data.mask[:_LOOKED_AT]
    half = torch.arange(len(real), device=real.device) // _TOGETHER % 2

    def loss(values: Mapping[str, Tensor], mine: Tensor) -> Tensor:
        whole = {unit: torch.cat([part, me.values[unit][len(part) :]]) for unit, part in values.items()}
        return (few.losses(me.at(whole)(few.x)) * mine).sum() / mine.sum().clamp(min=1)

    start = {unit: me.values.trained(unit) for unit in units}
    slopes = [grad(loss)(start, real * (half == which)) for which in (0, 1)]
    return torch.stack([sketch(torch.cat(list(slope.values())), _SKETCH, name) for slope in slopes])


def found_facts(known: Mapping[str, Known], declared: Tensor) -> dict[str, dict[str, Any]]:
    """By module, how many cohorts were found, and how well they match declared ones (K,): the adjusted Rand index."""
    facts: dict[str, dict[str, Any]] = {}
    for module, found in known.items():
        circle, both = found["circle"], found["decided"] & (declared >= 0)
        facts.setdefault("cohorts_found", {})[module] = len(set(circle[found["decided"]].tolist()))
        if bool(both.any()):
            facts.setdefault("adjusted_rand", {})[module] = adjusted_rand(circle[both], declared[both])
    return facts


def by_directions(known: Known, tasks: Sequence[Task], sent: Updates, report: str, samples: Tensor) -> Known:
    """Find cohorts and their number from `directions` (k, 2, size), where clients of a task are at one point still.

    Their number is found among clients of one architecture: they join while what they gain, less noise, is more than
    what they lose by following others (`sharing.evidence`). Then all of a task are clustered, so many cohorts, by the
    cosine between directions: what devices see differs, and so do directions, but less than those of cohorts. Clients
    of a task that has cohorts already are left where they are.
    """
    circle, decided, first = known["circle"].clone(), known["decided"].clone(), dict(known["first"])
    for task in {tasks[up.ids[0]]: None for up in sent.ups if report in up.reports}:
        peers = torch.tensor([other == task for other in tasks])
        told = [up for up in sent.ups if report in up.reports and tasks[up.ids[0]] == task]
        if bool((decided & peers).any()):
            continue
        now, looks = torch.cat([up.numbers for up in told]), torch.cat([up.reports[report] for up in told])
        number = max(_how_many(up.reports[report], samples[up.numbers]) for up in told)
        groups = cluster_updates(looks.mean(1), number)
        circle[now] = keep_ids(groups, torch.full_like(now, -1), _outside(circle, now))
        decided[now], first[repr(task)] = True, _received(task, sent, now).mean(0).cpu()
    return {"circle": circle, "decided": decided, "first": first}


def _how_many(looks: Tensor, samples: Tensor) -> int:
    """How many cohorts there are among clients of one architecture, whose modules below are the same too.

    One noise a sample for all: that of a few samples by themselves is too noisy to go by.
    """
    found = evidence(looks[:, 0], looks[:, 1])
    noise = _DOUBT * (found.noise * samples).mean() / samples
    alike = Evidence(found.products + (found.noise - noise).diag(), noise)
    return len(agglomerate(alike, samples, _LAM).unique())


def nearest(updates: Tensor, centres: Tensor) -> Tensor:
    """(k,) for each update (k, size) the row of the centre (c, size) with the smallest cosine distance.

    >>> nearest(torch.tensor([[1.0, 0.2]]), torch.tensor([[0.0, 1.0], [3.0, 0.0]])).tolist()
    [1]
    """
    return cosine_distance(torch.cat([updates, centres]))[: len(updates), len(updates) :].argmin(1)


def _copies(task: Task, tasks: Sequence[Task], sent: Updates) -> tuple[Tensor, Tensor]:
    """Who of a task sent its module, (k,), and their copies, (k, size); who sent no finite numbers is left out."""
    ids, copies = [torch.zeros(0, dtype=torch.int64)], []
    for up in sent.ups if task else ():
        # Units of a module are planned alike, so whoever sent one of them sent all.
        parts = [up.part([unit]) for unit, _ in task] if tasks[up.ids[0]] == task else []
        there = [part for part in parts if part is not None]
        if there and len(there) == len(task):
            values = torch.cat([value for _, value in there], 1)
            good = finite_rows(values)
            ids.append(there[0][0][good.cpu()])
            copies.append(values[good])
    return torch.cat(ids), torch.cat(copies) if copies else torch.zeros(0, 0)


def _received(task: Task, sent: Updates, ids: Tensor) -> Tensor:
    """(k, size) what clients of a task had of their module before they trained."""
    return torch.cat([sent.received(unit, ids) for unit, _ in task], 1)


def _outside(circle: Tensor, ids: Tensor) -> set[int]:
    """The circles of all other clients."""
    others = torch.ones(len(circle), dtype=torch.bool)
    others[ids] = False
    return set(circle[others].tolist())
