"""What the files of a federation's runs say of how they stand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedquilt.deploy.ops.runs import is_led
from fedquilt.deploy.project import Project
from fedquilt.deploy.server.run_folder import LETTERS, STATUS
from fedquilt.report.read_runs import read_run
from fedquilt.runs.alarms import alarms
from fedquilt.runs.folder import METRICS, PLANS, RunFolder
from fedquilt.sharing import Plan


@dataclass
class RunFacts:
    """A run as far as it went."""

    name: str
    state: str
    round: int = 0
    rounds: int = 0
    seconds: float = 0.0  # of its last exchange of letters
    up: int = 0
    down: int = 0
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # by client and code
    note: str = ""  # whom it waits for, or why it failed


def facts_of(folder: Path) -> RunFacts:
    """Reads a run's status and letters. A run that nobody leads any more is 'interrupted', whatever it said last."""
    status = json.loads((folder / STATUS).read_text())
    found = RunFacts(folder.name, str(status["state"]), status.get("round", 0), status.get("rounds", 0))
    found.note = f"waiting for {status['waiting']}" if status.get("waiting") else status.get("error", "")
    if found.state in ("running", "starting") and not is_led(folder):
        found.state = "interrupted"
    letters = folder / LETTERS
    text = letters.read_text() if letters.is_file() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        letter: dict[str, Any] = json.loads(line)
        found.seconds = letter["seconds"]
        found.up += sum(letter["bytes_up"].values())
        found.down += sum(letter["bytes_down"].values())
        found.refused.update(letter["refused"].items())
    return found


def run_folders(project: Project) -> list[Path]:
    """The folders of a federation's runs, that which moved last at the end."""
    found = sorted(project.runs.glob(f"*/{STATUS}"), key=lambda path: path.stat().st_mtime)
    return [path.parent for path in found]


def circles(folder: Path) -> str:
    """Who shares what with whom in a run now, a line a unit; empty where nothing is planned yet."""
    lines = RunFolder(folder).lines(PLANS)
    return str(Plan.from_json(lines[-1])) if lines else ""


def to_look_at(folder: Path) -> list[str]:
    """Clients of a run whose scores fell, as far as it went."""
    if not (folder / METRICS).is_file():
        return []
    run = read_run(folder)
    return alarms(RunFolder(folder).lines(METRICS), [], run.reading[0], run.metric)
