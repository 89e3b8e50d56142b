"""The papers' experiments, as papers.py runs them: scenario, settings, methods, and what is scaled down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BOTH = ("received", "adapted")
Methods = Mapping[str, tuple[str, Mapping[str, Any]]]  # how a row calls it -> method and its settings


@dataclass(frozen=True)
class Experiment:
    """A scenario with its settings, and the methods compared there."""

    scenario: str
    settings: Mapping[str, Any]
    training: Mapping[str, Any]
    methods: Methods
    readouts: tuple[str, ...] = BOTH
    why: str = ""
    own_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the scenario, for some
    own_training: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    own_readouts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # for who refuses one of them
    groups: Mapping[str, str] = field(default_factory=dict)  # how clients' names begin -> a column of their own


def _plain(*names: str) -> dict[str, tuple[str, dict[str, Any]]]:
    return {name: (name, {}) for name in names}


def _modfl(alike: bool) -> Methods:
    """ModFL's rivals; where all clients have the same labels, its FedAvg, which federates each kind of device apart."""
    per_device = {"fedavg-per-device": ("modfl", {"by": {"configuration": "device", "operation": "device"}})}
    return _plain("local", "fedavg", "fedper", "modfl") | (per_device if alike else {})


def _cameras(labels: int, settings: Mapping[str, Any], training: Mapping[str, Any], why: str) -> Experiment:
    return Experiment(
        "modfl-cameras", {"labels": labels, **settings}, training, _modfl(labels == 9), why=why,
        groups={"gen2-": "colour %", "gen1-": "grey %"},
    )  # fmt: skip


_POOL = {"blocks": (2, 2, 2), "width": 128}  # the paper's pool for CIFAR, with blocks of a width for small clients
_FULL = "72 clients, 200 rounds as in the paper, with CIFAR-10 through two cameras for CIFAR-10 and STL-10"
_SMALL = "18 of 72 clients with 126 images each, 20 of 200 rounds"


def _wearables(labels: int, rounds: int = 100, lr: float = 0.01) -> Experiment:
    why = "2000 rounds at a rate of 0.001, as in the paper" if rounds == 2000 else f"{rounds} rounds at a rate of {lr}"
    return Experiment(
        "modfl-wearables", {"labels": labels}, {"rounds": rounds, "lr": lr}, _modfl(labels == 5), why=why,
        groups={"gen2-": "HAPT's network %", "gen1-": "WISDM's network %"},
    )  # fmt: skip


_PLAIN_SGD = {"momentum": 0.0, "weight_decay": 0.0}  # for who reads gradients off the way that clients go
_FEDEM = ("local", "fedavg", "ditto", "apfl", "clustered", "fedem", "fedprox", "pfedme")


def _fedem(model: str, fraction: float, rounds: int, why: str) -> Experiment:
    """FedEM's and kNN-Per's table, with FedMN's: 80 clients."""
    return Experiment(
        "fedem-cifar10", {"model": model, "fraction": fraction}, {"rounds": rounds},
        _plain(*_FEDEM) | {"fedrep": ("fedrep", {"head_epochs": 1}), "fedmn": ("fedmn", _POOL)},
        (*BOTH, "fine-tuned-chosen", "knn"), why=f"{why}; FedRep trains its head for one epoch, not ten",
        own_readouts={"fedmn": BOTH}, own_training={"pfedme": _PLAIN_SGD},
    )  # fmt: skip


def _feddl(epochs: int, why: str) -> Experiment:
    """FedDL's own regime: 8 users with at most 80 windows, one scale for all, layers that join every 2 or 8 rounds."""
    return Experiment(
        "feddl-har", {"clients": 8, "scale": "all", "windows": 80}, {"epochs": epochs},
        _plain("local", "fedavg") | {
            "fedper": ("fedper", {"personal": 2}),  # the paper's K = 3: the lower three of five layers are shared
            "fedper-convolutions": ("fedper", {"personal": 3}),
            "feddl-2": ("feddl", {"interval": 2}), "feddl-8": ("feddl", {"interval": 8}),
            "feddl-average-2": ("feddl", {"interval": 2, "linkage": "average"}),
            "feddl-average-8": ("feddl", {"interval": 8, "linkage": "average"}),
        } | _plain("pfedme"), BOTH, why=why,
    )  # fmt: skip


def _sizes() -> Experiment:
    """What the papers plot over the number of clients, of public samples and of modules, on the bundled digits."""
    clients = {f"{m}, clients={n}": (m, n) for n in (8, 16, 24, 40) for m in ("local", "fedavg", "modfl", "fedmn")}
    public = {f"feddl, public={n}": n for n in (1, 3, 10, 30)}
    modules = {f"fedmn, modules={n}": n for n in (1, 2, 3, 4)}
    methods: dict[str, tuple[str, Mapping[str, Any]]] = {name: (m, {}) for name, (m, _) in clients.items()}
    methods |= {name: ("feddl", {}) for name in public}
    methods |= {name: ("fedmn", {"blocks": (n, n)}) for name, n in modules.items()}
    return Experiment(
        "digits", {}, {}, methods,
        own_settings={name: {"clients": n} for name, (_, n) in clients.items()}
        | {name: {"common": n} for name, n in public.items()},
        why="the bundled digits, 24 clients where nothing else is said, in the place of the papers' data",
    )  # fmt: skip


EXPERIMENTS: dict[str, Experiment] = {
    "feddl-har-8-steps": _feddl(15, "R = 30 read as steps: 15 epochs of two steps"),
    "feddl-har-8-epochs": _feddl(30, "R = 30 read as epochs"),
    "feddl-har": Experiment(
        "feddl-har", {}, {},
        _plain("local", "fedavg", "fedper") | {
            "feddl": ("feddl", {}), "feddl-average": ("feddl", {"linkage": "average"}),
        }, BOTH, why="40 rounds of 30 local epochs, as in the paper",
    ),
    "modfl-wearables-4": _wearables(4), "modfl-wearables-2": _wearables(2), "modfl-wearables-5": _wearables(5),
    **{f"modfl-wearables-{p}-2000": _wearables(p, 2000, 0.001) for p in (2, 4, 5)},
    "modfl-cameras-3": _cameras(3, {}, {}, _FULL),
    "modfl-cameras-6": _cameras(6, {}, {}, _FULL),
    "modfl-cameras-9": _cameras(9, {}, {}, _FULL),
    "modfl-cameras-small-3": _cameras(3, {"clients": 18, "fraction": 0.15}, {"rounds": 20}, _SMALL),
    "modfl-cameras-small-6": _cameras(6, {"clients": 18, "fraction": 0.15}, {"rounds": 20}, _SMALL),
    "animals-labels": Experiment(
        "animals-labels", {}, {},
        {
            "score-sharing": ("score-sharing", {}), "score-sharing-literal": ("score-sharing", {"normalise": False}),
            "score-sharing-own": ("score-sharing", {"normalise": False, "protocol": "paper", "scored": "own"}),
        }, ("received", "own"), why="100 images a label and round and 48 x 48 pixels, not 500 and 128 x 128",
    ),
    "thesis-mnist": Experiment(
        "thesis-mnist", {}, {}, _plain("local", "fedavg"), (*BOTH, "best-of-both", "averaged"),
        why="100 rounds as in the thesis, of one epoch where its text has five",
    ),
    "thesis-cifar10": Experiment(
        "thesis-cifar10", {"fraction": 0.1}, {"rounds": 50}, _plain("local", "fedavg"),
        (*BOTH, "best-of-both", "averaged"), why="a tenth of the images, 50 of 100 rounds",
    ),
    "thesis-cifar10-full": Experiment(
        "thesis-cifar10", {}, {}, _plain("local", "fedavg"), (*BOTH, "best-of-both", "averaged"),
        why="100 rounds as in the thesis, of one epoch where its text has five",
    ),
    "fedrep-cifar10": Experiment(
        "fedrep-cifar10", {}, {},
        _plain(
            "local", "fedavg", "fedper", "fedrep", "ditto", "lg-fedavg", "apfl", "per-fedavg", "fedprox", "scaffold",
            "fedbabu", "fedrod", "fedala", "fedpac", "pfedme",
        ), (*BOTH, "fine-tuned-chosen"), why="100 clients with two classes each, 100 rounds of a tenth of them",
        own_training=dict.fromkeys(("per-fedavg", "scaffold", "pfedme"), _PLAIN_SGD),
    ),
    "fedem-cifar10-cnn": _fedem("small-cnn", 1.0, 100, "all images, 100 rounds as in kNN-Per, two convolutions"),
    "fedem-cifar10-mobilenet": _fedem("mobilenet-v2", 0.25, 100, "a quarter of the images, 100 of 200 rounds"),
    "digits-sizes": _sizes(),
    "fedem-cifar10": Experiment(
        "fedem-cifar10", {"fraction": 0.05, "clients": 20, "model": "small-cnn"}, {"rounds": 20, "batch": 32},
        _plain("local", "fedavg", "fedprox") | {
            "fedmn": ("fedmn", _POOL), "fedmn-concat": ("fedmn", {**_POOL, "joint": "concat"}),
        },
        (*BOTH, "fine-tuned"),
        why="a twentieth of the images, 20 of 80 clients, a small CNN for MobileNet-v2, 20 of 200 rounds",
    ),
}  # fmt: skip
