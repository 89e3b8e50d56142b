"""The server's half of the Flower app: it leads the run that a file describes, over Flower's grid."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedquilt.deploy.lead import lead
from fedquilt.deploy.post import FlowerPost, OpenPost
from fedquilt.deploy.project import Project
from fedquilt.deploy.records import Records

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Leads a run; what goes wrong is said in the run's `status.json`."""
    spec = json.loads(Path(str(context.run_config["spec"])).read_text())
    project = Project.read(Path(spec["project"]))
    try:
        known = project.server.authentication
        post = FlowerPost(grid, project.nodes()) if known else OpenPost(grid, project.clients)
        lead(project, spec, post)
    except Exception as error:
        traceback.print_exc()
        Records(spec["folder"]).status(state="failed", error=str(error))
        raise
