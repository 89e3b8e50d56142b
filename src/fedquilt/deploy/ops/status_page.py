"""How a federation stands, for people (`/`) and for Prometheus (`/metrics`), on a port of its own."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedquilt.deploy.ops.sent_away import sent_away
from fedquilt.deploy.ops.superlink import who_is_there
from fedquilt.deploy.project import Project

_PAGE = """<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="5"><title>{title}</title>
<style>body{{font:14px sans-serif;margin:2em}}td,th{{padding:.2em 1em;text-align:left}}</style>
<h1>{title}</h1><h2>Clients</h2><table>{clients}</table>{refused}<h2>Runs</h2>
<table><tr><th>run<th>state<th>round<th>last exchange<th>up<th>down<th>left out</tr>{runs}</table>
"""


@dataclass
class RunFacts:
    """What the files of a run say."""

    name: str
    state: str
    round: int = 0
    rounds: int = 0
    seconds: float = 0.0  # of its last exchange of letters
    up: int = 0
    down: int = 0
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # by client and code


def facts_of(folder: Path) -> RunFacts:
    """Reads a run's status and letters."""
    status = json.loads((folder / "status.json").read_text())
    found = RunFacts(folder.name, str(status["state"]), status.get("round", 0), status.get("rounds", 0))
    letters = folder / "letters.jsonl"
    text = letters.read_text() if letters.is_file() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        letter: dict[str, Any] = json.loads(line)
        found.seconds = letter["seconds"]
        found.up += sum(letter["bytes_up"].values())
        found.down += sum(letter["bytes_down"].values())
        found.refused.update(letter["refused"].items())
    return found


def all_runs(project: Project) -> list[RunFacts]:
    """The runs of a federation; the one that moved last comes last."""
    found = sorted(project.runs.glob("*/status.json"), key=lambda path: path.stat().st_mtime)
    return [facts_of(path.parent) for path in found]


def metrics(clients: dict[str, str], runs: list[RunFacts]) -> str:
    """The facts in the format of Prometheus.

    >>> print(metrics({"a": "online"}, [RunFacts("r", "running", 2, 5, 1.5, 10, 20, Counter({("a", "failed"): 1}))]))
    fedquilt_client_online{client="a"} 1
    fedquilt_run_running{run="r"} 1
    fedquilt_round{run="r"} 2
    fedquilt_rounds{run="r"} 5
    fedquilt_exchange_seconds{run="r"} 1.5
    fedquilt_bytes_up_total{run="r"} 10
    fedquilt_bytes_down_total{run="r"} 20
    fedquilt_refused_total{run="r",client="a",code="failed"} 1
    <BLANKLINE>
    """
    lines = [f'fedquilt_client_online{{client="{name}"}} {int(state == "online")}' for name, state in clients.items()]
    for run in runs:
        of = f'{{run="{run.name}"}}'
        lines += [f"fedquilt_run_running{of} {int(run.state == 'running')}", f"fedquilt_round{of} {run.round}"]
        lines += [f"fedquilt_rounds{of} {run.rounds}", f"fedquilt_exchange_seconds{of} {run.seconds:g}"]
        lines += [f"fedquilt_bytes_up_total{of} {run.up}", f"fedquilt_bytes_down_total{of} {run.down}"]
        for (client, code), count in sorted(run.refused.items()):
            lines.append(f'fedquilt_refused_total{{run="{run.name}",client="{client}",code="{code}"}} {count}')
    return "\n".join(lines) + "\n"


def page(title: str, clients: dict[str, str], runs: list[RunFacts], refused: list[str]) -> str:
    """The facts as a page that renews itself; `refused` has a sentence about each whom the server sent away."""
    rows = "".join(f"<tr><td>{escape(name)}<td>{escape(state)}</tr>" for name, state in clients.items())
    lines = ""
    for run in reversed(runs):
        left_out = ", ".join(f"{client}: {code} {count}x" for (client, code), count in sorted(run.refused.items()))
        cells = (run.name, run.state, f"{run.round} of {run.rounds}", f"{run.seconds:.1f} s", f"{run.up / 1e6:.1f} MB")
        shown = "".join(f"<td>{escape(cell)}" for cell in (*cells, f"{run.down / 1e6:.1f} MB", left_out))
        lines += f"<tr>{shown}</tr>"
    told = "<h2>Sent away</h2>" + "<br>".join(map(escape, refused)) if refused else ""
    return _PAGE.format(title=escape(title), clients=rows, refused=told, runs=lines)


@contextmanager
def served(project: Project, port: int, listen: str = "127.0.0.1") -> Iterator[int]:
    """Serves both on a port (0: a free one) while the context lasts; gives the port. Nobody is asked who they are."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen = who_is_there(project) or {}
            clients = {name: seen.get(name, "not seen") for name in project.clients}
            if self.path == "/metrics":
                kind, text = "text/plain; version=0.0.4", metrics(clients, all_runs(project))
            elif self.path == "/":
                kind = "text/html; charset=utf-8"
                text = page(str(project.folder), clients, all_runs(project), sent_away(project))
            else:
                self.send_error(404)
                return
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing: whoever looks does so every few seconds."""

    with ThreadingHTTPServer((listen, port), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
