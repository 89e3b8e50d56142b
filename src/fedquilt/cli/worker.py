"""A process that does runs of a comparison: orders come on standard input, one line of JSON each; so go the answers.

When the input ends, whoever gave the orders is gone, and the process ends at once, whatever it is doing: what it had is
on disk. A Ctrl-C (SIGINT) lets the round end and be kept.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from fedquilt.cli.jobs import Job
    from fedquilt.federation import Federation, RoundReport
    from fedquilt.scenario import Scenario


def main() -> None:
    """Do what is ordered until there is no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints to standard output must not disturb the answers
    orders: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", FutureWarning)
    warnings.showwarning = lambda message, *_, **__: _answer(answers, told="warning", text=str(message))
    try:
        built: dict[str, Scenario] = {}
        while (order := orders.get()) is not None:
            _work(order, built, answers)
    except KeyboardInterrupt:
        _answer(answers, told="stopped")


def _read(orders: queue.Queue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        order = json.loads(line)
        orders.put(order)
        if order is None:
            return
    os._exit(1)


def _answer(answers: TextIO, **what: Any) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def _work(order: dict[str, Any], built: dict[str, Scenario], answers: TextIO) -> None:
    from fedquilt.cli.board import Progressed
    from fedquilt.cli.jobs import Job

    _keep_to(order["cores"])
    job = Job(**order["job"])
    progress = Progressed()

    def tell(federation: Federation, report: RoundReport) -> None:
        text = progress.text(federation, report)
        _answer(answers, told="round", round=report.round, rounds=report.rounds, text=text)

    try:
        job.run(Path(order["out"]), _clients(job, built), [tell], order["checkpoint_every"])
    except Exception as error:
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        _answer(answers, told="failed", kind=type(error).__name__, text=text)
    else:
        _answer(answers, told="finished")


def _clients(job: Job, built: dict[str, Scenario]) -> Scenario:
    """The scenario of a job; that of the last one where it is the same."""
    key = json.dumps([job.scenario, job.scenario_settings, job.training, job.seed], sort_keys=True)
    if key not in built:
        built.clear()
        built[key] = job.build()
    return built[key]


def _keep_to(cores: list[int] | None) -> None:
    """Stay on some of the cores, with as many threads: other workers have the others."""
    import torch

    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    if cores:
        torch.set_num_threads(len(cores))


if __name__ == "__main__":
    main()
