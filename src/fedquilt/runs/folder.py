"""A run on disk: settings, rows as they come, plans, traffic, checkpoints, and each client's model. No pickles.

A run directory holds `run.toml` (everything needed to repeat it), `metrics.jsonl`, `plans.jsonl`, `traffic.jsonl`,
`privacy.jsonl` where privacy was asked for, `summary.json`, `confusion.json`, `checksums.json`, `checkpoint/` and
`models/`. Lines are appended as rounds finish; a checkpoint notes how long the files were and their checksums, so that
what a kill left behind it is cut off before the run goes on, and what somebody changed is noticed.
"""

from __future__ import annotations

import errno
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fedquilt._util.checksums import NAME as CHECKSUMS
from fedquilt._util.checksums import Growing, check, digest, digest_of_file, seal, sealed
from fedquilt._util.files import NEW, DiskFull, write_text
from fedquilt._util.lock import Lock
from fedquilt._util.toml import to_toml
from fedquilt._util.trust import remember
from fedquilt.core.federation import Federation, RoundReport
from fedquilt.results import Evaluation, Row
from fedquilt.runs.checkpoint import Damaged, Tensors, federation_state, load, restore_federation, save, tidy
from fedquilt.runs.code_digest import model_code, same_code
from fedquilt.runs.kept_rows import KeptRows
from fedquilt.runs.promises import spent
from fedquilt.runs.saved_models import MODELS, write_models
from fedquilt.runs.settings import check_can_be_kept, describe, fingerprint, identity, named_code, read_settings
from fedquilt.sharing import Plan

METRICS, PLANS, TRAFFIC, PRIVACY = "metrics.jsonl", "plans.jsonl", "traffic.jsonl", "privacy.jsonl"
SUMMARY = "summary.json"
ALONE = "alone"  # the run of the same clients by themselves, inside the run that they are the bar for
_LINES = (METRICS, PLANS, TRAFFIC, PRIVACY)
_READ = ("run.toml", *_LINES, "confusion.json", MODELS)  # the files that a finished run is read for
_LEFT_BEHIND = {".lock", "run.toml" + NEW}  # what a run that was killed before it began may leave


@dataclass(frozen=True)
class Kept:
    """What a run directory holds up to its last checkpoint, read and checked."""

    checkpoint: tuple[Tensors, dict[str, Any]] | None
    rows: list[Row]
    plans: list[tuple[int, Plan]]  # the round from which on each holds
    moved: list[tuple[int, int]]  # bytes up and down of every round

    @property
    def more(self) -> dict[str, Any]:
        """What the caller of `RunFolder.checkpoint` had added."""
        return {} if self.checkpoint is None else dict(self.checkpoint[1]["more"])


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
        self._code: Mapping[str, Any] = {}
        self._growing: dict[str, Growing] = {}
        self._rows = KeptRows()

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
                remember(*named_code(federation))
                self.settings(federation, options)
            except BaseException:
                self.lock.release()
                raise

    def settings(self, federation: Federation, options: Mapping[str, Any]) -> None:
        """Write `run.toml`."""
        self._checksum = self._checksum or fingerprint(federation.scenario)
        self._code = self._code or model_code(federation)
        text = to_toml({**describe(federation, options, self._checksum, self._code), "started": self._started})
        self._identity = identity(tomllib.loads(text))
        with self._room():
            write_text(self.folder / "run.toml", text)

    def check_by_itself(self) -> None:
        """Refuse a run of a comparison, whose name says how long it is."""
        told = self.folder.absolute().parent / "comparison.json"
        if told.is_file() and self.folder.absolute().name in told.read_text(encoding="utf-8"):
            raise ValueError(
                f"'{self.folder}' is a run of a comparison, where all are equally long; run the comparison again with "
                "more --rounds"
            )

    def reopen(self, longer: Mapping[str, Any], before: int) -> None:
        """Make a finished run of `before` rounds one that is to go on, as the settings `longer` say.

        After a kill in between it is a run that can be resumed, of the rounds before or of those after.
        """
        with self._room():
            self.forget_end()
            extended = {**longer, "extended": [*longer.get("extended", []), before]}
            write_text(self.folder / "run.toml", to_toml(extended))

    def forget_end(self) -> None:
        """Make a finished run one that is to go on: what seals its files would call later ones damaged."""
        for name in (SUMMARY, CHECKSUMS):
            (self.folder / name).unlink(missing_ok=True)

    def round(self, federation: Federation, report: RoundReport) -> None:
        """Append a finished round."""
        clients, up, down = federation.scenario.clients, report.traffic.bytes_up, report.traffic.bytes_down
        moved: dict[str, Any] = {
            "round": report.round,
            "up": {clients[i].name: int(up[i]) for i in report.participants},
            "down": {clients[i].name: int(down[i]) for i in (*report.participants, *report.late)},
        } | ({} if report.clock is None else {"clock": report.clock})
        with self._room():
            for evaluation in report.evaluations:
                self._append(METRICS, *evaluation.rows())
            if self._plan is None or self._plan != report.plan:
                self._plan = report.plan
                self._append(PLANS, {"round": report.round, **report.plan.to_json()})
            self._append(TRAFFIC, moved)
            for line in spent(federation, report):
                self._append(PRIVACY, line)

    def checkpoint(self, federation: Federation, more: Mapping[str, Any]) -> None:
        """Keep all that is needed to go on from here to the same bits."""
        if self._checkpointed == federation.round:
            return
        self._collect(federation)
        tensors: dict[str, torch.Tensor] = {}
        earlier = self._rows.lean(federation)
        text = federation_state(federation, tensors, since=bool(earlier))
        with self._room():
            for name in _LINES:  # first the lines, then a checkpoint that counts on them, also when the power fails
                with suppress(FileNotFoundError), (self.folder / name).open("rb") as file:
                    os.fsync(file.fileno())
            more = {"of": self._identity, **self._written(_LINES), "more": dict(more)}
            entry = save(self.folder / "checkpoint", tensors, {**text, **more}, earlier)
        self._rows.wrote(federation, *earlier, entry)
        self._checkpointed = federation.round

    def finish(self, federation: Federation, summary: Mapping[str, Any], last: list[Evaluation]) -> None:
        """Write what a finished run is read for: confusion counts, every client's model, and the summary."""
        self._collect(federation)
        tables: dict[str, dict[str, Any]] = {client.name: {} for client in federation.scenario.clients}
        for evaluation in last:
            if evaluation.split == "test" and evaluation.kept.is_sparse:
                for name, cells in zip(evaluation.clients, evaluation.cells(), strict=True):
                    tables[name][evaluation.readout] = {"classes": federation.scenario.classes, "cells": cells}
        with self._room():
            labels = list(federation.scenario.label_names)
            write_text(self.folder / "confusion.json", json.dumps({"labels": labels, "clients": tables}))
            self._models(federation)
            told = json.dumps(summary, indent=1) + "\n"
            files = {name: digest_of_file(self.folder / name) for name in _READ if (self.folder / name).is_file()}
            write_text(self.folder / CHECKSUMS, seal({**files, SUMMARY: digest(told.encode())}))
            write_text(self.folder / SUMMARY, told)  # last: with it the run is finished

    def _collect(self, federation: Federation) -> None:
        federation.simulation.collect(federation.server)

    def _models(self, federation: Federation) -> None:
        write_models(self.folder, federation)

    def _append(self, name: str, *lines: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def _written(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """How long files of lines are now, and their checksums: what a checkpoint says of them."""
        now = {name: self._growing.setdefault(name, Growing(self.folder / name)).now() for name in names}
        return {
            "lengths": {name: length for name, (length, _) in now.items()},
            "checksums": {name: checksum for name, (_, checksum) in now.items()},
        }

    def _cut(self, lengths: Mapping[str, int], names: Sequence[str]) -> None:
        """Cut off files of lines what came after a checkpoint."""
        for name in names:
            if (self.folder / name).is_file():
                with (self.folder / name).open("r+b") as file:
                    file.truncate(lengths.get(name, 0))

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
                f"some space and go on with: {self.again}"
            ) from error

    @property
    def again(self) -> str:
        """The command that goes on with the run."""
        return f"fedquilt resume {self.shown}"

    # --- reading -----------------------------------------------------------------------------------------------------

    def read_settings(self) -> dict[str, Any]:
        """`run.toml`; what is not a run directory is refused."""
        return read_settings(self.folder)

    @property
    def finished(self) -> bool:
        """Whether the run went to its end."""
        return (self.folder / SUMMARY).is_file()

    def restore(self, federation: Federation) -> Kept:
        """Put a federation where the last checkpoint was, and cut off what came after it.

        Everything is read and checked before the first byte is changed.
        """
        kept = self.look(federation)
        self._plan = kept.plans[-1][1] if kept.plans else None
        self._started = str(self.read_settings().get("started", self._started))
        if kept.checkpoint is not None:
            restore_federation(federation, *kept.checkpoint)
            self._rows.found(federation, *kept.checkpoint)
            tidy(self.folder / "checkpoint", self._rows.names)
        self._cut({} if kept.checkpoint is None else kept.checkpoint[1]["lengths"], _LINES)
        self._checkpointed = federation.round
        return kept

    def look(self, federation: Federation) -> Kept:
        """The last checkpoint and the lines up to it, checked to be of this federation; nothing is changed."""
        settings = self.read_settings()
        self._checksum, self._identity = fingerprint(federation.scenario), identity(settings)
        if settings.get("fingerprint") != self._checksum:
            raise Damaged(
                f"the data of scenario '{federation.scenario.name}' are not those that '{self.folder}' was run on; "
                "it was left as it is"
            )
        self._code = same_code(self.folder, settings.get("model_code", {}), model_code(federation))
        found = load(self.folder / "checkpoint")
        lengths = [settings["training"]["rounds"], *settings.get("extended", [])]  # also as it was before it was longer
        same = [identity({**settings, "training": {**settings["training"], "rounds": each}}) for each in lengths]
        if found is not None and found[1]["of"] not in same:
            raise Damaged(
                f"'{self.folder / 'run.toml'}' is not the one that its checkpoint was made with; it was left as it is"
            )
        rows, planned, moved, _ = (self.lines(name, {} if found is None else found[1]) for name in _LINES)
        try:
            plans = [(int(line["round"]), Plan.from_json(line)) for line in planned]
            sums = [(sum(line["up"].values()), sum(line["down"].values())) for line in moved]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            told = f"a line of '{PLANS}' or '{TRAFFIC}' in '{self.folder}' does not say what it should ({error!r})"
            raise Damaged(f"{told}; it was left as it is") from None
        return Kept(found, rows, plans, sums)

    def lines(self, name: str, checkpoint: Mapping[str, Any] | None = None) -> list[Row]:
        """The lines of a file, or those up to a checkpoint (none where it is empty); one cut short is left out."""
        path = self.folder / name
        data = path.read_bytes() if path.is_file() else b""
        if checkpoint is not None:
            length = checkpoint.get("lengths", {}).get(name, 0)
            if len(data) < length:
                raise Damaged(f"'{path}' is shorter than it was at the checkpoint; it was left as it is")
            data = data[:length]
            check(path, digest(data), checkpoint.get("checksums", {}).get(name))
        elif self.finished:
            check(path, digest(data), sealed(self.folder, self.read_settings().get("format")).get(name))
        try:
            whole = data[: data.rfind(b"\n") + 1].decode("utf-8")
            return [json.loads(line) for line in whole.splitlines()]
        except (ValueError, RecursionError) as error:
            raise Damaged(f"'{path}' holds a line that is not JSON ({error}); it was left as it is") from None
