"""What lies on the server after a run: no sample of a client's, and no text of what went wrong on its device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
from deploy_help import LocalPost, digits_with_public

from fedquilt.deploy.device.device import Device
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.project import Address, Project, Rounds
from fedquilt.deploy.server.coordinator import lead
from fedquilt.deploy.transport.transport import Answer

SECRET, FAILING = "what only the device may know", "client-1"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A federation after a run in which one client's program failed in every round, with a sentence."""
    folder, rules = tmp_path_factory.mktemp("kept") / "fed", Rounds(timeout=5, quorum=0.5)
    made = create_from_scenario(folder, digits_with_public(), Address(), rules)
    post = LocalPost(made)

    def fail(client: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if client != FAILING or round_ == 0:
            return None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedquilt.deploy.device.device.keep", raising)
            return Answer(client, device.handle(letter))

    post.accident = fail
    spec = {"run": "r", "method": "fedavg", "rounds": 2, "seed": 0, "project": str(folder)}
    lead(made, {**spec, "folder": str(made.runs / "r")}, post)
    return made


def raising(*_: object) -> None:
    raise RuntimeError(SECRET)


def kept(project: Project) -> dict[Path, bytes]:
    """Every file that the server has: all but the folders that go to clients."""
    clients = [project.client_folder(name) for name in project.clients]
    files = [path for path in project.folder.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files if not any(own in path.parents for own in clients)}


def samples(project: Project, name: str) -> list[bytes]:
    """Some of a client's training samples, as the bytes that they would lie in a file as."""
    with np.load(project.client_folder(name) / "data.npz") as data:
        whole: Any = data[next(key for key in data.files if data[key].ndim > 1)]
    return [np.ascontiguousarray(row).astype(kind).tobytes() for row in whole[:20] for kind in (np.float32, np.float64)]


def test_the_run_went_on_and_says_that_it_failed_by_a_code(project: Project) -> None:
    summary = (project.runs / "r" / "summary.json").read_text()
    assert '"failed"' in summary
    assert FAILING in summary


def test_no_file_of_the_server_has_a_text_of_the_devices(project: Project) -> None:
    found = kept(project)
    assert len(found) > 5
    assert [path for path, content in found.items() if SECRET.encode() in content or b"Traceback" in content] == []


def test_no_file_of_the_server_has_a_sample(project: Project) -> None:
    looked_for = [part for name in project.clients for part in samples(project, name)]
    assert [path for path, content in kept(project).items() if any(part in content for part in looked_for)] == []


def test_the_same_search_finds_a_sample_where_there_is_one(project: Project) -> None:
    name = project.clients[0]
    with np.load(project.client_folder(name) / "data.npz") as data:
        there = b"".join(np.ascontiguousarray(data[key]).tobytes() for key in data.files)
    assert any(part in there for part in samples(project, name))
