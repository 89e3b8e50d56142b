"""Several processes as one federation: the same bits however many, a rank that is gone, and going on with others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks_help import in_ranks
from run_help import SETTINGS, build, contents, kept
from safetensors.torch import load_file
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.core.family_state import blocks_of
from fedquilt.core.ranks import Ranks, among, from_environment
from fedquilt.core.spread import joined
from fedquilt.engines.parallel import can_fork
from fedquilt.families.family import Family
from fedquilt.families.layout import Layout
from fedquilt.families.units import cut
from fedquilt.interface.messages import Update

pytestmark = [
    pytest.mark.skipif(not can_fork(), reason="ranks are forked here"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
# plain; private units; state that travels; models that the server runs; single copies; circles chosen by clients;
# mixtures of all; what clients say of public samples; mixtures and reports of clients that choose what to send; routes
FEW = ("scaffold", "fedfomo", "fedpac")
METHODS = ("fedavg", "fedper", "scaffold", "feddl", "fedfomo", "ifca", "fedamp", "score-sharing", "fedpac", "fedmn")


def one(method: str, folder: Path, engine: str = "sequential", **more: Any) -> None:
    options: dict[str, Any] = {"alone": False, "checkpoint_every": 2, "readouts": ("received", "adapted"), **more}
    fq.run(build(clients=7), method, engine=engine, settings=SETTINGS.get(method), out=folder, rounds=3, **options)


# One worker does them: setting up what they share takes half a minute.
together = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all these methods by one rank and by two, and of some by four."""
    place = tmp_path_factory.mktemp("ranks")

    def work(size: int, methods: Sequence[str]) -> Callable[[], None]:
        def go() -> None:
            for method in methods:
                one(method, place / f"{method}-{size}")
            one("fedper", place / f"stacked-{size}", engine="vectorised", alone=True)

        return go

    for size in (1, 2, 4):
        assert in_ranks(size, work(size, METHODS if size < 4 else FEW)) == [0] * size
    return place


@together
@pytest.mark.parametrize("name", [*METHODS, "stacked"])
def test_however_many_ranks_there_are_the_bits_are_the_same(name: str, folder: Path) -> None:
    first = contents(folder / f"{name}-1")
    assert contents(folder / f"{name}-2") == first
    if name in FEW or name == "stacked":
        assert contents(folder / f"{name}-4") == first
    if name == "stacked":
        assert contents(folder / f"{name}-2" / "alone") == contents(folder / f"{name}-1" / "alone")


@together
@pytest.mark.parametrize("method", METHODS)
def test_ranks_do_what_one_process_does(method: str, folder: Path, tmp_path: Path) -> None:
    mine, plain = folder / f"{method}-2", tmp_path / "plain"
    one(method, plain)
    rows = [
        [{**row, "loss": None, "training_loss": None} for row in map(json.loads, text.splitlines())]
        for text in ((place / "metrics.jsonl").read_text() for place in (mine, plain))
    ]
    assert rows[0] == rows[1]
    torch.testing.assert_close(rows_at_the_end(mine), rows_at_the_end(plain), rtol=1e-4, atol=1e-5)
    assert (mine / "traffic.jsonl").read_text() == (plain / "traffic.jsonl").read_text()


def rows_at_the_end(folder: Path) -> Tensor:
    found = [fq.load_model(folder, f"c{i}").state_dict() for i in range(7)]
    return torch.stack([torch.cat([tensor.flatten().float() for tensor in state.values()]) for state in found])


def test_nobody_goes_before_all_have_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has the addresses: on a busy machine it was over and gone, and another rank waited for half an hour."""
    meet, met = dist.init_process_group, tmp_path / "met"

    def slowly(*given: Any, **named: Any) -> None:
        meet(*given, **named)
        if named["rank"] == 1:
            time.sleep(0.5)
            met.touch()

    def work() -> None:
        assert met.exists()

    monkeypatch.setattr(dist, "init_process_group", slowly)
    assert in_ranks(3, work) == [0] * 3


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    def until(round_: int) -> Callable[[], None]:
        def stop(federation: fq.Federation, report: Any) -> None:
            if report.round == round_:
                os.kill(os.getpid(), signal.SIGKILL)

        return lambda: one("scaffold", tmp_path / "run", callbacks=[stop])

    assert in_ranks(1, lambda: one("scaffold", tmp_path / "whole")) == [0]
    assert in_ranks(2, until(3)) == [-9, -9]  # after the checkpoint of round 2
    assert (tmp_path / "run" / "checkpoint" / "round-000002.safetensors").is_file()
    assert in_ranks(5, lambda: fq.resume(tmp_path / "run", build(clients=7))) == [1] * 5  # there are four shards
    assert in_ranks(4, lambda: fq.resume(tmp_path / "run", build(clients=7))) == [0] * 4
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    one("fedavg", tmp_path / "plain", callbacks=[])
    (tmp_path / "plain" / "summary.json").unlink()
    with among(Ranks()), pytest.raises(ValueError, match="was begun in one process"):
        fq.resume(tmp_path / "plain", build(clients=7))


def test_without_ranks_a_run_of_ranks_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    def stop(federation: fq.Federation, report: Any) -> None:
        if report.round == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_ranks(1, lambda: one("fedper", tmp_path / "whole")) == [0]
    assert in_ranks(2, lambda: one("fedper", tmp_path / "run", callbacks=[stop])) == [-9, -9]
    assert not (tmp_path / "run" / "summary.json").exists()
    before = torch.get_num_threads()
    fq.resume(tmp_path / "run", build(clients=7))
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert torch.get_num_threads() == before


def test_a_killed_rank_ends_the_run_with_a_sentence_and_nothing_is_lost(tmp_path: Path) -> None:
    words = [
        "run",
        "digits",
        "fedper",
        "--rounds",
        "100000",
        "--no-alone",
        "--set",
        "clients=6",
        "--checkpoint-every",
        "1",
    ]
    command = [sys.executable, "-m", "fedquilt", *words, "--ranks", "2", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "run" / "checkpoint" / "state.json").is_file():
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(int(children[1]), signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 2, said
    assert "rank 1 of 2 was ended by SIGKILL" in said
    assert "another rank of this run is gone" in said
    state = json.loads(json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_text())["state"])
    assert state["server"]["round"] >= 1  # whole, with its checksum
    assert load_file(tmp_path / "run" / "checkpoint" / state["tensors"])
    assert not [path for path in (tmp_path / "run").iterdir() if path.name == "summary.json"]


@pytest.mark.parametrize("keep", [lambda i, unit: True, lambda i, unit: i % 2 == 0 or unit != "0"])
def test_updates_of_ranks_are_joined_as_one_process_has_them(keep: Callable[[int, str], bool]) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    family = Family(tuple(range(9)), net, Layout(net, cut(net)))
    rows = torch.randn(9, family.layout.width)
    units = [unit.name for unit in family.layout.units]

    def update(ids: tuple[int, ...]) -> Update:
        send = {unit: torch.tensor([keep(i, unit) for i in ids]) for unit in units}
        return Update(1, ids, blocks_of(family, rows[list(ids)], send), {"loss": rows[list(ids), 0]})

    whole, parts = update((0, 2, 3, 5, 6, 8)), [update((0, 8)), update((5,)), update((2, 6)), update((3,))]
    found = joined(parts, parts, units, Ranks(), torch.device("cpu"))
    assert found.ids == whole.ids
    assert torch.equal(found.reports["loss"], whole.reports["loss"])
    assert len(found.blocks) == len(whole.blocks)
    for mine, other in zip(found.blocks, whole.blocks, strict=True):
        assert (mine.units, mine.sizes) == (other.units, other.sizes)
        assert torch.equal(mine.value, other.value)
        assert (mine.places is None) == (other.places is None)
        assert mine.places is None or (other.places is not None and torch.equal(mine.places, other.places))


def test_who_a_process_is_follows_from_torchrun_or_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert from_environment() is None  # a job of Slurm's like any other
    monkeypatch.setenv("MASTER_ADDR", "node-1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert from_environment() == (3, 4, 1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert from_environment() == (0, 2, 0)
    assert [list(Ranks(rank, 3).mine) for rank in range(3)] == [[0, 1], [2], [3]]
    assert sum(Ranks(rank, 3).owns(7) for rank in range(3)) == 1


def test_codes_and_what_waits_are_the_same_in_one_process_and_in_ranks(tmp_path: Path) -> None:
    how = fq.Compression("topk", "float16", kept=0.2)
    one("feddl", tmp_path / "plain", compress=how)  # some of its clients send codes, and some do not
    assert in_ranks(2, lambda: one("feddl", tmp_path / "ranks", compress=how)) == [0, 0]
    assert (tmp_path / "ranks" / "traffic.jsonl").read_text() == (tmp_path / "plain" / "traffic.jsonl").read_text()
    rows = [kept(tmp_path / name / "checkpoint") for name in ("plain", "ranks")]
    assert rows[0].keys() == rows[1].keys()
    for name in rows[0]:
        if name.startswith("row "):
            mine, theirs = (np.frombuffer(found[name], np.float32) for found in rows)
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
