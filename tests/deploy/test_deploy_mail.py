"""Answers as Flower hands them over, from clients that announce, upload and write what they like."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.node_pb2 import Node as FlowerNode
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.task_identity import TaskIdentity

from fedquilt.deploy.server import answers
from fedquilt.deploy.server.answers import Exchange
from fedquilt.deploy.transport import transport
from fedquilt.deploy.transport.flower_mail import Mail
from fedquilt.deploy.transport.flower_records import BYTES, RECORD, read_record, to_record
from fedquilt.deploy.transport.transport import Answer, OpenTransport, Patience
from fedquilt.deploy.transport.wire import pack


@pytest.fixture(autouse=True)
def _in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for what, number in (("_run_id", 7), ("_node_id", 1), ("_task_id", 3)):
        monkeypatch.setattr(TaskIdentity, what, number)


class FakeLink:
    """SuperLink's half: answers by the letter that they answer."""

    def __init__(self) -> None:
        self.node, self.run = FlowerNode(node_id=1), SimpleNamespace(run_id=7)
        self._runtime_client = self
        self.heads: dict[str, tuple[Any, Any]] = {}
        self.objects: dict[str, bytes] = {}
        self.confirmed: list[str] = []

    def answer(
        self,
        letter: str,
        node: int,
        content: RecordDict,
        says: str | None = None,
        change: Callable[[str, bytes], bytes | None] = lambda _, b: b,
    ) -> None:
        """A reply to a letter; the message itself may say that it answers another one, and its pieces may differ."""
        asked = Message(RecordDict(), dst_node_id=node, message_type="train")
        asked.metadata.__dict__["_message_id"] = says or letter
        reply = Message(content, reply_to=asked)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        head = message_to_proto(reply)
        head.ClearField("content")
        head.metadata.reply_to_message_id, head.metadata.src_node_id = letter, node
        self.heads[letter] = (head, get_object_tree(reply))
        for name, piece in get_all_nested_objects(reply).items():
            changed = change(name, piece.deflate())
            if changed is not None:
                self.objects[name] = changed

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:
        found = [self.heads.pop(name) for name in list(request.message_ids) if name in self.heads]
        return PullAppMessagesResponse(
            messages_list=[head for head, _ in found], message_object_trees=[tree for _, tree in found]
        )

    def PullObject(self, request: Any) -> PullObjectResponse:
        content = self.objects.get(request.object_id)
        return PullObjectResponse(
            object_found=True, object_available=content is not None, object_content=content or b""
        )

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed.append(request.message_object_id)


def collect(link: FakeLink, patience: Patience, clients: dict[str, int]) -> dict[str, Answer]:
    sent = {f"letter-{name}": (number, name) for name, number in clients.items()}
    return {answer.client: answer for answer in Mail(link, sent, patience).collect()}  # type: ignore[arg-type]


def test_what_flower_stumbles_over_is_its_senders_alone() -> None:
    link = FakeLink()
    link.answer("letter-good", 11, to_record(b"fine"))
    link.answer("letter-other", 12, to_record(b"mine"), says="letter-of-nobody")
    link.answer("letter-odd", 13, to_record(b"odd"), change=lambda _, b: b.split(b"\0")[0] + b"\0{not json")
    link.answer("letter-forged", 99, to_record(b"forged"))
    link.answer("letter-empty", 15, RecordDict())
    link.answer("letter-number", 16, RecordDict({RECORD: ConfigRecord({BYTES: 7})}))
    clients = {"good": 11, "other": 12, "odd": 13, "forged": 14, "empty": 15, "number": 16}
    found = collect(link, Patience(5), clients)
    assert found["good"] == Answer("good", b"fine")
    assert found["other"] == Answer("other", b"mine")  # its letter's token is what counts
    codes = {name: found[name].code for name in ("odd", "forged", "empty", "number")}
    assert codes == {"odd": "unreadable", "forged": "unknown-client", "empty": "unreadable", "number": "unreadable"}
    assert len(link.confirmed) == 6  # the database keeps none of them


@pytest.mark.parametrize(("size", "objects"), [(0, 3), (1000, 3), (4 << 20, 3), ((4 << 20) + 1, 5), (12 << 20, 7)])
def test_a_message_is_few_objects_each_of_which_passes_the_gate(size: int, objects: int) -> None:
    """Each object is a request of the sender and one of the receiver; the gate takes 8 MiB."""
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    message = Message(to_record(content), dst_node_id=1, message_type="train")
    found = get_all_nested_objects(message)
    assert len(found) == objects
    assert max(len(piece.deflate()) for piece in found.values()) < 8 << 20
    assert read_record(message) == content


def test_a_stalled_upload_costs_the_honest_nothing() -> None:
    link = FakeLink()
    link.answer("letter-stalled", 11, to_record(b"never"), change=lambda *_: None)
    link.answer("letter-good", 12, to_record(b"fine"))
    start, when = time.monotonic(), dict[str, float]()
    sent = {"letter-stalled": (11, "stalled"), "letter-good": (12, "good")}
    for answer in Mail(link, sent, Patience(2)).collect():  # type: ignore[arg-type]
        when[answer.client] = time.monotonic() - start
    assert when["good"] < 1
    assert "stalled" not in when or when["stalled"] >= 2
    assert time.monotonic() - start < 4


def test_more_bytes_than_expected_are_not_fetched() -> None:
    link = FakeLink()
    link.answer("letter-bomb", 11, to_record(b"x" * (30 << 20)))
    assert collect(link, Patience(5, largest={"bomb": 1 << 20}), {"bomb": 11})["bomb"].code == "too-large"


def test_an_exchange_closes_at_quorum_and_grace() -> None:
    link = FakeLink()
    link.answer("letter-good", 12, to_record(b"fine"))
    patience = Patience(30, needed=1, grace=0.5)
    start = time.monotonic()
    for _ in Mail(link, {"letter-good": (12, "good"), "letter-gone": (13, "gone")}, patience).collect():  # type: ignore[arg-type]
        patience.good()
    assert 0.4 < time.monotonic() - start < 3


def test_grace_makes_no_exchange_longer_than_its_time() -> None:
    patience = Patience(5, needed=1, grace=60)
    patience.good()
    assert patience.left <= 5


def test_without_authentication_a_name_is_of_the_node_that_said_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as that is there; and only a name of the operator's list is one."""
    says, online = {11: "a", 12: "a", 13: "nobody", 14: "b"}, [11]
    post = OpenTransport(SimpleNamespace(get_node_ids=lambda: online), lambda: ["a", "b"])  # type: ignore[arg-type]
    monkeypatch.setattr(
        post, "_carry", lambda asked, *_: [Answer(str(n), pack({}, {"name": says[n]})) for n in sorted(asked)]
    )
    assert post.reachable() == {"a"}
    online += [12, 13, 14]
    assert post.reachable() == {"a", "b"}
    assert post._names == {11: "a", 14: "b"}
    online.remove(11)
    assert post.reachable() == {"a", "b"}
    assert post._names == {12: "a", 14: "b"}


class Spoken:
    """A post whose answers are there already, and what each left of patience."""

    def __init__(self, *answers: Answer) -> None:
        self.answers, self.left = answers, list[float]()

    def exchange(self, letters: Mapping[str, bytes], round_: int, patience: Patience) -> Iterator[Answer]:
        for answer in self.answers:
            yield answer
            self.left.append(patience.left)


def test_answers_that_are_refused_do_not_close_an_exchange() -> None:
    """Else who answers nonsense at once would shut out all who train."""
    names = ["a", "b", "c", "d"]
    good = pack({}, {"token": "t", "round": 1})
    post = Spoken(Answer("a", b"nonsense"), Answer("b", pack({}, {"token": "u"})), Answer("c", good), Answer("d", good))
    letters, tokens = dict.fromkeys(names, b""), dict.fromkeys(range(4), "t")
    record = Exchange(1, "round", 1, names)
    answers.collect(post, letters, names, tokens, record, Patience(60, needed=2, grace=0), lambda *_: None)  # type: ignore[arg-type]
    assert record.refused == {"a": "unreadable", "b": "wrong-round"}
    assert min(post.left[:3]) > 50
    assert post.left[3] == 0


@pytest.mark.parametrize("hiccups", [2, 99])
def test_letters_that_a_busy_server_does_not_take_are_sent_again(monkeypatch: pytest.MonkeyPatch, hiccups: int) -> None:
    """What a soak found: one refused piece of a letter ended the run."""
    now, tries = 0.0, 0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def push() -> list[str]:
        nonlocal tries
        tries += 1
        if tries <= hiccups:
            raise ObjectPushError("piece", 1, "session")
        return ["letter"]

    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    if hiccups == 2:
        assert transport._until_sent(push, Patience(25)) == ["letter"]
        assert now == 2
    else:
        with pytest.raises(ObjectPushError):
            transport._until_sent(push, Patience(25))
        assert now == 24
