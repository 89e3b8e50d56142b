"""A simulation in which some clients lie: they train, send and report as an attack says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedquilt._util.randomness import key_of
from fedquilt.attacks import Attack, Sent
from fedquilt.client import Client
from fedquilt.core.compressed import compressed
from fedquilt.core.server import Server
from fedquilt.core.simulation import Simulation
from fedquilt.core.terms import Terms
from fedquilt.families.layout import Signature
from fedquilt.interface.messages import Instructions, Update
from fedquilt.interface.readout import Readout
from fedquilt.interface.steps import Do
from fedquilt.sharing import AnyUnit, MixedUnit


class _Part(NamedTuple):
    """The copies of one unit in one block of an update."""

    ids: Tensor  # (k,)
    copies: Tensor  # (k, size), a view of what will be sent
    start: Tensor  # (k, size)


class AttackedSimulation(Simulation):
    """A simulation of clients of whom those of the numbers `liars` lie."""

    def __init__(
        self, attack: Attack, liars: Sequence[int], clients: Sequence[Client], terms: Terms,
        device: torch.device | str = "cpu", engine: str = "auto", clients_at_once: int | None = None,
    ) -> None:  # fmt: skip
        self.attack = attack
        self.lies = torch.zeros(len(clients), dtype=torch.bool)
        self.lies[list(liars)] = True
        there = [attack.client(client) if lies else client for client, lies in zip(clients, self.lies, strict=True)]
        super().__init__(there, terms, device, engine, clients_at_once)
        reporting = any(isinstance(step, Do) and step.reports for step in self.steps)
        if type(attack).reports is not Attack.reports and not reporting:
            raise ValueError(
                f"the attack '{attack.name}' lies in reports, and clients of '{terms.method.name}' report nothing; "
                "take 'sign-flip'"
            )
        in_copies = type(attack).copies is not Attack.copies and type(attack).reports is Attack.reports
        if in_copies and not terms.method.merges:
            raise ValueError(
                f"the attack '{attack.name}' lies in copies of units, and clients of '{terms.method.name}' send none; "
                "take 'label-flip'"
            )

        if in_copies and terms.privacy is not None and terms.privacy.level == "client":
            raise ValueError(
                f"the attack '{attack.name}' with dp.level=client: liars know what the honest send and clip nothing of "
                "it, so nothing would be promised; try it with dp.level=local or sample, or take 'label-flip'"
            )

    def exchange(
        self, server: Server, chosen: Sequence[int], readouts: Sequence[Readout]
    ) -> list[tuple[Instructions, Update]]:  # fmt: skip
        downs = [server.instructions(ids) for ids in self.families(chosen)]
        starts = [self._start(down) for down in downs]
        ups = [self._reported(self.run(down)) for down in downs]
        if type(self.attack).copies is not Attack.copies:
            ups = self._sent(server, ups, starts)
        if self.terms.compress.codes:
            ups = [self._coded(up, down) for down, up in zip(downs, ups, strict=True)]
        return self._closed(server, list(zip(downs, ups, strict=True)))

    def _start(self, down: Instructions) -> Tensor:
        """(k, width) the rows of clients of one family when they have installed what they receive."""
        family_state = self.family_states[self.home[down.ids[0]][0]]
        rows = family_state.store.take(family_state.places(down.ids)).to(self.device, copy=True)
        self._install(family_state, rows, down)
        return rows

    def _coded(self, up: Update, down: Instructions) -> Update:
        """What liars say is said in codes, too."""
        layout = self.family_states[self.home[up.ids[0]][0]].family.layout
        blocks = []
        for block, coded in zip(up.blocks, compressed(up, down, layout, self.terms.compress, None).blocks, strict=True):
            lies = self.lies[up.numbers if block.places is None else up.numbers[block.places]]
            lies = lies.to(block.value.device)[:, None]
            blocks.append(replace(block, value=torch.where(lies, coded.value, block.value)))
        return replace(up, blocks=tuple(blocks))

    def _reported(self, up: Update) -> Update:
        return replace(up, reports=self.attack.reports(up.reports, up.numbers, self.lies[up.numbers]))

    def _sent(self, server: Server, ups: Sequence[Update], starts: Sequence[Tensor]) -> list[Update]:
        """What is sent in the place of updates: unit by unit and shape by shape, over all families."""
        false = [  # written into below, and not into the rows that liars keep
            replace(up, blocks=tuple(replace(block, value=block.value.clone()) for block in up.blocks)) for up in ups
        ]
        parts: dict[tuple[str, Signature], list[_Part]] = {}
        for up, rows in zip(false, starts, strict=True):
            has, layout = (
                server.roster.members[up.ids[0]].units,
                self.family_states[self.home[up.ids[0]][0]].family.layout,
            )
            for block in up.blocks:
                places = torch.arange(len(up.ids)) if block.places is None else block.places
                at = 0
                for unit, size in zip(block.units, block.sizes, strict=True):
                    start = layout.take(rows, unit)[places.to(rows.device)]
                    part = _Part(up.numbers[places], block.value[:, at : at + size], start)
                    parts.setdefault((unit, has[unit]), []).append(part)
                    at += size
        for (unit, _), mine in parts.items():
            self._lie(server, unit, mine, key_of("attack", self.terms.seed, ups[0].round, unit))
        return false

    def _lie(self, server: Server, unit: str, parts: Sequence[_Part], key: int) -> None:
        """Write what liars send of a unit; running statistics stay as they are, since models break by any other."""
        ids = torch.cat([part.ids for part in parts])
        if not bool(self.lies[ids].any()):
            return
        statistics = server.roster.members[int(ids[0])].statistics.get(unit, 0)
        width = parts[0].copies.shape[1] - statistics
        copies, start = (torch.cat([part[at][:, :width] for part in parts]) for at in (1, 2))
        lies, circle = self.lies[ids].to(copies.device), _circles(server.plan[unit], ids).to(copies.device)
        told = self.attack.copies(Sent(ids, copies, start, circle, lies, key))
        sent = torch.where(lies[:, None], told, copies)
        for part, value in zip(parts, sent.split([len(part.ids) for part in parts]), strict=True):
            part.copies[:, :width] = value


def _circles(unit: AnyUnit, ids: Tensor) -> Tensor:
    """(k,) the circles of some clients as numbers from 0 up; those who are in none, or mix, are together."""
    circle = torch.zeros_like(ids) if isinstance(unit, MixedUnit) else unit.circle[ids]
    _, found = torch.unique(circle, return_inverse=True)
    return torch.as_tensor(found)
