"""Runs of a comparison on several GPUs; PyTorch only says that there are some."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedquilt.cli import main, worker_process
from fedquilt.cli.compare import _gpus
from fedquilt.cli.workers import WorkerPool


@pytest.mark.parametrize(
    ("there", "devices", "says"),
    [
        (0, "0", "--devices 0: PyTorch sees no GPU here"),
        (2, "0,2", "--devices 0,2: give different numbers from 0 to 1, with commas"),
        (2, "1,1", "--devices 1,1: give different numbers"),
        (2, "first", "--devices first: give different numbers"),
    ],
)
def test_gpus_that_are_not_there_are_refused_before_work(
    there: int, devices: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    assert main(["compare", "digits", "fedavg", "--devices", devices, "--out", str(tmp_path / "none")]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "none").exists()


def test_each_worker_keeps_to_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    gpus = _gpus("2,0", "auto")
    pool = WorkerPool(3, tmp_path, 5, gpus)
    for worker in pool.workers:
        worker_process._keep_to(None, worker.gpu)
    assert taken == [2, 0, 2]
    assert [worker.gpu for worker in WorkerPool(2, tmp_path, 5).workers] == [None, None]
