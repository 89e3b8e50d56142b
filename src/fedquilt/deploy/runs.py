"""Starting a run on a federation that is up, following it, and going on with one that was interrupted."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from fedquilt.deploy.lead import make_terms
from fedquilt.deploy.operator import Operator
from fedquilt.deploy.processes import Failed
from fedquilt.deploy.project import Project
from fedquilt.deploy.records import CHECKPOINT, LETTERS, STATUS
from fedquilt.files import write_text
from fedquilt.methods import METHODS
from fedquilt.methods.find import address_of, find, source_of

SPEC = "deploy.json"
_APP = """\
[project]
name = "fedquilt-app"
version = "1.0.0"
description = "A fedquilt federation"
license = "Apache-2.0"
dependencies = ["flwr>=1.41"]

[tool.flwr.app]
publisher = "fedquilt"

[tool.flwr.app.components]
serverapp = "fedquilt_app.server:app"
clientapp = "fedquilt_app.client:app"

[tool.flwr.app.config]
spec = ""
"""


def write_app(folder: Path) -> Path:
    """The Flower app of every federation. Devices run the ClientApp of their own library, not the one sent with it."""
    package = folder / "fedquilt_app"
    package.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(_APP)
    (package / "__init__.py").write_text("")
    (package / "server.py").write_text("from fedquilt.deploy.server_app import app as app\n")
    (package / "client.py").write_text("from flwr.clientapp import ClientApp\n\napp = ClientApp()\n")
    return folder


def new_spec(project: Project, method: str, **options: Any) -> dict[str, Any]:
    """Describes a new run; a wrong method or setting is refused here, before anything is sent anywhere."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    scenario = re.sub(r"[^A-Za-z0-9._-]+", "-", project.terms.scenario).strip("-.")[:60] or "own"
    kind = find(method)
    name = f"{scenario}-{kind.name}-{options.get('seed', 0)}-{stamp}"
    own = kind.name not in METHODS
    spec = {
        "run": name,
        "project": str(project.folder),
        "folder": str(project.runs / name),
        "method": address_of(kind) if own else kind.name,  # where it is from anywhere: the run has a process of its own
        **({"source": source_of(kind)} if own else {}),
        **{key: value for key, value in options.items() if value is not None},
    }
    make_terms(project, spec)
    return spec


def latest_spec(project: Project) -> dict[str, Any]:
    """The run that was started last and has not finished."""
    unfinished = [path for path in project.runs.glob(f"*/{SPEC}") if _state(path.parent).get("state") != "finished"]
    if not unfinished:
        raise FileNotFoundError(f"{project.runs} holds no unfinished run to go on with; start one without --resume")
    found: dict[str, Any] = json.loads(max(unfinished, key=lambda path: path.stat().st_mtime).read_text())
    # The project may have been moved since.
    return found | {"project": str(project.folder), "folder": str(project.runs / found["run"])}


def start_run(project: Project, spec: Mapping[str, Any]) -> int:
    """Sends the app with this description to SuperLink; gives Flower's number of the run."""
    folder = Path(spec["folder"])
    with Operator(project) as operator:
        operator.nodes()  # before anything is written: is anybody there at all?
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / SPEC, json.dumps(dict(spec), indent=2))
        (folder / STATUS).unlink(missing_ok=True)
        return operator.start(write_app(project.server_folder / "app"), {"spec": str(folder / SPEC)})


def stop_run(project: Project, number: int) -> None:
    """Ends a run; what it has completed is kept."""
    with Operator(project) as operator:
        operator.stop(number)


def follow(
    project: Project,
    spec: Mapping[str, Any],
    number: int,
    tell: Callable[[Mapping[str, Any]], None] = lambda _: None,
    poll: float = 0.5,
) -> dict[str, Any]:
    """Waits for the end of a run and gives its summary. `tell` gets each new line of `letters.jsonl`."""
    folder = Path(spec["folder"])
    told = set(_text(folder / LETTERS).splitlines())  # what a run that goes on had said before
    checked = time.monotonic()
    while True:
        state = _state(folder)
        text = _text(folder / LETTERS)
        for line in text[: text.rfind("\n") + 1].splitlines():
            if line not in told:
                told.add(line)
                tell(json.loads(line))
        if state.get("state") == "finished":
            summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
            return summary
        if state.get("state") == "failed":
            raise Failed(f"the run {spec['run']} failed: {state.get('error')}{_go_on(folder)}")
        if time.monotonic() - checked > 5:
            checked = time.monotonic()
            try:
                with Operator(project) as operator:
                    status = operator.status(number)
            except (httpx.HTTPError, ConnectionError):
                again = f"start it again with `fedquilt deploy server {project.folder}`"
                raise Failed(f"the server is gone; {again}{_go_on(folder)}") from None
            if status.startswith("finished") and _state(folder).get("state") not in ("finished", "failed"):
                log = project.server_folder / "logs" / "superlink.log"
                raise Failed(f"the run {spec['run']} ended as '{status}'; see {log}{_go_on(folder)}")
        time.sleep(poll)


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _state(folder: Path) -> dict[str, Any]:
    path = folder / STATUS
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _go_on(folder: Path) -> str:
    return "; go on with `fedquilt deploy run --resume`" if (folder / CHECKPOINT).is_dir() else ""
