"""Methods of the operator's own on devices: only what a device's owner allowed, and only the very same code."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deploy_help import LocalPost, digits_with_public, same_rows, simulate

from fedquilt.deploy.device.check_folder import check
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.ops.runs import new_spec
from fedquilt.deploy.project import Node, Project, Rounds
from fedquilt.deploy.server.agreement import make_terms
from fedquilt.deploy.server.answers import Exchange
from fedquilt.deploy.server.coordinator import lead, make_federation
from fedquilt.deploy.server.declarations import declare
from fedquilt.deploy.transport.wire import unpack

MINE = """
from dataclasses import dataclass
from typing import ClassVar

from fedquilt.methods import FedAvg
from fedquilt.interface.steps import Install, Train


@dataclass(frozen=True)
class Slow(FedAvg):
    name: ClassVar[str] = "slow"
    rate: float = 0.01

    def local(self):
        return Install(), Train(lr=self.rate)
"""
CLIENTS = [f"client-{i}" for i in range(4)]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A federation, and a file with a method beside it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_slow.py").write_text(MINE)
    yield create_from_scenario(tmp_path / "fed", digits_with_public(), rounds=Rounds(timeout=20))
    for name in [name for name in sys.modules if "own_slow" in name]:
        del sys.modules[name]


def allow(project: Project, names: list[str], code: str = MINE, address: str = "methods/own_slow.py:Slow") -> None:
    """What the owners of some devices do: put the file there, and allow it."""
    for name in names:
        folder = project.client_folder(name)
        (folder / "methods").mkdir()
        (folder / "methods" / "own_slow.py").write_text(code)
        dataclasses.replace(Node.read(folder), allow=(address,)).write()


def spec_of(project: Project) -> dict[str, Any]:
    return new_spec(project, "own_slow.py:Slow", rounds=2, settings={"rate": 0.05}, training={"epochs": 1})


def test_where_it_is_allowed_it_runs_as_in_a_simulation(project: Project) -> None:
    allow(project, CLIENTS)
    spec, post = spec_of(project), LocalPost(project)
    assert spec["run"].startswith("digits-public-slow-0-")
    summary = lead(project, spec, post)
    assert (summary["method"], summary["left_out"]) == ("slow", {})
    there = simulate(digits_with_public(), "own_slow.py:Slow", 2, settings={"rate": 0.05}, training={"epochs": 1})
    federation = make_federation(project, spec, post, declare(project, spec, post))
    rows = [row for _ in range(2) for e in federation.step().evaluations for row in e.rows()]
    rows += [row for evaluation in federation.evaluate(last=True) for row in evaluation.rows()]
    same_rows(rows, there.rows)
    told = unpack(post.down["client-0"][0])[1]["terms"]["method"]
    assert (told["name"], told["class"], told["settings"]) == ("slow", "own_slow.py:Slow", {"rate": 0.05})
    assert str(project.folder.parent) not in str(told)  # where the operator keeps it is not told


def test_where_it_is_not_allowed_nothing_runs(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    spec, post = spec_of(project), LocalPost(project)
    with pytest.raises(ValueError, match=r"4 of 4 clients do not take part .* 'client-0': the method is none of"):
        declare(project, spec, post)
    assert {unpack(up)[1]["code"] for ups in post.up.values() for up in ups} == {"unknown-method"}
    assert "the device's owner has not allowed it ('own_slow.py:Slow')" in capfd.readouterr().err


def test_other_code_than_the_servers_does_not_run(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    allow(project, CLIENTS[:2])
    allow(project, CLIENTS[2:], MINE.replace("lr=self.rate", "lr=self.rate * 2"))
    spec, post = spec_of(project), LocalPost(project)
    seen: list[Exchange] = []
    assert list(declare(project, spec, post, seen.append)) == CLIENTS[:2]
    assert [unpack(post.up[name][0])[1].get("code") for name in CLIENTS] == [None, None, "other-code", "other-code"]
    assert seen[0].details["client-2"] == "the device's code of the method is not the server's"


def test_a_module_is_allowed_by_its_address(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    package = project.folder.parent / "own_slow_package"
    package.mkdir()
    (package / "__init__.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(project.folder.parent))
    allow(project, CLIENTS, address="own_slow_package:Slow")
    spec, post = new_spec(project, "own_slow_package:Slow", rounds=1), LocalPost(project)
    assert spec["method"] == "own_slow_package:Slow"
    assert list(declare(project, spec, post)) == CLIENTS


def test_a_run_goes_on_only_by_the_code_that_it_began_with(project: Project) -> None:
    spec = spec_of(project)
    make_terms(project, spec)
    Path("own_slow.py").write_text(MINE.replace("0.01", "0.001"))
    for name in [name for name in sys.modules if "own_slow" in name]:
        del sys.modules[name]
    with pytest.raises(ValueError, match=r"the code of the method 'slow' is not that which the run .* was begun with"):
        make_terms(project, spec)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        (
            "methods/gone.py:Slow",
            "client 'client-0': client.toml allows the method 'methods/gone.py:Slow', but",
        ),
        ("methods/own_slow.py:Slw", "did you mean 'Slow'"),
        ("nobody.has.this:Slow", "the module 'nobody' cannot be imported"),
    ],
)
def test_a_mistake_in_what_is_allowed_is_said_at_the_start(project: Project, address: str, sentence: str) -> None:
    allow(project, CLIENTS[:1], address=address)
    folder = project.client_folder(CLIENTS[0])
    assert sentence in (check(folder, folder / "data.npz") or "")


def test_what_is_allowed_is_a_list_of_addresses(project: Project) -> None:
    path = project.client_folder(CLIENTS[0]) / "client.toml"
    path.write_text(path.read_text() + '\n[methods]\nallow = "own_slow.py:Slow"\n')
    with pytest.raises(ValueError, match=r"table \[methods\]: write allow = "):
        Node.read(path.parent)
