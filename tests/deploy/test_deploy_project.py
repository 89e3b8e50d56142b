"""A federation's folder: what is in it, who may read it, and what a mistake in it says."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("flwr")

from fedquilt.client import Change, Client
from fedquilt.deploy.device.client_folder import load_client
from fedquilt.deploy.ops.create import create, create_from_scenario
from fedquilt.deploy.project import Address, Node, Project, Rounds, Transfer
from fedquilt.scenario import Scenario


def two_clients() -> Scenario:
    rng = np.random.default_rng(0)

    def data(n: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.normal(size=(n, width)).astype(np.float32), np.arange(n) % 3

    return Scenario(
        "two",
        [
            Client("a", partial(nn.Linear, 4, out_features=3), data(9, 4), test=data(3, 4), traits={"device": "x"}),
            Client("b", partial(nn.Linear, 2, 3), data(6, 2), labels=[0, 1, 2],
                   changes={3: Change(partial(nn.Linear, 2, 4), train=data(5, 2)), 5: Change(labels=(0, 1))}),
        ],
        common=data(4, 4),
        label_names=["r", "s", "t"],
    )  # fmt: skip


def test_a_scenario_goes_to_disk_and_back_client_by_client(tmp_path: Path) -> None:
    scenario = two_clients()
    create_from_scenario(tmp_path / "fed", scenario, rounds=Rounds(timeout=7))
    project = Project.read(tmp_path / "fed")
    assert project.clients == ("a", "b")
    assert project.rounds == Rounds(timeout=7)
    assert project.spec.label_names == ("r", "s", "t")
    for client in scenario.clients:
        folder = project.client_folder(client.name)
        back = load_client(Node.read(folder), folder / "data.npz")
        assert (back.name, back.traits, back.labels) == (client.name, client.traits, client.labels)
        for round_ in (1, 3, 5):
            now, then = back.at(round_), client.at(round_)
            assert torch.equal(now.train.x, then.train.x)
            assert torch.equal(now.test.y, then.test.y)
            assert now.labels == then.labels
            assert str(now.model()) == str(then.model())


def test_a_client_folder_holds_its_own_data_alone(tmp_path: Path) -> None:
    scenario = two_clients()
    project = create_from_scenario(tmp_path / "fed", scenario)
    for mine, other in (("a", "b"), ("b", "a")):
        secret = next(c for c in scenario.clients if c.name == other).train.x.numpy()[0].tobytes()
        for file in project.client_folder(mine).iterdir():
            assert secret not in file.read_bytes(), file


def test_secrets_stay_where_they_belong(tmp_path: Path) -> None:
    project = create_from_scenario(tmp_path / "fed", two_clients())
    files = {p.name for p in project.client_folder("a").iterdir()}
    assert files == {"client.toml", "ca.crt", "node.key", "node.pub", "data.npz", "common.npz"}
    for private in ("authority", "server", "clients", "clients/a"):
        assert (project.folder / private).stat().st_mode & 0o077 == 0, private
    assert (project.client_folder("a") / "data.npz").stat().st_mode & 0o077 == 0
    assert not (project.server_folder / "ca.key").exists()


def test_an_own_federation_carries_its_model_file(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("from torch import nn\n\n\ndef small():\n    return nn.Linear(2, 4)\n")
    project = create(tmp_path / "fed", ["p-1", "p-2"], f"{tmp_path}/nets.py:small", classes=4)
    np.savez(tmp_path / "my.npz", x_train=np.zeros((3, 2), np.float32), y_train=np.arange(3))
    client = load_client(Node.read(project.client_folder("p-2")), tmp_path / "my.npz")
    assert str(client.model()) == str(nn.Linear(2, 4))
    assert client.labels == (0, 1, 2)


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make a project with `fedquilt deploy init"):
        Project.read(tmp_path)
    with pytest.raises(ValueError, match="cannot be a folder"):
        create(tmp_path / "x", ["../evil"], "torch.nn:Linear", 2)
    project = create(tmp_path / "fed", ["a"], "torch.nn:Linear", 2)
    with pytest.raises(FileExistsError, match="not empty"):
        create(tmp_path / "fed", ["a"], "torch.nn:Linear", 2)
    path = project.folder / "federation.toml"
    path.write_text(path.read_text().replace("quorum", "quorun"))
    with pytest.raises(ValueError, match=r"table \[rounds\].*quorun"):
        Project.read(project.folder)
    with pytest.raises(FileNotFoundError, match="folder of one client"):
        Node.read(tmp_path)
    np.savez(tmp_path / "bad.npz", x=np.zeros(3))
    with pytest.raises(KeyError, match="holds no x_train; it has x"):
        load_client(Node.read(project.client_folder("a")), tmp_path / "bad.npz")
    with pytest.raises(ValueError, match="largest_change must be above 1"):
        Transfer(largest_change=1)


def test_protection_is_on_and_its_absence_is_said_aloud() -> None:
    assert Address().tls
    assert Address().authentication
    assert Address().warning is None
    assert "OFF" in str(Address(authentication=False).warning)
    assert "OFF" in str(Address(tls=False, authentication=False).warning)
    with pytest.raises(ValueError, match="both off or neither"):
        Address(tls=False)


def test_pickles_are_refused_in_data_files(tmp_path: Path) -> None:
    project = create(tmp_path / "fed", ["a"], "torch.nn:Linear", 2)
    np.savez(tmp_path / "evil.npz", x_train=np.array([{"a": 1}], dtype=object), y_train=np.zeros(1, int))
    with pytest.raises(ValueError, match="x_train holds Python objects, which would be a pickle"):
        load_client(Node.read(project.client_folder("a")), tmp_path / "evil.npz")
