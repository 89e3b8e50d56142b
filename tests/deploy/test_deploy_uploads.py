"""Uploads that do not belong in a merge: left out, counted, reported, and their sender is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch
from deploy_help import LocalPost, digits_with_public, federate

from fedquilt.core.federation import Federation
from fedquilt.deploy.device.device import Device
from fedquilt.deploy.project import Rounds
from fedquilt.deploy.server.remote_clients import remote
from fedquilt.deploy.server.silence import NoQuorum
from fedquilt.deploy.transport.transport import Answer, Patience
from fedquilt.deploy.transport.wire import pack, unpack

BAD = "client-2"
Change = Callable[[dict[str, Any], dict[str, Any]], bytes]


def changed(arrays: dict[str, Any], text: dict[str, Any], **more: Any) -> bytes:
    return pack({**arrays, **more}, text)


def first(arrays: Mapping[str, Any]) -> str:
    return next(name for name in arrays if name.startswith("value/"))


ATTACKS: dict[str, tuple[str, Change]] = {
    "nothing at all": ("failed", lambda a, t: b""),
    "noise": ("unreadable", lambda a, t: b"\x93NUMPY" * 9),
    "a pickle": ("unreadable", lambda a, t: b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94."),
    "another version": ("wrong-version", lambda a, t: pack(a, t).replace(b'\\"version\\":2', b'\\"version\\":9')),
    "another letter's token": ("wrong-round", lambda a, t: pack(a, {**t, "token": "0" * 32})),
    "another round": ("wrong-round", lambda a, t: pack(a, {**t, "round": t["round"] - 1})),
    "an unknown unit": ("unknown-unit", lambda a, t: changed(a, t, **{"value/evil": np.ones(3, np.float32)})),
    "a missing unit": ("missing-unit", lambda a, t: pack({k: v for k, v in a.items() if k != first(a)}, t)),
    "another shape": ("wrong-shape", lambda a, t: changed(a, t, **{first(a): np.ones(7, np.float32)})),
    "a matrix": ("wrong-shape", lambda a, t: changed(a, t, **{first(a): a[first(a)][None]})),
    "another dtype": ("wrong-dtype", lambda a, t: changed(a, t, **{first(a): a[first(a)].astype(np.float64)})),
    "whole numbers": ("wrong-dtype", lambda a, t: changed(a, t, **{first(a): np.ones(a[first(a)].shape, np.int64)})),
    "NaN": ("not-finite", lambda a, t: changed(a, t, **{first(a): np.full_like(a[first(a)], np.nan)})),
    "infinity": ("not-finite", lambda a, t: changed(a, t, **{first(a): np.full_like(a[first(a)], np.inf)})),
    "an absurd norm": ("absurd-norm", lambda a, t: changed(a, t, **{first(a): np.full_like(a[first(a)], 1e7)})),
    "a NaN report": ("not-finite", lambda a, t: changed(a, t, **{"report/loss": np.array(np.nan, np.float32)})),
    "an odd report": ("wrong-shape", lambda a, t: changed(a, t, **{"report/loss": np.ones((3, 3), np.float32)})),
    "a report too many": ("wrong-shape", lambda a, t: changed(a, t, **{"report/extra": np.ones(2, np.float32)})),
    "a text for a code": ("failed", lambda a, t: pack({}, {**t, "code": "the name of a patient"})),
}


def attack(post: LocalPost, change: Change, rounds: tuple[int, ...] = (2,)) -> None:
    def accident(name: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if name != BAD or round_ not in rounds:
            return None
        return Answer(name, change(*unpack(device.handle(letter))))

    post.accident = accident


def values(federation: Federation) -> list[torch.Tensor]:
    return [circle_values.value.clone() for circle_values in federation.server.all_values]


@pytest.fixture(scope="module")
def without_it(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """The server's values where the bad client says nothing in round 2."""
    federation, post = federate(tmp_path_factory.mktemp("silent") / "fed", digits_with_public(), "fedavg", 2)
    post.accident = lambda name, round_, *_: Answer(name, code="no-answer") if (name, round_) == (BAD, 2) else None
    federation.step()
    federation.step()
    return values(federation)


@pytest.mark.parametrize("kind", ATTACKS)
def test_a_bad_upload_is_left_out(tmp_path: Path, kind: str, without_it: list[torch.Tensor]) -> None:
    code, change = ATTACKS[kind]
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedavg", 3)
    seen: list[dict[str, str]] = []
    remote(federation).log = lambda exchange: seen.append(exchange.refused)
    attack(post, change)
    federation.step()
    report = federation.step()
    assert seen == [{}, {BAD: code}]  # reported
    assert remote(federation).left_out == {BAD: {code: 1}}  # counted
    assert report.participants == (0, 1, 3)
    for ours, expected in zip(values(federation), without_it, strict=True):  # left out
        torch.testing.assert_close(ours, expected)
    federation.step()
    told = {name: unpack(letters[-1])[1]["refused"] for name, letters in post.down.items()}
    assert told == {name: code if name == BAD else "" for name in told}  # the sender is told
    assert report.refused == 1


def test_only_the_first_of_two_answers_counts(tmp_path: Path) -> None:
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedavg", 2)
    plain = post.exchange

    def twice(letters: Mapping[str, bytes], round_: int, patience: Patience) -> Iterator[Answer]:
        for answer in plain(letters, round_, patience):
            yield answer
            if answer.client == BAD:
                yield answer

    post.exchange = twice  # type: ignore[method-assign]
    report = federation.step()
    assert report.participants == (0, 1, 2, 3)
    assert remote(federation).left_out == {BAD: {"duplicate": 1}}


def test_an_answer_in_another_name_is_not_heard(tmp_path: Path) -> None:
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedavg", 2)

    def impersonate(name: str, round_: int, letter: bytes, device: Device) -> Answer | None:
        if name != BAD:
            return None
        return Answer("client-0", device.handle(letter))  # its own honest update, under another client's name

    post.accident = impersonate
    report = federation.step()
    assert report.participants == (0, 1, 3)
    assert remote(federation).left_out == {"client-0": {"wrong-round": 1}} or remote(federation).left_out == {
        "client-0": {"duplicate": 1}
    }


def test_a_stranger_is_not_heard(tmp_path: Path) -> None:
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedavg", 2)
    plain = post.exchange

    def with_stranger(letters: Mapping[str, bytes], round_: int, patience: Patience) -> Iterator[Answer]:
        answers = list(plain(letters, round_, patience))
        yield Answer("nobody-knows-me", answers[0].content)
        yield from answers

    post.exchange = with_stranger  # type: ignore[method-assign]
    assert federation.step().participants == (0, 1, 2, 3)
    assert remote(federation).left_out == {"nobody-knows-me": {"unknown-client": 1}}


def test_a_client_whose_update_was_left_out_goes_on_from_where_it_was(tmp_path: Path) -> None:
    """Its private units must not keep what came of a round that did not count."""
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedper", 2)
    attack(post, ATTACKS["NaN"][1], rounds=(1,))
    federation.step()
    post.accident = lambda *_: None
    federation.step()
    before = unpack(post.down[BAD][2])[1]
    assert before["accepted"] == ""  # the server knows of nothing that the client did
    assert before["refused"] == "not-finite"
    assert remote(federation).accepted[BAD] != ""


def test_nobody_good_is_no_quorum(tmp_path: Path) -> None:
    federation, post = federate(
        tmp_path / "fed", digits_with_public(), "fedavg", 2, rules=Rounds(quorum=0.5, attempts=2, timeout=5)
    )
    before = values(federation)
    post.accident = lambda name, *_: Answer(name, b"noise")
    why = r"was tried 2 times and fewer than 50% .* at the last try it could not be decoded \(client-0, client-1, "
    with pytest.raises(NoQuorum, match=why):
        federation.step()
    assert federation.round == 0
    for ours, expected in zip(values(federation), before, strict=True):
        torch.testing.assert_close(ours, expected)


def test_lies_about_scores_hurt_only_the_liar(tmp_path: Path) -> None:
    federation, post = federate(tmp_path / "fed", digits_with_public(), "fedavg", 2)

    def lie(arrays: dict[str, Any], text: dict[str, Any]) -> bytes:
        return pack(arrays, {**text, "counts": {"received": {"test": [[-5]], "validation": "all"}, "adapted": None}})

    attack(post, lie)
    federation.step()
    report = federation.step()
    assert report.participants == (0, 1, 2, 3)
    rows = [row for evaluation in report.evaluations for row in evaluation.rows()]
    assert {row["client"] for row in rows} == {"client-0", "client-1", "client-3"}
