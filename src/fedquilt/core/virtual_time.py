"""Virtual time: how long clients of unlike hardware would take, when rounds close, and what arrives late.

Clients declare `speed`, training samples a second, and `bandwidth`, megabytes a second, as traits. A round of client i
takes, with what the plan says that it receives and sends, n_i training samples and as many passes as its steps make,

    t_i = received_i / bandwidth_i + passes n_i / speed_i + sent_i / bandwidth_i

A round closes when all who were chosen have arrived, or after `deadline` seconds: who is late then stays as it was, as
on devices. With `arrivals` rounds are semi-asynchronous (FedBuff, Nguyen et al. 2022): a round closes when so many
have arrived, the others go on, and whoever is free starts from the values of now. An answer to values that were merged
into s times since then counts as a move of theirs, shortened by its staleness (FedAsync, Xie et al. 2019):

    copy_i <- value + (1 + s)^-staleness (copy_i - received_i)            before it is merged like any other
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedquilt.core.backend import Backend
from fedquilt.core.server import Server
from fedquilt.engines.settings import Training
from fedquilt.interface.messages import Instructions, Roster, UnitValues, Update
from fedquilt.interface.method import Method
from fedquilt.interface.passed import Passed, bytes_each
from fedquilt.sharing import UnitPlan

SPEED, BANDWIDTH = "speed", "bandwidth"
_DIGITS = 6  # of a second: sums of times that are equal on paper are equal


class Answers(NamedTuple):
    """What a round brought: updates to merge, what passed for them, and who was too late."""

    ups: list[Update]
    passed: list[Passed]
    late: tuple[int, ...] = ()


@dataclass(frozen=True)
class AtWork:
    """Clients that started together and have not arrived yet: what they will send, and when."""

    round: int  # in which they started
    up: Update
    base: Mapping[str, Tensor]  # (k, size) what they received, by unit
    arrives: Tensor  # (k,) virtual seconds
    told: int

    def at(self, places: Tensor) -> AtWork:
        """Some of them, by their places."""
        ids = tuple(self.up.ids[int(place)] for place in places)
        blocks = [block for each in self.up.blocks if (block := _of(each, places)) is not None]
        reports = {name: value[places.to(value.device)] for name, value in self.up.reports.items()}
        base = {unit: value[places.to(value.device)] for unit, value in self.base.items()}
        coded = {unit: None if who is None else who[places.to(who.device)] for unit, who in self.up.coded.items()}
        return replace(self, up=Update(self.up.round, ids, tuple(blocks), reports, coded=coded), base=base,
                       arrives=self.arrives[places])  # fmt: skip

    def rebased(self, server: Server, exponent: float) -> Update:
        """What they send, as moves of what they received put onto the values of now; as it is where these are those."""
        stale = server.round + 1 - self.round
        if stale == 0:
            return self.up
        blocks = []
        for block in self.up.blocks:
            value = block.value.clone()
            ids = self.up.numbers if block.places is None else self.up.numbers[block.places]
            start = 0
            for unit, size in zip(block.units, block.sizes, strict=True):
                plan, mine = server.plan[unit], value[:, start : start + size]
                merged = isinstance(plan, UnitPlan) and bool((plan.circle[ids] >= 0).all())
                if merged and unit in self.base:
                    base = self.base[unit]
                    base = base if block.places is None else base[block.places.to(base.device)]
                    mine.sub_(base).mul_((1 + stale) ** -exponent).add_(server.held(unit, ids))
                start += size
            blocks.append(replace(block, value=value))
        return replace(self.up, round=server.round + 1, blocks=tuple(blocks))


class Clock:
    """The virtual time of a simulation, and when its rounds close."""

    def __init__(self, training: Training, method: Method, roster: Roster, passes: int) -> None:
        self.now = 0.0
        self.late = 0  # answers that no round took
        self.deadline = training.deadline or math.inf
        self.arrivals, self.staleness, self.passes = training.arrivals, training.staleness, passes
        self.at_work: list[AtWork] = []
        if method.name == "local":  # who waits for nobody is late for nobody
            self.deadline, self.arrivals = math.inf, 0
        self.bandwidth = torch.tensor(_numbers(roster, BANDWIDTH) or [math.inf] * len(roster), dtype=torch.float64)
        self.speed = torch.tensor(_numbers(roster, SPEED) or [math.inf] * len(roster), dtype=torch.float64)

    def seconds(self, server: Server, chosen: Sequence[int]) -> Tensor:
        """(k,) how long a round takes each of these clients."""
        moved = server.traffic(chosen)
        travels = (moved.bytes_up + moved.bytes_down) / (1e6 * self.bandwidth)
        trains = self.passes * server.roster.samples.double() / self.speed
        return (travels + trains)[torch.tensor(chosen, dtype=torch.int64)]

    def busy(self) -> set[int]:
        """Who is at work."""
        return {number for group in self.at_work for number in group.up.ids}

    def exchange(self, server: Server, backend: Backend, chosen: Sequence[int]) -> Answers:
        """A round in which these clients start."""
        if self.arrivals:
            return self._until_enough(server, backend, chosen)
        taken = dict(zip(chosen, self.seconds(server, chosen).tolist(), strict=True))
        there = [i for i in chosen if taken[i] <= self.deadline] or [min(chosen, key=lambda i: taken[i])]
        late = tuple(i for i in chosen if i not in there)
        last = max(taken[i] for i in there)
        self.now = round(self.now + (max(self.deadline, last) if late else last), _DIGITS)
        self.late += len(late)
        pairs = backend.exchange(server, there, ())
        passed = [Passed.of(down, up) for down, up in pairs]
        return Answers([up for _, up in pairs], passed + ([Passed(late, 0, 0, {})] if late else []), late)

    def _until_enough(self, server: Server, backend: Backend, chosen: Sequence[int]) -> Answers:
        """Some clients start; who arrives until there are enough is merged, whoever has been at work since when."""
        if chosen:
            taken = dict(zip(chosen, self.seconds(server, chosen).tolist(), strict=True))
            for down, up in backend.exchange(server, chosen, ()):
                ends = [round(self.now + taken[i], _DIGITS) for i in up.ids]
                self.at_work.append(_started(down, up, torch.tensor(ends, dtype=torch.float64)))
        ends = torch.cat([group.arrives for group in self.at_work]).sort().values.tolist()
        enough = ends[min(self.arrivals, len(ends)) - 1]
        self.now = max(ends[0], min(enough, round(self.now + self.deadline, _DIGITS)))
        here = [(group, group.arrives <= self.now) for group in self.at_work]
        come = [group.at(there.nonzero()[:, 0]) for group, there in here if there.any()]
        self.at_work = [group.at((~there).nonzero()[:, 0]) for group, there in here if not there.all()]
        passed = [replace(Passed.of(_NOTHING, group.up), told=group.told) for group in come]
        return Answers([group.rebased(server, self.staleness) for group in come], passed)

    def kept(self) -> dict[str, Any]:
        """What a checkpoint must hold: plain values and tensors."""
        groups = [
            {
                "round": g.round, "ids": list(g.up.ids), "base": dict(g.base), "arrives": g.arrives, "told": g.told,
                "reports": dict(g.up.reports), "coded": dict(g.up.coded),
                "blocks": [[list(b.units), list(b.sizes), b.places, b.value] for b in g.up.blocks],
            }
            for g in self.at_work
        ]  # fmt: skip
        return {"now": self.now, "late": self.late, "at_work": groups}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Take back what `kept` gave."""
        self.now, self.late, self.at_work = kept["now"], kept["late"], []
        for g in kept["at_work"]:
            blocks = tuple(UnitValues(tuple(units), tuple(sizes), at, value) for units, sizes, at, value in g["blocks"])
            up = Update(g["round"], tuple(g["ids"]), blocks, g["reports"], coded=g.get("coded", {}))
            self.at_work.append(AtWork(g["round"], up, g["base"], g["arrives"], g["told"]))


def make_clock(training: Training, method: Method, server: Server, passes: int, changing: bool) -> Clock | None:
    """The clock of a federation whose clients declare numbers as `speed` or `bandwidth`; None where they do not."""
    roster = server.roster
    wanted = "deadline" if training.deadline else "arrivals" if training.arrivals else ""
    if _numbers(roster, SPEED) is None and _numbers(roster, BANDWIDTH) is None:
        if wanted:
            raise ValueError(
                f"training settings: {wanted} is in virtual seconds; have every client declare "
                f"traits={{'{SPEED}': samples a second, '{BANDWIDTH}': megabytes a second}}, one of them or both"
            )
        return None
    if wanted and server.merging.trusted is not None:
        raise ValueError(
            f"training settings: {wanted} may leave out trusted clients, whom this merge measures others by"
        )
    if training.arrivals and method.name != "local":
        at_once = max(1, round(training.share * len(roster)))
        if training.arrivals > at_once:
            raise ValueError(
                f"training settings: arrivals={training.arrivals}, but {at_once} clients are at work at once"
            )
        if type(method).update is not Method.update or server.plan.offered or server.plan.copies or changing:
            why = (
                "clients change during the run" if changing else f"the server of the method '{method.name}' keeps step"
            )
            raise ValueError(f"training settings: arrivals needs rounds that clients may answer late, but {why}")
    return Clock(training, method, roster, passes)


def _numbers(roster: Roster, trait: str) -> list[float] | None:
    """A trait of all clients as numbers above 0; None where nobody, or not everybody, declares one."""
    try:
        found = [float(member.traits[trait]) for member in roster.members]
    except (KeyError, ValueError):
        return None
    return found if all(0 < number < math.inf for number in found) else None


_NOTHING = Instructions(0, (), (), (), {})


def _started(down: Instructions, up: Update, arrives: Tensor) -> AtWork:
    """Clients that start now, with copies of what they will send and of what they received: both are written over."""
    base = {}
    for block in down.blocks:
        start = 0
        for unit, size in zip(block.units, block.sizes, strict=True):
            base[unit] = block.value[:, start : start + size].clone()
            start += size
    blocks = tuple(UnitValues(b.units, b.sizes, b.places, b.value.clone()) for b in up.blocks)
    reports = {name: value.clone() for name, value in up.reports.items()}
    kept = replace(up, blocks=blocks, reports=reports, codes={})
    return AtWork(up.round, kept, base, arrives, bytes_each(down.told))


def _of(block: UnitValues, places: Tensor) -> UnitValues | None:
    """The part of a block that clients at these places of its message sent; None where they sent nothing of it."""
    if block.places is None:
        return replace(block, value=block.value[places.to(block.value.device)])
    new, rows = (block.places[None] == places[:, None]).nonzero(as_tuple=True)  # who of these, and where in the block
    if not len(new):
        return None
    whole = len(new) == len(places)
    return replace(block, places=None if whole else new, value=block.value[rows.to(block.value.device)])
