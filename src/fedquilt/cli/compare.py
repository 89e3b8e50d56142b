"""`fedquilt compare SCENARIO METHOD...`: methods on the same clients and seeds, and which differences are real.

Every run has a directory of its own, named after what decides its results. What is finished there is reused, what was
interrupted goes on, so the same command after a kill ends the same comparison.
"""

from __future__ import annotations

import json as json_
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquilt._util.suggest import did_you_mean
from fedquilt.cli import options as opt
from fedquilt.cli.comparison import ALONE, Tried, best_setting, check_form, compared, show, tried_table
from fedquilt.cli.output import Refused, note, out
from fedquilt.cli.planned_runs import PlannedRun, sweep
from fedquilt.cli.progress import ProgressBoard
from fedquilt.cli.request import Choices
from fedquilt.cli.watch import watched
from fedquilt.cli.workers import WorkerEvent, WorkerPool, how_many

if TYPE_CHECKING:
    from rich.progress import TaskID

Format = Annotated[str, typer.Option("--format", help="The table as text, csv, latex or markdown.")]
Reference = Annotated[str | None, typer.Option("--reference", help="The method that every other is set against.")]
Target = Annotated[float | None, typer.Option("--target", help="Also: rounds and megabytes to this score, as 0.9.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Where the runs are kept; runs/compare-SCENARIO otherwise.")
]
Sweep = Annotated[
    list[str] | None,
    typer.Option("--sweep", metavar="KEY=A,B,C...", help="Settings to try, the best chosen on validation data."),
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", metavar="N", help="Runs at once; one a core (on a GPU one) otherwise.")
]


Devices = Annotated[
    str | None,
    typer.Option("--devices", metavar="N,...", help="Numbers of the GPUs to share the runs out to, one on each."),
]
AlsoMethods = Annotated[
    str | None, typer.Option("--methods", metavar="NAME,...", help="The same as METHOD..., with commas; or all.")
]
ALL = "all"


def compare(
    scenario: opt.Scenario,
    methods: opt.Methods = None,
    named: AlsoMethods = None,
    rounds: opt.Rounds = None,
    seed: opt.Seed = 0,
    seeds: opt.Seeds = 1,
    settings: opt.Settings = None,
    sweeps: Sweep = None,
    readouts: opt.Readouts = None,
    merge: opt.Merge = "mean",
    attack: opt.Attack = None,
    liars: opt.Liars = None,
    secure_sums: opt.SecureSums = False,
    device: opt.Device = "auto",
    engine: opt.Engine = "auto",
    clients_at_once: opt.AtOnce = None,
    threads: opt.Threads = None,
    evaluate_every: opt.Every = 1,
    everyone: opt.Everyone = False,
    unseen: opt.Unseen = 0,
    alone: opt.Alone = True,
    reference: Reference = None,
    target: Target = None,
    to: Out = None,
    jobs: Jobs = None,
    devices: Devices = None,
    checkpoint_every: opt.Checkpoints = 5,
    watch: opt.Watch = None,
    form: Format = "text",
    json: opt.AsJson = False,
) -> None:
    """Run methods on the same clients and seeds, and say which differences are real.

    For example: fedquilt compare digits local fedavg modfl --seeds 3. Started again after a Ctrl-C or a kill it goes on
    where it was; what is finished is not run again. With `all` in the place of methods it is all that the scenario
    allows; those that refuse it say why, in a line each. With --attack the same clients lie to every method and with
    every seed, and are not counted.
    """
    from fedquilt.methods.find import find

    numbers = range(seed, seed + seeds)
    said = opt.lying(settings, attack, liars)
    if attack is not None and not any(word.startswith("attack.draw=") for word in said):
        said.append(f"attack.draw={seed}")  # the honest must be the same in all seeds, to be set against each other
    choices = Choices(
        rounds, said, readouts, merge, device, engine, clients_at_once, evaluate_every, numbers, attack, secure_sums,
        threads, everyone, unseen,
    )  # fmt: skip
    check_form(form)
    asked = [*(methods or ()), *(word.strip() for word in (named or "").split(",") if word.strip())]
    methods = wanted(asked)
    if not methods:
        raise Refused("name the methods to compare, or all of them: fedquilt compare digits --methods all")
    names = [find(method).name for method in methods]
    reference = dict(zip(methods, names, strict=True)).get(reference or "", reference)  # as it was written above
    if reference is not None and reference not in names:
        raise Refused(did_you_mean(reference, names, "method in this comparison"))
    if jobs is not None and jobs < 1:
        raise Refused(f"--jobs {jobs}: give at least 1")
    gpus = _gpus(devices, device)
    opt.check_checkpoints(checkpoint_every)
    everybody = [*methods, *([ALONE] if alone and ALONE not in names else [])]
    todo = sweep(scenario, everybody, choices, sweeps or ())
    if target is not None and not 0 < target <= 1:  # above 1 there are other scores than accuracies
        metric = todo[0].build().task.metric
        if not metric.low < target <= metric.high:
            raise Refused(f"--target {target}: give {metric.name} above {metric.low:g} and at most {metric.high:g}")
    folder = to or Path("runs") / f"compare-{Path(scenario.partition(':')[0]).stem}"
    refused = do(todo, folder, jobs, checkpoint_every, watch, forgiving=ALL in asked, gpus=gpus)
    todo, names = [job for job in todo if job.name not in refused], [name for name in names if name not in refused]
    if not names:
        raise Refused("; ".join(f"{name}: {reason}" for name, reason in refused.items()))
    reference = None if reference in refused else reference
    chosen = best_setting(todo, folder)
    kept = [job for job in todo if job.variant == chosen[job.name].variant]
    tried = [one for choice in chosen.values() for one in choice.tried]
    write_list(folder, kept, tried)
    table = compared(
        {name: [folder / job.folder for job in kept if job.name == name] for name in names},
        [folder / job.folder for job in kept if job.name == ALONE] if alone else [],
        reference,
        target,
    )
    swept = [choice for choice in chosen.values() if choice.among > 1]
    left_out = [
        f"left out is {name}: {reason.rstrip('.').removeprefix(f'{name}: ')}" for name, reason in refused.items()
    ]
    table = replace(table, notes=(*table.notes, *map(str, swept), *left_out))
    told = {"tried": [asdict(one) for one in tried]} if tried else {}
    show(table, form, json, folder=str(folder), chosen={c.method: c.label for c in swept}, **told)
    if tried and not json and form == "text":
        out.print()
        out.print(tried_table(tried, swept[0].metric))
        out.print()
    if not json and form == "text":
        note(f"Kept in {folder}; look at it with: fedquilt report {folder}")


def wanted(asked: Sequence[str]) -> list[str]:
    """The methods that were asked for, all of the library in the place of `all`.

    >>> wanted(["all", "mine.py:Mine"])[-2:], wanted(["fedavg"])
    (['fedproto', 'mine.py:Mine'], ['fedavg'])
    """
    from fedquilt.methods import METHODS

    return list(dict.fromkeys([*METHODS, *(word for word in asked if word != ALL)])) if ALL in asked else list(asked)


def do(
    todo: Sequence[PlannedRun], folder: Path, jobs: int | None, checkpoint_every: int, watch: int | None,
    forgiving: bool = False, gpus: Sequence[int] = (),
) -> dict[str, str]:  # fmt: skip
    """Do all runs that are not finished yet; a Ctrl-C lets rounds end, keeps them and says how to go on.

    A run that fails ends it all, or, where it is forgiving, leaves out its method: the reasons are given back by name.
    """
    from fedquilt.core.federation import pick_device
    from fedquilt.runs.ctrl_c import first_ctrl_c

    left = [job for job in todo if not (folder / job.folder / "summary.json").is_file()]
    refused: dict[str, str] = {}
    if not left:
        return refused
    folder.mkdir(parents=True, exist_ok=True)
    write_list(folder, todo)
    device, engine = pick_device(left[0].hardware["device"]).type, left[0].hardware["engine"]
    pool = WorkerPool(how_many(jobs, len(left), device, engine, len(gpus)), folder, checkpoint_every, gpus)
    lines = _Lines(done=len(todo) - len(left), of=len(todo))
    try:
        with lines, watched(watch, folder), first_ctrl_c(True) as asked_to_stop:
            for news in pool.work(left):
                if news is not None:
                    lines.hear(news)
                if news is not None and news.told == "failed" and forgiving:
                    refused.setdefault(news.job.name, news.text)
                elif news is not None and news.told == "failed" and not pool.stopping:
                    lines.failed = news
                    pool.stop()
                if asked_to_stop and not pool.stopping:
                    note("stopping: the rounds under way end and are kept; Ctrl-C again ends at once")
                    pool.stop()
    finally:
        pool.close()
    again = f"{lines.finished} of {len(todo)} runs are finished; the same command goes on from there"
    if lines.failed is not None:
        raise Refused(f"{lines.failed.job.folder}: {lines.failed.text}. {again}")
    if pool.stopping:
        note(f"stopped; {again}")
        raise typer.Exit(130)
    return refused


def _gpus(devices: str | None, device: str) -> list[int]:
    """The GPUs of these numbers, which must be there."""
    import torch

    if devices is None:
        return []
    there, words = torch.cuda.device_count(), [word.strip() for word in devices.split(",")]
    if device == "cpu" or not there:
        raise Refused(f"--devices {devices}: PyTorch sees no GPU here, or --device cpu asks for none; leave it out")
    if not all(word.isdecimal() and int(word) < there for word in words) or len(set(words)) < len(words):
        raise Refused(f"--devices {devices}: give different numbers from 0 to {there - 1}, with commas")
    return [int(word) for word in words]


def write_list(folder: Path, jobs: Sequence[PlannedRun], tried: Sequence[Tried] = ()) -> None:
    """Write down which runs the comparison is of, and which settings a sweep tried, for the page."""
    from fedquilt._util.files import write_text
    from fedquilt.report.read_runs import COMPARISON

    told: dict[str, Any] = {"runs": [job.folder for job in jobs], "settings": {job.folder: job.label for job in jobs}}
    told |= {"tried": [asdict(one) for one in tried]} if tried else {}
    write_text(folder / COMPARISON, json_.dumps(told, indent=1) + "\n")


class _Lines(ProgressBoard):
    """A bar for all runs, and one for each that is under way."""

    def __init__(self, done: int, of: int) -> None:
        super().__init__()
        self.all = self.progress.add_task("runs".ljust(10), total=of, completed=done, told="")
        self.finished = done
        self.lines: dict[str, TaskID] = {}
        self.failed: WorkerEvent | None = None
        self.warned: set[str] = set()

    def hear(self, news: WorkerEvent) -> None:
        """Draw what a worker told."""
        job = news.job
        if news.told == "started":
            label = f"{job.name} {job.label}".strip() + f" seed {job.seed}"
            self.lines[job.folder] = self.progress.add_task(label, total=None, told="")
        elif news.told == "round":
            self.progress.update(self.lines[job.folder], total=news.rounds, completed=news.round, told=news.text)
        elif news.told == "warning":
            if news.text not in self.warned:
                note(news.text)
            self.warned.add(news.text)
        else:
            self.progress.remove_task(self.lines.pop(job.folder))
            if news.told == "finished":
                self.finished += 1
                self.progress.update(self.all, completed=self.finished)
