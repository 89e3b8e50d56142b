"""Letters between the server and clients. The server's loop knows only this; Flower is one way to carry them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

_POLL = 0.2


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
        self._numbers = {name: number for number, name in names.items()}

    def reachable(self) -> set[str]:
        """Clients whose node is online, as far as Flower knows (it takes about a minute to notice a dead one)."""
        return {self._names[number] for number in self._grid.get_node_ids() if number in self._names}

    def exchange(self, letters: Mapping[str, bytes], round_: int, timeout: float) -> Iterator[Answer]:
        """See `Post`. A node that Flower gives up is an answer too, so that nobody waits for it."""
        from flwr.app import Message

        from fedquilt.deploy.relay import to_record

        messages = [
            Message(
                to_record(content),
                dst_node_id=self._numbers[name],
                message_type="train",
                group_id=str(round_),
                ttl=timeout + 5,
            )
            for name, content in letters.items()
        ]
        end = time.monotonic() + timeout
        numbers = list(self._grid.push_messages(messages)) or [""] * len(letters)
        waiting = {number: name for number, name in zip(numbers, letters, strict=True) if number}
        while waiting and time.monotonic() < end:
            for message in self._grid.pull_messages(list(waiting)):
                client = waiting.pop(message.metadata.reply_to_message_id)
                yield read_answer(client, self._numbers[client], message)
            if waiting:
                time.sleep(_POLL)
        unsent = [name for number, name in zip(numbers, letters, strict=True) if not number]
        for name in [*waiting.values(), *unsent]:
            yield Answer(name, code="no-answer")


def read_answer(client: str, node: int, message: Message) -> Answer:
    """The bytes of a Flower reply. An error that Flower made of it stays a code here, whatever its text was; Flower
    itself does not check that a reply comes from the node that was asked, so this does."""
    if message.has_error():
        return Answer(client, code="no-answer")
    if message.metadata.src_node_id != node:
        return Answer(client, code="unknown-client")
    from fedquilt.deploy.relay import read_record

    try:
        return Answer(client, content=read_record(message))
    except Exception:
        return Answer(client, code="unreadable")
