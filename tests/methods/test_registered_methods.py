"""Methods that installed packages bring along: found by name, listed with their package, never in another's place."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fedquilt as fq
from fedquilt.cli import catalogue, main
from fedquilt.methods import METHODS
from fedquilt.methods.find import find
from fedquilt.runs.settings import method_from, method_to

CODE = """
from dataclasses import dataclass
from typing import ClassVar

from fedquilt.methods import FedAvg


@dataclass(frozen=True)
class Halfway(FedAvg):
    \"\"\"FedAvg whose server goes only a part of the way.\"\"\"

    name: ClassVar[str] = "halfway"
    part: float = 0.5

    def update(self, unit, held, merged, heard, memory):
        return held + self.part * (merged - held), memory
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package with one module and entry points, as pip would, in a folder of this test's."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDQUILT_STATE", str(tmp_path / "state"))
    made = []

    def run(package: str, code: str = CODE, **entries: str) -> None:
        module = package.replace("-", "_")
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text(code)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {where}" for name, where in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[fedquilt.methods]", *lines]) + "\n")
        made.append(module)

    yield run
    for module in made:
        sys.modules.pop(module, None)


def test_a_package_brings_a_method_along(install: Install, capfd: pytest.CaptureFixture[str]) -> None:
    install("half-methods", halfway="half_methods:Halfway")
    assert main(["list", "methods"]) == 0
    assert "from the package half-methods\nhalfway" in capfd.readouterr().out
    assert main(["list", "methods", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)
    assert [entry["name"] for entry in listed][:-1] == list(METHODS)
    assert (listed[-1]["package"], listed[-1]["settings"]) == ("half-methods", {"part": 0.5})
    words = ("--set", "clients=4", "part=0.25", "--rounds", "1", "--engine", "sequential", "--no-alone")
    assert main(["run", "digits", "halfway", *words, "-o", "kept", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["summary"]["method"] == "halfway"


def test_a_run_names_the_package_and_asks_for_it(install: Install, tmp_path: Path) -> None:
    install("half-methods", halfway="half_methods:Halfway")
    text = method_to(find("halfway")())
    assert text == {"name": "halfway", "settings": {"part": 0.5}, "package": "half-methods"}
    del sys.modules["half_methods"]  # in another process; that it is installed is the user's word for it
    assert repr(method_from(text)) == "Halfway(part=0.5)"
    (tmp_path / "half_methods-1.0.dist-info" / "entry_points.txt").write_text("")
    with pytest.raises(ValueError, match=r"is of the package 'half-methods', which does not bring it along here; inst"):
        method_from(text)


@pytest.mark.parametrize(("name", "holder"), [("fedavg", "fedquilt"), ("halfway", "all-methods")])
def test_a_name_that_there_is_already_is_refused(install: Install, name: str, holder: str) -> None:
    install("all-methods", halfway="all_methods:Halfway")
    install("other-methods", **{name: "other_methods:Halfway"})
    sentence = (
        f"the package 'other-methods' registers a method '{name}', but {holder} has one of that name already; it is "
        "left out: use it by its address, other_methods:Halfway, or give it another name"
    )
    with pytest.warns(UserWarning, match=f"^{sentence}$"):
        listed = catalogue.methods()
    assert [entry["package"] for entry in listed if "package" in entry] == ["all-methods"]
    with pytest.warns(UserWarning, match=f"^{sentence}$"):
        assert find("halfway").__module__ == "all_methods"
    assert find("fedavg") is METHODS["fedavg"]


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("half_methods:Gone", "of the package 'half-methods' cannot be loaded (AttributeError"),
        ("nobody_has_this:Halfway", "cannot be loaded (ModuleNotFoundError: No module named 'nobody_has_this')"),
        ("half_methods:dataclass", "half_methods:dataclass is no method"),
        ("half_methods:Halfway", "half_methods:Halfway calls itself 'halfway'; make the two the same"),
    ],
)
def test_a_package_that_does_not_keep_its_word(
    install: Install, capfd: pytest.CaptureFixture[str], entry: str, sentence: str
) -> None:
    install("half-methods", other=entry)
    assert main(["run", "digits", "other"]) == 2
    assert sentence in capfd.readouterr().err
    assert main(["list", "methods", "--json"]) == 0  # which shows the others all the same
    assert sentence in json.loads(capfd.readouterr().out)[-1]["about"]
    with pytest.raises(ValueError, match="did you mean 'other'"):
        fq.run(fq.scenarios.build("digits", clients=4), "othr")
