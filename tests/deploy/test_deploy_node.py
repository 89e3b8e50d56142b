"""A client's loop against a server that is away, busy, somebody else, or has forgotten it: it goes on, and says why."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr")

from deploy_help import digits_with_public
from flwr.supercore.error import ApiErrorCode

from fedquilt.deploy.device import node as node_module
from fedquilt.deploy.device.fleet import SESSION, Fleet, Letter, Taken
from fedquilt.deploy.device.node import ClientLoop
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.project import UNKNOWN_KEY, Node, Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return create_from_scenario(tmp_path / "fed", digits_with_public(clients=2))


def refusal(status: int, detail: str = "", **more: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://localhost")
    body = json.dumps({"detail": detail} | more) if detail else "<html>"
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, text=body, request=request))


def expired() -> httpx.ConnectError:
    error = httpx.ConnectError("certificate verify failed")
    error.__cause__ = ssl.SSLCertVerificationError("verify failed")
    error.__cause__.verify_message = "certificate has expired"
    return error


class Script:
    """A server that does what it is told, in turn: an error, a letter, or nothing; then the loop is over."""

    def __init__(self, loop: ClientLoop, acts: list[Exception | bytes | None]) -> None:
        self.loop, self.acts, self.number = loop, acts, 0
        self.answers: list[bytes] = []
        self.came_in = 0

    def come_in(self) -> None:
        self.came_in += 1
        self.number = 7

    def letter(self) -> Letter | None:
        if not self.acts:
            self.loop.over.set()
            return None
        act = self.acts.pop(0)
        if isinstance(act, Exception):
            raise act
        return None if act is None else Letter(act, None)

    def answer(self, _: Letter, content: bytes, seconds: float) -> None:
        self.answers.append(content)

    def beat(self) -> bool:
        return True

    def leave(self) -> None:
        self.number = 0


def play(
    project: Project, monkeypatch: pytest.MonkeyPatch, acts: list[Exception | bytes | None], glitch: float = -1.0
) -> tuple[Script, list[str]]:
    folder, said = project.client_folder("client-0"), list[str]()
    loop = ClientLoop(folder, folder / "data.npz", said.append)
    script = Script(loop, acts)
    loop.fleet = script  # type: ignore[assignment]
    monkeypatch.setattr(loop.over, "wait", lambda *_: loop.over.is_set())  # no pauses
    monkeypatch.setattr(threading.Thread, "start", lambda *_: None)
    monkeypatch.setattr(node_module, "_GLITCH", glitch)
    monkeypatch.setattr(loop.device, "handle", lambda letter: b"answer to " + letter)
    loop.run()
    return script, said


def test_whatever_the_server_does_the_loop_goes_on(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    acts: list[Exception | bytes | None] = [
        *(b"1", refusal(503), httpx.ConnectError("refused"), ValueError("a web page"), b"2"),
        *(expired(), refusal(401), None, b"3"),
    ]
    script, said = play(project, monkeypatch, acts)
    assert script.answers == [b"answer to 1", b"answer to 2", b"answer to 3"]
    where = f"localhost:{project.server.port}"
    assert said == [
        "the server is there",
        f"{where} is busy",
        f"{where} cannot be reached: refused",
        f"{where} answers what makes no sense (ValueError)",
        "the server is there",
        f"the certificate of {where} is not accepted: certificate has expired",
        f"the server sends this client away: {UNKNOWN_KEY}",
        "the server is there",
    ]
    assert script.came_in == 3  # at first, and after it was sent away for good


def test_a_glitch_is_nobodys_business(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, said = project.client_folder("client-0"), list[str]()
    loop = ClientLoop(folder, folder / "data.npz", said.append)
    for _ in range(3):
        assert not loop._trouble(refusal(503))
    assert said == []
    assert "is busy" in (folder / "node.log").read_text()


def test_being_let_in_is_told_however_short_the_wait_was(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is started a moment before its server: nobody hears of the moment, but its owner that it is in."""
    refused = httpx.ConnectError("refused")
    _, said = play(project, monkeypatch, [refused, refused, b"1", refusal(503), b"2"], glitch=60.0)
    assert said == ["the server is there"]


def test_a_full_disk_ends_no_loop(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a soak found: a line for the log that could not be written ended the loop, and the heart went on beating."""
    folder = project.client_folder("client-0")
    (folder / "node.log").unlink(missing_ok=True)
    (folder / "node.log").mkdir()  # no line can be written there, whoever tries
    script, said = play(project, monkeypatch, [b"1", refusal(503), httpx.ConnectError("refused"), b"2"])
    assert script.answers == [b"answer to 1", b"answer to 2"]
    assert said[-1] == "the server is there"


def test_the_servers_own_words_reach_the_owner(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    _, said = play(
        project, monkeypatch, [refusal(401, "the device's clock is 70 s ahead of the server's; set it right")]
    )
    assert said[0] == (
        "the server sends this client away: the device's clock is 70 s ahead of the server's; set it right"
    )


def test_an_answer_for_a_run_that_has_ended_sends_nobody_away(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a walk found: after a restart of the server a client's owner read that the server had sent it away."""
    code = ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED
    over = refusal(403, "The current run status does not allow this Fleet API operation.", code=code)
    script, said = play(project, monkeypatch, [b"1", over, b"2"])
    assert script.answers == [b"answer to 1", b"answer to 2"]
    assert script.came_in == 1
    assert said == ["the server is there", "the run that an answer was for has ended", "the server is there"]
    other = refusal(403, "Failed to get run.", code=ApiErrorCode.FLEET_GET_RUN_FAILED)
    assert play(project, monkeypatch, [other])[1][0] == "the server sends this client away: Failed to get run."


class Flower:
    """The part of Flower's client that coming in needs."""

    def __init__(self, activate: Callable[[], Any]) -> None:
        self.activate, self.asked = activate, list[str]()

    def DeactivateNode(self, request: Any) -> None:
        self.asked.append(f"deactivate {request.node_id}")
        raise refusal(412)

    def ActivateNode(self, _: Any) -> Any:
        self.asked.append("activate")
        return self.activate()


class Activated:
    node_id = 9


def fleet(project: Project, folder: Path, activate: Callable[[], Any] = Activated) -> tuple[Fleet, Flower]:
    made = Fleet(Node.read(folder))
    made._client.close()
    flower = Flower(activate)
    made._client = flower  # type: ignore[assignment]
    return made, flower


def test_who_was_killed_says_first_that_it_had_gone(project: Project, tmp_path: Path) -> None:
    folder = project.client_folder("client-0")
    first, flower = fleet(project, folder)
    first.come_in()
    assert flower.asked == ["activate"]
    second, flower = fleet(project, folder)  # the first one was killed
    second.come_in()
    assert flower.asked == ["deactivate 9", "activate"]
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in ("client.toml", "node.key", "ca.crt", SESSION):
        (copy / file).write_bytes((folder / file).read_bytes())
    twin, flower = fleet(project, copy)
    twin.come_in()
    assert flower.asked == ["activate"]  # a copy of the folder turns nobody out
    second.leave()
    third, flower = fleet(project, folder)
    third.come_in()
    assert flower.asked == ["activate"]


def test_a_twin_is_told_that_it_is_one(project: Project) -> None:
    def refuse() -> Any:
        raise refusal(412)

    twin, _ = fleet(project, project.client_folder("client-0"), refuse)
    with pytest.raises(Taken, match="another device uses its key"):
        twin.come_in()


class Ended(Exception):
    """The process has ended."""


@pytest.mark.parametrize("what", ["away", "works", "there"])
def test_a_process_that_finds_no_way_to_the_server_starts_afresh(
    project: Project, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Whatever keeps it from there: its owner may have mended the folder, which is read at the start. A device that
    works is left alone, however long that takes."""
    folder = project.client_folder("client-0")
    monkeypatch.setattr(node_module, "BEAT_EVERY", 0.1)
    monkeypatch.setattr(node_module, "_LOST", 0.5)
    monkeypatch.setattr(node_module, "_SELDOM", 0.1)

    def letter(self: Fleet) -> Letter | None:
        if what == "away":
            raise httpx.ConnectError("refused")
        return Letter(b"much to do", None) if what == "works" else None

    looks = list[ClientLoop]()

    def look(self: ClientLoop) -> bool:
        looks.append(self)
        if len(looks) == 40:  # two seconds
            raise KeyboardInterrupt
        return lost(self)

    def ended(status: int) -> None:
        raise Ended(status)

    lost, over = ClientLoop.lost, threading.Event()
    monkeypatch.setattr(ClientLoop, "lost", look)
    monkeypatch.setattr("os._exit", ended)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for name, instead in (("come_in", lambda self: None), ("letter", letter), ("beat", lambda self: True)):
        monkeypatch.setattr(Fleet, name, instead)
    monkeypatch.setattr(Fleet, "answer", lambda self, *_: None)
    monkeypatch.setattr(ClientLoop, "_answer", lambda self, _: str(over.wait(60)).encode())
    with pytest.raises(Ended if what == "away" else KeyboardInterrupt):
        node_module.serve([folder], [folder / "data.npz"])
    over.set()
    looks[0].over.set()
    log = (folder / "node.log").read_text() if (folder / "node.log").exists() else ""
    assert ("no word from the server for 0 minutes" in log) == (what == "away")
