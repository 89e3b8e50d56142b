"""The run directory of a run over a network: an ordinary one, and beside it what became of every letter."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from fedquilt._util.files import write_bytes, write_text
from fedquilt._util.lock import Held
from fedquilt.core.federation import Federation
from fedquilt.deploy.server.answers import Exchange
from fedquilt.deploy.server.remote_clients import remote
from fedquilt.results import Evaluation
from fedquilt.runs.checkpoint import load, restore_server, save, server_state
from fedquilt.runs.folder import METRICS, PLANS, PRIVACY, TRAFFIC, RunFolder
from fedquilt.sharing import Plan

LETTERS, STATUS, CHECKPOINT, EARLIER = "letters.jsonl", "status.json", "checkpoint", "earlier"
LOG, STOP = "leader.log", "stop"
KEPT_ROUNDS = 5  # checkpoints that a run can go back to; devices keep as many of their own states
_FILES = (METRICS, PLANS, TRAFFIC, PRIVACY, LETTERS)


class RemoteRunFolder(RunFolder):
    """The files of one run. `letters.jsonl` has a line for each exchange: who was asked, who answered, what was left
    out and why, and the bytes each way. Models are not here: they end on their devices."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def again(self) -> str:
        return f"fedquilt deploy run --resume {self.folder.name} --dir {shlex.quote(str(self.folder.parent.parent))}"

    @contextmanager
    def led(self, patience: float = 0.0) -> Iterator[None]:
        """One leader at a time: two would each undo what the other has agreed on with the devices. A leader has some
        seconds of `patience`: whoever looks whether there is one holds the lock for a moment."""
        end = time.monotonic() + patience
        while True:
            try:
                self.lock.take()
                break
            except Held:
                if time.monotonic() >= end:
                    raise Held(
                        f"the run {self.folder.name} is being led already; look at it with "
                        f"`fedquilt deploy follow {self.folder.name}`"
                    ) from None
            time.sleep(0.05)
        try:
            yield
        finally:
            self.lock.release()

    @property
    def stop_asked(self) -> bool:
        """Whether the operator wants the run's leader to go."""
        return (self.folder / STOP).exists()

    def ask_to_stop(self) -> None:
        """Asks the run's leader to go."""
        (self.folder / STOP).touch()

    def forget_stop(self) -> None:
        """The run goes on."""
        (self.folder / STOP).unlink(missing_ok=True)

    def letters(self, exchange: Exchange) -> None:
        """Writes what an exchange of letters was."""
        self._append(LETTERS, asdict(exchange))

    def say(self, line: str) -> None:
        """A line for the operator, with its time, where it is found without Flower."""
        print(line, flush=True)
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now().isoformat(' ', 'seconds')} {line}\n")

    def status(self, **what: Any) -> None:
        """Says how the run stands, for whoever follows it."""
        write_text(self.folder / STATUS, json.dumps(what))

    def evaluated(self, evaluations: Iterable[Evaluation]) -> None:
        """Writes scores that came after the last round."""
        for evaluation in evaluations:
            self._append(METRICS, *evaluation.rows())

    def keep(self, federation: Federation, more: Mapping[str, Any]) -> None:
        """Keeps what the server needs to go on from here; what clients need they keep themselves."""
        tensors: dict[str, Any] = {}
        text = {
            "server": server_state(federation.server, tensors),
            "kept": remote(federation).kept(),
            "more": dict(more),
        }
        with self._room():
            save(self.folder / CHECKPOINT, tensors, {**text, **self._written(_FILES)})
            self._checkpointed = federation.round
            self._put_by(federation.round)

    def _put_by(self, round_: int) -> None:
        """Keeps the checkpoint of a round for `go_back_to`, and removes those that are too old."""
        shelf = self.folder / EARLIER
        shutil.rmtree(shelf / str(round_), ignore_errors=True)
        copy(self.folder / CHECKPOINT, shelf / str(round_))
        for old in self.earlier()[:-KEPT_ROUNDS]:
            shutil.rmtree(shelf / str(old))

    def earlier(self) -> list[int]:
        """The rounds after which the run can go on."""
        found = (self.folder / EARLIER).glob("*/state.json")
        return sorted(int(path.parent.name) for path in found if path.parent.name.isdigit())

    def go_back_to(self, round_: int) -> None:
        """Makes the checkpoint of an earlier round the last one; what came after it is forgotten.

        Not where privacy was promised: devices have what came after it, and of a round told twice, with one noise, the
        difference is what clients sent.
        """
        known = self.earlier()
        if round_ not in known:
            told = f"can go on after the rounds {', '.join(map(str, known))}" if known else "has no checkpoint yet"
            raise ValueError(f"the run {self.folder.name} {told}, not after round {round_}")
        if round_ != known[-1] and "dp" in self.read_settings():
            raise ValueError(
                f"the run {self.folder.name} promises privacy, and devices have what came after round {round_}: rounds "
                "told twice are not in the promise. Start a new run"
            )
        self.forget_end()
        copy(self.folder / EARLIER / str(round_), self.folder / CHECKPOINT)
        for later in known[known.index(round_) + 1 :]:
            shutil.rmtree(self.folder / EARLIER / str(later))

    def kept(self) -> dict[str, Any] | None:
        """What the caller had added to the last checkpoint; None where there is none."""
        found = load(self.folder / CHECKPOINT)
        return None if found is None else dict(found[1]["more"])

    def go_back(self, federation: Federation) -> None:
        """Puts a federation where the last checkpoint was, and cuts off what came after it."""
        found = load(self.folder / CHECKPOINT)
        assert found is not None
        tensors, text = found
        lines = {name: self.lines(name, text) for name in _FILES}  # before anything is cut
        self._plan = Plan.from_json(lines[PLANS][-1]) if lines[PLANS] else None
        remote(federation).turn(federation.server, text["server"]["round"])
        restore_server(federation.server, tensors, text["server"])
        remote(federation).remember(text["kept"])
        self._cut(text["lengths"], _FILES)

    def _collect(self, federation: Federation) -> None:
        """Nothing: what clients keep they keep themselves."""

    def _models(self, federation: Federation) -> None:
        """Nothing: a client's model holds private units, and these never leave it."""


def copy(checkpoint: Path, place: Path) -> None:
    """A checkpoint in another place too, its tensors first, so that what names them is whole whenever it is there."""
    place.mkdir(parents=True, exist_ok=True)
    for tensors in checkpoint.glob("round-*.safetensors"):
        if not (place / tensors.name).exists():
            os.link(tensors, place / tensors.name)
    write_bytes(place / "state.json", (checkpoint / "state.json").read_bytes())
