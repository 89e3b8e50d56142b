"""Results: one row per client, round, read-out and split; means and spread are computed from the rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedquilt._util.wording import worst_decile
from fedquilt.tasks import Classification, Task

Row = dict[str, Any]
_CLASSES = Classification()


@dataclass(frozen=True)
class Evaluation:
    """What all clients scored with one read-out on one split after one round."""

    round: int
    readout: str
    split: str
    clients: tuple[str, ...]
    kept: Tensor  # the counts; by class as a sparse tensor: they are nearly all 0, and a run keeps every round
    losses: Tensor | None = None  # (K,) mean loss of each client; None where a read-out names classes only
    training: Tensor | None = None  # (K,) mean loss over the steps of its last training; NaN for who was not chosen
    task: Task = _CLASSES
    own: Tensor | None = None  # (K, metrics) of a user's own
    left_out: tuple[int, ...] = ()  # of everyone's samples, how many each client's model does not take
    liars: tuple[int, ...] = ()  # the numbers of clients that an attack has: their rows are marked, and not counted

    @property
    def counts(self) -> Tensor:
        """(K, classes, classes) how many samples of a class (row) each client took for which (column).

        Of another task, the counts and sums that its metrics are computed from.
        """
        return self.kept.to_dense() if self.kept.is_sparse else self.kept

    def cells(self) -> list[list[list[int]]]:
        """For each client the cells of its counts that are not empty: class, predicted class, number of samples."""
        found: list[list[list[int]]] = [[] for _ in self.clients]
        if not self.kept.is_sparse:
            return found
        kept = self.kept.coalesce()
        for (client, *labels), number in zip(kept.indices().T.tolist(), kept.values().tolist(), strict=True):
            found[client].append([*labels, number])
        return found

    def rows(self) -> list[Row]:
        """One row a client; a client without samples in the split has none."""
        samples, details = self.task.samples(self.kept).tolist(), self.task.details(self.kept)
        measures = {name: _numbers(values, len(samples)) for name, values in self.measures().items()}
        losses, training = _numbers(self.losses, len(samples)), _numbers(self.training, len(samples))
        return [
            {
                "round": self.round,
                "client": client,
                "readout": self.readout,
                "split": self.split,
                **{name: values[i] for name, values in measures.items()},
                "samples": int(samples[i]),
                **{name: values[i] for name, values in details.items()},
                "loss": losses[i],
                "training_loss": training[i],
                **({"left_out": self.left_out[i]} if self.left_out else {}),
                **({"liar": True} if i in self.liars else {}),
            }
            for i, client in enumerate(self.clients)
            if samples[i]
        ]

    def measures(self) -> dict[str, Tensor]:
        """(K,) every metric by name, in double; NaN for a client without samples."""
        found = self.task.measures(self.kept) | self.task.from_losses(self.losses)
        if self.own is not None:
            found |= {metric.name: self.own[:, at] for at, metric in enumerate(self.task.metrics)}
        return found

    @property
    def score(self) -> float:
        """The mean of the leading metric, accuracy say, over the honest clients that have samples."""
        values = self.measures().get(self.task.lead)
        if values is None:
            return math.nan
        honest = torch.ones(len(values), dtype=torch.bool)
        honest[list(self.liars)] = False
        return float(values.where(honest, math.nan).nanmean())


def _numbers(of_clients: Tensor | None, clients: int) -> list[float | None]:
    """A number a client, None where there is none, or none that JSON could hold."""
    if of_clients is None:
        return [None] * clients
    return [number if math.isfinite(number) else None for number in of_clients.tolist()]


def final(rows: Iterable[Row], readout: str, split: str) -> dict[str, Row]:
    """Each honest client's last row with a read-out on a split."""
    last: dict[str, Row] = {}
    for row in rows:
        if row["readout"] == readout and row["split"] == split and "liar" not in row:
            last[row["client"]] = row
    return last


def summarise(
    rows: Sequence[Row], alone: Sequence[Row] | None, readout: str, split: str = "test", task: Task = _CLASSES
) -> dict[str, Any]:
    """Mean, spread and worst decile over clients in the last round, and the gain over the same clients alone."""
    metric, key = task.metric, task.lead
    last = {client: row for client, row in final(rows, readout, split).items() if row.get(key) is not None}
    means = [other.name for other in task.all_metrics if other.name != key]
    summary: dict[str, Any] = {
        "readout": readout, "split": split, "metric": metric.told(), "clients_measured": len(last)
    }  # fmt: skip
    summary |= dict.fromkeys((f"{key}_mean", f"{key}_std", f"{key}_worst_decile", *(f"{n}_mean" for n in means)))
    if not last:
        return summary
    scores = torch.tensor([row[key] for row in last.values()], dtype=torch.float64)
    summary |= {
        f"{key}_mean": float(scores.mean()),
        f"{key}_std": float(scores.std(correction=0)),
        f"{key}_worst_decile": worst_decile(scores.tolist(), metric.higher),
    }
    for name in means:
        there = [row[name] for row in last.values() if row.get(name) is not None]
        summary[f"{name}_mean"] = sum(there) / len(there) if there else None
    if alone is not None:
        bar = final(alone, "received", split) or final(alone, "adapted", split)  # the same where nothing is received
        bar = {client: row for client, row in bar.items() if row.get(key) is not None}
        gains = [metric.gain(row[key], bar[client][key]) for client, row in last.items() if client in bar]
        if not gains:
            raise ValueError("the run alone has no rows of these clients; give one of the same scenario")
        summary |= {
            "alone_mean": sum(bar[c][key] for c in last if c in bar) / len(gains),
            "gain_over_alone": sum(gains) / len(gains),
            "share_gaining": sum(gain > 0 for gain in gains) / len(gains),
        }
    return summary
