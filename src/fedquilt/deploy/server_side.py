"""The server's machine: SuperLink on the loopback address, nginx in front of it, the project's clients registered."""

from __future__ import annotations

import json
import ssl
import time
import urllib.request
from contextlib import ExitStack
from types import TracebackType

from fedquilt.deploy import nginx
from fedquilt.deploy.operator import Operator
from fedquilt.deploy.processes import Failed, Service, environment, free_port, listening, program
from fedquilt.deploy.project import Project
from fedquilt.files import write_text


class ServerSide:
    """Both processes of the server; leaving the context ends them.

    Without a gate SuperLink listens on the public port itself, which is allowed on the loopback address alone.
    """

    def __init__(self, project: Project, gate: bool = True) -> None:
        self.project, self.with_gate = project, gate
        self.inner_port = free_port() if gate else project.server.port
        self.superlink: Service | None = None
        self.gate: Service | None = None
        self._stack = ExitStack()

    def __enter__(self) -> ServerSide:
        try:
            server = self.project.server
            if not self.with_gate and server.listen not in ("127.0.0.1", "localhost"):
                raise ValueError(
                    f"without nginx the server may listen on 127.0.0.1 alone, not on {server.listen}: whoever reaches "
                    "Flower's port can register nodes and start runs"
                )
            if listening(server.reachable, server.port):
                raise OSError(f"port {server.port} is in use; end what listens there or change [server] port")
            executable = nginx.find_nginx() if self.with_gate else ""
            self.superlink = self._start_superlink()
            self._register_clients()
            if self.with_gate:
                self.gate = self._start_gate(executable)
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
        return "nginx is OFF: every process on this machine can register nodes and start runs."

    def watch(self) -> None:
        """Returns never, unless one of the processes ends by itself, which is an error."""
        while all(service.alive for service in self.services):
            time.sleep(0.5)
        dead = next(service for service in self.services if not service.alive)
        raise Failed(f"{dead.name} ended by itself; the end of {dead.log}:\n{dead.tail()}")

    @property
    def services(self) -> list[Service]:
        """The processes that must be alive."""
        return [service for service in (self.superlink, self.gate) if service is not None]

    def _start_superlink(self) -> Service:
        server, folder = self.project.server, self.project.server_folder
        control = folder / "control.json"
        write_text(control, json.dumps({"port": self.inner_port}))
        self._stack.callback(lambda: control.unlink(missing_ok=True))
        command = [program("flower-superlink"), "--host", "127.0.0.1", "--port", str(self.inner_port)]
        command += ["--database", str(folder / "superlink.db"), "--disable-runtime-dependency-installation"]
        if server.tls:
            command += ["--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.crt")]
            command += ["--ssl-keyfile", str(folder / "server.key")]
        else:
            command += ["--insecure"]
        if server.authentication:
            command += ["--enable-supernode-auth"]
        log = folder / "logs" / "superlink.log"
        service = Service.start("SuperLink", command, log, environment(self.project.flower_home))
        self._stack.callback(service.stop)
        service.wait_until(self._healthy, "starting")
        return service

    def _start_gate(self, executable: str) -> Service:
        server, folder = self.project.server, self.project.server_folder
        gate = folder / "nginx"
        gate.mkdir(exist_ok=True)
        text = nginx.configuration(
            gate, folder, server.listen, server.port, self.inner_port, server.tls, server.authentication
        )
        (gate / "nginx.conf").write_text(text)
        command = [executable, "-p", str(gate), "-c", str(gate / "nginx.conf"), "-e", str(gate / "error.log")]
        service = Service.start("nginx", command, folder / "logs" / "nginx.log", environment(self.project.flower_home))
        self._stack.callback(service.stop)
        service.wait_until(lambda: listening(server.reachable, server.port), "starting")
        return service

    def _healthy(self) -> bool:
        scheme, context = "http", None
        if self.project.server.tls:
            scheme = "https"
            context = ssl.create_default_context(cafile=str(self.project.server_folder / "ca.crt"))
        try:
            with urllib.request.urlopen(f"{scheme}://127.0.0.1:{self.inner_port}/health", context=context, timeout=2):
                return True
        except OSError:
            return False

    def _register_clients(self) -> None:
        """Registers the keys of clients that are not registered yet; a key is a client's name from then on."""
        if not self.project.server.authentication:
            return
        nodes = self.project.nodes()
        with Operator(self.project) as operator:
            for name in self.project.clients:
                if name not in nodes.values():
                    nodes[operator.register(self.project.public_key(name))] = name
        self.project.write_nodes(nodes)
