"""Clients of which every rank simulates some: what they send and keep stays where they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedquilt.client import Client
from fedquilt.core.evaluation import Measured, Scored
from fedquilt.core.family_state import FamilyState
from fedquilt.core.ranks import Ranks
from fedquilt.core.server import Server
from fedquilt.core.simulation import Simulation
from fedquilt.core.spread import described, joined, read
from fedquilt.core.terms import Terms
from fedquilt.engines.memory_budget import memory_budget
from fedquilt.engines.select import ENGINES
from fedquilt.families.habits import bits_of
from fedquilt.interface.messages import Instructions, Update
from fedquilt.interface.readout import Readout
from fedquilt.results import Evaluation

_BYTES = 96  # that a number of a row is reckoned to take in a stack: it, its gradient, what the optimiser keeps, ...


class RankedSimulation(Simulation):
    """A simulation whose clients are shared among ranks. It knows them all, and trains and measures its own.

    The engine is told, not tried: a trial could end otherwise on another rank, and so could the bits.
    """

    def __init__(
        self, ranks: Ranks, clients: Sequence[Client], terms: Terms, device: torch.device, engine: str,
        clients_at_once: int | None,
    ) -> None:  # fmt: skip
        self.ranks = ranks
        self._now: dict[int, str] = {}  # the engine of each template
        chosen = ",".join("vectorised" if name == "auto" else name for name in engine.split(","))
        super().__init__(clients, terms, device, chosen, clients_at_once)

    def _gather(self, fresh: Set[int]) -> None:
        super()._gather(fresh)
        for family_state in self.family_states:  # before anybody trains: groups must be the same on every rank
            most = memory_budget(self.device) // max(1, _BYTES * family_state.family.layout.width)
            family_state.at_once = self.training.clients_at_once or max(1, most)

    def exchange(
        self, server: Server, chosen: Sequence[int], readouts: Sequence[Readout]
    ) -> list[tuple[Instructions, Update]]:  # fmt: skip
        """A round of the chosen clients: each rank's own train, shard by shard; all ranks hear who sent what."""
        families = [ids for ids in self.families(chosen) if ids]
        self._agreed()
        tensors: dict[str, Tensor] = {}
        entries: list[dict[str, Any]] = []
        own: dict[int, list[Update]] = {number: [] for number in range(len(families))}
        for shard in self.ranks.mine:
            for number, ids in enumerate(families):
                some = tuple(i for i in ids if i % self.ranks.shards == shard)
                if some:
                    up = self.run(server.instructions(some))
                    if self.device.type == "cuda":  # the next shard trains in the same memory
                        copies = (replace(block, value=block.value.clone()) for block in up.blocks)
                        up = replace(up, blocks=tuple(copies))
                    own[number].append(up)
                    family_state = self.family_states[self.home[some[0]][0]]
                    entry = {"shard": shard, "family": number, "engines": self.training.found([family_state])}
                    entries.append(entry | described(up, f"{shard}/{number}/", tensors))
                    if family_state.loss is not None and family_state.lost[0] == self.round:
                        tensors[f"{shard}/{number}/loss"] = family_state.loss.clone()
        said = [(entry, tensors) for tensors, entries in self.ranks.gather(tensors, entries) for entry in entries]
        pairs = []
        for number, ids in enumerate(families):
            mine = sorted((s for s in said if s[0]["family"] == number), key=lambda s: int(s[0]["shard"]))
            ups = [read(entry, f"{entry['shard']}/{number}/", tensors, server.round + 1) for entry, tensors in mine]
            family_state = self.family_states[self.home[ids[0]][0]]
            for entry, _ in mine:
                for engine in entry["engines"]:
                    self.training.agree(family_state, engine)
            units = [unit.name for unit in family_state.family.layout.units]
            losses = [tensors.get(f"{entry['shard']}/{number}/loss") for entry, tensors in mine]
            if all(loss is not None for loss in losses):
                found = torch.cat([loss for loss in losses if loss is not None])
                family_state.loss = found[torch.tensor([i for up in ups for i in up.ids]).argsort()]
                family_state.lost = (self.round, family_state.places(ids))
            pairs.append((self._told(server, ids), joined(ups, own[number], units, self.ranks, self.device)))
        return pairs

    def _told(self, server: Server, ids: tuple[int, ...]) -> Instructions:
        """What went to clients of all ranks: what of it is counted, and all of it where it has to be kept."""
        if self.terms.training.arrivals:
            return server.instructions(ids)
        return Instructions(server.round + 1, ids, (), (), {}, told=server.told(ids))

    def _stacks(self, family_state: FamilyState) -> bool:
        """As it was when the round began: within it, who trained first on a rank depends on how many there are."""
        name = self._now.get(id(family_state.family.template), "")
        return bool(name) and ENGINES[name].stacks

    def evaluate(self, server: Server, readouts: Sequence[Readout], last: bool) -> list[Evaluation]:
        """What every client scores, those of other ranks included."""
        self._agreed()
        return super().evaluate(server, readouts, last)

    def _agreed(self) -> None:
        """Every rank knows by now which engine a family has, if any rank does."""
        self._now = {id(f.family.template): "".join(self.training.found([f])) for f in self.family_states}

    def groups(self) -> Iterator[tuple[int, ...]]:
        """This rank's clients, shard by shard."""
        for shard in self.ranks.mine:
            yield from self.groups_of(partial(self._is_of, shard))

    def _is_of(self, shard: int, number: int) -> bool:
        return number % self.ranks.shards == shard

    def in_order(self, said: list[tuple[int, str, Tensor]]) -> list[tuple[int, str, Tensor]]:
        """What groups of clients say, by the first of them: those of all ranks, shard by shard."""
        names = [[first, name] for first, name, _ in said]
        gathered = self.ranks.gather({str(at): tensor for at, (_, _, tensor) in enumerate(said)}, names)
        found = [(f, n, tensors[str(at)]) for tensors, told in gathered for at, (f, n) in enumerate(told)]
        return sorted(found, key=lambda each: each[0] % self.ranks.shards)

    def scored(self, order: list[int], scored: Scored) -> tuple[list[int], Scored]:
        """What clients of all ranks scored, from what those of this rank did."""
        tensors: dict[str, Tensor] = {}
        keys = []
        for at, ((readout, split), parts) in enumerate(scored.items()):
            counts = torch.cat([part.counts.cpu() for part in parts])
            keys.append([readout, split, list(counts.shape)])
            if counts.is_sparse:
                counts = counts.coalesce()
                tensors[f"{at}/cells"], counts = counts.indices(), counts.values()
            tensors[f"{at}/counts"] = counts
            for name in ("losses", "own"):
                known = [each for part in parts if (each := getattr(part, name)) is not None]
                if known:
                    tensors[f"{at}/{name}"] = torch.cat(known)
        everyone: list[int] = []
        found: Scored = {}
        for heard, told in self.ranks.gather(tensors, {"order": order, "keys": keys}):
            everyone += told["order"]
            for at, (readout, split, shape) in enumerate(told["keys"]):
                counts, cells = heard[f"{at}/counts"], heard.get(f"{at}/cells")
                if cells is not None:
                    counts = torch.sparse_coo_tensor(cells, counts, shape, check_invariants=False, is_coalesced=True)
                measured = Measured(counts, heard.get(f"{at}/losses"), heard.get(f"{at}/own"))
                found.setdefault((readout, split), []).append(measured)
        return everyone, found

    def collect(self, server: Server) -> None:
        """Bring to rank 0 what clients of other ranks keep, as far as it changed; ranks that came apart are noticed."""
        tensors: dict[str, Tensor] = {}
        for number, family_state in enumerate(self.family_states):
            store, ids = family_state.store, family_state.family.ids
            changed = set(range(len(ids))) - store.fresh if store.changed is None else store.changed
            mine = sorted(at for at in changed if self.ranks.rank and self.ranks.owns(ids[at]))
            tensors[f"{number}/seen"] = torch.tensor(mine, dtype=torch.int64)
            tensors[f"{number}/rows"] = store.take(mine)
            if self.ranks.rank:
                store.changed = set()
        memory = [(ids, kept) for ids, kept in self.memory.items() if self.ranks.owns(ids[0])]
        tensors |= {f"memory/{at}/{name}": t for at, (_, kept) in enumerate(memory) for name, t in kept.items()}
        values = hashlib.blake2b()
        for circle_values in server.all_values:
            values.update(bits_of(circle_values.value))
        text = {"memory": [list(ids) for ids, _ in memory], "values": values.hexdigest()}
        said = self.ranks.gather(tensors, text, to_all=False)
        if len({told["values"] for _, told in said}) > 1:
            raise RuntimeError(
                "the ranks have come apart: a step of the server gave other numbers on one machine than on another; "
                "run it on machines of one kind"
            )
        for tensors, told in said[1:]:
            for number, family_state in enumerate(self.family_states):
                seen = tensors[f"{number}/seen"].tolist()
                if seen:
                    family_state.store.put(seen, tensors[f"{number}/rows"])
            for at, ids in enumerate(told["memory"]):
                start = f"memory/{at}/"
                kept = {n.removeprefix(start): t.to(self.device) for n, t in tensors.items() if n.startswith(start)}
                self.memory[tuple(ids)] = kept
