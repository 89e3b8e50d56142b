"""Figures of docs/results.md from the rows in results/: python benchmarks/figures.py

Accuracy over rounds, where all rows of an experiment have it, beside what was moved, and over the number of clients,
public samples and modules. All are means over clients and seeds on test samples. Nothing is run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import EXPERIMENTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parent.parent / "results"
IMAGES = Path(__file__).parent.parent / "docs" / "images"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's
DASHES, MARKS = ("-", "--", ":"), ("o", "^", "s")
OF = {"clients": "clients", "public": "public samples of each label", "modules": "modules in each layer"}
SIZES = "digits-sizes"
BYTES = ("fedrep-cifar10", "feddl-har", "feddl-har-8-steps", "fedem-cifar10")  # where methods move unlike amounts


def kept(title: str) -> list[dict[str, Any]]:
    """The rows of an experiment, less its first line; none where it was not run."""
    path = RESULTS / f"{title}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()[1:]] if path.is_file() else []


def over_rounds(axes: Axes, title: str, readout: str) -> None:
    """A line for each method, in the experiment's order: the mean over its seeds, round by round."""
    curves: dict[str, list[dict[str, float]]] = {}
    for line in kept(title):
        if "over_rounds" in line:
            found = line["over_rounds"]["test"]
            curves.setdefault(line["run"], []).append(found.get(readout, found["received"]))
    for number, method in enumerate(name for name in EXPERIMENTS[title].methods if name in curves):
        seeds = curves[method]
        rounds = list(seeds[0])
        means = [100 * statistics.fmean(curve[at] for curve in seeds) for at in rounds]
        dashes = DASHES[number // len(COLOURS) % len(DASHES)]
        colour = COLOURS[number % len(COLOURS)]
        axes.plot([int(at) for at in rounds], means, dashes, label=method, linewidth=1.2, color=colour)
    axes.set_title(f"{title}, {readout}", fontsize=9)
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy %")


def beside_bytes(axes: Axes, title: str) -> None:
    """A point for each method: what it moved in all, and the better of received and adapted."""
    moved: dict[str, list[float]] = {}
    scores: dict[str, dict[str, list[float]]] = {}
    for line in kept(title):
        if "run" in line:
            moved.setdefault(line["run"], []).append(line["megabytes_up"] + line["megabytes_down"])
        elif line["split"] == "test" and line["readout"] in ("received", "adapted"):
            scores.setdefault(line["method"], {}).setdefault(line["readout"], []).append(100 * line["accuracy"])
    for number, (method, by) in enumerate(scores.items()):
        best = max(statistics.fmean(each) for each in by.values())
        mark, colour = MARKS[number // len(COLOURS) % len(MARKS)], COLOURS[number % len(COLOURS)]
        axes.scatter(statistics.fmean(moved[method]), best, color=colour, marker=mark, s=20, label=method)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("MB moved in all")
    axes.set_ylabel("accuracy %")


def over_sizes(axes: Axes, title: str, of: str) -> None:
    """A line for each method whose rows are called "METHOD, OF=NUMBER": accuracy over the number."""
    scores: dict[str, dict[int, dict[int, list[float]]]] = {}
    for line in kept(title):
        method, _, size = line.get("method", "").partition(f", {of}=")
        if size and (line["split"], line["readout"]) == ("test", "received"):
            seeds = scores.setdefault(method, {}).setdefault(int(size), {})
            seeds.setdefault(line["seed"], []).append(100 * line["accuracy"])
    for number, (method, by) in enumerate(scores.items()):
        sizes = sorted(by)
        means = [[statistics.fmean(each) for each in by[size].values()] for size in sizes]
        axes.plot(sizes, [statistics.fmean(m) for m in means], "o-", label=method, color=COLOURS[number], markersize=3)
        axes.fill_between(sizes, [min(m) for m in means], [max(m) for m in means], color=COLOURS[number], alpha=0.15)
    axes.set_xticks(sorted({size for by in scores.values() for size in by}))
    axes.set_title(f"{title}: number of {OF[of]}", fontsize=9)
    axes.set_xlabel(f"number of {OF[of]}")
    axes.set_ylabel("accuracy %")


def save(name: str, panels: Sequence[Any], across: int, one_scale: bool = False) -> None:
    """A figure of panels, each a function that draws on axes; `one_scale`: accuracies are on one."""
    from matplotlib import pyplot as plt

    down = -(-len(panels) // across)
    figure, grid = plt.subplots(
        down, across, squeeze=False, sharey=one_scale, figsize=(4.2 * across, 3.1 * down), layout="constrained"
    )
    for axes, draw in zip(grid.flat, panels, strict=False):
        draw(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=6, frameon=False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "fedquilt", "svg.fonttype": "none", "font.size": 8}
    runs = {t: [line for line in kept(t) if "run" in line] for t in EXPERIMENTS if t != SIZES}
    with_curves = [t for t, lines in runs.items() if lines and all("over_rounds" in line for line in lines)]
    curves = [(t, readout) for t in with_curves for readout in ("received", "adapted")]
    save("results-rounds", [lambda axes, of=of: over_rounds(axes, *of) for of in curves], 2)
    there = [title for title in BYTES if kept(title)]
    save("results-bytes", [lambda axes, of=title: beside_bytes(axes, of) for title in there], 2)
    if kept(SIZES):
        save("results-sizes", [lambda axes, of=of: over_sizes(axes, SIZES, of) for of in OF], 3, one_scale=True)
    print(f"{len(curves)} panels of rounds, {len(there)} of bytes in {IMAGES}")


if __name__ == "__main__":
    main()
