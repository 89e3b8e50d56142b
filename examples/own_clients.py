"""Clients of your own, from arrays: twelve machines with two kinds of vibration sensor, some of which fail early.

    python examples/own_clients.py
    fedquilt run examples/own_clients.py fedper --rounds 10

The function `build` is all that fedquilt needs; the command line finds it by that name. Replace `recordings` by reading
your own files.
"""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import fedquilt as fq

FEATURES = {"old": 6, "new": 10}  # what the two kinds of sensor measure
STATES = ("healthy", "worn", "failing")


def recordings(machine: int, features: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Stands for your data: 90 samples of one machine. Each machine shakes in a way of its own."""
    common, own = np.random.default_rng(0), np.random.default_rng([seed, machine])
    centres = common.normal(0, 1.0, (len(STATES), 10))[:, :features] + own.normal(0, 0.4, features)
    y = own.integers(0, len(STATES), 90)
    x = centres[y] + own.normal(0, 1.0, (90, features))
    return x.astype(np.float32), y


def make_net(features: int) -> nn.Module:
    """Any module that gives one score a class. Its layers become units named 0, 2 and 4."""
    return nn.Sequential(nn.Linear(features, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, len(STATES)))


def build(seed: int = 0, machines: int = 12) -> fq.Scenario:
    """Machines in two halls, with two kinds of sensor."""
    clients = []
    for machine in range(machines):
        sensor, hall = ("old", "new")[machine % 2], ("east", "west")[machine // 2 % 2]
        x, y = recordings(machine, FEATURES[sensor], seed)
        clients.append(
            fq.Client(
                f"machine-{machine + 1}",
                model=partial(make_net, FEATURES[sensor]),
                train=(x[:30], y[:30]),
                validation=(x[30:45], y[30:45]),
                test=(x[45:], y[45:]),
                traits={"device": sensor, "hall": hall},
            )
        )
    training = fq.Training(rounds=20, epochs=2, batch=10, lr=0.1)
    return fq.Scenario("machines", clients, training, label_names=STATES)


def main(rounds: int = 20) -> None:
    """Federate all but the last layer, and look at what came of it."""
    run = fq.run(build(), "fedper", rounds=rounds, seed=0)
    print(run.plan)
    for key in ("accuracy_mean", "accuracy_worst_decile", "alone_mean", "gain_over_alone", "share_gaining"):
        print(f"{key:<24}{run.summary[key]:.3f}")
    x, _ = recordings(0, FEATURES["old"], seed=0)
    model = run.model("machine-1")  # an ordinary nn.Module, personal
    print("machine-1 is", [STATES[i] for i in model(torch.as_tensor(x[:4])).argmax(1)])


if __name__ == "__main__":
    main()
