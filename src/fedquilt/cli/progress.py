"""Progress while clients train, and runs that a Ctrl-C ends with what was reached."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedquilt._util.metric import ACCURACY
from fedquilt.cli.output import Refused, err

if TYPE_CHECKING:
    from fedquilt.cli.request import Request
    from fedquilt.core.federation import Callback, Federation, RoundReport
    from fedquilt.methods import Method
    from fedquilt.runs.result import Run
    from fedquilt.scenario import Scenario


@dataclass(frozen=True)
class Outcome:
    """A run, and whether it went to its end."""

    run: Run
    finished: bool

    @property
    def summary(self) -> dict[str, Any]:
        """The run's summary; of a run that was stopped, the name says where."""
        found = self.run.summary
        return found if self.finished else found | {"method": f"{found['method']} (round {found['rounds']})"}


class Stopped(Refused):
    """A Ctrl-C before there was anything to show."""


class ProgressBoard:
    """Progress bars on standard error, one a run: round, accuracy now and at best, megabytes, time left."""

    def __init__(self) -> None:
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(compact=True),
            console=err,
            disable=not err.is_terminal,
        )

    def __enter__(self) -> ProgressBoard:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.progress.stop()

    def run(
        self, order: Request, scenario: Scenario, method: Method, seed: int, label: str,
        also: Sequence[Callback] = (), **options: Any,
    ) -> Outcome:  # fmt: skip
        """Run one method; `also` are further callbacks, `options` arguments of `fedquilt.run` beside the order's."""
        from fedquilt.runs.run import run

        given: dict[str, Any] = {**order.how(), "alone": False, **options}
        line = _Line(self.progress, label, scenario.training.rounds, alone=given["alone"] is True)
        return self.watch(line, lambda: run(scenario, method, seed=seed, callbacks=[line, *also], **given))

    def resume(self, label: str, rounds: int, go: Callable[[Sequence[Callback]], Run]) -> Outcome:
        """Go on with a run; `go` takes the callbacks."""
        line = _Line(self.progress, label, rounds, alone=True)
        return self.watch(line, lambda: go([line]))

    def watch(self, line: _Line, go: Callable[[], Run]) -> Outcome:
        """Run it; a Ctrl-C gives back the rounds that were over."""
        start = time.perf_counter()
        try:
            return Outcome(go(), True)
        except KeyboardInterrupt:
            kept = line.kept
            if kept is None or not kept.evaluations:
                raise Stopped(f"stopped before a round of {line.label} was measured; nothing to show") from None
            kept.seconds = time.perf_counter() - start
            return Outcome(kept, kept.federation.round == kept.federation.training.rounds)
        finally:
            line.end()


class Progressed:
    """How a run goes, in a few words: accuracy now and at best, and megabytes moved."""

    def __init__(self) -> None:
        self.best = math.nan
        self.moved = 0

    def text(self, federation: Federation, report: RoundReport) -> str:
        """After a round."""
        self.moved += report.traffic.total_up + report.traffic.total_down
        found = current(report, [federation.method.readout, *(readout.name for readout in federation.readouts)])
        told = ""
        if found is not None:
            metric = federation.scenario.task.metric
            if not metric.gain(self.best, found[1]) >= 0:
                self.best = found[1]
            name = "" if metric == ACCURACY else f"{metric.name} "
            told = f"{found[0]} {name}{metric.show(found[1])}{metric.unit} (best {metric.show(self.best)})"
        return f"{told}  {self.moved / 1e6:.1f} MB" if self.moved else told


class _Line:
    """A callback that draws one run's progress, and keeps the rounds that are over."""

    def __init__(self, progress: Progress, label: str, rounds: int, alone: bool) -> None:
        self.progress, self.label, self.alone = progress, label, alone
        self.task = progress.add_task(label.ljust(10), total=rounds, told="")
        self.waiting: Any = None
        self.kept: Run | None = None
        self.progressed = Progressed()

    def __call__(self, federation: Federation, report: RoundReport) -> None:
        from fedquilt.runs.result import Run

        self.kept = self.kept or Run(federation)
        self.kept.take(federation, report)
        self.progress.update(self.task, completed=report.round, told=self.progressed.text(federation, report))
        if report.round == report.rounds and self.alone and federation.method.name != "local":
            self.waiting = self.progress.add_task("alone".ljust(10), total=None, told="the same clients by themselves")

    def end(self) -> None:
        """Nothing is under way any more."""
        if self.waiting is not None:
            self.progress.remove_task(self.waiting)


def current(report: RoundReport, readouts: Sequence[str]) -> tuple[str, float] | None:
    """The score to show for a round: on validation data, or on test data where clients have no other."""
    for split in ("validation", "test"):
        for readout in readouts:
            for evaluation in report.evaluations:
                if (evaluation.split, evaluation.readout) == (split, readout) and math.isfinite(evaluation.score):
                    return split, evaluation.score
    return None
