"""The public benchmark of pfl-research: CIFAR-10 on 1000 clients, one model for all, until 1500 rounds are over.

Taken from its benchmarks/image_classification (configs/baseline.yaml, the data set "cifar10_iid", the model
"simple_cnn"): 50 images a client at random, 50 clients a round, one epoch of SGD with rate 0.1 in batches of 10, every
client counts the same, the mean replaces the model; two convolutions, one pooling, two linear layers, dropout; images
centred and scaled by the training set's channels; 10,000 test images after every tenth round.

    python benchmarks/pfl_cifar10.py --device cuda              # to the end: seconds and accuracy
    python benchmarks/pfl_cifar10.py --rounds 3 --peer 5        # by turns with pfl-research (pip install pfl), 5 each

CIFAR-10 is looked for where `fedquilt data get cifar10` puts it (FEDQUILT_DATA).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.data import load

CLIENTS, A_ROUND, IMAGES, ROUNDS, LOOK = 1000, 50, 50, 1500, 10


class CNN(nn.Sequential):
    """The benchmark's network, first weights as it draws them."""

    def __init__(self) -> None:
        below = (nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25))
        above = (nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))
        super().__init__(*below, *above)
        for layer in self:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)


def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (50000, 3, 32, 32) in an order drawn once, their labels, and the same of the test images."""
    data = load("cifar10")
    assert data.is_test is not None
    train, test = (np.asarray(data.x[which], dtype=np.float32) for which in (~data.is_test, data.is_test))
    mean, std = train.mean(axis=(0, 1, 2), dtype=np.float64), train.std(axis=(0, 1, 2), dtype=np.float64)
    x, of_test = (torch.from_numpy(((some - mean) / std).astype(np.float32)).movedim(3, 1) for some in (train, test))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    y, labels = (torch.from_numpy(data.y[which]).long() for which in (~data.is_test, data.is_test))
    return x[order].contiguous(), y[order], of_test.contiguous(), labels


def federation(x: Tensor, y: Tensor, device: str, engine: str) -> fq.Federation:
    own = zip(x.split(IMAGES), y.split(IMAGES), strict=True)
    clients = [fq.Client(f"c{i}", CNN, some, labels=tuple(range(10))) for i, some in enumerate(own)]
    training = fq.Training(rounds=ROUNDS, epochs=1, batch=10, optimiser="sgd", lr=0.1, share=A_ROUND / CLIENTS)
    scenario = fq.Scenario("pfl-cifar10", clients, training)
    return fq.Federation(scenario, fq.methods.FedAvg(), device=device, engine=engine)


@torch.no_grad()
def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    net.eval()
    right = sum(int((net(some).argmax(1) == of).sum()) for some, of in zip(x.split(2000), y.split(2000), strict=True))
    return right / len(y)


def to_the_end(rounds: int, device: str, engine: str) -> dict[str, Any]:
    """Seconds and accuracy of so many rounds, looking as often as the benchmark does."""
    x, y, test, labels = images()
    began = time.perf_counter()
    run = federation(x, y, device, engine)
    test, labels = test.to(run.device), labels.to(run.device)
    seen: dict[int, float] = {}
    started = time.perf_counter()
    while run.round < rounds:
        run.step(evaluate=False)
        if run.round % LOOK == 0 or run.round == rounds:
            seen[run.round] = accuracy(run.model("c0").to(run.device), test, labels)
            if run.round % 100 == 0:
                print(f"round {run.round}: {seen[run.round]:.2%}, {time.perf_counter() - started:.1f} s", flush=True)
    found = {
        "rounds": rounds,
        "start_s": round(started - began, 2),
        "rounds_s": round(time.perf_counter() - started, 2),
        "accuracy": seen[rounds],
        "engine": run.backend.engines,
        "device": torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "accuracies": seen,
    }
    run.close()
    return found


def peer(x: Tensor, y: Tensor) -> Callable[[int], None]:
    """What does so many rounds of the same by pfl-research, on the CPU."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    class Theirs(CNN):
        def loss(self, inputs: Tensor, targets: Tensor, eval: bool = False) -> Tensor:
            self.train(not eval)
            return nn.functional.cross_entropy(self(inputs), targets)

        @torch.no_grad()
        def metrics(self, inputs: Tensor, targets: Tensor, eval: bool = True) -> dict[str, Any]:
            self.train(not eval)
            return {"loss": Weighted(float(self.loss(inputs, targets, eval)) * len(inputs), len(inputs))}

    own = dict(enumerate(zip(x.split(IMAGES), y.split(IMAGES), strict=True)))
    data = FederatedDataset.from_slices(own, get_user_sampler("random", range(len(own))))
    net = Theirs()
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0))
    backend = SimulatedBackend(training_data=data, val_data=None, postprocessors=[WeightByUser()])
    train = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=10)

    def go(rounds: int) -> None:
        how = NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**9,
            train_cohort_size=A_ROUND,
            val_cohort_size=0,
        )
        FederatedAveraging().run(
            algorithm_params=how,
            backend=backend,
            model=model,
            model_train_params=train,
            model_eval_params=NNEvalHyperParams(local_batch_size=1000),
            callbacks=[],
        )

    return go


def by_turns(rounds: int, turns: int, engine: str) -> dict[str, Any]:
    """Seconds a round of ours and of pfl-research's on this machine's cores, so many a turn; evaluation aside."""
    x, y, _, _ = images()
    theirs = peer(x, y)
    ours = federation(x, y, "cpu", engine)

    def go(count: int) -> None:
        for _ in range(count):
            ours.step(evaluate=False)

    seconds: dict[str, list[float]] = {"fedquilt": [], "pfl-research": []}
    go(2)  # the engine is found
    theirs(1)
    for _ in range(turns):
        for name, work in (("fedquilt", go), ("pfl-research", theirs)):
            start = time.perf_counter()
            work(rounds)
            seconds[name].append((time.perf_counter() - start) / rounds)
            print(f"{name}: {seconds[name][-1]:.2f} s a round", flush=True)
    ours.close()
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    ratios = [them / us for us, them in zip(*seconds.values(), strict=True)]
    return {"seconds_a_round": middle, "ratio": statistics.median(ratios), "ratios": ratios, "turns": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--peer", type=int, metavar="TURNS", help="rounds by turns with pfl-research, on the CPU")
    parser.add_argument("--out", type=Path, help="write what was found to this file")
    arguments = parser.parse_args()
    if arguments.peer:
        found = by_turns(arguments.rounds, arguments.peer, arguments.engine)
    else:
        found = to_the_end(arguments.rounds, arguments.device, arguments.engine)
    print(json.dumps({key: value for key, value in found.items() if key not in ("accuracies", "turns")}))
    if arguments.out:
        arguments.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
