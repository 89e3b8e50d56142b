"""One by one against stacked: time of a round and peak memory, for models that people train.

Each model trains one round of FedAvg with each engine; a line of JSON is written for each, and lines that are there
already are not measured again. Run it with

    python benchmarks/stacks.py                        # CPU: sequential, parallel, vectorised, auto
    python benchmarks/stacks.py --device cuda          # a GPU: sequential, captured, vectorised, auto
    python benchmarks/stacks.py --table                # the table of the docs from what was measured
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine import WORKLOADS, Workload, own_peak
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.models.mobilenet import MobileNetV2
from fedquilt.models.recurrent import LSTM

ENGINES = {
    "cpu": ("sequential", "parallel", "vectorised", "auto"),
    "cuda": ("sequential", "captured", "vectorised", "auto"),
}
ROUNDS = {"cpu": 2, "cuda": 5}


class _Residual(nn.Module):
    """A block of two convolutions and a way around them (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs),
        )  # fmt: skip
        around = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)]
        self.around = nn.Sequential(*around) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.body(x) + self.around(x)).relu()
        return out


def resnet18(norm: Callable[[int], nn.Module]) -> nn.Module:
    """ResNet-18 for images of 32 x 32."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), norm(64), nn.ReLU()]
    now = 64
    for wide, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [_Residual(now, wide, stride, norm), _Residual(wide, wide, 1, norm)]
        now = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class SmallViT(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021): patches of 4 x 4, 6 layers of width 192."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 4, 4)
        self.place = nn.Parameter(torch.zeros(64, 192))
        layer = nn.TransformerEncoderLayer(192, 3, 384, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.patches(x).flatten(2).transpose(1, 2) + self.place).mean(1))
        return out


def lstm() -> nn.Module:
    return nn.Sequential(LSTM(9, 64), nn.Linear(64, 6))


_SGD = fq.Training(optimiser="sgd", lr=0.03, momentum=0.9, batch=128)
_IMAGES: dict[str, Callable[[], nn.Module]] = {
    "MobileNet-v2": MobileNetV2,
    "ResNet-18, GroupNorm": lambda: resnet18(lambda wide: nn.GroupNorm(8, wide)),
    "ResNet-18, BatchNorm": lambda: resnet18(nn.BatchNorm2d),
    "small ViT": SmallViT,
}


def workloads(device: str) -> list[Workload]:
    """The models and how many clients train them: on a CPU fewer, with fewer samples and smaller batches."""
    clients, samples, training = (80, 156, _SGD) if device == "cuda" else (4, 24, _SGD.but({"batch": 16}))
    images = [Workload(name, model, clients, samples, (3, 32, 32), 10, training) for name, model in _IMAGES.items()]
    return [*images, Workload("LSTM", lstm, 30, 224, (128, 9), 6, fq.Training(lr=0.1, batch=32)), *WORKLOADS]


def measure(work: Workload, device: str, engine: str) -> dict[str, Any]:
    """The median time of a round in milliseconds, the peak memory in MiB and who trained."""
    clients = [fq.Client(f"c{i}", work.model, train=pair) for i, pair in enumerate(work.data())]
    scenario = fq.Scenario(work.name, clients, work.training.but({"rounds": 10**6}))
    federation = fq.Federation(scenario, fq.methods.FedAvg(), engine=engine, device=device)
    times: list[float] = []

    def rounds() -> None:
        for _ in range(2 + ROUNDS[device]):  # a GPU captures in the second
            start = time.perf_counter()
            federation.step(evaluate=False)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)

    if device == "cuda":
        rounds()
        peak = torch.cuda.max_memory_reserved() / 2**20
    else:
        peak = own_peak(rounds)
    found = federation.simulation.engines[0]
    federation.close()
    return {"ms": round(1000 * statistics.median(times[2:]), 2), "peak_mib": round(peak), "trained_by": found}


def one(name: str, device: str, engine: str) -> dict[str, Any]:
    """A measurement in a process of its own, so that memory is that of this one alone."""
    command = [sys.executable, __file__, "--device", device, "--measure", name, engine]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        return {"trouble": (ended.stderr.strip().splitlines() or ["killed"])[-1][:200]}
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def table(lines: list[dict[str, Any]]) -> str:
    """What was measured as a table in Markdown: time of a round and peak memory of each engine."""
    rows = []
    for device in ENGINES:
        of_device = [line for line in lines if line["device"] == device]
        if not of_device:
            continue
        engines = ENGINES[device]
        rows += [f"| {device} | {' | '.join(engines)} |", "|---" * (len(engines) + 1) + "|"]
        for model in dict.fromkeys(line["model"] for line in of_device):
            by_engine = {line["engine"]: line for line in of_device if line["model"] == model}
            rows.append(f"| {model} | " + " | ".join(_cell(by_engine.get(engine)) for engine in engines) + " |")
        rows.append("")
    return "\n".join(rows)


def _cell(line: dict[str, Any] | None) -> str:
    if line is None or "trouble" in line:
        return "-" if line is None else line["trouble"]
    by = f" ({line['trained_by']})" if line["trained_by"] != line["engine"] else ""
    return f"{line['ms']:g} ms, {line['peak_mib']} MiB{by}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="*", help="names of models")
    parser.add_argument("--engines", nargs="*")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results" / "stacks.jsonl")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "ENGINE"), help="one, printed as JSON")
    asked = parser.parse_args()
    known = {work.name: work for work in workloads(asked.device)}
    if asked.measure:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(known[asked.measure[0]], asked.device, asked.measure[1])))
        return
    lines = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    if asked.table:
        print(table(lines))
        return
    done = {(line["model"], line["device"], line["engine"]) for line in lines}
    for name in asked.only or known:
        for engine in asked.engines or ENGINES[asked.device]:
            if (name, asked.device, engine) not in done:
                line = {"model": name, "device": asked.device, "engine": engine} | one(name, asked.device, engine)
                print(json.dumps(line), flush=True)
                with asked.out.open("a") as out:
                    out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
