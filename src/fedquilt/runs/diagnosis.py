"""Whether a federation learns at all, and the likeliest cause where it does not.

What it has to beat is the best answer that needs no look at a sample: one class, or the mean target, the same for all
clients. A mean score within two standard errors of that is chance, and so is one that fell by as much since the first
round that was measured. The cause is read off the losses that clients had while they trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fedquilt.engines.settings import Training
from fedquilt.results import Row
from fedquilt.scenario import Scenario
from fedquilt.tasks import Classification, Task

_CLASSES = Classification()
_ERRORS = 2.0  # standard errors that a mean may be off by chance
_BARELY = 0.9  # a loss above this part of what it was has barely moved
_FITTED = 0.5  # and one below this part has fallen a lot
_HIGH = {"sgd": 0.5, "adam": 0.02, "adamw": 0.02}  # rates from which on losses stand still since they were thrown off
_FAR = 10.0  # numbers of samples of this size, in the mean, are too large for a network as it begins


def trouble(
    first: Sequence[Row], last: Sequence[Row], chance: tuple[float, float], training: Training, refused: int,
    task: Task = _CLASSES, cause: Callable[[], str] = str, alone: Sequence[Row] = (),
) -> str | None:  # fmt: skip
    """A sentence on a federation that does not learn, with what to try; None for one that does.

    `first` and `last` are the clients' rows of the first and the last round that were measured, `chance` is what the
    task's simplest answer scores, the best single class say, and its standard error, `refused` how many updates were
    left out since they were not finite, `cause` finds out whether something else is known to be in the way, and `alone`
    are the last rows of the same clients alone.

    >>> row = {"accuracy": 0.34, "samples": 100, "training_loss": 1.09, "round": 5}
    >>> trouble([row], [row], (0.35, 0.048), Training(lr=0.001), 0).partition(". Likely cause: ")[0]
    'Nothing was learnt: 34.0 % is not clearly more than always naming the commonest class gives (35.0 %)'
    """
    if not last:
        return None
    metric, (simplest, error) = task.metric, chance
    now, before, margin = _mean(last, task.lead), _mean(first, task.lead), _ERRORS * error

    def shown(score: float) -> str:
        return f"{metric.show(score)}{metric.unit}" if metric.percent else f"{metric.name} {metric.show(score)}"

    if not metric.gain(now, simplest) > margin:  # nor is what is no number
        told = f"Nothing was learnt: {shown(now)} is not clearly {'more' if metric.higher else 'less'} than "
        told += f"{task.simplest} gives ({shown(simplest)})"
    elif first and first[0]["round"] < last[0]["round"] and metric.gain(now, before) < -margin:
        told = f"It got worse: {shown(now)} after round {last[0]['round']}, "
        told += f"{shown(before)} after round {first[0]['round']}"
    else:
        return None
    if why := cause():
        return f"{told}. Likely cause: {why}."
    by_itself = _mean(alone, task.lead)
    if metric.gain(by_itself, simplest) > margin and metric.gain(by_itself, now) > margin:
        cure = "let more of each model stay at home, as ditto, fedper or auto do; fedquilt advise looks for what helps"
        return f"{told}. Likely cause: clients pull apart, for alone they have {shown(by_itself)}: {cure}."
    return f"{told}. Likely cause: {_cause(first, last, training, refused)}."


def of_the_samples(scenario: Scenario) -> str:
    """What of the clients' training samples keeps a federation from learning; empty where nothing is known to."""
    splits = [client.train for client in scenario.clients if client.train.x.numel()]
    if scenario.task.kind == "classification" and len({label for s in splits for label in s.y.unique().tolist()}) == 1:
        return "all training samples have the same label"
    sizes = [float(s.x.flatten(1).abs().mean(0).max()) for s in splits if s.x.is_floating_point()]
    if max(sizes, default=0.0) > _FAR:
        return (
            f"samples hold numbers of about {max(sizes):.2g}, and a network begins best where they are about 1: "
            "standardise=true scales those of a table"
        )
    return ""


def _cause(first: Sequence[Row], last: Sequence[Row], training: Training, refused: int) -> str:
    """Which of the usual causes goes with what the losses of training did."""
    start, end = _training_loss(first), _training_loss(last)
    lower = f"lr={training.lr:g} is too high; try lr={training.lr / 10:g}"
    if refused:
        return f"updates were not finite and were refused, so {lower}"
    if start is None or end is None:
        return f"the learning rate lr={training.lr:g}; try ten times and a tenth of it"
    if end > max(start, 1e-12) / _BARELY:
        return f"losses of training rose, so {lower}"
    same_round = first[0]["round"] == last[0]["round"]
    if same_round or end > _BARELY * start:
        if training.lr / (1 - training.momentum) >= _HIGH[training.optimiser]:
            return f"losses of training barely fell, at a rate that is not low, so {lower}"
        return (
            f"losses of training barely fell, so lr={training.lr:g} is too low, or epochs and rounds too few; "
            f"try lr={10 * training.lr:g}"
        )
    if end < _FITTED * start:
        return (
            "clients fit their training samples but not their test samples: look whether labels are in the order of "
            "their samples, splits are scaled alike, and no number that only names a sample is among what a model sees"
        )
    return f"losses of training still fall: {last[0]['round']} rounds are too few, or lr={training.lr:g} is too low"


def _mean(rows: Sequence[Row], key: str) -> float:
    """The mean of a metric over some rows; NaN where one of them has none."""
    found = [math.nan if row.get(key) is None else row[key] for row in rows]
    return sum(found) / len(found) if found else math.nan


def _training_loss(rows: Sequence[Row]) -> float | None:
    """The mean loss of training over the clients that have one."""
    known = [row["training_loss"] for row in rows if row.get("training_loss") is not None]
    return sum(known) / len(known) if known else None
