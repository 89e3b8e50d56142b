"""Made-up run directories, written as a run writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

LEVEL = {"local": 0.78, "fedavg": 0.80, "fedper": 0.85, "feddl": 0.88, "fedmn": 0.84}
SPEED = {"local": 2.0, "fedavg": 6.0, "fedper": 5.0, "feddl": 4.0, "fedmn": 8.0}
LABELS = ["walking", "upstairs", "downstairs", "sitting", "standing", "lying"]


def plan_of(method: str, at: int, clients: int, rounds: int) -> dict[str, Any]:
    """The circles a method of this name might have found by round `at`."""
    rng = np.random.default_rng(5)
    everyone, nobody = np.zeros(clients, dtype=int), np.full(clients, -1)
    shuffled = rng.permutation(clients)
    if method == "fedmn":
        rng = np.random.default_rng(at)
        units = {}
        for name, n in (("encoder", 3), ("block.1", 3), ("output", 3)):
            kept = shuffled % n
            for j in range(n):
                on = (kept == j) | (rng.random(clients) < 0.35 * (1 - at / rounds) + 0.1)
                units[f"{name}.{j}"] = np.where(on, 0, -1)
        units["router"] = everyone
    else:
        units = dict.fromkeys(("conv1", "conv2", "fc1", "fc2", "head"), everyone)
        if method == "local":
            units = dict.fromkeys(units, nobody)
        if method in ("fedper", "feddl"):
            units["head"] = nobody
        if method == "feddl":
            part = rounds / 4
            units["conv1"] = everyone if at >= part else nobody
            units["conv2"] = shuffled % 2 if at >= 2 * part else nobody
            units["fc1"] = shuffled % 4 if at >= 3 * part else nobody
            units["fc2"] = shuffled % 8 if at >= 3.5 * part else nobody
    return {
        name: {"circle": c.tolist(), "weight": (c >= 0).astype(float).tolist(), "pull": (c >= 0).astype(float).tolist()}
        for name, c in units.items()
    }


def write_run(
    folder: Path,
    method: str = "fedavg",
    seed: int = 0,
    clients: int = 12,
    rounds: int = 10,
    names: list[str] | None = None,
    readouts: tuple[str, ...] = ("received",),
    every: int = 1,
) -> Path:
    """Write a run directory and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, *method.encode()])
    who = np.random.default_rng(7).normal(0, 0.05, clients)
    names = names or [f"phone-{i + 1}" for i in range(clients)]
    level = np.clip(LEVEL[method] + who + rng.normal(0, 0.02, clients) + rng.normal(0, 0.006), 0.2, 0.99)
    listed = ", ".join(json.dumps(n, ensure_ascii=False) for n in names)
    (folder / "run.toml").write_text(
        f'scenario = "har"\nmethod = "{method}"\nseed = {seed}\nrounds = {rounds}\nclients = [{listed}]\n'
        f"label_names = {json.dumps(LABELS)}\n",
        encoding="utf-8",
    )
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as out:
        for at in range(every, rounds + 1, every):
            now = level * (1 - 0.7 * np.exp(-at / SPEED[method])) + rng.normal(0, 0.006, clients)
            for readout in readouts:
                bonus = 0.02 if readout == "adapted" else 0.0
                scores = np.clip(now + bonus, 0, 1).round(4).tolist()
                for i, (name, score) in enumerate(zip(names, scores, strict=True)):
                    f = [None if (i + c) % 5 == 4 else round(score * (1 - c / 50), 4) for c in range(6)]
                    row = {
                        "round": at, "client": name, "readout": readout, "split": "test", "samples": 120,
                        "accuracy": score, "loss": round(2 - 2 * score, 4), "f1": score,
                        "f_by_class": f if at + every > rounds else None,
                    }  # fmt: skip
                    out.write(json.dumps(row) + "\n")
    before = None
    with (folder / "plans.jsonl").open("w", encoding="utf-8") as out:
        for at in range(rounds + 1):
            units = plan_of(method, at, clients, rounds)
            if units != before:
                out.write(json.dumps({"round": at, "units": units}) + "\n")
            before = units
    share = {"local": 0.0, "fedavg": 1.0, "fedper": 0.9, "feddl": 0.6, "fedmn": 0.5}[method] * 2e5
    with (folder / "traffic.jsonl").open("w", encoding="utf-8") as out:
        for at in range(1, rounds + 1):
            up = {n: int(share * (1 + i / clients)) for i, n in enumerate(names)}
            out.write(json.dumps({"round": at, "up": up, "down": {n: int(v * 1.1) for n, v in up.items()}}) + "\n")
    confusion = {}
    for i, name in enumerate(names):
        hits = np.diag((20 * level[i] * np.ones(6)).astype(int)) + rng.integers(0, 3, (6, 6))
        confusion[name] = hits.tolist()
    (folder / "confusion.json").write_text(json.dumps(confusion), encoding="utf-8")
    summary = {
        "scenario": "har", "method": method, "seed": seed, "rounds": rounds, "readout": readouts[0],
        "split": "test", "accuracy_mean": float(level.mean()), "seconds": 12.5, "engine": "vectorised", "device": "cpu",
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder
