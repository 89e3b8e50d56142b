"""The server: it holds the plan, one value per unit and circle, and a method's server half. It never sees data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedquilt._util.randomness import key_of
from fedquilt.core.guard import Guard
from fedquilt.core.halved import Halved
from fedquilt.core.left_out import LeftOut
from fedquilt.core.merge_rules import check_circles, trusted_among
from fedquilt.core.privacy_rules import check_plan
from fedquilt.core.secure_round import at_home, take_sums
from fedquilt.core.selection import Selection
from fedquilt.core.trial_merge import merged_by_now
from fedquilt.core.values import CircleValues, Key, Merging, held, owned, size_of
from fedquilt.families.common import Common
from fedquilt.interface.messages import ClientInfo, Instructions, Roster, UnitValues, Update, Updates
from fedquilt.interface.method import Method, State
from fedquilt.interface.passed import lengths_of
from fedquilt.interface.sent_models import SentModels
from fedquilt.privacy import Privacy
from fedquilt.secure import SecureSums
from fedquilt.sharing import Compression, MixedUnit, Plan, Rule, Traffic, UnitPlan, inherit, mean, traffic


class Server:
    """Writes plans, merges what is sent, and hands each client the values of its circles.

    `first` gives the first value of every unit in every shape: that of the first client to bring it; of a pool, circle
    j has those of the draw j. `rule` is how copies are merged; with a `guard` it is by a mean with noise. `privacy`
    says which plans are refused; with `secure` it gets sums of copies only, with `compress` codes of changes.
    """

    def __init__(
        self,
        method: Method,
        roster: Roster,
        first: Callable[[int], Mapping[Key, Tensor]],
        rule: Rule = mean,
        device: torch.device | str = "cpu",
        look: Callable[[Updates, Common], list[SentModels]] | None = None,
        privacy: Privacy | None = None,
        guard: Guard | None = None,
        secure: SecureSums | None = None,
        compress: Compression | None = None,
    ) -> None:
        self.method, self.roster, self.rule, self.look = method, roster, rule, look
        self.privacy, self.guard, self.secure, self.compress = privacy, guard, secure, compress or Compression()
        self.device, self.round = torch.device(device), 0
        self.merging: Merging
        self._left_out = LeftOut(len(roster), self.device)
        self.state: State = method.begin(roster)
        self.plan = at_home(method.plan(self.state, roster), secure, privacy)
        self._check(self.plan)
        check_circles(rule, self.plan, method)
        self.all_values = self._arrange(self.plan)
        draws = [first(0)]
        for circle_values in self.all_values:
            pool = circle_values.plan.pool if isinstance(circle_values.plan, UnitPlan) else None
            draws += [first(draw) for draw in range(len(draws), pool or 0)]
            for circle, row in enumerate(circle_values.value):
                values = draws[circle if pool else 0]
                row.copy_(torch.cat([values[key].to(self.device) for key in circle_values.keys]))
            circle_values.known.fill_(True)
        self._declared()

    # --- a round ---------------------------------------------------------------------------------------------------

    def instructions(self, ids: Sequence[int]) -> Instructions:
        """What clients of one architecture receive now: values of their circles, and what to send after training."""
        ids = tuple(ids)
        has = self.roster.members[ids[0]].units
        of = Selection(ids, len(self.roster))
        blocks: list[UnitValues] = []
        pulls: list[Tensor | None] = []
        offers: dict[str, Tensor] = {}
        copies: dict[str, Tensor] = {}
        for circle_values in self.all_values:
            if any(has.get(unit) != signature for unit, signature in circle_values.keys):
                continue
            plan = circle_values.plan
            for unit in [unit for unit in circle_values.units if unit in self.plan.offered]:
                if bool(of(self.plan.offered[unit]).any()):
                    offers[unit] = self.halved(circle_values.column((unit, has[unit])), (unit, has[unit]))
            for unit in [unit for unit in circle_values.units if unit in self.plan.copies]:
                key = (unit, has[unit])
                copies[unit] = self.halved(circle_values.copies(key, of(self.plan.copies[unit])), key)
            receives = None if plan.for_all else of(plan.receives)
            if receives is not None and not bool(receives.any()):
                continue
            whole = plan.whole and (receives is None or bool(receives.all())) and circle_values.all_known()
            value, pull = circle_values.sent(of, whole)
            pulls.append(pull)
            value = self.halved(value, *circle_values.keys)
            blocks.append(UnitValues(circle_values.units, circle_values.sizes, None, value))
        send = {}
        for unit in has:
            if unit in self.plan.from_all:
                send[unit] = of.all
            elif bool((sends := of(self.plan.sends(unit))).any()):
                send[unit] = sends
        values = tuple(blocks), tuple(pulls)
        return Instructions(self.round + 1, ids, *values, send, self._everyone, self.told(ids), offers, copies)

    def told(self, ids: tuple[int, ...]) -> Mapping[str, Tensor]:
        """What clients are told beside values."""
        told = self.method.tell(self.state, self.roster, ids)
        return told if self.guard is None else {**told, **self.guard.tells(len(ids))}

    def merge(self, ups: Sequence[Update]) -> None:
        """Close a round: the method writes the plan, by which what was sent is merged."""
        if self.merging.in_context:
            self.merging = replace(self.merging, key=key_of("merge", self.roster.seed, self.round + 1))
        looks = self.look, self.held, self.copies
        updates = Updates(self.round + 1, tuple(ups), *looks, lambda: merged_by_now(self, ups))
        before, self.state = self.state, self.method.learn(self.state, updates, self.roster)
        if self.state is not before:
            self._follow(self.roster)
        left_out = [] if self.secure is None else take_sums(self, ups)
        for circle_values in list(self.all_values):
            self.merge_values(circle_values, ups, left_out)
        if self.guard is not None:
            self.guard.next(ups)
        self._left_out.add(left_out)
        self.round += 1

    @property
    def refused(self) -> Tensor:
        """(K,) how many updates of each client were left out so far; counting them waits until somebody asks."""
        return self._left_out.counts

    @refused.setter
    def refused(self, counts: Tensor) -> None:
        self._left_out.counts = counts

    def held(self, unit: str, ids: Tensor) -> Tensor:
        """(k, size) the values of a unit in the circles of clients that have it in one shape."""
        values, key = self._where(unit, int(ids[0]))
        value, _ = values.received(lambda whole: whole[ids.to(whole.device)], values.columns(key))
        return value.clone()  # the next merge writes where values lie

    def copies(self, unit: str, ids: Tensor) -> Tensor:
        """(k, size) what clients that have a mixed unit in one shape sent of it last."""
        values, key = self._where(unit, int(ids[0]))
        if not isinstance(values.plan, MixedUnit):
            raise ValueError(f"of unit '{unit}' a value a circle is held, and no client's copy; plan a MixedUnit")
        return values.column(key)[ids.to(self.device)]

    def _where(self, unit: str, client: int) -> tuple[CircleValues, Key]:
        """The values among which a unit of a client's is, and its key there."""
        key = (unit, self.roster.members[client].units[unit])
        for circle_values in self.all_values:
            if key in circle_values.keys:
                return circle_values, key
        name = self.roster.names[client]
        raise KeyError(f"unit '{unit}' is in no circle of client '{name}', so no value is held")

    def traffic(self, participants: Sequence[int]) -> Traffic:
        """What the coming round moves, from the plan alone."""
        return traffic(self.plan, self.sizes, torch.tensor(participants), self.bytes)

    def declare(self, members: Mapping[int, ClientInfo]) -> None:
        """Clients that changed declare themselves anew: other labels, other sample counts, another architecture."""
        now = tuple(members.get(i, member) for i, member in enumerate(self.roster.members))
        self._enrol(now, Updates(self.round, ()))

    def welcome(self, member: ClientInfo, updates: Updates) -> None:
        """A newcomer joins as the last of the roster; `updates` is what it has to show; nobody else is regrouped."""
        self._enrol((*self.roster.members, member), updates)
        self.refused = torch.cat([self.refused, self.refused.new_zeros(1)])

    def _enrol(self, members: tuple[ClientInfo, ...], updates: Updates) -> None:
        before, self.roster = self.roster, replace(self.roster, members=members)
        self._declared()
        self.state = self.method.enrol(self.state, before, self.roster, updates)
        self._follow(before)

    def _follow(self, before: Roster) -> None:
        """Write the plan anew; where it differs, or the roster does from the one before, values find their places."""
        self.merging = replace(self.merging, state=self.state)
        plan = at_home(self.method.plan(self.state, self.roster), self.secure, self.privacy)
        if plan != self.plan or (before is not self.roster and self.roster.signatures() != before.signatures()):
            self._check(plan)
            self._rearrange(plan, before)
            self.plan = plan

    def _check(self, plan: Plan) -> None:
        """Refuse a plan that does not suit the clients, or the privacy that was promised to them."""
        plan.check(self.roster.signatures(), self.roster.names)
        if self.privacy is not None:
            check_plan(self.privacy, plan, self.roster)

    def _declared(self) -> None:
        self.sizes, self.bytes = self.roster.sizes(), lengths_of(self.roster, self.compress)
        self.halved = Halved(self.roster, self.compress, self.device)
        counts = {(u, member.units[u]): n for member in self.roster.members for u, n in member.statistics.items()}
        trusted = trusted_among(self.rule, self.roster)
        self.merging = Merging(self.rule, self.method, counts, trusted, state=self.state, guard=self.guard)
        self._everyone = int(self.roster.samples.sum())

    # --- values ----------------------------------------------------------------------------------------------------

    def merge_values(
        self, circle_values: CircleValues, ups: Sequence[Update], left_out: list[tuple[Tensor, Tensor]]
    ) -> None:
        """Merge units that lie together at once where all came together from everyone, else one by one."""
        whole = [self._part(up, circle_values.keys) for up in ups]
        together = all(
            part is not None or all(self._part(up, (key,)) is None for key in circle_values.keys)
            for part, up in zip(whole, ups, strict=True)
        )
        if not together:
            for single in self._apart(circle_values):
                self.merge_values(single, ups, left_out)
            return
        parts = [part for part in whole if part is not None]
        if len(parts) == 1:
            ids, values = parts[0]
            left_out.append((ids, circle_values.replayed(ids, values, self.merging)))
        elif parts or self.guard is not None:  # that nobody was heard must not show under noise
            everyone = torch.cat([torch.zeros(0, dtype=torch.int64), *(ids for ids, _ in parts)])
            left_out.append((everyone, circle_values.merge(parts, self.merging)))

    def _apart(self, circle_values: CircleValues) -> list[CircleValues]:
        """Units that lay together, each by itself from now on."""
        self.all_values.remove(circle_values)
        singles = [circle_values.single(key) for key in circle_values.keys]
        self.all_values += singles
        return singles

    def _part(self, up: Update, keys: Sequence[Key]) -> tuple[Tensor, Tensor] | None:
        has = self.roster.members[up.ids[0]].units
        if any(has.get(unit) != signature for unit, signature in keys):
            return None
        return up.part([unit for unit, _ in keys])

    def _arrange(self, plan: Plan) -> list[CircleValues]:
        """Empty values for a plan: units that are planned alike and that the same clients have lie together.

        So a unit of some shape lies in one place only, and whoever has one unit of a place has all of them.
        """
        signatures = self.roster.signatures()
        all_values = []
        for unit_plan, units in plan.alike:
            if unit_plan.count == 0:
                continue
            owners: dict[Key, list[int]] = {}
            for unit in units:
                for i, signature in enumerate(signatures[unit]):
                    if signature is not None:
                        owners.setdefault((unit, signature), []).append(i)
            groups: dict[tuple[int, ...], list[Key]] = {}
            for key, ids in owners.items():
                groups.setdefault(tuple(ids), []).append(key)
            for keys in groups.values():
                size = sum(size_of(signature) for _, signature in keys)
                value = torch.zeros(unit_plan.count, size, device=self.device)
                known = torch.zeros(unit_plan.count, dtype=torch.bool, device=self.device)
                all_values.append(CircleValues(unit_plan, tuple(keys), value, known))
        return all_values

    def _rearrange(self, plan: Plan, roster: Roster) -> None:
        """Shelves for a new plan, filled with what the old ones held for the roster of then.

        A circle that goes on keeps its value; one that nobody has been heard in has none, nor has, where clients join
        or change, one of a single client, who has trained and sent nothing.
        """
        old = {key: circle_values for circle_values in self.all_values for key in circle_values.keys}
        all_values: list[CircleValues] = []
        joined = self.round > 0 and roster is not self.roster  # between two rounds: nobody is heard before it counts
        for circle_values in self._arrange(plan):
            singles: list[CircleValues] = []
            for key in circle_values.keys:
                single, before = circle_values.single(key), old.get(key)
                if before is not None:
                    rows = inherit(circle_values.plan, before.plan).to(self.device)
                    row = rows.clamp(min=0)
                    heard = owned(before.plan, key, roster) & (held(before.plan) | (not joined))
                    single.known = (rows >= 0) & (before.known & heard.to(self.device))[row]
                    single.value = torch.where(single.known[:, None], before.column(key)[row], 0.0)
                    for name, tensor in before.memory.items():
                        kept = tensor[:, before.columns(key)][row]
                        single.memory[name] = torch.where(single.known[:, None], kept, 0.0)
                nobodys = ~owned(circle_values.plan, key, self.roster)
                single.known |= nobodys.to(self.device)  # these rows nobody asks for
                singles.append(single)
            one = singles[0]
            if all(torch.equal(s.known, one.known) and s.memory.keys() == one.memory.keys() for s in singles):
                value = torch.cat([single.value for single in singles], dim=1)
                memory = {name: torch.cat([single.memory[name] for single in singles], dim=1) for name in one.memory}
                all_values.append(CircleValues(circle_values.plan, circle_values.keys, value, one.known, memory=memory))
            else:
                all_values += singles
        self.all_values = all_values
