"""`fedquilt compare SCENARIO METHOD...`: methods on the same clients and seeds, and which differences are real."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fedquilt.cli import options as opt
from fedquilt.cli.board import Board, Outcome, Stopped
from fedquilt.cli.comparison import compared, default_reference, show
from fedquilt.cli.order import Choices, Order, take_order
from fedquilt.cli.speak import Refused, did_you_mean, note

if TYPE_CHECKING:
    from fedquilt.run import Run
    from fedquilt.scenario import Scenario

Format = Annotated[str, typer.Option("--format", help="The table as text, csv, latex or markdown.")]
Reference = Annotated[str | None, typer.Option("--reference", help="The method that every other is set against.")]
Target = Annotated[float | None, typer.Option("--target", help="Also: rounds and megabytes to this accuracy, 0 to 1.")]


def compare(
    scenario: opt.Scenario,
    methods: opt.Methods,
    rounds: opt.Rounds = None,
    seed: opt.Seed = 0,
    seeds: opt.Seeds = 1,
    settings: opt.Settings = None,
    readouts: opt.Readouts = None,
    merge: opt.Merge = "mean",
    device: opt.Device = "auto",
    engine: opt.Engine = "auto",
    clients_at_once: opt.AtOnce = None,
    evaluate_every: opt.Every = 1,
    alone: opt.Alone = True,
    reference: Reference = None,
    target: Target = None,
    form: Format = "text",
    json: opt.AsJson = False,
) -> None:
    """Run methods on the same clients and seeds, and say which differences are real.

    For example: fedquilt compare digits local fedavg modfl --seeds 3
    """
    numbers = range(seed, seed + seeds)
    choices = Choices(rounds, settings or (), readouts, merge, device, engine, clients_at_once, evaluate_every, numbers)
    if form not in ("text", "csv", "latex", "markdown"):
        raise Refused(did_you_mean(form, ("text", "csv", "latex", "markdown"), "format"))
    if reference is not None and reference not in methods:
        raise Refused(did_you_mean(reference, methods, "method in this comparison"))
    if target is not None and not 0 < target <= 1:
        raise Refused(f"--target {target}: give an accuracy above 0 and at most 1")
    order = take_order(scenario, methods, choices)
    runs: dict[str, dict[int, Run]] = {name: {} for name in methods}
    bars: dict[int, Run] = {}
    stopped = False
    with Board() as board:
        for number in numbers:
            made = order.scenario(number)
            label = f" seed {number}" if seeds > 1 else ""
            done: dict[str, Run] = {}
            try:
                for method in order.methods:
                    outcome = board.run(order, made, method, number, method.name + label)
                    stopped = not outcome.finished
                    if stopped:
                        break
                    done[method.name] = outcome.run
                if not stopped and alone:
                    bars[number] = done.get("local") or by_themselves(board, order, made, number).run
            except (KeyboardInterrupt, Stopped):
                stopped = True
            if stopped:
                break
            for name, run in done.items():
                runs[name][number] = run
    finished = len(next(iter(runs.values())))
    if stopped and not finished:
        raise Refused("stopped before every method had run with a seed; nothing to compare yet")
    if stopped:
        note(f"stopped; compared are the {finished} seed(s) that every method has run with")
    show(compared(runs, bars, reference or default_reference(methods), target), form, json)


def by_themselves(board: Board, order: Order, scenario: Scenario, seed: int) -> Outcome:
    """The same clients without a federation: measured once, at the end."""
    from fedquilt.methods import METHODS

    last_only = {"evaluate_every": scenario.training.rounds, "readouts": ("received",)}
    return board.run(order, scenario, METHODS["local"](), seed, "alone", **last_only)
