"""Answers of one exchange out of Flower's hands: each by itself, none larger than expected, none waited for too long.

Flower's own `pull_messages` gets all answers or none, waits three minutes for what a client announced and did not
upload, and unpacks whatever came. Here a thread gets each answer that was announced, piece by piece, and whatever is
odd about one of them is that client's alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, inflate_object_from_contents

from fedquilt.deploy.transport.flower_records import read_record
from fedquilt.deploy.transport.transport import Answer, Patience
from fedquilt.deploy.transport.wire import Refused

_POLL = 0.2
_PIECES = 100_000  # of an answer, more than 400 GB


class Mail:
    """The answers to letters that were sent: `sent` has the node and the client of each by Flower's name for it."""

    def __init__(self, grid: Grid, sent: Mapping[str, tuple[int, str]], patience: Patience) -> None:
        self._grid: Any = grid  # what is used of it below is not public
        self._waiting, self._patience = dict(sent), patience
        self._found: queue.Queue[Answer] = queue.Queue()
        self._fetching = 0

    def collect(self) -> Iterator[Answer]:
        """Answers as they come, until there are all or patience is over; what is still on its way then is left."""
        while (self._waiting or self._fetching) and self._patience.left:
            self._look()
            end = time.monotonic() + min(_POLL, self._patience.left)
            while True:
                try:
                    answer = self._found.get(timeout=max(0.0, end - time.monotonic()))
                except queue.Empty:
                    break
                self._fetching -= 1
                yield answer
        while not self._found.empty():  # what came while the last one was looked at
            yield self._found.get()

    def _look(self) -> None:
        """Asks Flower which answers were announced, and has them fetched."""
        if not self._waiting:
            return
        try:
            found = self._grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=list(self._waiting)))
        except (httpx.HTTPError, OSError):  # the server is busy; it is asked again
            return
        for head, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            asked = self._waiting.pop(head.metadata.reply_to_message_id, None)
            if asked is not None:
                self._fetching += 1
                threading.Thread(target=self._fetch, args=(*asked, head, tree), daemon=True).start()

    def _fetch(self, number: int, client: str, head: Any, tree: Any) -> None:
        """A thread's work: one answer."""
        try:
            answer = self._read(number, client, head, tree)
        except Refused as refusal:
            answer = Answer(client, code=refusal.code)
        except Exception as error:  # whatever a client can make Flower stumble over
            print(f"the answer of client '{client}' could not be read ({type(error).__name__})", flush=True)
            answer = Answer(client, code="unreadable")
        self._found.put(answer)

    def _read(self, number: int, client: str, head: Any, tree: Any) -> Answer:
        """The bytes of an answer. An error that Flower made of it stays a code here, whatever its text was; Flower
        itself does not check that a reply comes from the node that was asked, so this does."""
        if head.HasField("error"):
            raise Refused("no-answer")
        try:
            if head.metadata.src_node_id != number:
                raise Refused("unknown-client")
            contents = self._pieces(client, tree)
        finally:
            self._confirm(head.metadata.message_id)
        message = inflate_object_from_contents(head.metadata.message_id, contents)
        if not isinstance(message, Message) or message.has_error():
            raise Refused("no-answer")
        return Answer(client, content=read_record(message))

    def _pieces(self, client: str, tree: Any) -> dict[str, bytes]:
        """Every piece of an answer, as they arrive; not more bytes than the client may send."""
        run, node = self._grid.run.run_id, self._grid.node
        pull = make_pull_object_fn_protobuf(self._grid._runtime_client.PullObject, node, run)
        left, contents = self._patience.largest.get(client, 1 << 40), dict[str, bytes]()
        for place, name in enumerate(piece.object_id for piece in iterate_object_tree(tree)):
            if name not in contents:
                contents[name] = self._piece(pull, name)
                left -= len(contents[name])
            if left < 0 or place > _PIECES:
                raise Refused("too-large")
        return contents

    def _piece(self, pull: Any, name: str) -> bytes:
        """One piece, once it has been uploaded; after the end of the exchange nobody asks for it any more."""
        while self._patience.left:
            try:
                return bytes(pull(name))
            except (ObjectUnavailableError, httpx.HTTPError):
                time.sleep(_POLL)
        raise Refused("no-answer")

    def _confirm(self, message: str) -> None:
        """Lets Flower forget an answer, so that its pieces do not stay in the database."""
        request = ConfirmMessageReceivedRequest(
            node=self._grid.node, run_id=self._grid.run.run_id, message_object_id=message
        )
        try:
            self._grid._runtime_client.ConfirmMessageReceived(request)
        except (httpx.HTTPError, OSError):
            print("an answer could not be confirmed", flush=True)
