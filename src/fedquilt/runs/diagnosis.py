"""Whether a federation learns at all, and the likeliest cause where it does not.

What it has to beat is the best answer that needs no look at a sample: one class, the same for all clients. A mean
accuracy within two standard errors of that is chance, and so is one that fell by as much since the first round that was
measured. The cause is read off the losses that clients had while they trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedquilt.engines.settings import Training
from fedquilt.results import Row

_ERRORS = 2.0  # standard errors that a mean may be off by chance
_BARELY = 0.9  # a loss above this part of what it was has barely moved
_FITTED = 0.5  # and one below this part has fallen a lot


def trouble(first: Sequence[Row], last: Sequence[Row], chance: float, training: Training, refused: int) -> str | None:
    """A sentence on a federation that does not learn, with what to try; None for one that does.

    `first` and `last` are the clients' rows of the first and the last round that were measured, `chance` is the mean
    accuracy of the best single class, `refused` how many updates were left out since they were not finite.

    >>> row = {"accuracy": 0.34, "samples": 100, "training_loss": 1.09, "round": 5}
    >>> trouble([row], [row], 0.35, Training(lr=0.001), 0).partition(". Likely cause: ")[0]
    'Nothing was learnt: 34.0 % is not clearly more than always naming the commonest class gives (35.0 %)'
    """
    if not last:
        return None
    now, before = _mean(last), _mean(first)
    samples = sum(row["samples"] for row in last)
    margin = _ERRORS * math.sqrt(max(chance * (1 - chance), 0.0) / samples)
    if now <= chance + margin:
        told = (
            f"Nothing was learnt: {100 * now:.1f} % is not clearly more than always naming the commonest class gives "
        )
        told += f"({100 * chance:.1f} %)"
    elif first and first[0]["round"] < last[0]["round"] and now < before - margin:
        told = f"It got worse: {100 * now:.1f} % after round {last[0]['round']}, "
        told += f"{100 * before:.1f} % after round {first[0]['round']}"
    else:
        return None
    return f"{told}. Likely cause: {_cause(first, last, training, refused)}."


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
        return (
            f"losses of training barely fell, so lr={training.lr:g} is too low, or epochs and rounds too few; "
            f"try lr={10 * training.lr:g}"
        )
    if end < _FITTED * start:
        return (
            "clients fit their training samples but not their test samples: are labels in the order of their samples, "
            "and are splits scaled alike?"
        )
    return f"losses of training still fall: {last[0]['round']} rounds are too few, or lr={training.lr:g} is too low"


def _mean(rows: Sequence[Row]) -> float:
    """The mean accuracy of some rows."""
    return sum(row["accuracy"] for row in rows) / len(rows) if rows else math.nan


def _training_loss(rows: Sequence[Row]) -> float | None:
    """The mean loss of training over the clients that have one."""
    known = [row["training_loss"] for row in rows if row.get("training_loss") is not None]
    return sum(known) / len(known) if known else None
