"""A page of very many clients shows some of them, chosen evenly through their scores; what is averaged is over all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedquilt.report.read_runs import Floats, RunFiles, Series

MOST = 2000  # clients with a line, a row of the quilt and a history of their own


def shown(runs: Sequence[RunFiles], clients: Sequence[str]) -> list[str]:
    """The clients that a page shows one by one: all, or the quantiles of the first run's last scores, in their order.

    >>> shown([], ["ann", "bob"])
    ['ann', 'bob']
    """
    if len(clients) <= MOST:
        return list(clients)
    first = next((run for run in runs if run.reading in run.series), None)
    scores = np.zeros(len(clients))
    if first is not None:
        number = {client: at for at, client in enumerate(clients)}
        scores[[number[client] for client in first.clients]] = np.nan_to_num(first.series[first.reading].filled()[-1])
    ranked = np.argsort(scores, kind="stable")
    chosen = np.sort(ranked[np.linspace(0, len(clients) - 1, MOST).astype(int)])
    return [clients[at] for at in chosen]


def some_clients(run: RunFiles, names: Sequence[str]) -> RunFiles:
    """What a run directory says of some of its clients."""
    wanted = set(names)
    places = [at for at, client in enumerate(run.clients) if client in wanted]
    if len(places) == len(run.clients):
        return run

    def of(table: Floats) -> Floats:
        return table[:, places]

    series = {
        reading: Series(
            each.rounds,
            of(each.score),
            None if each.f_by_class is None else each.f_by_class[places],
            None if each.loss is None else of(each.loss),
        )
        for reading, each in run.series.items()
    }
    moved = run.traffic
    traffic = None if moved is None else replace(moved, up=of(moved.up), down=of(moved.down))
    plans = [
        (at, {unit: circle[[p for p in places if p < len(circle)]] for unit, circle in plan.items()})
        for at, plan in run.plans
    ]
    return replace(
        run,
        clients=tuple(run.clients[at] for at in places),
        series=series,
        plans=plans,
        traffic=traffic,
        confusion={name: matrix for name, matrix in run.confusion.items() if name in wanted},
    )
