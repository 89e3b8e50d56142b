"""Draws the pictures of partitions on the page about data: python docs/partition_pictures.py"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedquilt import data

FOLDER = Path(__file__).parent / "images"


def main() -> None:
    """Four partitions of the bundled digits, each as it draws itself."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "fedquilt"  # the same file again
    y = data.load("digits").y
    sets = [(k, (k + 1) % 10, (k + 2) % 10) for k in range(8)]
    made = {
        "iid": data.iid(y, clients=8, seed=0),
        "dirichlet": data.dirichlet(y, clients=8, alpha=0.3, seed=0),
        "by-label-sets": data.by_label_sets(y, sets, everything=True, seed=0),
        "quantity-skew": data.quantity_skew(y, clients=8, alpha=0.7, seed=0),
    }
    for name, partition in made.items():
        figure = partition.plot()
        figure.savefig(FOLDER / f"partition-{name}.svg", metadata={"Date": None}, bbox_inches="tight")
    print(f"{len(made)} pictures in {FOLDER}, of {len(np.unique(y))} labels")


if __name__ == "__main__":
    main()
