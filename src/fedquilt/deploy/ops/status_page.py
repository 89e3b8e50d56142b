"""How a federation stands, for people (`/`) and for Prometheus (`/metrics`), on a port of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fedquilt.deploy.ops.run_facts import RunFacts, circles, facts_of, run_folders, to_look_at
from fedquilt.deploy.ops.sent_away import sent_away
from fedquilt.deploy.ops.superlink import who_is_there
from fedquilt.deploy.project import Project

_PAGE = """<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="5"><title>{title}</title>
<style>body{{font:14px sans-serif;margin:2em}}td,th{{padding:.2em 1em;text-align:left}}</style>
<h1>{title}</h1><h2>Clients</h2><table>{clients}</table>{refused}<h2>Runs</h2>
<table><tr><th>run<th>state<th>round<th>last exchange<th>up<th>down<th>left out</tr>{runs}</table>
{latest}
"""


def metrics(clients: dict[str, str], runs: Sequence[RunFacts], alarms: Sequence[str] = ()) -> str:
    """The facts in the format of Prometheus; `alarms` are those of the last run.

    >>> from collections import Counter
    >>> print(metrics({"a": "online"}, [RunFacts("r", "running", 2, 5, 1.5, 10, 20, Counter({("a", "failed"): 1}))]))
    fedquilt_client_online{client="a"} 1
    fedquilt_run_running{run="r"} 1
    fedquilt_round{run="r"} 2
    fedquilt_rounds{run="r"} 5
    fedquilt_exchange_seconds{run="r"} 1.5
    fedquilt_bytes_up_total{run="r"} 10
    fedquilt_bytes_down_total{run="r"} 20
    fedquilt_refused_total{run="r",client="a",code="failed"} 1
    fedquilt_clients_to_look_at{run="r"} 0
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
    if runs:
        lines.append(f'fedquilt_clients_to_look_at{{run="{runs[-1].name}"}} {len(alarms)}')
    return "\n".join(lines) + "\n"


def page(
    title: str,
    clients: dict[str, str],
    runs: Sequence[RunFacts],
    refused: Sequence[str],
    plan: str,
    alarms: Sequence[str],
) -> str:
    """The facts as a page that renews itself; `refused` has a sentence about each whom the server sent away, `plan` and
    `alarms` are those of the last run."""
    rows = "".join(f"<tr><td>{escape(name)}<td>{escape(state)}</tr>" for name, state in clients.items())
    lines = ""
    for run in reversed(runs):
        left_out = ", ".join(f"{client}: {code} {count}x" for (client, code), count in sorted(run.refused.items()))
        state = run.state + (f": {run.note}" if run.note else "")
        cells = (run.name, state, f"{run.round} of {run.rounds}", f"{run.seconds:.1f} s", f"{run.up / 1e6:.1f} MB")
        shown = "".join(f"<td>{escape(cell)}" for cell in (*cells, f"{run.down / 1e6:.1f} MB", left_out))
        lines += f"<tr>{shown}</tr>"
    told = "<h2>Sent away</h2>" + "<br>".join(map(escape, refused)) if refused else ""
    latest = "<h2>To look at in the last run</h2>" + "<br>".join(map(escape, alarms)) if alarms else ""
    latest += f"<h2>Circles of the last run</h2><pre>{escape(plan)}</pre>" if plan else ""
    return _PAGE.format(title=escape(title), clients=rows, refused=told, runs=lines, latest=latest)


@contextmanager
def served(project: Project, port: int, listen: str = "127.0.0.1") -> Iterator[int]:
    """Serves both on a port (0: a free one) while the context lasts; gives the port. Nobody is asked who they are."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            now = Project.read(project.folder)  # clients come and go while the server runs
            seen, places = who_is_there(now) or {}, run_folders(now)
            clients = {name: seen.get(name, "not seen") for name in now.clients}
            runs, alarms = [facts_of(place) for place in places], to_look_at(places[-1]) if places else []
            if self.path == "/metrics":
                kind, text = "text/plain; version=0.0.4", metrics(clients, runs, alarms)
            elif self.path == "/":
                kind, plan = "text/html; charset=utf-8", circles(places[-1]) if places else ""
                text = page(str(now.folder), clients, runs, sent_away(now), plan, alarms)
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
