"""What the operator asks of SuperLink: to register a client's key, to start a run, how things stand.

These calls go to SuperLink's control interface on the loopback address. Flower's command line makes the same ones, but
takes a second or two for each.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext

from fedquilt.deploy.ops.processes import Failed
from fedquilt.deploy.project import Project
from fedquilt.deploy.server.door import SECRET_HEADER


class _Operator:
    """Shows at the door that a request is the operator's."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Adds the secret to a request."""
        context.request.headers[SECRET_HEADER] = self._secret
        return call_next(context)


class SuperLink(AbstractContextManager["SuperLink"]):
    """A connection to the control interface of a project's SuperLink."""

    def __init__(self, project: Project) -> None:
        path, away = project.server_folder / "control.json", f"the server of {project.folder} is not running"
        if not path.is_file():
            raise ConnectionError(f"{away}; start it with `fedquilt deploy server {project.folder}`")
        try:
            secret = (project.server_folder / "control.secret").read_text()
            control = json.loads(path.read_text())
            certificate = Path(control["ca"]).read_bytes() if project.server.tls else None
        except PermissionError:
            raise PermissionError(f"only who started the server of {project.folder} may ask it that") from None
        except FileNotFoundError:  # what a server that was killed had left is being replaced
            raise ConnectionError(f"{away} yet; try again in a moment") from None
        self._client = ControlHttpClient.from_server_address(
            f"127.0.0.1:{control['port']}",
            insecure=not project.server.tls,
            root_certificates=certificate,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="fedquilt"), _Operator(secret)],
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def register(self, key: Path) -> int:
        """Registers a client's public key; the number is Flower's name for the client."""
        public = load_ssh_public_key(key.read_bytes())
        assert isinstance(public, ec.EllipticCurvePublicKey)
        try:
            answer = self._client.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(public)))
        except httpx.HTTPStatusError as error:
            raise Failed(f"the key {key.name} could not be registered: {error.response.text[:300]}") from None
        return int(answer.node_id)

    def unregister(self, number: int) -> None:
        """Takes a client's key away; one that is not there any more is no matter."""
        try:
            self._client.UnregisterNode(UnregisterNodeRequest(node_id=number))
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in (400, 404):
                raise

    def start(self, app: Path, config: Mapping[str, str | int | float | bool]) -> int:
        """Sends an app to run; the number is Flower's name for the run."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Flower asks pathspec for a pattern by its old name
            bundle = build_fab_from_disk(app)
        request = StartRunRequest(
            fab=fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})),
            override_config=user_config_to_proto(dict(config)),
        )
        return int(self._client.StartRun(request).run_id)

    def status(self, run: int) -> str:
        """For example 'running', 'finished:completed', 'finished:failed'."""
        found = self._client.ListRuns(ListRunsRequest(run_id=run)).run_dict[run].status
        return f"{found.status}:{found.sub_status}" if found.sub_status else str(found.status)

    def nodes(self) -> dict[int, str]:
        """Each registered node and whether it is 'online', 'offline' or only 'registered'."""
        return {int(n.node_id): str(n.status) for n in self._client.ListNodes(ListNodesRequest()).nodes_info}

    def stop(self, run: int) -> None:
        """Ends a run."""
        self._client.StopRun(StopRunRequest(run_id=run))


def who_is_there(project: Project) -> dict[str, str] | None:
    """Each client and whether it is online, as far as Flower knows; None where the server does not run."""
    try:
        with SuperLink(project) as operator:
            seen = operator.nodes()
    except (ConnectionError, httpx.HTTPError):
        return None
    names = project.nodes()
    return {names[number]: state for number, state in seen.items() if number in names}
