"""The server half among ranks: it merges what lies on all of them, and moves no more of it than the merge needs.

Of means and of merges with noise the circles' sums go between ranks; of robust merges the columns of copies, some to
each rank, and what is summed over columns (distances between copies, say); mixtures, and rules of one's own that do not
say that they are `by_columns`, look at whole copies, which go to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedquilt.core.ranks import Ranks
from fedquilt.core.server import Server
from fedquilt.core.spread import Spread
from fedquilt.core.values import CircleValues, Key
from fedquilt.interface.messages import Update
from fedquilt.sharing import Merged, UnitPlan
from fedquilt.sharing.columns import share_of_columns
from fedquilt.sharing.merge import Mean
from fedquilt.sharing.rule import apply_rule
from fedquilt.sharing.weighted_sums import Sums, finite_rows


class SpreadPart(NamedTuple):
    """Copies of units that lie together, of clients of one family: who sent them, and this rank's rows."""

    block: Spread
    at: slice  # columns of the block

    @property
    def own(self) -> Tensor:
        """(n, size)"""
        return self.block.own[:, self.at]


class RankedServer(Server):
    """A server that runs alike on every rank."""

    def __init__(self, ranks: Ranks, *what: Any) -> None:
        self.ranks = ranks
        super().__init__(*what)

    def merge_values(
        self, circle_values: CircleValues, ups: Sequence[Update], left_out: list[tuple[Tensor, Tensor]]
    ) -> None:
        """Merge units that lie together; clients' copies stay where they are if sums or columns will do."""
        if not all(
            isinstance(block, Spread) for up in ups for block in up.blocks
        ):  # they came rounds ago, and rest here
            super().merge_values(circle_values, ups, left_out)
            return
        keys = circle_values.keys
        whole = [self._spread(up, keys) for up in ups]
        if any(
            part is None and any(self._spread(up, (key,)) is not None for key in keys)
            for part, up in zip(whole, ups, strict=True)
        ):
            for single in self._apart(circle_values):
                self.merge_values(single, ups, left_out)
            return
        parts = [part for part in whole if part is not None]
        if parts or self.guard is not None:
            ids = torch.cat([torch.zeros(0, dtype=torch.int64), *(part.block.numbers for part in parts)])
            merged = self._merged(circle_values, parts, ids)
            left_out.append((ids, circle_values.hold(merged, [(ids, merged.value)], self.merging)))

    def _spread(self, up: Update, keys: Sequence[Key]) -> SpreadPart | None:
        has = self.roster.members[up.ids[0]].units
        if any(has.get(unit) != signature for unit, signature in keys):
            return None
        for block in up.blocks:
            assert isinstance(block, Spread)
            at = block.where([unit for unit, _ in keys])
            if at is not None:
                return SpreadPart(block, at)
        return None

    def _merged(self, circle_values: CircleValues, parts: Sequence[SpreadPart], ids: Tensor) -> Merged:
        """What becomes of copies, of all ranks' clients. How does not depend on the number of ranks."""
        plan, rule = circle_values.plan, self.rule
        # a number is eight bytes in a sum and four in a copy: of many small circles copies are less
        if isinstance(plan, UnitPlan) and 2 * plan.count <= len(ids):
            if self.guard is not None:
                return self.guard.moved(circle_values, self._sums(circle_values, parts, ids, torch.ones(len(plan))))
            if isinstance(rule, Mean):
                return self._sums(circle_values, parts, ids, plan.weight).mean()
        if isinstance(plan, UnitPlan) and self.guard is None and getattr(rule, "by_columns", False):
            return self._by_columns(circle_values, plan, parts, ids)
        copies = [(part.block.numbers, part.block.columns(circle_values.units)) for part in parts]
        return circle_values.merged([(who, value) for who, value in copies if value is not None], self.merging)

    def _sums(self, circle_values: CircleValues, parts: Sequence[SpreadPart], ids: Tensor, weight: Tensor) -> Sums:
        """The circles' sums over all ranks' clients."""
        plan, size, device = circle_values.plan, circle_values.value.shape[1], circle_values.value.device
        vectors = {}
        for shard in self.ranks.mine:
            refused, before = torch.zeros(len(ids), dtype=torch.float64, device=device), 0
            sums = []
            for part in parts:
                numbers = part.block.numbers[part.block.mine]
                some = (numbers % self.ranks.shards == shard).nonzero()[:, 0]  # neighbours
                rows = part.own[int(some[0]) : int(some[-1]) + 1] if len(some) else part.own[:0]
                who = numbers[some]
                sums.append(Sums.of(rows, plan.row[who].to(device), weight[who].to(device), plan.count))
                refused[(before + part.block.mine[some]).to(device)] = sums[-1].refused.double()
                before += len(part.block.numbers)
            whole = sum(sums, Sums.nothing(plan.count, size, device)) if len(sums) != 1 else sums[0]
            vectors[shard] = torch.cat([whole.total.flatten(), whole.weight, refused])
        total, weights, refused = self.ranks.added(vectors).split([plan.count * size, plan.count, len(ids)])
        return Sums(total.view(plan.count, size), weights, refused > 0)

    def _by_columns(
        self, circle_values: CircleValues, plan: UnitPlan, parts: Sequence[SpreadPart], ids: Tensor
    ) -> Merged:
        """A merge that looks at columns, and at sums over all of them: every rank merges some columns of all copies."""
        ranks, own = self.ranks, torch.cat([part.own for part in parts])
        width, device = own.shape[1], own.device
        counts = [sum(len(part.block.order[rank]) for part in parts) for rank in range(ranks.size)]
        starts = [sum(len(part.block.numbers) for part in parts[:at]) for at in range(len(parts))]
        each = [[start + places for places in part.block.order] for start, part in zip(starts, parts, strict=True)]
        order = torch.cat([places for of_rank in zip(*each, strict=True) for places in of_rank]).to(device)
        finite = torch.empty(len(ids), dtype=torch.bool, device=device)
        finite[order] = torch.cat(ranks.spread(finite_rows(own).byte(), counts)).bool()
        ends = [[width * shard // ranks.shards for shard in ranks.bounds(rank)] for rank in range(ranks.size)]
        parcels = [own[:, end[0] : end[-1]].flatten() for end in ends]
        mine = ends[ranks.rank]
        found = torch.cat(ranks.swap(parcels, [count * (mine[-1] - mine[0]) for count in counts]))
        copies = own.new_empty(len(ids), mine[-1] - mine[0])
        copies[order] = found.view(copies.shape)

        def added(found: Sequence[Tensor]) -> Tensor:
            sums = dict(zip(ranks.mine, (each.flatten() for each in found), strict=True))
            return ranks.added(sums).view(found[0].shape)

        given = plan.row[ids].to(device), plan.weight[ids].to(device) * finite, plan.count
        context = circle_values.context(self.merging, slice(mine[0], mine[-1])).of(ids.to(device))
        with share_of_columns([end - mine[0] for end in mine], added):
            merged = apply_rule(self.rule, copies, *given, context)
        columns = merged.value.T.flatten()  # column after column
        values = torch.cat(ranks.spread(columns, [plan.count * (end[-1] - end[0]) for end in ends]))
        return merged._replace(value=values.view(width, plan.count).T.contiguous(), refused=~finite)
