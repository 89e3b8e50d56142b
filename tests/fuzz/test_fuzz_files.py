"""Settings, configurations, a federation's files and archives of anybody's: read, or refused in a sentence."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz_help import SENTENCES, attempt, damaged, fuzzed
from hypothesis import given
from hypothesis import strategies as st

import fedquilt as fq
from fedquilt.cli.config import read_config
from fedquilt.cli.request import Choices, take_request
from fedquilt.cli.settings import spread
from fedquilt.data.archives import idx, open_zip, tar_members, zip_member
from fedquilt.data.errors import DataDamaged
from fedquilt.data.npz import NotArrays, read_arrays

CONFIG = b"""
scenario = {name = "digits", settings = {clients = 6, noise = 0.2}}
method = {name = "fedprox", settings = {mu = 0.1}}
rounds = 3
seed = 1
readouts = ["received", "knn-3"]
merge = {name = "nnm+krum", byzantine = 0.2}
attack = {name = "alie", liars = 0.3}
evaluate_every = 1
alone = false
[training]
lr = 0.05
decay_at = [0.5, 0.75]
"""
YAML = b"""
scenario: {name: digits, settings: {clients: 6}}
method: fedper
rounds: 2
training: {lr: 0.1, batch: 8}
merge: trimmed-mean
"""
FEDERATION = b"""
clients = ["a", "b"]
[server]
hosts = ["127.0.0.1"]
port = 8443
[rounds]
timeout = 60.0
quorum = 0.5
[transfer]
dtype = "float32"
largest_change = 100.0
[scenario]
scenario = "own"
classes = 3
label_names = ["x", "y", "z"]
[scenario.training]
lr = 0.1
"""
NODE = b"""
name = "a"
host = "127.0.0.1"
port = 8443
classes = 3
labels = [0, 1]
[traits]
device = "gen1"
[model]
builder = "model.py:net"
arguments = [1, 2]
[methods]
allow = ["own.py:Mine"]
"""
WORDS = st.one_of(
    st.text(max_size=20),
    st.builds(
        "{}={}".format,
        st.sampled_from(
            ["clients", "lr", "mu", "merge.byzantine", "keep", "attack.liars", "by.head", "decay_at", "betas", "x.y.z"]
        ),
        st.one_of(
            st.text(max_size=6),
            st.integers().map(str),
            st.floats().map(str),
            st.sampled_from(["none", "0.5,", "1,2", "true"]),
        ),
    ),
)


@fuzzed(60)
@given(
    words=st.lists(WORDS, max_size=3),
    merge=st.sampled_from(["krum", "nnm+krum", "bucketing+median", "nnm+", "+", "", "mean+nnm"]),
)
def test_settings_are_taken_or_refused(words: list[str], merge: str) -> None:
    spread(["run", "--set", *words])
    made, refused = attempt(
        lambda: take_request("digits", ["fedprox"], Choices(settings=words, merge=merge, attack="alie"))
    )
    assert made is not None or refused


@fuzzed(120)
@given(content=st.one_of(damaged(CONFIG), st.binary(max_size=60)), suffix=st.just(".toml"))
def test_a_configuration_is_taken_or_refused(
    content: bytes, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _try_config(content, tmp_path_factory.getbasetemp() / f"config{suffix}")


@fuzzed(80)
@given(content=st.one_of(damaged(YAML), st.binary(max_size=60)))
def test_a_configuration_in_yaml_is_taken_or_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("yaml")
    _try_config(content, tmp_path_factory.getbasetemp() / "config.yaml")


def _try_config(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    config, _ = attempt(lambda: read_config(path, trust=False))
    if config is not None:
        attempt(lambda: config.request(Choices(merge=config.options["merge"], attack=config.options["attack"])))


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000, "scenario = 3", "scenario = []\nmethod = 4", "merge = 2\n" + CONFIG.decode()]
)
def test_configurations_of_nonsense_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text.replace('merge = {name = "nnm+krum", byzantine = 0.2}', "") if "merge = 2" in text else text)
    with pytest.raises(SENTENCES):
        read_config(path, trust=False)


@fuzzed(80)
@given(content=damaged(FEDERATION), node=damaged(NODE))
def test_a_federations_files_are_read_or_refused(
    content: bytes, node: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("flwr")
    from fedquilt.deploy.project import Node, Project

    folder = tmp_path_factory.getbasetemp()
    (folder / "federation.toml").write_bytes(content)
    (folder / "client.toml").write_bytes(node)
    for read in (Project.read, Node.read):
        attempt(partial(read, folder))


def npz() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, x=np.arange(24, dtype=np.float32).reshape(12, 2), y=np.arange(12) % 2)
    return file.getvalue()


@cache  # its file has a time
def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("top/data.txt", "1 2\n3 4\n")
    return file.getvalue()


@cache
def tarred() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        info = tarfile.TarInfo("data.txt")
        info.size = 8
        tar.addfile(info, io.BytesIO(b"1 2\n3 4\n"))
    return file.getvalue()


IDX = gzip.compress(bytes([0, 0, 8, 2]) + struct.pack(">2I", 2, 3) + bytes(range(6)))


@fuzzed(200)
@given(content=damaged(npz()))
def test_a_file_of_arrays_is_read_or_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "arrays.npz"
    path.write_bytes(content)
    try:
        found = read_arrays(path)
    except (NotArrays, OSError):
        return
    assert all(array.nbytes < 2**20 for array in found.values())


@fuzzed(150)
@given(
    content=st.one_of(damaged(npz()), damaged(b"a,b,label\n1,2,0\n3,4,1\n5,6,0\n7,8,1\n1,2,0\n3,4,1\n5,6,0\n7,8,1\n"))
)
def test_a_scenario_of_a_file_is_built_or_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / ("own.npz" if content[:2] == b"PK" else "own.csv")
    path.write_bytes(content)
    options: dict[str, Any] = {} if path.suffix == ".npz" else {"label": "label"}
    made, _ = attempt(lambda: fq.scenario_from(path, clients=2, **options), (TypeError,))
    assert made is None or all(client.samples > 0 for client in made.clients)


@fuzzed(150)
@given(data=st.data())
def test_an_archive_is_read_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "archive"
    kind, whole = data.draw(st.sampled_from([("zip", zipped()), ("tar", tarred()), ("idx", IDX)]))
    content = data.draw(damaged(whole))
    path.write_bytes(content)

    def read() -> bytes:
        if kind == "zip":
            with open_zip(path) as archive:
                return archive.read(zip_member(path, archive, "data.txt"))
        return tar_members(path, ["data.txt"])["data.txt"] if kind == "tar" else idx(path, content).tobytes()

    with suppress(DataDamaged):
        assert len(read()) < 2**20
