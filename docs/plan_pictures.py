"""Draws the plans of all methods, family by family, for the pages about them: python docs/plan_pictures.py

Each plan is that of a run on eight clients: two kinds of sensors and two cohorts, who own three of four labels each and
name what they see otherwise. Rows are clients, columns are units. Patches that look alike are shared by the same
clients, blank stays private; a unit with a mixture of its own for each client is a picture of who takes how much of
whom.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import fedquilt as fq
from fedquilt.report.quilt import BLANK, PALETTE, groups, letters
from fedquilt.sharing import MixedUnit, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).parent / "images"
ROUNDS = 8
CLIENTS = [(sensor, cohort) for cohort in ("north", "south") for sensor in ("old", "new") for _ in range(2)]
Methods = Mapping[str, Mapping[str, Any]]  # each with its settings

FAMILIES: dict[str, Methods] = {
    "server": {"fedavg": {}, "scaffold": {}, "feddyn": {}, "local": {}},
    "twins": {"ditto": {}, "apfl": {}, "pfedme": {"lam": 1.0}, "fml": {}},
    "cuts": {"fedper": {}, "lg-fedavg": {}, "fedbn": {}, "fedrod": {}},
    "adapters": {"fedit": {"rank": 2}, "ffa-lora": {"rank": 2}, "fedsa-lora": {"rank": 2}},
    "groups": {"ifca": {}, "clustered": {"after": 1, "eps_1": 1.0, "eps_2": 0.3}, "fedem": {"components": 2}},
    "mixtures": {"fedamp": {}, "fedpac": {}, "gossip": {}, "fedala": {}},
    "systems": {
        "modfl": {"split": 2}, "feddl": {}, "fedmn": {"blocks": (2, 2), "width": 8}, "score-sharing": {},
        "fedproto": {},
    },
    "auto": {"auto": {}},
}  # fmt: skip


def network() -> nn.Module:
    layers = {
        "first": nn.Linear(10, 16), "norm": nn.LayerNorm(16), "bend": nn.Tanh(), "middle": nn.Linear(16, 16),
        "again": nn.Tanh(), "head": nn.Linear(16, 4),
    }  # fmt: skip
    return nn.Sequential(OrderedDict(layers))


def scenario() -> fq.Scenario:
    """What an old sensor sees is turned, and the south calls by other names what it sees."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 10, generator=draw) * 1.2
    turned, _ = torch.linalg.qr(torch.randn(10, 10, generator=draw))

    def samples(count: int, sensor: str, cohort: str) -> tuple[torch.Tensor, torch.Tensor]:
        kind = torch.arange(count) % 3  # of four kinds, those that a cohort knows
        x = centres[kind] + torch.randn(count, 10, generator=draw)
        return (x @ turned if sensor == "old" else x), (kind if cohort == "north" else 3 - kind)

    made = [
        fq.Client(
            f"{sensor} {cohort} {number}", network, samples(90, sensor, cohort), samples(60, sensor, cohort),
            samples(60, sensor, cohort), traits={"device": sensor, "cohort": cohort},
        )
        for number, (sensor, cohort) in enumerate(CLIENTS, start=1)
    ]  # fmt: skip
    common = (centres.repeat(8, 1) + torch.randn(32, 10, generator=draw), torch.arange(32) % 4)
    training = fq.Training(rounds=ROUNDS, epochs=5, batch=15, lr=0.1)
    return fq.Scenario("eight clients", made, training, common, public_test=common, label_names=tuple("abcd"))


def draw_patches(axes: Axes, plan: Plan, names: Sequence[str]) -> None:
    """A column for each unit, a patch for each client that shares it."""
    from matplotlib.colors import to_rgb

    cells, _ = groups(plan)
    colours = [[to_rgb("white" if g < 0 else PALETTE[g % len(PALETTE)][0]) for g in mine] for mine in cells]
    axes.imshow(colours, aspect="auto", interpolation="none")
    for row, mine in enumerate(cells):
        for column, group in enumerate(mine):
            if group != BLANK:
                said, front = ("~", "black") if group < 0 else (letters(group), PALETTE[group % len(PALETTE)][1])
                axes.text(column, row, said, color=front, ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(plan.units)), list(plan.units))
    axes.set_xticks([column + 0.5 for column in range(len(plan.units) - 1)], minor=True)
    axes.set_yticks([row + 0.5 for row in range(len(names) - 1)], minor=True)
    axes.grid(which="minor", color="#dddddd", linewidth=1.5)


def draw_mixture(axes: Axes, mixed: MixedUnit, names: Sequence[str]) -> None:
    """A row for each client: how much it takes of whom."""
    axes.imshow(mixed.matrix.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="none")
    axes.set_xticks(range(len(names)), list(names))


def main() -> None:
    """A picture for each family."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "fedquilt", "svg.fonttype": "none"}  # the same file again; text as text
    from matplotlib import pyplot as plt

    of, names = scenario(), [f"{sensor}, {cohort}" for sensor, cohort in CLIENTS]
    for family, methods in FAMILIES.items():
        plans = {name: fq.run(of, name, settings=settings, alone=False).plan for name, settings in methods.items()}
        panels: list[tuple[str, Plan, MixedUnit | None]] = []
        for name, plan in plans.items():
            matrices = [(unit, each) for unit, each in plan.units.items() if isinstance(each, MixedUnit)]
            if len(matrices) < len(plan.units):
                panels.append((name, plan, None))
            panels += [(f"{name}: {unit}", plan, each) for unit, each in matrices[-1:]]
        widths = [len(CLIENTS) if mixed else len(plan.units) for _, plan, mixed in panels]
        figure, row = plt.subplots(
            1, len(panels), figsize=(1.2 + 0.26 * sum(widths) + 0.3 * len(widths), 3.0), sharey=True, squeeze=False,
            gridspec_kw={"width_ratios": widths, "wspace": 0.6 / (sum(widths) / len(widths))},
        )  # fmt: skip
        for axes, (name, plan, mixed) in zip(row[0], panels, strict=True):
            if mixed is None:
                draw_patches(axes, plan, names)
            else:
                draw_mixture(axes, mixed, names)
            axes.set_title(name, fontsize=9)
            axes.set_yticks(range(len(names)), names)
            axes.tick_params(which="both", length=0, labelsize=7)
            plt.setp(axes.get_xticklabels(), rotation=60, ha="right", rotation_mode="anchor")
            for spine in axes.spines.values():
                spine.set_color("#dddddd")
        figure.savefig(FOLDER / f"plan-{family}.svg", metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)
        print(f"{family}: {', '.join(plans)}", flush=True)


if __name__ == "__main__":
    main()
