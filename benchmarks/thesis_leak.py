"""The thesis' best of both as it was measured, F-measures from the very samples that are predicted, beside the honest
way, F-measures from validation samples.

    python benchmarks/thesis_leak.py thesis-cifar10 --fraction 0.1 --rounds 50 --seeds 3

One line of JSON a seed: accuracies in per cent, means over clients, of the received and the adapted model, of best of
both by validation samples and by the tested ones. The data come from FEDQUILT_DATA.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch
from torch import Tensor

import fedquilt as fq
from fedquilt.readouts.best_of_both import most_trusted

MODELS = ("received", "adapted")


def f_measures(predicted: Tensor, y: Tensor, classes: int) -> Tensor:
    """(classes,) eq. 5.1-5.3 of the thesis: twice the hits over all that was predicted and all that is so."""
    hits = torch.bincount(y[predicted == y], minlength=classes)
    both = torch.bincount(predicted, minlength=classes) + torch.bincount(y, minlength=classes)
    return 2 * hits / both.clamp(min=1)


def leaky(run: fq.Run, client: fq.Client, classes: int) -> float:
    """A client's accuracy where the tested samples say which model is better at which class."""
    said = [run.federation.predict(client.name, client.test.x, model).cpu()[None] for model in MODELS]
    measures = [f_measures(each[0], client.test.y, classes)[None] for each in said]
    return float((most_trusted(said, measures)[0] == client.test.y).float().mean())


def one(name: str, fraction: float, rounds: int, seed: int, device: str) -> dict[str, float]:
    """The accuracies of a seed."""
    scenario = fq.scenarios.build(name, seed=seed, fraction=fraction)
    run = fq.run(
        scenario, "fedavg", rounds, seed=seed, readouts=[*MODELS, "best-of-both"], device=device, alone=False,
        evaluate_every=rounds,
    )  # fmt: skip
    found: dict[str, list[float]] = {}
    for row in run.rows:
        if row["split"] == "test":
            found.setdefault(row["readout"], []).append(row["accuracy"])
    found["best-of-both, by tested samples"] = [leaky(run, c, len(scenario.label_names)) for c in scenario.clients]
    return {readout: round(100 * statistics.fmean(values), 2) for readout, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=["thesis-mnist", "thesis-cifar10"])
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    for seed in range(asked.seeds):
        found = one(asked.scenario, asked.fraction, asked.rounds, seed, asked.device)
        print(json.dumps({"seed": seed} | found), flush=True)


if __name__ == "__main__":
    main()
