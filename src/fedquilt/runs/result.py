"""What came of a run: rows, plans, a summary, each client's personal model, and ways to look at all of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedquilt._util.plain_values import python
from fedquilt.core.federation import Federation, RoundReport
from fedquilt.interface.readout import EVERYONE
from fedquilt.results import Evaluation, Row, final, summarise
from fedquilt.runs.alarms import alarms
from fedquilt.runs.diagnosis import of_the_samples, trouble
from fedquilt.runs.looking import as_frame, as_html, drawn, in_words
from fedquilt.runs.promises import promised
from fedquilt.runs.unseen import Joined
from fedquilt.sharing import Plan

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


_ONE_BY_ONE = 500  # clients that are looked at one by one


@dataclass(repr=False)
class Run:
    """What a run gave: rows, plans, a summary, and each client's personal model.

    >>> import fedquilt as fq
    >>> run = fq.run(fq.scenarios.build("digits", clients=4), "fedper", rounds=3, engine="sequential", alone=False)
    >>> print(run)                                                               # doctest: +ELLIPSIS
    fedper on digits, seed 0: 4 clients, 3 rounds
    accuracy ... % on test data, read-out 'received' (mean ± standard deviation over clients; worst decile ...)
    ... MB up, ... MB down, ... s
    >>> first = run.federation.scenario.clients[0]
    >>> len(run.predict(first.name, first.test.x)) == len(first.test)
    True
    """

    federation: Federation
    evaluations: list[Evaluation] = field(default_factory=list)
    plans: list[tuple[int, Plan]] = field(default_factory=list)
    bytes_up: list[int] = field(default_factory=list)
    bytes_down: list[int] = field(default_factory=list)
    seconds: float = 0.0
    alone: Run | None = None
    folder: Path | None = None
    joined: Joined = field(default_factory=Joined)  # clients that were held out, once the rounds are over
    earlier: list[Row] = field(default_factory=list)  # rows of the rounds before the run was resumed
    # what the simplest answer would score on test data, the best single class say, and the standard error of that
    chance: tuple[float, float] = field(default=(math.nan, math.nan), init=False)
    _first: list[Row] = field(default_factory=list, init=False, repr=False)  # of the first round that was measured
    _history: tuple[int, list[Row]] = field(default=(0, []), init=False, repr=False)  # how far alarms have looked
    _last: dict[tuple[str, str], tuple[int, list[Row]]] = field(default_factory=dict, init=False, repr=False)

    def take(self, federation: Federation, report: RoundReport) -> None:
        """A callback: remember a round."""
        self.evaluations += report.evaluations
        self.note_chance(report.evaluations)
        self._first_rows()
        if not self.plans or self.plans[-1][1] != report.plan:
            self.plans.append((report.round, report.plan))
        self.bytes_up.append(report.traffic.total_up)
        self.bytes_down.append(report.traffic.total_down)
        self.seconds += report.seconds

    def note_chance(self, evaluations: Iterable[Evaluation]) -> None:
        """Remember what the best answer without a look at samples would give, where it was measured."""
        for evaluation in evaluations:
            if (evaluation.readout, evaluation.split) == (self.readout, "test"):
                self.chance = evaluation.task.chance(evaluation.kept)

    def _first_rows(self) -> list[Row]:
        """The rows of the first round that was measured, with the read-out that results are reported with."""
        if not self._first:
            before = [row for row in self.earlier if (row["readout"], row["split"]) == (self.readout, "test")]
            mine = (e.rows() for e in self.evaluations if (e.readout, e.split) == (self.readout, "test"))
            found = before or next(mine, [])
            self._first = [row for row in found if row["round"] == found[0]["round"]]
        return self._first

    @property
    def rows(self) -> list[Row]:
        """One row per client, round, read-out and split."""
        return self.earlier + [row for evaluation in self.evaluations for row in evaluation.rows()]

    def last_rows(self, readout: str, split: str = "test") -> list[Row]:
        """Each client's last row with a read-out on a split, in the order of the clients.

        It looks back only as far as it has to, and remembers what it found until there is a new evaluation.
        """
        known = self._last.get((readout, split))
        if known is None or known[0] != len(self.evaluations):
            clients = self.federation.scenario.clients
            # of clients on devices of their own it is not known here who has samples
            missing = {c.name for c in clients if len(getattr(c, split, c.test))} or {c.name for c in clients}
            found: dict[str, Row] = {}
            for evaluation in reversed(self.evaluations):
                if missing and (evaluation.readout, evaluation.split) == (readout, split):
                    found |= {row["client"]: row for row in evaluation.rows() if row["client"] in missing}
                    missing -= found.keys()
            if missing:
                found = final(self.earlier, readout, split) | found
            known = (len(self.evaluations), [found[client.name] for client in clients if client.name in found])
            self._last[readout, split] = known
        return known[1]

    @property
    def plan(self) -> Plan:
        """The last plan; it prints itself."""
        return self.federation.server.plan

    def model(self, client: str) -> nn.Module:
        """A client's personal model: an ordinary module, ready to use."""
        return self.federation.model(client)

    def predict(self, client: str, x: Any) -> Tensor:
        """(n,) the classes that a client takes samples (n, ...) for, or what else the task is to predict.

        It is the read-out that results are reported with that says so.

        Some methods predict with more than `model` has, a mixture of two models say; this is what was measured.
        """
        return self.federation.predict(client, x, self.readout)

    def save_model(self, client: str, path: str | Path) -> Path:
        """Write a client's personal model as safetensors: `load_state_dict` takes what `load_file` reads from it."""
        from fedquilt.runs.checkpoint import write_tensors

        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, self.model(client).state_dict())
        return path

    @property
    def readout(self) -> str:
        """The read-out that results are reported with: the method's, or the first one where that was not made."""
        named = [made.name for made in self.federation.readouts]
        wanted = self.federation.method.readout
        return wanted if wanted in named else named[0]

    @property
    def trouble(self) -> str | None:
        """What is wrong and likely why, if the federation does not learn; None where it does."""
        if not math.isfinite(self.chance[0]):
            return None
        federation = self.federation
        refused = int(federation.server.refused.sum())
        first, last = (
            [r for r in rows if "liar" not in r] for rows in (self._first_rows(), self.last_rows(self.readout))
        )
        return trouble(
            first, last, self.chance, federation.training, refused, federation.scenario.task,
            lambda: _in_the_way(federation) or of_the_samples(federation.scenario),
            [] if self.alone is None else self.alone.last_rows("received"),
        )  # fmt: skip

    def alarms(self, alone: Sequence[Row] | None) -> list[str]:
        """Clients that fell from what they were, or are worse off than alone, a sentence each; of few clients only."""
        if len(self.federation.scenario.clients) > _ONE_BY_ONE:
            return []
        if self._history[0] != len(self.evaluations):
            new = [e for e in self.evaluations[self._history[0] :] if e.readout == self.readout]
            rows = [row for evaluation in new for row in evaluation.rows()]
            self._history = (len(self.evaluations), self._history[1] + rows)
        rows = self.earlier + self._history[1]
        return alarms(rows, alone or [], self.readout, self.federation.scenario.task.metric)

    def _on_everyone(self) -> dict[str, Any]:
        """The mean on everyone's test samples, and how many of them models did not take, where that was asked for."""
        key, rows = self.federation.scenario.task.lead, self.last_rows(self.readout, EVERYONE)
        known = [row for row in rows if row.get(key) is not None and "liar" not in row]
        if not self.federation.terms.everyone or not known:
            return {}
        mean = sum(row[key] for row in known) / len(known)
        return {"everyone_mean": mean, "everyone_left_out": sum(row["left_out"] for row in known) / len(known)}

    # --- looking at it -----------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return in_words(self.summary)

    __repr__ = __str__

    def to_pandas(self) -> pd.DataFrame:
        """The rows as a data frame, which needs pandas."""
        return as_frame(self.rows)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Accuracy and loss over rounds, a line a read-out and split, which needs matplotlib; also kept at `path`."""
        return drawn(self, path)

    def report(self, path: str | Path = "report.html") -> Path:
        """Write the page about this run, which was made with `out`, and return where it is."""
        if self.folder is None:
            raise ValueError("the page is made of a run on disk: give fedquilt.run a folder, as in out='runs/first'")
        from fedquilt.report.page import write_page

        return write_page([self.folder], path)

    def _repr_html_(self) -> str:
        """The summary and the quilt, for notebooks."""
        return as_html(self)

    @property
    def summary(self) -> dict[str, Any]:
        """Mean, spread, worst decile, gain over alone, megabytes and seconds, of the last round on test data."""
        federation, server = self.federation, self.federation.server
        wrong = self.trouble
        alone = self if federation.method.name == "local" else self.alone
        bar = None if alone is None else alone.last_rows("received") + alone.last_rows("adapted")
        return {
            "scenario": federation.scenario.name,
            "method": federation.method.name,
            "seed": federation.seed,
            "clients": len(federation.scenario.clients),
            "rounds": federation.round,
            **({} if federation.attack is None else {"attack": federation.attack.name, "liars": len(federation.liars)}),
            **summarise(self.last_rows(self.readout), bar, self.readout, task=federation.scenario.task),
            **self._on_everyone(),
            **self.joined.told,
            "megabytes_up": sum(self.bytes_up) / 1e6,
            "megabytes_down": sum(self.bytes_down) / 1e6,
            "seconds": self.seconds,
            **({} if federation.clock is None else {"virtual_seconds": federation.clock.now}),
            **({} if federation.clock is None else {"late_updates": federation.clock.late}),
            "engine": "+".join(sorted(set(federation.backend.engines))),
            "device": federation.backend.where,
            "refused_updates": int(server.refused.sum()),
            **({"compression": said} if (said := federation.terms.compress.told) else {}),
            **promised(federation),
            **({} if wrong is None else {"trouble": wrong}),
            **({"alarms": told} if (told := self.alarms(bar)) else {}),
            **python(dict(federation.method.describe(server.state, server.plan, server.roster))),
        }


def _in_the_way(federation: Federation) -> str:
    """What a run was asked for that keeps a federation from learning: liars, or the noise of privacy."""
    if federation.attack is not None:
        lie = f"the clients that lie ({federation.attack.name})"
        return f"{lie}; try another merge (fedquilt list merges), or see how it goes without them"
    if federation.terms.privacy is not None:
        return "the noise of privacy (dp); more clients, a higher dp.epsilon or fewer rounds take less of it"
    return ""
