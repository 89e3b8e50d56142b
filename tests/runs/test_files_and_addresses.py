"""Files that are there whole or not at all, and builders of models as text and back, for a run and for a device."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
from torch import nn

import fedquilt as fq
from fedquilt._util.addresses import load_file, taken_apart
from fedquilt._util.files import write_bytes, write_text, written_whole
from fedquilt._util.toml import to_toml
from fedquilt.deploy.device.client_folder import builder
from fedquilt.runs.settings import builder_from_text, builder_to_text


class Blocks(nn.Module):
    def __init__(
        self, width: int, shape: tuple[int, ...] = (), inner: dict[str, tuple[int, ...]] | None = None
    ) -> None:
        super().__init__()


@pytest.mark.parametrize("by_many", [False, True])
def test_a_write_that_fails_leaves_what_was_there_and_nothing_beside_it(tmp_path: Path, by_many: bool) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def fail() -> None:
        with written_whole(path, by_many=by_many) as new:
            new.write_text("half of")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    write_text(path, "new\r\n")
    assert path.read_bytes() == b"new\r\n"
    assert list(tmp_path.iterdir()) == [path]


def test_of_many_who_write_one_file_the_last_counts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with written_whole(path, by_many=True) as mine:
        mine.write_text("mine")
        with written_whole(path, by_many=True) as others:
            others.write_text("theirs")
        assert path.read_text() == "theirs"
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_a_builder_comes_back_from_a_run_and_from_a_device_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from fedquilt.deploy.ops.create import model_reference

    made = partial(partial(Blocks, 3), shape=(1, 2), inner={"a": (4,)})
    as_run = builder_from_text(json.loads(json.dumps(builder_to_text(made))))
    reference, file = model_reference(made, "a")
    assert file is not None  # this one
    as_device = builder(file.parent, tomllib.loads(to_toml(reference)), "a")
    assert taken_apart(as_run) == taken_apart(made) == (Blocks, (3,), {"shape": (1, 2), "inner": {"a": (4,)}})
    assert taken_apart(as_device) == taken_apart(made)


def test_a_models_file_is_run_once_and_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_nets.py").write_text("WIDTH = 3\n")
    (tmp_path / "nets_beside.py").write_text(
        "from torch import nn\nfrom neighbour_of_nets import WIDTH\n\n\ndef small():\n    return nn.Linear(2, WIDTH)\n"
    )
    made = builder(tmp_path, {"builder": "nets_beside.py:small"}, "a")
    assert str(made()) == str(nn.Linear(2, 3))
    assert taken_apart(made)[0] is load_file(tmp_path / "nets_beside.py").small
    with pytest.raises(FileNotFoundError, match=r"copy it beside client\.toml"):
        builder(tmp_path, {"builder": "nets.py:small"}, "a")
    with pytest.raises(ValueError, match=r"client 'a': nets_beside\.py has no function 'large'"):
        builder(tmp_path, {"builder": "nets_beside.py:large"}, "a")


def test_a_model_whose_module_is_gone_names_it(tmp_path: Path) -> None:
    (tmp_path / "gone_soon.py").write_text(
        "from torch import nn\n\n\ndef make() -> nn.Module:\n    return nn.Linear(2, 2)\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        make = importlib.import_module("gone_soon").make
        data = ([[0.0, 1.0], [1.0, 0.0]], [0, 1])
        made = fq.Scenario("s", [fq.Client(i, make, data, test=data) for i in "34"], fq.Training(rounds=1))
        fq.run(made, "fedavg", engine="sequential", alone=False, out=tmp_path / "run")
        assert isinstance(fq.load_model(tmp_path / "run", 3), nn.Module)  # type: ignore[arg-type]  # as it was named
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["gone_soon"]
    with pytest.raises(ValueError, match="module 'gone_soon' cannot be imported here"):
        fq.load_model(tmp_path / "run", "3", trust=True)
