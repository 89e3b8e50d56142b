"""The run directory as ranks other than the first see it: they read it, and hand over what is written in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedquilt._util.lock import Lock
from fedquilt.core.federation import Federation, RoundReport
from fedquilt.core.ranks import Ranks, among, is_first, ranks
from fedquilt.results import Evaluation
from fedquilt.runs.checkpoint import restore_federation
from fedquilt.runs.folder import Kept, RunFolder


def folder_of(out: str | Path) -> RunFolder:
    """The directory of a run, for a process that writes it or for another rank."""
    return RunFolder(out) if is_first() else OtherRank(out)


class OtherRank(RunFolder):
    """A run directory that rank 0 writes."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.lock = _NoLock(self.folder)

    def start(self, federation: Federation, options: Mapping[str, Any]) -> None:
        """Rank 0 makes the directory."""

    def settings(self, federation: Federation, options: Mapping[str, Any]) -> None:
        """Rank 0 writes them."""

    def round(self, federation: Federation, report: RoundReport) -> None:
        """Rank 0 appends it."""

    def checkpoint(self, federation: Federation, more: Mapping[str, Any]) -> None:
        """Hand over what clients of this rank keep."""
        if self._checkpointed != federation.round:
            federation.simulation.collect(federation.server)
            self._checkpointed = federation.round

    def finish(self, federation: Federation, summary: Mapping[str, Any], last: list[Evaluation]) -> None:
        """Hand over what clients of this rank end with."""
        federation.simulation.collect(federation.server)

    def reopen(self, longer: Mapping[str, Any], before: int) -> None:
        """Rank 0 does it."""

    def restore(self, federation: Federation) -> Kept:
        """Put the federation where the last checkpoint was; rank 0 cuts off what came after it."""
        kept = self.look(federation)
        if kept.checkpoint is not None:
            restore_federation(federation, *kept.checkpoint)
            self._rows.found(federation, *kept.checkpoint)
        self._checkpointed = federation.round
        return kept


class _NoLock(Lock):
    """Rank 0 holds the lock for all."""

    def take(self) -> None:
        """Nothing is held."""

    def release(self) -> None:
        """Nothing was."""


@contextmanager
def shards_of(known: Mapping[str, Any]) -> Iterator[None]:
    """The shards that a run was begun in, over the ranks that there are now."""
    here, shards = ranks(), known.get("shards")
    if here is None or shards is None:
        if here is not None:
            raise ValueError("this run was begun in one process, without ranks; go on with it in one, without --ranks")
        with among(None if shards is None else Ranks(shards=shards)):
            yield
        return
    here.over(shards)
    yield
