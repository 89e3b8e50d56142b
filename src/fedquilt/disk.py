"""A run on disk: settings, rows as they come, plans, traffic, checkpoints, and each client's model. No pickles.

A run directory holds `run.toml` (everything needed to repeat it), `metrics.jsonl`, `plans.jsonl`, `traffic.jsonl`,
`summary.json`, `confusion.json`, `checkpoint/` and `models/`. Lines are appended as rounds finish; a checkpoint notes
how long the files were, so that what a kill left behind it is cut off before the run goes on.
"""

from __future__ import annotations

import errno
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from fedquilt.checkpoint import (
    Damaged,
    Tensors,
    federation_state,
    load,
    restore_federation,
    save,
    tidy,
    write_tensors,
    write_text,
)
from fedquilt.federation import Federation, RoundReport
from fedquilt.lock import Lock
from fedquilt.messages import Member
from fedquilt.parts import model_of
from fedquilt.results import Evaluation, Row
from fedquilt.runfile import (
    FORMAT,
    builder_from_text,
    builder_to_text,
    check_can_be_kept,
    describe,
    fingerprint,
    identity,
    to_toml,
)
from fedquilt.runfile import method_from as method_from
from fedquilt.runfile import method_to as method_to
from fedquilt.scenarios.own import load_file as load_own_file
from fedquilt.scenarios.own import split_address
from fedquilt.sharing import Plan

METRICS, PLANS, TRAFFIC = "metrics.jsonl", "plans.jsonl", "traffic.jsonl"
ALONE = "alone"  # the run of the same clients by themselves, inside the run that they are the bar for
_LINES = (METRICS, PLANS, TRAFFIC)
_LEFT_BEHIND = {".lock", "run.toml.new"}  # what a run that was killed before it began may leave


class DiskFull(OSError):
    """A full disk, as a sentence; the last checkpoint is whole."""


class RunFolder:
    """The directory of one run."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        inside = self.folder.name == ALONE and (self.folder.parent / "run.toml").is_file()
        self.shown = self.folder.parent if inside else self.folder  # what a user is told to go on with
        self.lock = Lock(self.folder)
        self._plan: Plan | None = None
        self._checkpointed = -1
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._checksum = ""
        self._identity = ""

    # --- writing -----------------------------------------------------------------------------------------------------

    def start(self, federation: Federation, options: Mapping[str, Any]) -> None:
        """Make the directory and write `run.toml`; a directory that holds anything else is refused."""
        there = self.folder.exists()
        if there and (not self.folder.is_dir() or {path.name for path in self.folder.iterdir()} - _LEFT_BEHIND):
            raise FileExistsError(
                f"'{self.folder}' is not empty; give another --out, or go on with it: fedquilt resume {self.folder}"
            )
        check_can_be_kept(federation)
        federation_state(federation, {})  # a state that no checkpoint can hold is refused now, not rounds later
        with self._room():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock.take()
            try:
                self.settings(federation, options)
            except BaseException:
                self.lock.release()
                raise

    def settings(self, federation: Federation, options: Mapping[str, Any]) -> None:
        """Write `run.toml`."""
        self._checksum = self._checksum or fingerprint(federation.scenario)
        text = to_toml({**describe(federation, options, self._checksum), "started": self._started})
        self._identity = identity(tomllib.loads(text))
        with self._room():
            write_text(self.folder / "run.toml", text)

    def round(self, federation: Federation, report: RoundReport) -> None:
        """Append a finished round."""
        names = [client.name for client in federation.scenario.clients]
        up, down = report.traffic.bytes_up.tolist(), report.traffic.bytes_down.tolist()
        moved = {
            "round": report.round,
            "up": {names[i]: up[i] for i in report.participants},
            "down": {names[i]: down[i] for i in report.participants},
        }
        with self._room():
            for evaluation in report.evaluations:
                self._append(METRICS, *evaluation.rows())
            if self._plan is None or self._plan != report.plan:
                self._plan = report.plan
                self._append(PLANS, {"round": report.round, **report.plan.to_json()})
            self._append(TRAFFIC, moved)

    def checkpoint(self, federation: Federation, more: Mapping[str, Any]) -> None:
        """Keep all that is needed to go on from here to the same bits."""
        if self._checkpointed == federation.round:
            return
        tensors: dict[str, torch.Tensor] = {}
        text = federation_state(federation, tensors)
        with self._room():
            for name in _LINES:  # first the lines, then a checkpoint that counts on them, also when the power fails
                with suppress(FileNotFoundError), (self.folder / name).open("rb") as file:
                    os.fsync(file.fileno())
            lengths = {name: self._length(name) for name in _LINES}
            more = {"of": self._identity, "lengths": lengths, "more": dict(more)}
            save(self.folder / "checkpoint", tensors, {**text, **more})
        self._checkpointed = federation.round

    def finish(self, federation: Federation, summary: Mapping[str, Any], last: list[Evaluation]) -> None:
        """Write what a finished run is read for: confusion counts, every client's model, and the summary."""
        tables: dict[str, dict[str, Any]] = {client.name: {} for client in federation.scenario.clients}
        for evaluation in last:
            if evaluation.split == "test":
                for name, counts in zip(evaluation.clients, evaluation.counts.tolist(), strict=True):
                    tables[name][evaluation.readout] = counts
        found = {"labels": list(federation.scenario.label_names), "clients": tables}
        with self._room():
            write_text(self.folder / "confusion.json", json.dumps(found))
            self._models(federation)
            write_text(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")

    def _models(self, federation: Federation) -> None:
        folder = self.folder / "models"
        folder.mkdir(exist_ok=True)
        known = {}
        for number, client in enumerate(federation.scenario.clients):
            file = f"{number:05d}.safetensors"
            # not synced one by one, which takes long with many clients: they can be made again from the checkpoint
            write_tensors(folder / file, federation.model(client.name).state_dict(), sync=False)
            now = client.at(federation.round)
            known[client.name] = {
                "file": file,
                "builder": builder_to_text(now.model),
                "traits": dict(now.traits),
                "labels": list(now.labels),
                "samples": now.samples,
                "public": federation.server.roster.members[number].public,
            }
        write_text(folder / "models.json", json.dumps({"classes": federation.scenario.classes, "clients": known}))

    def _append(self, name: str, *lines: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def _length(self, name: str) -> int:
        path = self.folder / name
        return path.stat().st_size if path.is_file() else 0

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Turn a full disk into a sentence."""
        try:
            yield
        except OSError as error:
            if isinstance(error, DiskFull) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            kept = f"the last checkpoint, of round {self._checkpointed}, is whole" if self._checkpointed > 0 else ""
            raise DiskFull(
                f"the disk is full, so '{self.folder}' could not be written; {kept or 'no round was kept yet'}; free "
                f"some space and go on with: fedquilt resume {self.shown}"
            ) from error

    # --- reading -----------------------------------------------------------------------------------------------------

    def read_settings(self) -> dict[str, Any]:
        """`run.toml`; what is not a run directory is refused."""
        path = self.folder / "run.toml"
        if not path.is_file():
            raise Damaged(f"'{self.folder}' is not a run directory: it has no run.toml; it was left as it is")
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise Damaged(f"'{path}' is not TOML ({error}); it was left as it is") from None
        if found.get("format") != FORMAT or "scenario" not in found or "method" not in found:
            raise Damaged(f"'{path}' was not written by this version of fedquilt; it was left as it is")
        return found

    @property
    def finished(self) -> bool:
        """Whether the run went to its end."""
        return (self.folder / "summary.json").is_file()

    def restore(self, federation: Federation) -> dict[str, Any]:
        """Put a federation where the last checkpoint was, and cut off what came after it; what the caller had added.

        Everything is checked before the first byte is changed.
        """
        found, lines = self.look(federation)
        lengths = {} if found is None else found[1]["lengths"]
        if found is not None:
            restore_federation(federation, *found)
            tidy(self.folder / "checkpoint", found[1]["tensors"])
        for name in _LINES:
            if (self.folder / name).is_file():
                with (self.folder / name).open("r+b") as file:
                    file.truncate(lengths.get(name, 0))
        self._plan = Plan.from_json(lines[PLANS][-1]) if lines[PLANS] else None
        self._started = str(self.read_settings().get("started", self._started))
        self._checkpointed = federation.round
        return {} if found is None else dict(found[1]["more"])

    def look(self, federation: Federation) -> tuple[tuple[Tensors, dict[str, Any]] | None, dict[str, list[Row]]]:
        """The last checkpoint and the lines up to it, checked to be of this federation; nothing is changed."""
        settings = self.read_settings()
        self._checksum, self._identity = fingerprint(federation.scenario), identity(settings)
        if settings.get("fingerprint") != self._checksum:
            raise Damaged(
                f"the data of scenario '{federation.scenario.name}' are not those that '{self.folder}' was run on; "
                "it was left as it is"
            )
        found = load(self.folder / "checkpoint")
        lengths = {} if found is None else found[1]["lengths"]
        if found is not None and found[1]["of"] != self._identity:
            raise Damaged(
                f"'{self.folder / 'run.toml'}' is not the one that its checkpoint was made with; it was left as it is"
            )
        return found, {name: self.lines(name, lengths.get(name, 0)) for name in _LINES}

    def lines(self, name: str, length: int | None = None) -> list[Row]:
        """The lines of a file, or of its first `length` bytes; one that a kill cut short is left out."""
        path = self.folder / name
        data = path.read_bytes() if path.is_file() else b""
        if length is not None and len(data) < length:
            raise Damaged(f"'{path}' is shorter than it was at the checkpoint; it was left as it is")
        data = data[:length]
        try:
            whole = data[: data.rfind(b"\n") + 1].decode("utf-8")
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise Damaged(f"'{path}' holds a line that is not JSON ({error}); it was left as it is") from None


def load_model(folder: str | Path, client: str) -> nn.Module:
    """A client's personal model from a finished run: an ordinary module in eval mode, ready to use."""
    place = Path(folder)
    try:
        known = json.loads((place / "models" / "models.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Damaged(f"'{folder}' holds no models ({error}); finish the run first: fedquilt resume {folder}") from None
    if client not in known["clients"]:
        some = ", ".join(list(known["clients"])[:8])
        raise KeyError(f"'{folder}' has no client '{client}'; it has {some}")
    entry = known["clients"][client]
    settings = RunFolder(place).read_settings()
    own = split_address(settings["scenario"].get("file", ""))
    if own is not None and own[0].is_file():
        load_own_file(own[0])  # its models may be of classes in there
    method = method_from(settings["method"])
    member = Member(client, entry["samples"], entry["traits"], tuple(entry["labels"]), {}, entry.get("public", 0))
    model = model_of(method.parts(builder_from_text(entry["builder"])(), member, known["classes"]).module())
    model.load_state_dict(load_file(place / "models" / Path(entry["file"]).name))
    return model.eval()
