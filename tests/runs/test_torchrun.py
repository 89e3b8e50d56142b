"""Ranks as torchrun starts them: on two machines, of which one is lost, and on one that goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks_help import in_ranks
from run_help import contents

import fedquilt as fq
from fedquilt.engines.parallel import can_fork

pytestmark = [
    pytest.mark.skipif(not can_fork(), reason="ranks are forked here"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

WORDS = ("digits", "fedper", "--set", "clients=6", "--no-alone", "--engine", "sequential")
ROUNDS = 25
_PATIENCE = 120


def torchrun(nodes: int, node: int, each: int, port: int, words: list[str]) -> subprocess.Popen[str]:
    where = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(each)]
    where += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [sys.executable, "-m", "torch.distributed.run", *where, "-m", "fedquilt", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_two_machines_of_which_one_is_lost_and_one_that_goes_on(tmp_path: Path) -> None:
    def whole() -> None:
        made = fq.scenarios.build("digits", clients=6)
        fq.run(
            made,
            "fedper",
            rounds=ROUNDS,
            evaluate_every=ROUNDS,
            alone=False,
            engine="sequential",
            out=tmp_path / "whole",
        )

    words = [*WORDS, "--rounds", str(ROUNDS), "--evaluate-every", str(ROUNDS), "--checkpoint-every", "1"]
    port = free_port()
    started = [torchrun(2, node, 1, port, ["run", *words, "--out", str(tmp_path / "run")]) for node in range(2)]
    try:
        until = time.monotonic() + _PATIENCE
        while not (tmp_path / "run" / "checkpoint" / "state.json").is_file():
            assert time.monotonic() < until
            assert all(process.poll() is None for process in started)
            time.sleep(0.02)
        (far,) = Path(f"/proc/{started[1].pid}/task/{started[1].pid}/children").read_text().split()
        os.kill(int(far), signal.SIGKILL)
        said = [process.communicate(timeout=_PATIENCE)[0] for process in started]
    finally:
        for process in started:
            process.terminate()  # and with it what it started
    assert all(process.returncode for process in started)
    assert "another rank of this run is gone" in said[0]
    assert not (tmp_path / "run" / "summary.json").exists()

    again = torchrun(1, 0, 2, free_port(), ["resume", str(tmp_path / "run")])
    try:
        told = again.communicate(timeout=_PATIENCE)[0]
    finally:
        again.terminate()
    assert again.returncode == 0, told
    assert in_ranks(1, whole) == [0]
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
