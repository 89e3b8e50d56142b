"""The run directory of a run over a network: an ordinary one, and beside it what became of every letter."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedquilt.checkpoint import load, restore_server, save, server_state
from fedquilt.deploy.remote import Exchange, RemoteFederation
from fedquilt.disk import METRICS, PLANS, TRAFFIC, RunFolder
from fedquilt.federation import Federation
from fedquilt.files import write_text
from fedquilt.results import Evaluation
from fedquilt.sharing import Plan

LETTERS, STATUS, CHECKPOINT = "letters.jsonl", "status.json", "checkpoint"
_FILES = (METRICS, PLANS, TRAFFIC, LETTERS)


class Records(RunFolder):
    """The files of one run. `letters.jsonl` has a line for each exchange: who was asked, who answered, what was left
    out and why, and the bytes each way. Models are not here: they end on their devices."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def letters(self, exchange: Exchange) -> None:
        """Writes what an exchange of letters was."""
        self._append(LETTERS, asdict(exchange))

    def status(self, **what: Any) -> None:
        """Says how the run stands, for whoever follows it."""
        write_text(self.folder / STATUS, json.dumps(what))

    def evaluated(self, evaluations: Iterable[Evaluation]) -> None:
        """Writes scores that came after the last round."""
        for evaluation in evaluations:
            self._append(METRICS, *evaluation.rows())

    def keep(self, federation: RemoteFederation, more: Mapping[str, Any]) -> None:
        """Keeps what the server needs to go on from here; what clients need they keep themselves."""
        tensors: dict[str, Any] = {}
        text = {"server": server_state(federation.server, tensors), "kept": federation.kept(), "more": dict(more)}
        with self._room():
            save(self.folder / CHECKPOINT, tensors, {**text, **self._written(_FILES)})

    def kept(self) -> dict[str, Any] | None:
        """What the caller had added to the last checkpoint; None where there is none."""
        found = load(self.folder / CHECKPOINT)
        return None if found is None else dict(found[1]["more"])

    def go_back(self, federation: RemoteFederation) -> None:
        """Puts a federation where the last checkpoint was, and cuts off what came after it."""
        found = load(self.folder / CHECKPOINT)
        assert found is not None
        tensors, text = found
        lines = {name: self.lines(name, text) for name in _FILES}  # before anything is cut
        self._plan = Plan.from_json(lines[PLANS][-1]) if lines[PLANS] else None
        changed = federation.fleet.changes(text["server"]["round"])
        if changed:
            federation.server.declare(changed)
        restore_server(federation.server, tensors, text["server"])
        federation.remember(text["kept"])
        self._cut(text["lengths"], _FILES)

    def _models(self, federation: Federation) -> None:
        """Nothing: a client's model holds private units, and these never leave it."""
