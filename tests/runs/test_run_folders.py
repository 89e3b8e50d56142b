"""Run directories: foreign and damaged ones are refused and left alone, a full disk loses nothing."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from run_help import Net, build, contents, dies
from torch import nn

import fedquilt as fq
from fedquilt._util.files import DiskFull
from fedquilt._util.lock import Held, Lock
from fedquilt._util.toml import to_toml
from fedquilt.cli.report import comparisons
from fedquilt.client import Split
from fedquilt.methods import METHODS, FedAvg, FedMN, FedPer, ModFL
from fedquilt.runs.checkpoint import Damaged, from_plain, load, save, to_plain
from fedquilt.runs.folder import RunFolder
from fedquilt.runs.settings import builder_from_text, builder_to_text, fingerprint, method_from, method_to

QUICK: dict[str, Any] = {"engine": "sequential", "alone": False, "checkpoint_every": 2}


def half(folder: Path, rounds: int = 4, stop: int = 3) -> Path:
    """A run that ended after round `stop`, its last checkpoint after round 2."""

    def end(federation: fq.Federation, report: Any) -> None:
        if report.round == stop:
            raise RuntimeError("the machine is gone")

    with pytest.raises(RuntimeError, match="gone"):
        fq.run(build(), "fedavg", rounds=rounds, out=folder, callbacks=[end], **QUICK)
    return folder


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("at", ["step", "callback"])
def test_a_ctrl_c_at_any_moment_keeps_the_round(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = fq.Federation.step

    def interrupt(federation: fq.Federation, report: Any) -> None:
        if at == "callback" and report.round == 3:
            signal.raise_signal(signal.SIGINT)  # after the round's lines were written

    def interrupted(federation: fq.Federation) -> Any:
        if at == "step" and federation.round == 2:
            signal.raise_signal(signal.SIGINT)
        return step(federation)

    monkeypatch.setattr(fq.Federation, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fq.run(build(), "fedavg", rounds=5, out=tmp_path / "r", callbacks=[interrupt], **QUICK)
    kept = load(tmp_path / "r" / "checkpoint")
    assert kept is not None
    assert kept[1]["server"]["round"] == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- foreign and damaged -------------------------------------------------------------------------------------------


def flip(path: Path, at: float = 0.5) -> None:
    """Another bit in a file."""
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


DAMAGES: dict[str, tuple[Any, str]] = {
    "no run.toml": (lambda d: (d / "run.toml").unlink(), "not a run directory"),
    "run.toml is text": (lambda d: (d / "run.toml").write_text("hello"), "not TOML"),
    "another format": (lambda d: replace(d / "run.toml", "format = 2", "format = 99"), "not written by this version"),
    "a setting was changed": (lambda d: replace(d / "run.toml", "lr = 0.2", "lr = 0.5"), "not the one"),
    "a setting is gone": (lambda d: replace(d / "run.toml", "readouts", "rdouts"), "does not say what it should"),
    "an unknown method": (lambda d: replace(d / "run.toml", '"fedavg"', '"fedavvg"'), "not known"),
    "tensors flipped": (lambda d: flip(next((d / "checkpoint").glob("*.safetensors"))), "checksum differs"),
    "tensors cut": (lambda d: cut(next((d / "checkpoint").glob("*.safetensors"))), "checksum differs"),
    "tensors gone": (lambda d: next((d / "checkpoint").glob("*.safetensors")).unlink(), "cannot be read"),
    "state cut": (lambda d: cut(d / "checkpoint" / "state.json"), "no checkpoint that can be read"),
    "state flipped": (lambda d: flip(d / "checkpoint" / "state.json"), "left as it is"),
    "rows cut": (lambda d: cut(d / "metrics.jsonl"), "shorter than it was"),
    "rows flipped": (lambda d: flip(d / "metrics.jsonl", 0.0), "checksum differs"),
    "a score": (lambda d: replace(d / "metrics.jsonl", '"samples": 7', '"samples": 8'), "checksum differs"),
    "a read-out": (lambda d: replace(d / "metrics.jsonl", "received", "recemved"), "checksum differs"),
    "a number of bytes": (lambda d: replace(d / "traffic.jsonl", '"c1": ', '"c1": 1'), "checksum differs"),
    "a plan": (lambda d: replace(d / "plans.jsonl", "circle", "cibcle"), "checksum differs"),
    "plans gone": (lambda d: (d / "plans.jsonl").unlink(), "shorter than it was"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_directory_is_refused_and_left_as_it_is(what: str, tmp_path: Path, whole_half: Path) -> None:
    folder = Path(shutil.copytree(whole_half, tmp_path / "run"))
    damage, sentence = DAMAGES[what]
    damage(folder)
    before = everything(folder)
    with pytest.raises(Damaged, match=sentence):
        fq.resume(folder, build())
    assert everything(folder) == before


def test_threads_of_one_process_keep_each_other_out(tmp_path: Path, whole_half: Path) -> None:
    folder = Path(shutil.copytree(whole_half, tmp_path / "run"))
    caught: list[BaseException] = []

    def intrude() -> None:
        try:
            fq.resume(folder, build())
        except Held as error:
            caught.append(error)

    def meanwhile(federation: fq.Federation, report: Any) -> None:
        if report.round == 3:
            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()
            assert dies(Lock(folder).take) == 1  # nor did the attempt give the lock away to other processes

    fq.resume(folder, build(), callbacks=[meanwhile])
    assert [str(error) for error in caught] == [f"another thread of this process is at work in '{folder}'; wait for it"]
    assert len((folder / "traffic.jsonl").read_text().splitlines()) == 4
    free = Lock(folder)  # and it was given back
    free.take()
    free.release()


@pytest.fixture(scope="module")
def whole_half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return half(tmp_path_factory.mktemp("half") / "run")


def test_other_data_are_refused(whole_half: Path) -> None:
    before = everything(whole_half)
    with pytest.raises(Damaged, match="are not those that"):
        fq.resume(whole_half, build(seed=1))
    assert everything(whole_half) == before


def test_a_directory_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("chapter 1")
    with pytest.raises(FileExistsError, match="not empty"):
        fq.run(build(), "fedavg", rounds=1, out=tmp_path, **QUICK)
    assert everything(tmp_path) == {"thesis.tex": b"chapter 1"}
    with pytest.raises(Damaged, match="not a run directory"):
        fq.resume(tmp_path)
    assert everything(tmp_path) == {"thesis.tex": b"chapter 1"}


def test_a_finished_run_is_not_resumed_and_an_own_scenario_is_asked_for(tmp_path: Path, whole_half: Path) -> None:
    fq.run(build(), "fedavg", rounds=1, out=tmp_path / "run", **QUICK)
    with pytest.raises(ValueError, match="is finished"):
        fq.resume(tmp_path / "run")
    with pytest.raises(ValueError, match="does not say how its clients were made"):
        fq.resume(whole_half)


def test_what_the_fingerprint_sees() -> None:
    base = fingerprint(build())
    assert fingerprint(build()) == base != fingerprint(build(seed=1))
    swapped = build()
    swapped.clients[0].train.x[[0, 1]] = swapped.clients[0].train.x[[1, 0]]  # sums stay as they were
    assert fingerprint(swapped) != base
    assert swapped.common is not None
    other = build()
    assert isinstance(other.common, Split)
    other.common.x[0, 0] += 1
    assert fingerprint(other) != base


# --- one process at a time -------------------------------------------------------------------------------------------


def test_a_directory_in_use_is_refused(tmp_path: Path, whole_half: Path) -> None:
    folder = Path(shutil.copytree(whole_half, tmp_path / "run"))
    lock = Lock(folder)
    lock.take()

    def resume() -> None:
        with pytest.raises(Held, match="another process"):
            fq.resume(folder, build())

    assert dies(resume) == 0
    lock.release()
    assert dies(lambda: fq.resume(folder, build())) == 0
    assert not (folder / ".lock").exists()


# --- a full disk -----------------------------------------------------------------------------------------------------


class Full:
    """A disk with room for so many more bytes."""

    def __init__(self, patch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        opened, saved = Path.open, __import__("fedquilt.runs.checkpoint", fromlist=["save_file"]).save_file

        def open_(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            file: Any = opened(path, mode, *args, **kwargs)
            if mode in ("w", "a"):
                write = file.write
                file = _Proxy(file, lambda text: write(text) if self.takes(len(text)) else None)
            return file

        def save_file(tensors: Any, path: Path) -> None:
            size = sum(t.numel() * t.element_size() for t in tensors.values())
            if self.room < size:
                path.write_bytes(b"x" * self.room)
                from safetensors import SafetensorError

                raise SafetensorError("I/O error: No space left on device (os error 28)")
            self.room -= size
            saved(tensors, path)

        patch.setattr(Path, "open", open_)
        patch.setattr("fedquilt.runs.checkpoint.save_file", save_file)

    def takes(self, size: int) -> bool:
        if size > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= size
        return True


class _Proxy:
    def __init__(self, file: Any, write: Any) -> None:
        self.file, self.write = file, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> _Proxy:
        return self

    def __exit__(self, *args: object) -> None:
        self.file.close()


@pytest.mark.parametrize("room", [0, 3_000, 8_000, 14_000, 20_000, 22_000])
def test_a_full_disk_ends_with_a_sentence_and_loses_nothing(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        Full(patch, room)
        with pytest.raises(DiskFull, match=r"the disk is full.*fedquilt resume"):
            fq.run(build(), "fedavg", rounds=4, out=folder, **QUICK)
    assert not list(folder.rglob("*.new"))
    if not (folder / "run.toml").is_file():
        fq.run(build(), "fedavg", rounds=4, out=folder, **QUICK)
    else:
        fq.resume(folder, build())
    fq.run(build(), "fedavg", rounds=4, out=tmp_path / "whole", **QUICK)
    assert contents(folder) == contents(tmp_path / "whole")


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_models_come_back_as_they_were(tmp_path: Path) -> None:
    result = fq.run(build(), "fedper", rounds=2, out=tmp_path / "run", **QUICK)
    x = torch.randn(4, 6)
    for client in ("c0", "c3"):
        model = fq.load_model(tmp_path / "run", client)
        assert torch.equal(model(x), result.model(client)(x))
        assert not model.training
    with pytest.raises(KeyError, match="no client 'c9'"):
        fq.load_model(tmp_path / "run", "c9")


def test_the_clients_alone_inside_a_run_are_its_bar_in_reports(tmp_path: Path) -> None:
    result = fq.run(build(), "modfl", rounds=2, out=tmp_path / "run", **{**QUICK, "alone": True})
    table = comparisons([tmp_path / "run"], None, None)["tiny"]
    (row,) = table.rows
    assert row.gain is not None
    assert row.gain.mean == pytest.approx(result.summary["gain_over_alone"])
    assert row.share_gaining == pytest.approx(result.summary["share_gaining"])
    assert result.alone is not None
    assert result.alone.folder == tmp_path / "run" / "alone"


def test_no_pickles_anywhere(tmp_path: Path) -> None:
    fq.run(build(), "modfl", rounds=2, out=tmp_path / "run", **{**QUICK, "alone": True})
    kinds = {path.suffix for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert kinds == {".toml", ".jsonl", ".json", ".safetensors"}
    assert (tmp_path / "run" / "alone" / "summary.json").is_file()


@pytest.mark.parametrize(
    "method",
    [
        FedPer(personal=2),
        ModFL(by={"conv*": "found", "*": "private"}, cohorts=3),
        FedMN(blocks={"a": (2, 2), "b": (3, 2)}),
    ],
)
def test_methods_are_the_same_after_being_text(method: fq.Method) -> None:
    text = tomllib.loads(to_toml(method_to(method)))
    assert method_from(text) == method
    assert method_from(json.loads(json.dumps(method_to(method)))) == method


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_text(name: str) -> None:
    assert method_from(tomllib.loads(to_toml(method_to(METHODS[name]())))) == METHODS[name]()


def test_a_directory_from_elsewhere_names_only_models(tmp_path: Path) -> None:
    assert isinstance(builder_from_text(builder_to_text(Net))(), Net)
    for address in ("os:system", "subprocess:call", "builtins:eval", "no_such_module:f", "json:dumps"):
        with pytest.raises(Damaged, match=r"builds no model|module 'no_such_module' cannot be imported"):
            builder_from_text({"address": address, "args": ["1"], "kwargs": {}})
    with pytest.raises(Damaged, match="is no method"):
        method_from({"name": "x", "class": "os:system", "settings": {}})


def test_states_come_back_and_tensors_may_share_memory(tmp_path: Path) -> None:
    both = torch.arange(6.0)
    state = {"a": both, "again": both, "part": both[:2], "n": {3: (1, None)}, "flag": True, "empty": torch.zeros(0, 2)}
    tensors: dict[str, torch.Tensor] = {}
    save(tmp_path, tensors, {"server": {"round": 7}, "state": to_plain(state, tensors)})
    found = load(tmp_path)
    assert found is not None
    back = from_plain(found[1]["state"], found[0])
    assert torch.equal(back["again"], both)
    assert torch.equal(back["part"], both[:2])
    assert (back["n"], back["flag"], tuple(back["empty"].shape)) == ({3: (1, None)}, True, (0, 2))


class Odd(FedAvg):
    """A method whose state no file can hold."""

    def begin(self, roster: Any) -> Any:
        return {"odd": nn.Linear(1, 1)}


def test_what_cannot_be_kept_is_refused_before_work(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a method's state holds a Linear"):
        fq.run(build(), Odd(), rounds=2, out=tmp_path / "run", **QUICK)
    assert not (tmp_path / "run").exists()


def test_run_toml_says_what_is_needed(tmp_path: Path) -> None:
    fq.run(fq.scenarios.build("digits", clients=4), "fedavg", rounds=1, seed=3, out=tmp_path / "run", **QUICK)
    known = RunFolder(tmp_path / "run").read_settings()
    assert known["scenario"] == {"title": "digits", "name": "digits", "seed": 0, "settings": {"clients": 4}}
    assert (known["seed"], known["engine"], known["engines"]) == (3, "sequential", ["sequential"] * 2)
    assert set(known["versions"]) == {"fedquilt", "commit", "python", "torch"}
