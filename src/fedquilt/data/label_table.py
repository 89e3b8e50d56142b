"""The client x label table: who has how much of what, printed or drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from fedquilt.scenario import Scenario

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LabelTable:
    """How many samples of each label each client has: rows are clients, columns labels.

    >>> print(LabelTable(np.array([[3, 0], [1, 2]]), ("ann", "bob"), ("cat", "dog")))
        cat dog  all
    ann   3   ·    3
    bob   1   2    3
    all   4   2    6
    """

    counts: Ints
    clients: tuple[str, ...]
    labels: tuple[str, ...]

    def __str__(self) -> str:
        totals = np.vstack([self.counts, self.counts.sum(0)])  # (clients + 1, labels)
        cells = [[str(int(n)) if n else "·" for n in row] + [str(int(row.sum()))] for row in totals]
        heads = [*(name[:8] for name in self.labels), "all"]
        widths = [max(len(head), *(len(row[j]) for row in cells)) for j, head in enumerate(heads)]
        widths[-1] += 1  # sets the totals off
        names = [*self.clients, "all"]
        margin = max(len(name) for name in names)
        lines = [" ".join([" " * margin, *(head.rjust(w) for head, w in zip(heads, widths, strict=True))])]
        for name, row in zip(names, cells, strict=True):
            lines.append(" ".join([name.ljust(margin), *(c.rjust(w) for c, w in zip(row, widths, strict=True))]))
        return "\n".join(lines)

    def plot(self, path: str | Path | None = None, title: str = "") -> Any:
        """Draw the table as a heat map (needs the extra `fedquilt[plots]`), save it if a path is given; the figure."""
        try:
            from matplotlib.figure import Figure
        except ImportError as missing:
            raise ImportError("drawing a label table needs matplotlib: pip install 'fedquilt[plots]'") from missing
        clients, labels = self.counts.shape
        figure = Figure(
            figsize=(min(3.5 + 0.42 * labels, 16), min(1.8 + 0.24 * clients, 12)), dpi=110, layout="constrained"
        )
        axes = figure.add_subplot()
        shown = np.where(self.counts > 0, self.counts, np.nan)  # what a client does not have stays white
        picture = axes.imshow(shown, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
        step = max(1, clients // 60)
        axes.set_yticks(range(0, clients, step), [self.clients[i] for i in range(0, clients, step)], fontsize=7)
        many = max(1, labels // 40)
        axes.set_xticks(
            range(0, labels, many),
            [self.labels[j] for j in range(0, labels, many)],
            rotation=60,
            ha="right",
            fontsize=7,
        )
        axes.set_ylabel("client")
        axes.set_title(title or f"{int(self.counts.sum())} samples, {clients} clients", fontsize=9)
        if clients * labels <= 500:
            middle = np.nanmax(shown) / 2 if np.isfinite(shown).any() else 0
            for i, j in np.argwhere(self.counts > 0):
                n = int(self.counts[i, j])
                axes.text(j, i, str(n), ha="center", va="center", fontsize=6, color="white" if n < middle else "black")
        figure.colorbar(picture, ax=axes, label="samples")
        if path is not None:
            figure.savefig(path)
        return figure


def count_labels(groups: Sequence[npt.ArrayLike], classes: int) -> Ints:
    """Rows of label counts, one for each group of labels.

    >>> count_labels([[0, 0, 1], [2]], 3)
    array([[2, 1, 0],
           [0, 0, 1]])
    """
    if not len(groups):
        return np.zeros((0, classes), dtype=np.int64)
    return np.stack([np.bincount(np.asarray(g, dtype=np.int64), minlength=classes) for g in groups]).astype(np.int64)


def label_table(scenario: Scenario, split: str = "all") -> LabelTable:
    """The client x label table of a scenario: all its samples, or one split ("train", "validation", "test").

    A client whose training data change over the rounds is counted with the data it starts with.

    >>> from torch import nn
    >>> from fedquilt.client import Client
    >>> from fedquilt.scenario import Scenario
    >>> ann = Client("ann", lambda: nn.Linear(1, 2), train=([[0.], [1.], [1.]], [0, 1, 1]))
    >>> label_table(Scenario("one", [ann], label_names=("low", "high"))).counts
    array([[1, 2]])
    """
    splits = ("train", "validation", "test") if split == "all" else (split,)
    labels = [np.concatenate([getattr(c, s).y.numpy() for s in splits]) for c in scenario.clients]
    names = scenario.label_names or tuple(str(j) for j in range(scenario.classes))
    return LabelTable(count_labels(labels, scenario.classes), tuple(c.name for c in scenario.clients), names)
