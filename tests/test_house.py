"""The house: which room may know which, what lies in the hall, and how long a file may be."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fedquilt as fq

PACKAGE = Path(fq.__file__).parent
FLOORS = [  # whoever is on a floor knows those on floors above it in this list, and its own room
    {"_util"},
    {"sharing", "client", "privacy", "secure"},
    {"layers"},
    {"tasks"},
    {"families"},
    {"engines"},
    {"results", "scenario"},
    {"models", "data"},
    {"interface"},
    {"methods", "readouts", "scenarios", "attacks"},
    {"core"},
    {"report"},
    {"runs"},
    {"deploy"},
    {"authoring", "testing"},
    {"cli"},
    {"__init__", "__main__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
HALL = {
    "__init__.py",
    "__main__.py",
    "authoring.py",
    "client.py",
    "py.typed",
    "results.py",
    "scenario.py",
    "testing.py",
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = file
    return found


def imported(file: Path, known: dict[str, Path]) -> dict[str, bool]:
    """The modules of the package that a file imports, wherever in it; true where that is when it is loaded."""
    tree, found = ast.parse(file.read_text(encoding="utf-8")), dict[str, bool]()
    at_once = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedquilt":
            home = (node.module or "").partition(".")[2]
            for alias in node.names:
                inner = f"{home}.{alias.name}".strip(".")
                target = inner if inner in known else home or "__init__"
                found[target] = found.get(target, False) or id(node) in at_once
    return found


def room(module: str) -> str:
    """The room that a module is in."""
    return module.partition(".")[0]


def test_every_room_has_a_floor() -> None:
    assert {room(module) for module in modules()} == set(FLOOR)


def test_imports_go_down_only() -> None:
    known = modules()
    wrong = [
        f"{module} imports {target}"
        for module, file in known.items()
        for target in imported(file, known)
        if room(module) != room(target)
        and FLOOR[room(module)] <= FLOOR[room(target)]
        and not (target == "__init__" and module.startswith(("cli", "runs")))  # for the version
        and room(module) != "__init__"  # the public names, each loaded when it is asked for
    ]
    assert not wrong


def test_no_module_waits_for_itself_to_load() -> None:
    known = modules()
    waits = {module: {t for t, now in imported(file, known).items() if now} for module, file in known.items()}
    while True:
        free = {module for module, targets in waits.items() if not targets & waits.keys()}
        if not free:
            break
        waits = {module: targets for module, targets in waits.items() if module not in free}
    assert not waits


def test_the_hall_holds_what_users_type() -> None:
    assert {entry.name for entry in PACKAGE.iterdir() if entry.is_file()} == HALL
    assert not {name for name in fq.__all__ if callable(getattr(fq, name))} & set(modules())


def test_files_can_be_overseen() -> None:
    lengths = {module: len(file.read_text(encoding="utf-8").splitlines()) for module, file in modules().items()}
    long = {module: length for module, length in lengths.items() if length > 300}
    assert len(long) <= 3, long


@pytest.mark.parametrize("name", ["run", "onboard", "resume", "cut", "load_model"])
def test_a_public_function_stays_one_whatever_is_imported(name: str) -> None:
    import fedquilt.runs.onboarding
    import fedquilt.runs.run

    assert callable(getattr(fedquilt, name))
