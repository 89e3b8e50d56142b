"""`fedquilt run SCENARIO METHOD`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import typer

from fedquilt.cli import options as opt
from fedquilt.cli.board import Board, Outcome, Stopped
from fedquilt.cli.order import Choices, Order, take_order
from fedquilt.cli.speak import note, out, print_json
from fedquilt.cli.tables import summary_table, what_it_says

if TYPE_CHECKING:
    from fedquilt.scenario import Scenario


def run(
    scenario: opt.Scenario,
    method: opt.MethodName,
    rounds: opt.Rounds = None,
    seed: opt.Seed = 0,
    settings: opt.Settings = None,
    readouts: opt.Readouts = None,
    merge: opt.Merge = "mean",
    device: opt.Device = "auto",
    engine: opt.Engine = "auto",
    clients_at_once: opt.AtOnce = None,
    evaluate_every: opt.Every = 1,
    alone: opt.Alone = True,
    quilt: bool = typer.Option(False, "--quilt", help="Draw the last plan: a row a client, a patch a circle."),
    json: opt.AsJson = False,
) -> None:
    """Run a method on a scenario and say what came of it.

    For example: fedquilt run digits fedprox --rounds 10 --set clients=16 mu=0.1
    """
    choices = Choices(rounds, settings or (), readouts, merge, device, engine, clients_at_once, evaluate_every, (seed,))
    order = take_order(scenario, [method], choices)
    made = order.scenario(seed)
    with Board() as board:
        outcome = board.run(order, made, order.methods[0], seed, method)
        if alone and method != "local" and outcome.finished:
            with suppress(Stopped):  # the run itself is over: what it reached is shown all the same
                outcome.run.alone = by_themselves(board, order, made, seed).run
    if json:
        print_json(as_json(outcome))
    else:
        show(outcome, quilt)
    if not outcome.finished:
        raise typer.Exit(130)


def by_themselves(board: Board, order: Order, scenario: Scenario, seed: int) -> Outcome:
    """The same clients without a federation: measured once, at the end."""
    from fedquilt.methods import METHODS

    last_only = {"evaluate_every": scenario.training.rounds, "readouts": ("received",)}
    return board.run(order, scenario, METHODS["local"](), seed, "alone", **last_only)


def show(outcome: Outcome, quilt: bool) -> None:
    """The summary and the plan, for people."""
    from fedquilt.report.quilt import Quilt

    run, summary = outcome.run, outcome.summary
    if not outcome.finished:
        note("stopped; this is what was reached")
    out.print(summary_table([summary]))
    out.print()
    out.print(what_it_says(summary), style="dim")
    if summary["refused_updates"]:
        note(f"{summary['refused_updates']} updates were refused since they held NaN, infinite or misshapen values")
    out.print(f"\nWho shares what (engine {summary['engine']} on {summary['device']}):")
    out.print(Quilt(run.plan, [c.name for c in run.federation.scenario.clients]) if quilt else str(run.plan))


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The summary, the clients' last rows and the last plan, for machines."""
    run = outcome.run
    last = max(row["round"] for row in run.rows)
    return {
        "finished": outcome.finished,
        "summary": run.summary,
        "clients": [row for row in run.rows if row["round"] == last],
        "plan": run.plan.to_json(),
    }
