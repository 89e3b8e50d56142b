"""Secure sums in a round: what they go with, which circles are summed, and a simulated round of the protocol.

A place where units lie together (`CircleValues`) and a circle of it are one sum. The server knows who is in it and with
what weight, since it wrote the plan; so weights are no secret, and only weighted copies are masked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedquilt._util.randomness import key_of
from fedquilt.core.noisy_shares import NoisyShares, clipped_changes, in_shares
from fedquilt.families.layout import Signature
from fedquilt.interface.masked import Masked, Summed
from fedquilt.interface.messages import Instructions, Update
from fedquilt.interface.method import Method
from fedquilt.interface.steps import Do, Send
from fedquilt.privacy import Privacy
from fedquilt.privacy.discrete_gaussian import Words
from fedquilt.secure.graph import degree
from fedquilt.secure.settings import SecureSums, check_installed
from fedquilt.sharing import Plan, Rule, UnitPlan
from fedquilt.sharing.merge import Mean
from fedquilt.sharing.weighted_sums import Sums

if TYPE_CHECKING:
    from fedquilt.core.server import Server
    from fedquilt.core.values import CircleValues

# Bytes of the protocol beside numbers, for each neighbour and for each member: public keys, what binds a member, sealed
# shares, shares of one secret, and a client's number. See `secure.protocol`.
_KEYS, _BOUND, _SEALED, _SHARE, _NUMBER = 64, 32, 50, 17, 4
Keys = tuple[tuple[str, Signature], ...]


def check(
    secure: SecureSums | None, method: Method, rule: Rule, privacy: Privacy | None, ranked: bool, attacked: bool = False
) -> None:  # fmt: skip
    """Refuse, before any work, what needs more than sums; `ranked`: ranks hand each other clients' copies."""
    if secure is None and in_shares(privacy):
        raise ValueError(
            "dp.level=distributed gives each client a share of the noise, which hides little alone; it needs secure "
            "sums: add --secure-sums (secure=True; for devices, fedquilt deploy init --secure-sums)"
        )
    if secure is None:
        return
    check_installed()
    steps = method.local()
    if ranked:
        raise ValueError("secure sums are made in one process; leave --ranks out")

    def refuse(why: str) -> None:
        raise ValueError(
            f"the method '{method.name}' does not go with secure sums: {why}; take one whose server half needs means "
            "per circle only, such as fedavg, fedper, ditto, scaffold or modfl with declared circles"
        )

    if not isinstance(rule, Mean):
        raise ValueError(f"{rule} looks at single copies, and under secure sums the server has none; merge with 'mean'")
    if privacy is not None and (privacy.level == "client" or privacy.adaptive):
        raise ValueError(
            "dp.level=client and dp.adaptive add noise where the server sums, and secure sums are opened without it; "
            "take dp.level=distributed with a fixed clip, in which clients add it in shares, or run without secure sums"
        )
    if in_shares(privacy) and attacked:
        raise ValueError(
            "dp.level=distributed clips under masks, which liars would not do; try attacks with dp.level=local"
        )
    if method.learns:
        refuse("its server half learns from what single clients send")
    beside = [report for step in steps if isinstance(step, Do) for report in step.reports]
    if beside:
        refuse(f"its clients send reports beside units ('{beside[0]}'), which no sum hides")
    if any(isinstance(step, Send) for step in steps):
        refuse("its clients choose what they send, and the choice tells of their data")


def check_time(secure: SecureSums | None, clock: object | None) -> None:
    """Refuse virtual time."""
    if secure is not None and clock is not None:
        raise ValueError("secure sums are opened when a round ends, and virtual time lets updates come after that")


def at_home(plan: Plan, settings: SecureSums | None, privacy: Privacy | None = None) -> Plan:
    """A plan in which circles of fewer senders than can be hidden in a sum are private; the same without secure sums.

    Their units stay home for as long as the plan holds: a circle that is never opened would hand its first value back
    to its members for ever. Where noise comes in shares, sums that have no room for it are refused.
    """
    if settings is None:
        return plan
    units, least = {}, settings.minimum
    for name, unit in plan.units.items():
        if not isinstance(unit, UnitPlan):
            raise ValueError(f"unit '{name}' is mixed from single copies, and under secure sums the server has none")
        if name in plan.asked and bool((plan.asked[name] & ~unit.sends).any()):
            raise ValueError(
                f"unit '{name}' is asked for by itself, and no sum hides it; secure sums do not go with it"
            )
        senders = torch.bincount(unit.row[unit.sends], minlength=unit.count)
        small = (unit.circle >= 0) & (senders[unit.row] < least) if unit.count else torch.zeros_like(unit.sends)
        if bool(small.any()):
            unit = UnitPlan(torch.where(small, -1, unit.circle), unit.weight, unit.pull, unit.pool)
        units[name] = unit
        if (noisy := in_shares(privacy)) and bool(unit.sends.any()):
            NoisyShares(noisy, settings, int(senders.max()))
    moved = [name for name, unit in plan.units.items() if bool(unit.sends.any())]
    if moved and not any(bool(unit.sends.any()) for unit in units.values()):
        raise ValueError(
            f"no circle has {least} clients (secure.minimum), so that nothing would be shared; share more widely, or "
            "run without secure sums"
        )
    return Plan(units, {}, plan.offered, plan.copies)


def take_sums(server: Server, ups: Sequence[Update]) -> list[tuple[Tensor, Tensor]]:
    """Merge the sums of a round: who was in them, and who kept a faulty copy. No copy is merged, whoever sent it."""
    if any(up.blocks or up.reports for up in ups):
        raise RuntimeError("a client's copy came to the server under secure sums")
    found = []
    for summed in [summed for up in ups if up.masked for summed in up.masked.sums]:
        place = next(values for values in server.all_values if values.keys == summed.keys)
        found.append((summed.ids, place.take(summed.sums, summed.ids, server.merging)))
    return found


@dataclass(frozen=True)
class Circle:
    """One sum of a round: a circle of units that lie together, and those of the round's clients who send to it.

    `shares` are their weights for each of the largest in the circle: what a copy is multiplied by before it is summed.
    With noise in shares all count 1, and changes are summed.
    """

    values: CircleValues
    row: int
    members: tuple[int, ...]
    shares: tuple[float, ...]
    largest: float
    planned: int  # how many the plan has in it: the fixed point is for so many

    @property
    def size(self) -> int:
        return self.values.value.shape[1]

    def only(self, members: Sequence[int]) -> Circle:
        """The same circle with some of its members."""
        share = dict(zip(self.members, self.shares, strict=True))
        return replace(self, members=tuple(members), shares=tuple(share[i] for i in members))

    def moved(self, change: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of the members' copies, by that of their changes from the circle's value."""
        value: NDArray[np.float64] = self.values.value[self.row].double().numpy(force=True)
        return change + len(self.members) * value


def circles(server: Server, ids: Sequence[int]) -> list[Circle]:
    """The sums of a round of some clients, smaller ones too."""
    found = []
    there = torch.zeros(len(server.roster), dtype=torch.bool)
    there[list(ids)] = True
    for values in server.all_values:
        plan = values.plan
        assert isinstance(plan, UnitPlan)
        sends = plan.sends
        for key in values.keys[:1]:  # whoever has one unit of a place has all of them
            has = [member.units.get(key[0]) == key[1] for member in server.roster.members]
            sends = sends & torch.tensor(has)
        for row in range(plan.count):
            inside = sends & (plan.row == row)
            members = (inside & there).nonzero()[:, 0]
            if not len(members):
                continue
            weight = torch.ones_like(plan.weight) if in_shares(server.privacy) else plan.weight
            largest = float(weight[inside].max())
            shares = tuple((weight[members].double() / largest).tolist())
            found.append(Circle(values, row, tuple(members.tolist()), shares, largest, int(inside.sum())))
    return found


def summed(sums: Sequence[tuple[Circle, NDArray[np.float64]]], bad: Mapping[Keys, Sequence[int]]) -> list[Summed]:
    """What the server merges: of each place its circles' sums; `bad` are those who kept a faulty copy to themselves."""
    places: dict[Keys, list[tuple[Circle, NDArray[np.float64]]]] = {}
    for circle, total in sums:
        places.setdefault(circle.values.keys, []).append((circle, total))
    found = []
    for keys in {**places, **bad}:
        opened, left_out = places.get(keys, []), list(bad.get(keys, ()))
        heard = [i for circle, _ in opened for i in circle.members]
        count = opened[0][0].values.plan.count if opened else 0
        totals = torch.zeros(count, opened[0][0].size if opened else 0, dtype=torch.float64)
        weight = torch.zeros(count, dtype=torch.float64)
        for circle, part in opened:
            totals[circle.row] = torch.from_numpy(part) * circle.largest
            weight[circle.row] = sum(circle.shares) * circle.largest
        refused = torch.tensor([False] * len(heard) + [True] * len(left_out))
        found.append(Summed(keys, torch.tensor(heard + left_out), Sums(totals, weight, refused)))
    return found


def close(
    server: Server, pairs: Sequence[tuple[Instructions, Update]], settings: SecureSums, secret: int = 0
) -> list[tuple[Instructions, Update]]:  # fmt: skip
    """A simulated round's answers with sums in the place of copies, made by the protocol, all members in this process.

    A client with a number that is not finite or beyond the range sends nothing at all. Noise in shares is drawn by
    `secret`; with it a client sends noise alone where its numbers are not finite.
    """
    from fedquilt.secure.rehearsal import rehearse

    noisy = in_shares(server.privacy)
    if noisy is not None:
        pairs = [(down, clipped_changes(up, down, noisy.clip)) for down, up in pairs]
    most = math.inf if noisy is not None else settings.range
    fine = {i: ok for _, up in pairs for i, ok in zip(up.ids, _within(up, most).tolist(), strict=True)}
    found, bad = [], dict[Keys, list[int]]()
    for circle in circles(server, list(fine)):
        if faulty := [i for i in circle.members if not fine[i]]:
            bad.setdefault(circle.values.keys, []).extend(faulty)
        now = circle.only([i for i in circle.members if fine[i]])
        if len(now.members) < settings.minimum:
            continue
        copies = _copies(now, [up for _, up in pairs]).numpy(force=True).astype(np.float64)
        if noisy is not None:
            shares = NoisyShares(noisy, settings, len(now.members))
            whole = np.stack([shares.encode(*own) for own in zip(copies, _words(server, now, secret), strict=True)])
            found.append((now, now.moved(shares.decode(rehearse(whole, now.members, settings)))))
            continue
        point = settings.point(now.planned)
        whole = point.encode(copies * np.array(now.shares)[:, None])
        found.append((now, point.decode(rehearse(whole, now.members, settings))))
    merged = tuple(summed(found, bad))
    opened = [circle for circle, _ in found]
    return [
        (down, replace(up, blocks=(), masked=masked(up.ids, opened, settings, merged if not at else ())))
        for at, (down, up) in enumerate(pairs)
    ]


def _words(server: Server, circle: Circle, secret: int) -> Iterator[Words]:
    """What the noise of each member of a circle is drawn by in the coming round of a simulation."""
    from fedquilt.secure.masks import derive, words

    for member in circle.members:
        key = key_of("share", secret, server.roster.names[member], server.round + 1, circle.values.keys)
        yield words(derive(key.to_bytes(8, "little"), b"noise"))


def masked(
    ids: Sequence[int], opened: Sequence[Circle], settings: SecureSums, sums: tuple[Summed, ...] = ()
) -> Masked:  # fmt: skip
    """What went under masks between the server and some clients, counted; a number counts as the traffic's 4 bytes
    where the units are counted, and here with what it has more."""
    place = {i: at for at, i in enumerate(ids)}
    up, down = torch.zeros(2, len(ids), dtype=torch.int64)
    senders: dict[str, list[int]] = {}
    for circle in opened:
        near, mine = degree(len(circle.members)), [place[i] for i in circle.members if i in place]
        up[mine] += _KEYS + _BOUND + near * _SEALED + circle.size * (settings.bits // 8 - 4) + (near + 1) * _SHARE
        down[mine] += near * (_KEYS + _SEALED) + (near + 1) * _NUMBER
        for unit in circle.values.units:
            senders.setdefault(unit, []).extend(mine)
    return Masked({unit: torch.tensor(sorted(at)) for unit, at in senders.items() if at}, up, down, sums)


def _within(up: Update, most: float) -> Tensor:
    """(k,) whose numbers are all finite and within the range."""
    fine = torch.ones(len(up.ids), dtype=torch.bool)
    for block in up.blocks:
        if block.value.shape[1]:
            ok = (block.value.abs().amax(1) <= most).cpu()  # NaN is not below anything
            fine[block.places if block.places is not None else slice(None)] &= ok
    return fine


def _copies(circle: Circle, ups: Sequence[Update]) -> Tensor:
    """(n, size) the members' copies of a circle's units, in the members' order."""
    rows: dict[int, Tensor] = {}
    for up in ups:
        parts = [part for unit in circle.values.units if (part := up.part([unit])) is not None]
        if len(parts) == len(circle.values.units):
            rows |= dict(zip(parts[0][0].tolist(), torch.cat([value for _, value in parts], dim=1), strict=True))
    return torch.stack([rows[i] for i in circle.members])
