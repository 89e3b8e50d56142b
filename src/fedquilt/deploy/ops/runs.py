"""Starting a run on a federation that is up, following it, and going on with one that was interrupted."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from fedquilt._util.files import write_text
from fedquilt._util.lock import Held
from fedquilt.deploy.names import plain_name
from fedquilt.deploy.ops.processes import Failed
from fedquilt.deploy.ops.superlink import SuperLink
from fedquilt.deploy.project import Project
from fedquilt.deploy.server.agreement import make_terms
from fedquilt.deploy.server.run_folder import CHECKPOINT, LETTERS, STATUS, RemoteRunFolder
from fedquilt.methods.find import address_of, find, in_library, source_of

SPEC, LED = "deploy.json", "led.json"


class CutOff(Failed):
    """A run whose leader was lost; what it has completed is kept."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what + advice)
        self.what = what


_GLITCH = 5.0  # seconds without an answer that nobody needs to hear of
_PATIENCE = 45.0  # seconds without an answer after which the server counts as gone
_START = 90.0  # seconds that a run's leader may take to be there
_LOST = 4.0  # seconds without a leader after which a run that had one counts as cut off
_TRIES = 4  # how often in a row a run is gone on with that gets no further
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
    (package / "server.py").write_text("from fedquilt.deploy.server.app import app as app\n")
    (package / "client.py").write_text("from flwr.clientapp import ClientApp\n\napp = ClientApp()\n")
    return folder


def new_spec(project: Project, method: str, **options: Any) -> dict[str, Any]:
    """Describes a new run; a wrong method or setting is refused here, before anything is sent anywhere."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    scenario = re.sub(r"[^A-Za-z0-9._-]+", "-", project.spec.scenario).strip("-.")[:60] or "own"
    kind = find(method)
    name = f"{scenario}-{kind.name}-{options.get('seed', 0)}-{stamp}"
    own = in_library(kind.name) is None
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


def named_spec(project: Project, run: str) -> dict[str, Any]:
    """The run of a name."""
    if not plain_name(run) or not (project.runs / run / SPEC).is_file():
        known = sorted(path.parent.name for path in project.runs.glob(f"*/{SPEC}"))
        raise FileNotFoundError(f"{project.runs} holds no run '{run}'; it has {', '.join(known) or 'none'}")
    return _spec_at(project, project.runs / run / SPEC)


def latest_spec(project: Project, finished: bool = False) -> dict[str, Any]:
    """The run that was started last, and has not finished unless it may have."""
    found = list(project.runs.glob(f"*/{SPEC}"))
    if not finished:
        found = [path for path in found if read_state(path.parent).get("state") != "finished"]
    if not found:
        raise FileNotFoundError(f"{project.runs} holds no unfinished run to go on with; start one without --resume")
    return _spec_at(project, max(found, key=lambda path: path.stat().st_mtime))


def _spec_at(project: Project, path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    # The project may have been moved since.
    return found | {"project": str(project.folder), "folder": str(project.runs / found["run"])}


def start_run(project: Project, spec: Mapping[str, Any], from_round: int | None = None) -> int:
    """Sends the app with this description to SuperLink; gives Flower's number of the run.

    A run that is being led is refused: a second leader would undo what the first has agreed on with the devices.
    """
    folder = Path(spec["folder"])
    with SuperLink(project) as operator:
        operator.nodes()  # before anything is written: is anybody there at all?
        records = RemoteRunFolder(folder)
        with records.led():
            if from_round is not None:
                records.go_back_to(from_round)
            write_text(folder / SPEC, json.dumps(dict(spec), indent=2))
            (folder / STATUS).unlink(missing_ok=True)
            records.forget_stop()  # here and not by the leader, which may be asked to stop before it is up
        number = operator.start(write_app(project.server_folder / "app"), {"spec": str(folder / SPEC)})
        write_text(folder / LED, json.dumps({"number": number}))
        return number


def number_of(spec: Mapping[str, Any]) -> int:
    """Flower's number of a run that was started."""
    path = Path(spec["folder"]) / LED
    if not path.is_file():
        raise FileNotFoundError(f"the run {spec['run']} was never started")
    return int(json.loads(path.read_text())["number"])


def is_led(folder: Path) -> bool:
    """Whether somebody leads the run of a folder now."""
    try:
        with RemoteRunFolder(folder).led():
            return False
    except Held:
        return True


def stop_run(project: Project, spec: Mapping[str, Any]) -> None:
    """Ends a run, and waits a while until its leader is gone; what it has completed is kept."""
    RemoteRunFolder(spec["folder"]).ask_to_stop()
    with contextlib.suppress(httpx.HTTPError, OSError), SuperLink(project) as operator:  # else there is none to stop
        operator.stop(number_of(spec))
    end = time.monotonic() + _PATIENCE
    while is_led(Path(spec["folder"])) and time.monotonic() < end:
        time.sleep(0.2)


def see_through(
    project: Project,
    spec: Mapping[str, Any],
    number: int,
    tell: Callable[[Mapping[str, Any]], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Follows a run to its end, and goes on with it where its leader was lost; gives its summary."""
    folder, tries, before = Path(spec["folder"]), 0, -1
    while True:
        try:
            return follow(project, spec, number, tell, say=say)
        except CutOff as lost:
            done = int(read_state(folder).get("round", 0))
            tries, before = (tries + 1 if done == before else 1), done
            if tries > _TRIES or RemoteRunFolder(folder).stop_asked:
                raise
            say(f"{lost.what}; going on with it")
            number = _go_on_with(project, spec)


def _go_on_with(project: Project, spec: Mapping[str, Any]) -> int:
    """Starts a run again, which may take some attempts while the server is being started."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return start_run(project, spec)
        except Held:  # it is led after all
            return number_of(spec)
        except (httpx.HTTPError, OSError) as error:
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)  # then its leader could say nothing
            if full or time.monotonic() > end:
                why = "the disk is full, so free some space" if full else str(error)
                told = f"the run {spec['run']} was cut off, and could not be gone on with: {why}"
                raise Failed(told + _advice(spec)) from None
        time.sleep(1)


def follow(
    project: Project,
    spec: Mapping[str, Any],
    number: int,
    tell: Callable[[Mapping[str, Any]], None] = lambda _: None,
    poll: float = 0.5,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Waits for the end of a run and gives its summary; `CutOff` where it has no leader any more.

    `tell` gets each new line of `letters.jsonl`, `say` a sentence about whom the run waits for.
    """
    folder = Path(spec["folder"])
    told = set(_text(folder / LETTERS).splitlines())  # what a run that goes on had said before
    checked = answered = time.monotonic()
    waiting, leader, away, late = "", Leader(folder), False, checked + _GLITCH
    while True:
        state = read_state(folder)
        if not state and time.monotonic() > late:
            late = math.inf
            say("its leader is being started")
        if state.get("waiting", "") != waiting:
            waiting = state.get("waiting", "")
            say(f"waiting for {waiting}, for {project.rounds.timeout:g} s at most" if waiting else "it goes on")
        text = _text(folder / LETTERS)
        for line in text[: text.rfind("\n") + 1].splitlines():
            if line not in told:
                told.add(line)
                tell(json.loads(line))
        if state.get("state") == "finished":
            summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
            return summary
        if state.get("state") == "failed":
            error = str(state.get("error"))
            raise Failed(f"the run {spec['run']} failed: {error}{_advice(spec, said=error)}")
        if time.monotonic() - checked > 2:
            checked = time.monotonic()
            status = _asked(project, number)
            if away != (status is None and time.monotonic() - answered > _GLITCH):
                away = not away
                say("the server does not answer; it is being waited for" if away else "the server is there again")
            if status is not None:
                answered = time.monotonic()
            elif time.monotonic() - answered > _PATIENCE:  # one question without an answer says nothing
                again = f"start it again with `fedquilt deploy server {project.folder}`"
                raise Failed(f"the server has not answered for {_PATIENCE:.0f} s; {again}{_advice(spec)}")
            over = (status or "").startswith("finished") or (status is not None and leader.lost())
            if over and read_state(folder).get("state") not in ("finished", "failed"):
                raise CutOff(f"the run {spec['run']} is over before its end: its leader is gone", _advice(spec))
        time.sleep(poll)


class Leader:
    """Whether a run that should have a leader has lost it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._seen, self._last = folder, False, time.monotonic()

    def lost(self) -> bool:
        """Looks: nobody leads the run, and has not for longer than a look or a start takes."""
        if is_led(self.folder):
            self._seen, self._last = True, time.monotonic()
        return time.monotonic() - self._last > (_LOST if self._seen else _START)


def _asked(project: Project, number: int) -> str | None:
    """How Flower says that a run stands; None where it does not answer."""
    try:
        with SuperLink(project) as operator:
            return operator.status(number)
    except (httpx.HTTPError, ConnectionError, KeyError):
        return None


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def read_state(folder: Path) -> dict[str, Any]:
    """How a run says that it stands."""
    path = folder / STATUS
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _advice(spec: Mapping[str, Any], said: str = "") -> str:
    folder = Path(spec["folder"])
    again = RemoteRunFolder(folder).again
    return f"; go on with `{again}`" if (folder / CHECKPOINT).is_dir() and again not in said else ""
