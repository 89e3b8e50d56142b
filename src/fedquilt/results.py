"""Results: one row per client, round, read-out and split; means and spread are computed from the rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedquilt._util.wording import worst_decile
from fedquilt.engines.metrics import accuracy, f_by_class, macro_f1, margins

Row = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """What all clients scored with one read-out on one split after one round."""

    round: int
    readout: str
    split: str
    clients: tuple[str, ...]
    kept: Tensor  # the counts as a sparse tensor: with many classes they are nearly all 0, and a run keeps every round
    losses: Tensor | None = None  # (K,) mean cross-entropy of each client; None where a read-out names classes only
    training: Tensor | None = None  # (K,) mean loss over the steps of its last training; NaN for who was not chosen
    liars: tuple[int, ...] = ()  # the numbers of clients that an attack has: their rows are marked, and not counted

    @property
    def counts(self) -> Tensor:
        """(K, classes, classes) how many samples of a class (row) each client took for which (column)."""
        return self.kept.to_dense()

    def cells(self) -> list[list[list[int]]]:
        """For each client the cells of its counts that are not empty: class, predicted class, number of samples."""
        found: list[list[list[int]]] = [[] for _ in self.clients]
        kept = self.kept.coalesce()
        for (client, *labels), number in zip(kept.indices().T.tolist(), kept.values().tolist(), strict=True):
            found[client].append([*labels, number])
        return found

    def rows(self) -> list[Row]:
        """One row a client; a client without samples in the split has none."""
        right, f1, by_class = accuracy(self.kept), macro_f1(self.kept), f_by_class(self.kept)
        there = margins(self.kept).there
        samples = there.sum(1).tolist()
        measures = [[round(f, 6) if t else None for f, t in zip(*pair, strict=True)]
                    for pair in zip(by_class.tolist(), (there > 0).tolist(), strict=True)]  # fmt: skip
        return [
            {
                "round": self.round,
                "client": client,
                "readout": self.readout,
                "split": self.split,
                "accuracy": float(right[i]),
                "f1": float(f1[i]),
                "samples": int(samples[i]),
                "f_by_class": measures[i],
                "loss": _number(self.losses, i),
                "training_loss": _number(self.training, i),
                **({"liar": True} if i in self.liars else {}),
            }
            for i, client in enumerate(self.clients)
            if samples[i]
        ]

    @property
    def accuracy(self) -> float:
        """The mean over the honest clients that have samples."""
        found = accuracy(self.kept)
        found[list(self.liars)] = math.nan
        return float(found.nanmean())


def _number(of_clients: Tensor | None, client: int) -> float | None:
    """A client's number, None where there is none, or none that JSON could hold."""
    number = math.nan if of_clients is None else float(of_clients[client])
    return number if math.isfinite(number) else None


def final(rows: Iterable[Row], readout: str, split: str) -> dict[str, Row]:
    """Each honest client's last row with a read-out on a split."""
    last: dict[str, Row] = {}
    for row in rows:
        if row["readout"] == readout and row["split"] == split and "liar" not in row:
            last[row["client"]] = row
    return last


def summarise(rows: Sequence[Row], alone: Sequence[Row] | None, readout: str, split: str = "test") -> dict[str, Any]:
    """Mean, spread and worst decile over clients in the last round, and the gain over the same clients alone."""
    last = final(rows, readout, split)
    if not last:
        return {"readout": readout, "split": split, "clients_measured": 0} | dict.fromkeys(
            ("accuracy_mean", "accuracy_std", "accuracy_worst_decile", "f1_mean")
        )
    scores = torch.tensor([row["accuracy"] for row in last.values()], dtype=torch.float64)
    summary: dict[str, Any] = {
        "readout": readout,
        "split": split,
        "clients_measured": len(last),
        "accuracy_mean": float(scores.mean()),
        "accuracy_std": float(scores.std(correction=0)),
        "accuracy_worst_decile": worst_decile(scores.tolist()),
        "f1_mean": sum(row["f1"] for row in last.values()) / len(last),
    }
    if alone is not None:
        bar = final(alone, "received", split) or final(alone, "adapted", split)  # the same where nothing is received
        gains = [row["accuracy"] - bar[client]["accuracy"] for client, row in last.items() if client in bar]
        if not gains:
            raise ValueError("the run alone has no rows of these clients; give one of the same scenario")
        summary |= {
            "alone_mean": sum(bar[c]["accuracy"] for c in last if c in bar) / len(gains),
            "gain_over_alone": sum(gains) / len(gains),
            "share_gaining": sum(gain > 0 for gain in gains) / len(gains),
        }
    return summary


def commonest(evaluation: Evaluation) -> float:
    """The highest mean accuracy over clients that one class, the same for all of them, can reach: that of chance.

    >>> counts = torch.tensor([[[2, 0], [2, 0]], [[3, 0], [1, 0]]]).to_sparse()      # 2 of 4, and 3 of 4 are of class 0
    >>> commonest(Evaluation(1, "received", "test", ("ann", "bob"), counts))
    0.625
    """
    there = margins(evaluation.kept).there.double()  # (k, classes)
    measured = there[there.sum(1) > 0]
    return float((measured / measured.sum(1, keepdim=True)).mean(0).max()) if len(measured) else math.nan
