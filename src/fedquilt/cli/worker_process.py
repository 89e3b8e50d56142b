"""A process that does runs of a comparison: orders come through a pipe, and so go the answers.

When the pipe closes, whoever gave the orders is gone, and the process ends at once, whatever it is doing: what it had
is on disk. A SIGINT lets the round end and be kept.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.cli.interrupt import patient_ctrl_c

if TYPE_CHECKING:
    from fedquilt.cli.planned_runs import PlannedRun
    from fedquilt.core.federation import Federation, RoundReport
    from fedquilt.scenario import Scenario

_PATIENCE = 10.0  # seconds that a directory may be held by another process


def main(pipe: Connection, inherited: Sequence[Connection]) -> None:
    """Do what is ordered until there is no more. `inherited` are the other side's ends of pipes, copied by a fork."""
    for end in inherited:  # while a copy of one is open here, that the other side is gone would go unnoticed
        end.close()
    os.setsid()  # a Ctrl-C in the terminal is the other side's to handle, which tells its workers
    orders: queue.Queue[dict[str, Any] | None] = queue.Queue()
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", FutureWarning)
    warnings.showwarning = lambda message, *_, **__: pipe.send({"told": "warning", "text": str(message)})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with patient_ctrl_c():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the other side had blocked it for the start
            threading.Thread(target=_read, args=(pipe, orders), daemon=True).start()
            built: dict[str, Scenario] = {}
            while (order := orders.get()) is not None:
                _work(order, built, pipe)
    except KeyboardInterrupt:
        pipe.send({"told": "stopped"})
    except OSError:
        os._exit(1)


def _read(pipe: Connection, orders: queue.Queue[dict[str, Any] | None]) -> None:
    with suppress(EOFError, OSError):
        while True:
            order = pipe.recv()
            orders.put(order)
            if order is None:
                return
    os._exit(1)


def _work(order: dict[str, Any], built: dict[str, Scenario], pipe: Connection) -> None:
    from fedquilt._util.lock import Held
    from fedquilt.cli.planned_runs import PlannedRun
    from fedquilt.cli.progress import Progressed

    _keep_to(order["cores"], order["gpu"])
    job = PlannedRun(**order["job"])
    progress = Progressed()

    def tell(federation: Federation, report: RoundReport) -> None:
        text = progress.text(federation, report)
        pipe.send({"told": "round", "round": report.round, "rounds": report.rounds, "text": text})

    try:
        patience = time.monotonic() + _PATIENCE
        while True:
            try:
                job.run(Path(order["out"]), _clients(job, built), [tell], order["checkpoint_every"])
                break
            except Held:  # by a worker of a comparison that was killed a moment ago, most likely
                if time.monotonic() > patience:
                    raise
                time.sleep(0.5)
    except Exception as error:
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        pipe.send({"told": "failed", "text": text or type(error).__name__})
    else:
        pipe.send({"told": "finished"})


def _clients(job: PlannedRun, built: dict[str, Scenario]) -> Scenario:
    """The scenario of a job; that of the last one where it is the same."""
    key = json.dumps([job.scenario, job.scenario_settings, job.training, job.seed], sort_keys=True)
    if key not in built:
        built.clear()
        built[key] = job.build()
    return built[key]


def _keep_to(cores: list[int] | None, gpu: int | None) -> None:
    """Stay on some of the cores, with as many threads, and on one GPU: other workers have the others."""
    import torch

    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    if cores:
        torch.set_num_threads(len(cores))
    if gpu is not None:
        torch.cuda.set_device(gpu)  # "cuda" is this one from now on
