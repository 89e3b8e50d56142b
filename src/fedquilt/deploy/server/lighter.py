"""Flower's server without some of what it does for nothing in every request: about a quarter of its work.

* Parts of its app that have to do with the operator's requests, or with clients', are asked about all; each such
  question takes longer than most answers. Here they are asked about their own paths.
* Before it says how a run stands, which it does in every request, it writes to the database that processes without a
  sign of life are gone. Here it does so once a second; a sign of life is good for many.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.middleware import Middleware

_PATHS = {  # by the beginnings of their names: where parts of the app have something to do, as they say themselves
    "Control": "/v1/control/",
    "Fleet": "/v1/fleet/",
    "NodeAuth": "/v1/fleet/",
}
_GONE_EVERY = 1.0  # seconds

App = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class OnlyThere:
    """A part of an app that requests of other paths pass by."""

    def __init__(self, app: App, path: str, part: Middleware) -> None:
        self.app, self.path = app, path
        self.part: App = part.cls(app, *part.args, **part.kwargs)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """One request."""
        there = scope["type"] == "http" and scope["path"].startswith(self.path)
        await (self.part if there else self.app)(scope, receive, send)


def narrowed(part: Middleware) -> Middleware:
    """A part of Flower's app where it has something to do; one that is not known stays everywhere."""
    name = getattr(part.cls, "__name__", "")
    path = next((path for start, path in _PATHS.items() if name.startswith(start)), None)
    return part if path is None else Middleware(OnlyThere, path=path, part=part)


def seldom(act: Callable[[Any], None], seconds: float) -> Callable[[Any], None]:
    """A method without arguments that does nothing if it was done a moment ago.

    >>> done = seldom(lambda who: print("done"), 60.0)
    >>> done(None), done(None)
    done
    (None, None)
    """
    last = -seconds

    def method(self: Any) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            act(self)

    return method


def lighten() -> None:
    """Makes it so for a SuperLink that this process is about to become."""
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
    from flwr.superlink import main as superlink

    parts = superlink._get_middleware
    vars(superlink)["_get_middleware"] = lambda: [narrowed(part) for part in parts()]
    gone = SqlLinkState._cleanup_expired_task_tokens
    type.__setattr__(SqlLinkState, "_cleanup_expired_task_tokens", seldom(gone, _GONE_EVERY))
