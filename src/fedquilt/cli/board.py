"""Progress while clients train, and runs that a Ctrl-C ends with what was reached."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedquilt.cli.speak import Refused, err

if TYPE_CHECKING:
    from fedquilt.cli.order import Order
    from fedquilt.federation import Federation, RoundReport
    from fedquilt.methods import Method
    from fedquilt.run import Run
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


class Board:
    """Progress bars on standard error, one a run: round, accuracy now and at best, megabytes, time left."""

    def __init__(self, hidden: bool = False) -> None:
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(compact=True),
            console=err,
            disable=hidden or not err.is_terminal,
        )

    def __enter__(self) -> Board:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.progress.stop()

    def run(self, order: Order, scenario: Scenario, method: Method, seed: int, label: str, **options: Any) -> Outcome:
        """Run one method with a bar of its own; a Ctrl-C gives back the rounds that were over."""
        from fedquilt.run import Run, run

        line = self.progress.add_task(label.ljust(10), total=scenario.training.rounds, told="")
        kept: list[Run] = []
        best = -math.inf

        def keep(federation: Federation, report: RoundReport) -> None:
            nonlocal best
            if not kept:
                kept.append(Run(federation))
            kept[0].take(federation, report)
            found = current(report, [method.readout, *(readout.name for readout in federation.readouts)])
            told = ""
            if found is not None:
                best = max(best, found[1])
                told = f"{found[0]} {100 * found[1]:.1f} % (best {100 * best:.1f})"
            moved = (sum(kept[0].bytes_up) + sum(kept[0].bytes_down)) / 1e6
            self.progress.update(line, completed=report.round, told=f"{told}  {moved:.1f} MB" if moved else told)

        choices = order.choices
        start = time.perf_counter()
        given: dict[str, Any] = {
            "readouts": order.readouts, "device": choices.device, "engine": choices.engine, "merge": order.rule,
            "clients_at_once": choices.clients_at_once, "evaluate_every": choices.evaluate_every, "alone": False,
        } | options  # fmt: skip
        try:
            return Outcome(run(scenario, method, seed=seed, callbacks=[keep], **given), True)
        except KeyboardInterrupt:
            if not kept or not kept[0].evaluations:
                raise Stopped(f"stopped before a round of '{method.name}' was measured; nothing to show") from None
            kept[0].seconds = time.perf_counter() - start
            return Outcome(kept[0], False)


def current(report: RoundReport, readouts: Sequence[str]) -> tuple[str, float] | None:
    """The accuracy to show for a round: on validation data, or on test data where clients have no other."""
    for split in ("validation", "test"):
        for readout in readouts:
            for evaluation in report.evaluations:
                if (evaluation.split, evaluation.readout) == (split, readout) and math.isfinite(evaluation.accuracy):
                    return split, evaluation.accuracy
    return None
