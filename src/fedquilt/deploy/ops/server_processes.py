"""The server's machine: SuperLink on the loopback address, what starts runs' leaders, and nginx in front of it.

Everything that is started is watched: what ends, or does not answer for a while, is started again.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sqlite3
import ssl
import sys
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import TracebackType

from fedquilt._util.files import write_text
from fedquilt.deploy.ops import nginx
from fedquilt.deploy.ops.keys import check_certificate, make_authority, make_server_certificate, write_private
from fedquilt.deploy.ops.processes import Failed, Service, environment, free_port, listening, program, rotate
from fedquilt.deploy.ops.registration import register_clients
from fedquilt.deploy.project import Project
from fedquilt.deploy.server.door import REFUSED, key_bytes

_DEAF = 60.0  # seconds without an answer after which SuperLink is started again
_CALM = 120.0  # seconds that a process must live for its earlier ends to be forgotten
_ENDS = 6  # in a row, after which starting it again is no use


class ServerSide:
    """The processes of the server; leaving the context ends them.

    Without a gate SuperLink listens on the public port itself, which is allowed on the loopback address alone.
    """

    def __init__(self, project: Project, gate: bool = True) -> None:
        self.project, self.with_gate = project, gate
        self.inner_port = free_port() if gate else project.server.port
        self.services: dict[str, Service] = {}
        self._stack = ExitStack()
        self._starts: dict[str, Callable[[], Service]] = {}
        self._ends: dict[str, list[float]] = {}

    def __enter__(self) -> ServerSide:
        try:
            server = self.project.server
            if not self.with_gate and server.listen not in ("127.0.0.1", "localhost"):
                raise ValueError(
                    f"without nginx the server may listen on 127.0.0.1 alone, not on {server.listen}: nothing else "
                    "bounds what strangers send, how slowly, and over how many connections"
                )
            if listening(server.reachable, server.port):
                raise OSError(f"port {server.port} is in use; end what listens there or change [server] port")
            self._starts = {"superlink": self._start_superlink, "superexec": self._start_superexec}
            if self.with_gate:
                executable = nginx.find_nginx()
                self._starts["gate"] = lambda: self._start_gate(executable)
            if server.tls:
                check_certificate(self.project.server_folder / "server.crt", self.project.folder)
            self._stack.callback(self._stop)
            self._prepare()
            for name, start in self._starts.items():
                self.services[name] = start()
                if name == "superlink":
                    register_clients(self.project)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def warning(self) -> str | None:
        """What the operator must read if there is no gate, or None."""
        if self.with_gate:
            return None
        return (
            "nginx is OFF: every process on this machine reaches Flower's server, and nothing bounds what it sends, "
            "how slowly, and over how many connections."
        )

    @property
    def inner(self) -> Path:
        """Where SuperLink's own certificate is: clients see nginx's, which can be renewed without SuperLink."""
        return self.project.server_folder / ("inner" if self.with_gate else "")

    @property
    def superlink(self) -> Service:
        """SuperLink's process as it is now."""
        return self.services["superlink"]

    def watch(self, poll: float = 0.5) -> Iterator[str]:
        """Starts what has ended or gone deaf again, and yields a sentence about it each time; `Failed` where that is of
        no use. Between two sentences nothing is wrong."""
        heard = looked = time.monotonic()
        while True:
            for name, service in list(self.services.items()):
                if not service.alive:
                    yield f"{service.name} ended by itself, and is started again; its last words:\n{service.tail(5)}"
                    self._again(name)
            if time.monotonic() - looked > 5:
                looked = time.monotonic()
                heard = looked if self._healthy() else heard
                with suppress(OSError):  # a full disk is no reason to end
                    for log in self._logs():
                        rotate(log)
            if time.monotonic() - heard > _DEAF:
                yield f"SuperLink has not answered for {_DEAF:.0f} s; it is started again"
                self._again("superlink")
                heard = time.monotonic()
            time.sleep(poll)

    def _logs(self) -> list[Path]:
        """Files that grow while the server runs."""
        folder = self.project.server_folder
        gate = [folder / "nginx" / name for name in ("access.log", "error.log", nginx.STRANGERS)]
        return [service.log for service in self.services.values()] + [folder / REFUSED, *gate]

    def _again(self, name: str) -> None:
        """Starts a process again, after a pause that grows with how often that was done of late; a start that comes to
        nothing counts as an end."""
        old, error = self.services[name], ""
        while True:
            now = time.monotonic()
            ends = [end for end in self._ends.get(name, []) if now - end < _CALM] + [now]
            self._ends[name] = ends
            if len(ends) >= _ENDS:
                told = error or f"the end of {old.log}:\n{old.tail()}"
                raise Failed(f"{old.name} ended {len(ends)} times in a row; {told}")
            old.kill()
            time.sleep(min(30.0, 2.0 ** (len(ends) - 1) - 1))
            try:
                self.services[name] = self._starts[name]()
                return
            except OSError as failure:
                error = str(failure)

    def _stop(self) -> None:
        for service in reversed(list(self.services.values())):
            service.stop()

    def _prepare(self) -> None:
        """Secrets for whoever may ask SuperLink something, and a database that gives back what it no longer needs."""
        folder = self.project.server_folder
        for name in ("control.secret", "exec.secret"):
            (folder / name).unlink(missing_ok=True)
            write_private(folder / name, secrets.token_hex(32).encode())
        if self.with_gate and self.project.server.tls:  # between nginx and SuperLink, for as long as they run
            shutil.rmtree(self.inner, ignore_errors=True)
            self.inner.mkdir(mode=0o700)
            make_authority(self.inner)
            make_server_certificate(self.inner, self.inner, ["localhost", "127.0.0.1"])
        control = folder / "control.json"
        write_text(control, json.dumps({"port": self.inner_port, "ca": str(self.inner / "ca.crt")}))
        self._stack.callback(lambda: control.unlink(missing_ok=True))
        with closing(sqlite3.connect(folder / "superlink.db", isolation_level=None)) as database:
            database.execute("PRAGMA auto_vacuum = FULL")
            database.execute("VACUUM")
        (folder / "superlink.db").chmod(0o600)

    def _start_superlink(self) -> Service:
        server, folder = self.project.server, self.project.server_folder
        command = [sys.executable, "-m", "fedquilt.deploy.server.door", str(self.project.folder)]
        command += ["--host", "127.0.0.1", "--port", str(self.inner_port), "--isolation", "process"]
        command += ["--superexec-auth-secret-file", str(folder / "exec.secret")]
        command += ["--database", str(folder / "superlink.db"), "--disable-runtime-dependency-installation"]
        if server.tls:
            command += [
                "--ssl-ca-certfile",
                str(self.inner / "ca.crt"),
                "--ssl-certfile",
                str(self.inner / "server.crt"),
            ]
            command += ["--ssl-keyfile", str(self.inner / "server.key")]
        else:
            command += ["--insecure"]
        if server.authentication:
            command += ["--enable-supernode-auth"]
        service = self._service("SuperLink", command, "superlink.log")
        service.wait_until(self._healthy, "starting")
        return service

    def _start_superexec(self) -> Service:
        """What starts the leader of each run."""
        folder = self.project.server_folder
        command = [program("flower-superexec"), "--runtime-api-address", f"127.0.0.1:{self.inner_port}"]
        command += ["--superexec-auth-secret-file", str(folder / "exec.secret")]
        command += ["--root-certificates", str(self.inner / "ca.crt")] if self.project.server.tls else ["--insecure"]
        return self._service("SuperExec", command, "superexec.log")

    def _service(self, name: str, command: list[str], log: str) -> Service:
        env = environment(self.project.flower_home)
        return Service.start(name, command, self.project.server_folder / "logs" / log, env)

    def _start_gate(self, executable: str) -> Service:
        server, gate = self.project.server, self.project.server_folder / "nginx"
        write_gate(self.project, self.inner_port)
        command = [executable, "-p", str(gate), "-c", str(gate / "nginx.conf"), "-e", str(gate / "error.log")]
        service = self._service("nginx", command, "nginx.log")
        service.wait_until(lambda: listening(server.reachable, server.port), "starting")
        return service

    def _healthy(self) -> bool:
        scheme, context = "http", None
        if self.project.server.tls:
            scheme = "https"
            context = ssl.create_default_context(cafile=str(self.inner / "ca.crt"))
        try:
            with urllib.request.urlopen(f"{scheme}://127.0.0.1:{self.inner_port}/health", context=context, timeout=2):
                return True
        except OSError:
            return False


def write_gate(project: Project, inner_port: int) -> None:
    """Writes nginx's configuration with the keys that are registered now."""
    server, folder = project.server, project.server_folder
    gate = folder / "nginx"
    gate.mkdir(exist_ok=True)
    keys = {name: b64encode(key_bytes(project.public_key(name))).decode() for name in project.nodes().values()}
    text = nginx.configuration(
        gate, folder, server.listen, server.port, inner_port, server.tls, server.authentication, keys
    )
    write_text(gate / "nginx.conf", text)
