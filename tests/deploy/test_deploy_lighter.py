"""Flower's server answers what it answered before some of its work was spared it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.proto.control_pb2 import StartRunRequest, StopRunRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.superlink import main as superlink
from starlette.middleware import Middleware

from fedquilt.deploy.server.lighter import lighten, narrowed

PROTOBUF = {"content-type": "application/protobuf"}
REQUESTS: list[tuple[str, str, bytes]] = [
    ("GET", "/health", b""),
    ("GET", "/nowhere", b""),
    ("POST", "/v1/control/stop-run", StopRunRequest(run_id=1).SerializeToString()),
    ("POST", "/v1/control/start-run", StartRunRequest().SerializeToString()),
    ("POST", "/v1/control/get-login-details", b""),
    (
        "POST",
        "/v1/fleet/activate-node",
        ActivateNodeRequest(public_key=b"k", heartbeat_interval=30).SerializeToString(),
    ),
    ("POST", "/v1/fleet/pull-messages", PullMessagesRequest().SerializeToString()),
    ("GET", "/v1/fleet/pull-messages", b""),
    ("POST", "/v1/fleet/pull-messages", b"\xff no protobuf"),
    ("POST", "/v1/runtime/acquire-task", b""),
    ("POST", "/v1/runtime/pull-object", b""),
]


def answers() -> list[tuple[int, bytes, str | None]]:
    """What Flower's app says to each request."""
    door = httpx.ASGITransport(superlink.create_app(), raise_app_exceptions=False)

    async def ask() -> list[tuple[int, bytes, str | None]]:
        found = []
        async with httpx.AsyncClient(transport=door, base_url="http://localhost") as client:
            for method, path, body in REQUESTS:
                answer = await client.request(method, path, content=body, headers=PROTOBUF)
                found.append((answer.status_code, answer.content, answer.headers.get("cache-control")))
        return found

    return asyncio.run(ask())


def test_every_request_is_answered_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = answers()
    parts = superlink._get_middleware
    monkeypatch.setattr(superlink, "_get_middleware", lambda: [narrowed(part) for part in parts()])
    assert answers() == before
    assert len({status for status, *_ in before}) > 3  # they are answered in more than one way
    assert [part.kwargs.get("path") for part in superlink._get_middleware()].count("/v1/fleet/") == 2


def test_a_part_is_asked_about_its_own_paths_alone() -> None:
    asked = list[str]()

    class ControlThing:
        def __init__(self, app: Callable[..., Any]) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            asked.append(scope.get("path", scope["type"]))
            await self.app(scope, receive, send)

    seen = list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope.get("path", scope["type"]))

    part = narrowed(Middleware(ControlThing))
    narrow: Any = part.cls(app, *part.args, **part.kwargs)
    for path in ("/v1/control/start-run", "/v1/fleet/pull-messages", "/"):
        asyncio.run(narrow({"type": "http", "path": path}, None, None))
    asyncio.run(narrow({"type": "lifespan"}, None, None))
    assert asked == ["/v1/control/start-run"]
    assert seen == ["/v1/control/start-run", "/v1/fleet/pull-messages", "/", "lifespan"]


def test_what_is_gone_is_looked_for_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, clock = list[object](), [100.0]
    monkeypatch.setattr(SqlLinkState, "_cleanup_expired_task_tokens", looks.append)
    monkeypatch.setattr(superlink, "_get_middleware", superlink._get_middleware)  # is put back afterwards
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    lighten()
    for moment in (100.0, 100.5, 100.9, 101.0, 105.0, 105.1):
        clock[0] = moment
        SqlLinkState._cleanup_expired_task_tokens("a state")  # type: ignore[arg-type]
    assert looks == ["a state"] * 3
