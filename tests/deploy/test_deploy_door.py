"""The door of SuperLink and the checks of a client's own folder, without a network."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from fedquilt.cli import main
from fedquilt.deploy.device.check_folder import check
from fedquilt.deploy.ops import keys, membership
from fedquilt.deploy.ops.create import create
from fedquilt.deploy.project import Node, Project, loose
from fedquilt.deploy.server.door import SECRET_HEADER, Closed, Door


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = create(tmp_path / "fed", ["a", "b"], "torch.nn:Identity", 4)
    made.write_nodes({11: "a", 12: "b"}, {})
    return made


def door(project: Project, app: Any = None) -> Door:
    return Door(app, project.folder, "secret")


def headers(project: Project, name: str = "a", off: float = 0.0) -> dict[str, str]:
    """Those of a client's request, by a clock that is so many seconds off."""
    key: Any = load_ssh_private_key((project.client_folder(name) / "node.key").read_bytes(), password=None)
    stamp = (datetime.now(UTC) + timedelta(seconds=off)).isoformat()
    shown = {
        "flwr-public-key": b64encode(public_key_to_bytes(key.public_key())).decode(),
        "flwr-timestamp": stamp,
        "flwr-signature": b64encode(sign_message(key, stamp.encode())).decode(),
    }
    return {**shown, "content-length": "10"}


def test_a_registered_client_comes_in(project: Project) -> None:
    door(project).check("/v1/fleet/pull-messages", headers(project))
    assert door(project).keys.client_of(headers(project, "b")) == "b"


def test_the_operator_needs_the_secret(project: Project) -> None:
    for shown in ({}, {SECRET_HEADER: ""}, {SECRET_HEADER: "guess"}):
        with pytest.raises(Closed, match="only the operator") as closed:
            door(project).check("/v1/control/start-run", shown)
        assert closed.value.status == 401
    door(project).check("/v1/control/start-run", {SECRET_HEADER: "secret"})


@pytest.mark.parametrize(
    ("seconds", "sentence"), [(8, ""), (50, ""), (-250, ""), (70, "70 s ahead"), (-400, "400 s behind")]
)
def test_what_a_clock_may_be_off_by(project: Project, seconds: float, sentence: str) -> None:
    shown = headers(project, off=seconds)
    if not sentence:
        door(project).check("/v1/fleet/pull-messages", shown)
        return
    with pytest.raises(Closed, match=f"the device's clock is {sentence}"):
        door(project).check("/v1/fleet/pull-messages", shown)


def test_a_key_is_worth_nothing_once_it_was_replaced_or_taken_away(project: Project) -> None:
    gate, old = door(project), headers(project)
    gate.check("/v1/fleet/pull-messages", old)
    membership.rekey(project, "a")
    project.write_nodes({11: "a", 12: "b"}, {})
    with pytest.raises(Closed, match="it was never, or it was replaced or removed"):
        gate.check("/v1/fleet/pull-messages", old)
    gate.check("/v1/fleet/pull-messages", headers(project))
    membership.remove(project, "b")
    project.write_nodes({11: "a"}, {})
    with pytest.raises(Closed, match="not registered"):
        gate.check("/v1/fleet/pull-messages", headers(project, "b"))


def test_a_body_that_is_too_large_stays_outside(project: Project) -> None:
    gate = door(project)
    for path, shown in (
        ("push-object", {"content-length": str(9 << 20)}),
        ("push-object", {"transfer-encoding": "chunked"}),
        ("push-object", {"transfer-encoding": "Chunked"}),
        ("push-object", {"content-length": "-5"}),
        ("push-messages", {"content-length": str((128 << 10) + 1)}),  # only pieces of arrays are that large
    ):
        with pytest.raises(Closed) as closed:
            gate.check(f"/v1/fleet/{path}", headers(project) | shown)
        assert closed.value.status == 413
    gate.check("/v1/fleet/push-object", headers(project) | {"content-length": str(6 << 20)})
    gate.check("/v1/fleet/push-messages", headers(project) | {"content-length": str(100 << 10)})


def takes(gate: Door, shown: dict[str, str], pieces: int) -> None:
    """That so many pieces of 5 MiB come in, and not one more."""
    for _ in range(pieces):
        gate.check("/v1/fleet/push-object", shown | {"content-length": str(5 << 20)})
    with pytest.raises(Closed, match="many times the bytes that were expected"):
        gate.check("/v1/fleet/push-object", shown | {"content-length": str(5 << 20)})


def test_uploads_are_counted_against_what_the_run_expects(project: Project) -> None:
    gate, limits = door(project), project.server_folder / "limits"
    limits.mkdir()
    (limits / "r.json").write_text(json.dumps({"a": 12 << 20}))
    takes(gate, headers(project), 2)
    time.sleep(0.01)
    (limits / "new.json").write_text("{}")  # a round later
    takes(gate, headers(project), 2)


def test_what_two_runs_expect_of_a_client_adds_up(project: Project) -> None:
    gate, limits = door(project), project.server_folder / "limits"
    limits.mkdir()
    for run in ("r", "s"):
        (limits / f"{run}.json").write_text(json.dumps({"a": 6 << 20, "b": 60 << 20}))
    takes(gate, headers(project), 2)


def test_of_a_client_that_no_run_expects_anything_of_little_is_taken(project: Project) -> None:
    takes(door(project), headers(project), 3)


def request(gate: Door, path: str, shown: dict[str, str]) -> list[Any]:
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("nobody may read the body")

    async def send(message: Any) -> None:
        sent.append(message)

    found = [(key.encode(), value.encode()) for key, value in shown.items()]
    asyncio.run(gate({"type": "http", "path": path, "headers": found}, receive, send))
    return sent


def test_a_stranger_is_sent_away_unread_and_noted_once(project: Project) -> None:
    gate = door(project)
    for _ in range(5):
        assert request(gate, "/v1/fleet/push-object", {"content-length": "60000"})[0]["status"] == 401
    noted = (project.server_folder / "refused.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in noted] == ["the request is not signed"]


def test_the_operator_reads_who_was_sent_away_and_whose_key_it_was(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = project.public_key("a").read_text().strip()
    (project.server_folder / "former.json").write_text(json.dumps({old: "a"}))
    gate = project.server_folder / "nginx"
    gate.mkdir()
    seen = {"a": headers(project, "a")["flwr-public-key"], "b": headers(project, "b")["flwr-public-key"]}
    knocks = [("10.0.0.7", seen["a"]), ("10.0.0.8", seen["a"]), ("10.0.0.9", seen["b"]), ("10.0.0.1", "-")]
    knocks += [("10.0.0.2", "x y\\x0A")]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    lines = "".join(f"{now} {address} {key}\n" for address, key in knocks)
    (gate / "strangers.log").write_text(lines + f"{now} 10.0")  # the last is being written
    (project.server_folder / "refused.jsonl").write_text(json.dumps({"time": now, "client": "b", "reason": "late"}))
    assert main(["deploy", "status", "--dir", str(project.folder)]) == 0
    said = capsys.readouterr().out
    assert "a with a key that was replaced or taken away, from 10.0.0.8, 2 requests\n" in said
    assert "a stranger without a key, from 10.0.0.1\n" in said
    assert "something that is no key, from 10.0.0.2\n" in said
    ssh = project.public_key("b").read_text().split()[1]
    print_of_b = b64encode(hashlib.sha256(b64decode(ssh)).digest()).decode().rstrip("=")
    assert f"not registered (SHA256:{print_of_b}, as `ssh-keygen -lf node.pub` shows it), from 10.0.0.9\n" in said
    assert said.count("refused ") == 4


def test_a_failure_inside_is_told_as_busy(project: Project) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})

    assert request(door(project, broken), "/v1/fleet/pull-messages", headers(project))[0]["status"] == 503
    assert request(door(project, broken), "/v1/runtime/acquire-task", {})[0]["status"] == 503


def test_a_certificate_that_ran_out_is_said_and_renewed(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_SERVER_DAYS", 0)
    membership.renew(project)
    with pytest.raises(ValueError, match=r"ran out on .* make a new one with `fedquilt deploy renew"):
        keys.check_certificate(project.server_folder / "server.crt", project.folder)
    monkeypatch.setattr(keys, "_SERVER_DAYS", 30)
    membership.renew(project)
    assert keys.check_certificate(project.server_folder / "server.crt", project.folder).days == 29


def test_a_client_is_told_of_slips_in_its_own_folder(project: Project, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("from torch import nn\n\n\ndef small():\n    return nn.Linear(4, 4)\n")
    project = membership.add(project, "c", f"{tmp_path}/nets.py:small")
    folder = project.client_folder("c")
    assert Node.read(folder).classes == 4
    data, labels = folder / "data.npz", np.array([0, 1, 2, 3])
    np.savez(data, x_train=np.ones((4, 4), np.float32), y_train=labels)
    assert check(folder, data) is None
    np.savez(data, x_train=np.ones((4, 4), np.float32), y_train=np.array([0, 1, 7, 3]))
    said = check(folder, data) or ""
    assert "client 'c' has label 7, but the labels of this federation go from 0 to 3" in said
    np.savez(data, x_train=np.ones((4, 9), np.float32), y_train=labels)
    assert "its model cannot take its samples" in (check(folder, data) or "")
    data.write_text("not an archive")
    assert "write one with numpy.savez" in (check(folder, data) or "")


def test_a_key_that_others_can_read_is_warned_of(project: Project) -> None:
    key = project.client_folder("a") / "node.key"
    assert loose(key) is None
    key.chmod(0o644)
    assert "chmod 600" in (loose(key) or "")
