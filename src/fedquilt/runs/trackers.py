"""Callbacks that log a run elsewhere as it goes. Both need an extra: pip install 'fedquilt[track]'.

A callback is any function of the federation and the report of the round that is over; a list of them is an argument of
`fedquilt.run`:

>>> import fedquilt as fq
>>> def show(federation, report):
...     print(report.round, "of", report.rounds, sorted(scores(report))[0])
>>> scenario = fq.scenarios.build("digits", clients=4)
>>> _ = fq.run(scenario, "fedavg", rounds=1, alone=False, engine="sequential", callbacks=[show])
1 of 1 accuracy/adapted/test
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedquilt._util.wording import flat, worst_decile
from fedquilt.core.federation import Callback, Federation, RoundReport
from fedquilt.runs.settings import method_to


def scores(report: RoundReport) -> dict[str, float]:
    """The numbers of a round by name: metrics by read-out and split, the worst decile, and megabytes."""
    found: dict[str, float] = {}
    for evaluation in report.evaluations:
        rows = [row for row in evaluation.rows() if "liar" not in row]
        if rows:
            name = f"{evaluation.readout}/{evaluation.split}"
            task = evaluation.task
            for key in [metric.name for metric in task.all_metrics]:
                known = [row[key] for row in rows if row.get(key) is not None]
                if known:
                    found[f"{key}/{name}"] = sum(known) / len(known)
                if known and key == task.lead:
                    found[f"worst_decile/{name}"] = worst_decile(known, task.metric.higher)
    found["megabytes/up"] = report.traffic.total_up / 1e6
    found["megabytes/down"] = report.traffic.total_down / 1e6
    found["seconds"] = report.seconds
    for unit, sizes in report.plan.circle_sizes.items():
        found[f"circles/{unit}"] = float((sizes > 1).sum())
    return found


def settings(federation: Federation) -> dict[str, str]:
    """What the run is, as names and texts."""
    told: dict[str, Any] = {
        "scenario": federation.scenario.name,
        "clients": len(federation.scenario.clients),
        "seed": federation.seed,
        "method": federation.method.name,
    }
    told |= {f"training.{key}": value for key, value in asdict(federation.training).items()}
    told |= {f"method.{key}": value for key, value in flat(method_to(federation.method)["settings"])}
    return {key: str(value) for key, value in told.items()}


def tensorboard(folder: str | Path) -> Callback:
    """A callback that writes a round's numbers for TensorBoard: `tensorboard --logdir FOLDER`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(_needs("tensorboard", error)) from error
    writer: Any = None

    def log(federation: Federation, report: RoundReport) -> None:
        nonlocal writer
        if writer is None:  # not before there is something to write: a run that is refused leaves nothing behind
            writer = SummaryWriter(str(folder))
            writer.add_text("settings", "\n".join(f"    {k} = {v}" for k, v in settings(federation).items()))
        for name, value in scores(report).items():
            writer.add_scalar(name, value, report.round)
        writer.flush()
        if report.round == report.rounds:
            writer.close()

    return log


def mlflow(name: str, experiment: str = "fedquilt", uri: str | None = None) -> Callback:
    """A callback that logs a round's numbers to MLflow, to `uri` or where MLflow is set up to."""
    try:
        from mlflow import MlflowClient
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(_needs("mlflow", error)) from error
    client: Any = None
    run: str = ""

    def log(federation: Federation, report: RoundReport) -> None:
        nonlocal client, run
        if client is None:
            client = MlflowClient(uri)
            known = client.get_experiment_by_name(experiment)
            number = known.experiment_id if known is not None else client.create_experiment(experiment)
            run = client.create_run(number, run_name=name).info.run_id
            for key, value in settings(federation).items():
                client.log_param(run, key, value)
        for key, number in scores(report).items():
            client.log_metric(run, key, number, step=report.round)
        if report.round == report.rounds:
            client.set_terminated(run)

    return log


TRACKERS = {"tensorboard": tensorboard, "mlflow": mlflow}


def _needs(name: str, error: ModuleNotFoundError) -> str:
    return f"logging to {name} needs '{error.name}': pip install 'fedquilt[track]'"
