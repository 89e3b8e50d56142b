"""The server's half of the Flower app: it leads the run that a file describes, over Flower's grid."""

from __future__ import annotations

import contextlib
import json
import os
import sysconfig
import threading
import time
import traceback
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedquilt._util.lock import Held
from fedquilt.deploy.project import Project
from fedquilt.deploy.server.coordinator import lead
from fedquilt.deploy.server.run_folder import RemoteRunFolder
from fedquilt.deploy.server.silence import NoQuorum
from fedquilt.deploy.transport.transport import FlowerTransport, OpenTransport

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Leads a run; what goes wrong is said in the run's `status.json`."""
    path = Path(str(context.run_config["spec"])).resolve()
    spec = json.loads(path.read_text())
    project = Project.read(path.parents[2])
    records = RemoteRunFolder(project.runs / path.parent.name)
    leave_with_parent(records)
    limits = project.server_folder / "limits" / f"{records.folder.name}.json"
    try:
        known = project.server.authentication
        post = (
            FlowerTransport(grid, project.nodes, limits)
            if known
            else OpenTransport(grid, lambda: Project.read(project.folder).clients)
        )
        lead(project, spec, post)
    except Held:  # the run has a leader, whose words in `status.json` stay
        raise
    except Exception as error:
        with contextlib.suppress(OSError):  # a disk may be so full that only the first, or none, has room
            records.status(state="failed", error=in_words(error))
            records.say(traceback.format_exc())
            records.say(f"the run failed: {error}")
        raise
    finally:
        limits.unlink(missing_ok=True)


def in_words(error: Exception) -> str:
    """What the terminal says of the end of a run: a sentence that somebody wrote, or else what it was, and where.

    >>> in_words(ValueError("lr must be above 0"))
    'lr must be above 0'
    >>> in_words(KeyError("head"))
    "unexpected KeyError: 'head' (leader.log in the run's folder shows where)"
    """
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _installed(Path(frame.filename))]
    kind = type(error).__name__
    if own:  # code of the operator's: a method's server half, say
        return f"{Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name}: {kind}: {error}"
    if isinstance(error, ValueError | OSError | NoQuorum):
        return str(error)
    return f"unexpected {kind}: {error} (leader.log in the run's folder shows where)"


def _installed(file: Path) -> bool:
    places = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]
    return any(file.resolve().is_relative_to(place.resolve()) for place in (Path(__file__).parents[2], *places))


def leave_with_parent(records: RemoteRunFolder) -> None:
    """Ends this process when the one that started it is gone, or when the operator asks for it: Flower's own ways take
    half a minute, or for ever where a letter is being sent."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent and not records.stop_asked:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
