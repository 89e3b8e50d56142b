"""Letters between the server and clients. The server's loop knows only this; Flower is one way to carry them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedquilt._util.files import write_text
from fedquilt.deploy.transport.wire import Refused, pack, unpack

if TYPE_CHECKING:
    from flwr.serverapp import Grid

_INTRODUCTION = 60.0  # seconds that an unknown node gets to say its name


@dataclass(frozen=True)
class Answer:
    """What came back for a client: the bytes it sent, or the code of `wire.REASONS` why none came."""

    client: str
    content: bytes = b""
    code: str = ""


class Patience:
    """How long an exchange waits: `seconds`, or `grace` seconds after as many answers as are `needed` were good, which
    whoever reads them says by `good`. `largest` has the bytes that a client's answer may have.

    >>> patience = Patience(60, needed=1, grace=0)
    >>> patience.left > 50, patience.good() or patience.left
    (True, 0.0)
    """

    def __init__(
        self, seconds: float, needed: int = 0, grace: float = 0.0, largest: Mapping[str, int] | None = None
    ) -> None:
        self.seconds, self.grace, self.largest = seconds, grace, dict(largest or {})
        self._needed, self._end = needed, time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the exchange is over."""
        return max(0.0, self._end - time.monotonic())

    def good(self) -> None:
        """One answer more that counts."""
        self._needed -= 1
        if self._needed == 0:
            self._end = min(self._end, time.monotonic() + self.grace)


class Transport(Protocol):
    """Carries letters to clients and their answers back."""

    def members(self) -> set[str]:
        """Clients that belong to the federation now."""
        ...

    def reachable(self) -> set[str]:
        """Clients that seem to be there now."""
        ...

    def exchange(self, letters: Mapping[str, bytes], round_: int, patience: Patience) -> Iterator[Answer]:
        """Sends one letter to each client and yields answers as they come, until all have or patience is over."""
        ...


class FlowerTransport:
    """The post over Flower's grid. `names` tells Flower's node numbers and their clients, the binding made at
    registration, as it is now: clients come, and get new keys, while a run is going on."""

    def __init__(self, grid: Grid, names: Callable[[], Mapping[int, str]], limits: Path | None = None) -> None:
        self._grid = grid
        self._known = names
        self._names = dict(names())
        self._limits = limits  # where the door reads how much clients may upload

    def members(self) -> set[str]:
        """Clients with a registered key."""
        return set(self._known().values())

    def reachable(self) -> set[str]:
        """Clients whose node is online, as far as Flower knows (it takes half a minute to notice a dead one)."""
        self._names = dict(self._known())
        return {self._names[number] for number in self._grid.get_node_ids() if number in self._names}

    def exchange(self, letters: Mapping[str, bytes], round_: int, patience: Patience) -> Iterator[Answer]:
        """See `Transport`. A node that Flower gives up is an answer too, so that nobody waits for it."""
        numbers = {name: number for number, name in self._names.items()}
        if self._limits is not None:
            self._limits.parent.mkdir(exist_ok=True)
            write_text(self._limits, json.dumps(patience.largest))
        known = {numbers[name]: (name, letter) for name, letter in letters.items() if name in numbers}
        yield from self._carry(known, round_, patience)
        for name in sorted(set(letters) - set(numbers)):  # its key was taken away in the meantime
            yield Answer(name, code="no-answer")

    def _carry(self, letters: Mapping[int, tuple[str, bytes]], round_: int, patience: Patience) -> Iterator[Answer]:
        """Letters by node number, each with the name of the client it is for."""
        from flwr.app import Message

        from fedquilt.deploy.transport.flower_mail import Mail
        from fedquilt.deploy.transport.flower_records import to_record

        kept = patience.seconds + 5

        def push() -> list[str]:
            """Flower's name for each letter, in order; empty where it could not be sent."""
            messages = [
                Message(to_record(content), dst_node_id=number, message_type="train", group_id=str(round_), ttl=kept)
                for number, (_, content) in letters.items()
            ]
            return list(self._grid.push_messages(messages)) or [""] * len(letters)

        posted = _until_sent(push, patience)
        sent = {post: (number, letters[number][0]) for post, number in zip(posted, letters, strict=True) if post}
        silent = {name for name, _ in letters.values()}
        for answer in Mail(self._grid, sent, patience).collect():
            silent.discard(answer.client)
            yield answer
        for name in sorted(silent):
            yield Answer(name, code="no-answer")


class OpenTransport(FlowerTransport):
    """The post where node authentication is off: nodes are asked for their names, and believed."""

    def __init__(self, grid: Grid, clients: Callable[[], Iterable[str]]) -> None:
        self._met: dict[int, str] = {}
        super().__init__(grid, lambda: self._met)
        self._clients = clients

    def members(self) -> set[str]:
        """Clients by the operator's list."""
        return set(self._clients())

    def reachable(self) -> set[str]:
        """Clients whose node is online; nodes not met before introduce themselves first."""
        online = set(self._grid.get_node_ids())
        self._met = {number: name for number, name in self._met.items() if number in online}
        question = pack({}, {"kind": "who", "token": ""})
        strangers = {number: (str(number), question) for number in online - set(self._met)}
        if strangers:
            for answer in self._carry(strangers, 0, Patience(_INTRODUCTION)):
                name = _name(answer)
                if name in set(self._clients()) - set(self._met.values()):
                    self._met[int(answer.client)] = name
        return super().reachable()


def _until_sent(push: Callable[[], list[str]], patience: Patience) -> list[str]:
    """Sends letters, again while the server is too busy to take them: a hiccup of it must not end a run."""
    while True:
        try:
            return push()
        except Exception as error:  # Flower has many words for it
            print(f"letters could not be sent ({type(error).__name__}); they are sent again", flush=True)
            if patience.left <= 1:
                raise
        time.sleep(1)


def _name(answer: Answer) -> str:
    try:
        return str(unpack(answer.content)[1].get("name", ""))
    except Refused:
        return ""
