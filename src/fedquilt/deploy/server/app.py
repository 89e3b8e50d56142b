"""The server's half of the Flower app: it leads the run that a file describes, over Flower's grid."""

from __future__ import annotations

import json
import os
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
        records.say(traceback.format_exc())
        records.say(f"the run failed: {error}")
        records.status(state="failed", error=str(error))
        raise
    finally:
        limits.unlink(missing_ok=True)


def leave_with_parent(records: RemoteRunFolder) -> None:
    """Ends this process when the one that started it is gone, or when the operator asks for it: Flower's own ways take
    half a minute, or for ever where a letter is being sent."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent and not records.stop_asked:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
