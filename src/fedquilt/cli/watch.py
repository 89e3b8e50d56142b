"""`--watch`: the page about runs that are still going, served to this machine only, new as rounds finish."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedquilt.cli.output import Refused, note

HOST = "127.0.0.1"
EVERY = 2.0  # seconds between two looks
_USUAL = 8323
_FILES = ("metrics.jsonl", "plans.jsonl", "traffic.jsonl", "summary.json", "run.toml", "comparison.json")


class Watch:
    """A server of the page about a directory: a run, or a comparison. It answers on the loopback address alone."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        self._text, self._state = "", ""
        self._busy = threading.Lock()
        self.seen = 0.0
        self.server = self._bind(port)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server.server_address[1])

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{HOST}:{self.port}/"

    def data(self) -> str:
        """What the page draws, as JSON; read again only when a file has changed."""
        from fedquilt.report import data_json, page_data

        with self._busy:
            state = self._look()
            if state != self._state:
                self._text = data_json(page_data([self.folder], title=f"{self.folder.name}, running"))
                self._state = state
            return self._text

    def page(self) -> str:
        """The page itself."""
        import json

        from fedquilt.report import render_page

        return render_page(json.loads(self.data()), every=EVERY)

    def close(self) -> None:
        """Let an open page fetch what came last, and end."""
        if time.monotonic() - self.seen < 3 * EVERY:
            time.sleep(1.5 * EVERY)
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def _look(self) -> str:
        found = [path for name in _FILES for path in (*self.folder.glob(name), *self.folder.glob(f"*/{name}"))]
        return repr([(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(found)])

    def _bind(self, port: int) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"watch": self})
        for wanted in (port,) if port else (_USUAL, 0):
            try:
                return ThreadingHTTPServer((HOST, wanted), handler)
            except OSError as error:
                reason = error
        raise Refused(f"--watch {port}: this port cannot be listened on ({reason}); give another, or none")


class _Handler(BaseHTTPRequestHandler):
    watch: Watch

    def do_GET(self) -> None:
        """The page, its data, and nothing else."""
        # A page of another site that had its name lead here would still say that name.
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            self._send(403, "text/plain", "this page is for this machine only")
            return
        self.watch.seen = time.monotonic()
        path = self.path.partition("?")[0]
        try:
            if path == "/":
                self._send(200, "text/html", self.watch.page())
            elif path == "/data.json":
                self._send(200, "application/json", self.watch.data())
            else:
                self._send(404, "text/plain", "there is only one page here")
        except (FileNotFoundError, ValueError):  # the first round is not over: the browser asks again by itself
            self._send(503, "text/html", "<meta http-equiv=refresh content=2><p>Nothing is measured yet.", retry="2")

    def _send(self, code: int, kind: str, text: str, retry: str = "") -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if retry:
            self.send_header("Retry-After", retry)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal shows progress."""


@contextmanager
def watched(port: int | None, folder: Path | None) -> Iterator[None]:
    """Serve a directory's page meanwhile; not at all where no port is given."""
    if port is None:
        yield
        return
    if folder is None:
        raise Refused("--watch shows what is kept on disk, and nothing is; leave out --no-keep")
    try:
        import plotly  # noqa: F401
    except ModuleNotFoundError as error:
        raise Refused(f"the page needs '{error.name}': pip install 'fedquilt[report]'") from error
    watch = Watch(folder, port)
    note(f"watch it at {watch.address}")
    try:
        yield
    finally:
        watch.close()
