"""Letters between the server and clients. The server's loop knows only this; Flower is one way to carry them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fedquilt.deploy.wire import Refused, pack, unpack

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

_POLL = 0.2
_INTRODUCTION = 60.0  # seconds that an unknown node gets to say its name


@dataclass(frozen=True)
class Answer:
    """What came back for a client: the bytes it sent, or the code of `wire.REASONS` why none came."""

    client: str
    content: bytes = b""
    code: str = ""


class Post(Protocol):
    """Carries letters to clients and their answers back."""

    def reachable(self) -> set[str]:
        """Clients that seem to be there now."""
        ...

    def exchange(self, letters: Mapping[str, bytes], round_: int, timeout: float) -> Iterator[Answer]:
        """Sends one letter to each client and yields answers as they come, until all have or the time is up."""
        ...


class FlowerPost:
    """The post over Flower's grid. `names` maps Flower's node numbers to clients: the binding made at registration."""

    def __init__(self, grid: Grid, names: Mapping[int, str]) -> None:
        self._grid = grid
        self._names = dict(names)

    def reachable(self) -> set[str]:
        """Clients whose node is online, as far as Flower knows (it takes about a minute to notice a dead one)."""
        return {self._names[number] for number in self._grid.get_node_ids() if number in self._names}

    def exchange(self, letters: Mapping[str, bytes], round_: int, timeout: float) -> Iterator[Answer]:
        """See `Post`. A node that Flower gives up is an answer too, so that nobody waits for it."""
        numbers = {name: number for number, name in self._names.items()}
        yield from self._carry({numbers[name]: (name, letter) for name, letter in letters.items()}, round_, timeout)

    def _carry(self, letters: Mapping[int, tuple[str, bytes]], round_: int, timeout: float) -> Iterator[Answer]:
        """Letters by node number, each with the name of the client it is for."""
        from flwr.app import Message

        from fedquilt.deploy.parcel import to_record

        messages = [
            Message(to_record(content), dst_node_id=number, message_type="train", group_id=str(round_), ttl=timeout + 5)
            for number, (_, content) in letters.items()
        ]
        end = time.monotonic() + timeout
        posted = list(self._grid.push_messages(messages)) or [""] * len(letters)  # in order; empty where it failed
        waiting = {post: (number, letters[number][0]) for post, number in zip(posted, letters, strict=True) if post}
        while waiting and time.monotonic() < end:
            for message in self._grid.pull_messages(list(waiting)):
                number, client = waiting.pop(message.metadata.reply_to_message_id)
                yield read_answer(client, number, message)
            if waiting:
                time.sleep(_POLL)
        unsent = [letters[number][0] for post, number in zip(posted, letters, strict=True) if not post]
        for name in [*(name for _, name in waiting.values()), *unsent]:
            yield Answer(name, code="no-answer")


class OpenPost(FlowerPost):
    """The post where node authentication is off: nodes are asked for their names, and believed."""

    def __init__(self, grid: Grid, clients: Iterable[str]) -> None:
        super().__init__(grid, {})
        self._clients = set(clients)

    def reachable(self) -> set[str]:
        """Clients whose node is online; nodes not met before introduce themselves first."""
        online = set(self._grid.get_node_ids())
        self._names = {number: name for number, name in self._names.items() if number in online}
        question = pack({}, {"kind": "who", "token": ""})
        strangers = {number: (str(number), question) for number in online - set(self._names)}
        if strangers:
            for answer in self._carry(strangers, 0, _INTRODUCTION):
                name = _name(answer)
                if name in self._clients - set(self._names.values()):
                    self._names[int(answer.client)] = name
        return super().reachable()


def _name(answer: Answer) -> str:
    try:
        return str(unpack(answer.content)[1].get("name", ""))
    except Refused:
        return ""


def read_answer(client: str, node: int, message: Message) -> Answer:
    """The bytes of a Flower reply. An error that Flower made of it stays a code here, whatever its text was; Flower
    itself does not check that a reply comes from the node that was asked, so this does."""
    if message.has_error():
        return Answer(client, code="no-answer")
    if message.metadata.src_node_id != node:
        return Answer(client, code="unknown-client")
    from fedquilt.deploy.parcel import read_record

    try:
        return Answer(client, content=read_record(message))
    except Exception:
        return Answer(client, code="unreadable")
