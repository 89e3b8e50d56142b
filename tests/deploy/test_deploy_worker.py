"""The worker on a device: it answers whoever knows its key, and outlives those who do not."""

from __future__ import annotations

import json
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedquilt.deploy.relay import ask
from fedquilt.deploy.worker import serve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    threading.Thread(target=serve, args=(tmp_path, lambda letter: letter[::-1]), daemon=True).start()
    end = time.monotonic() + 5
    while not (tmp_path / "worker.json").exists() and time.monotonic() < end:
        time.sleep(0.01)
    return tmp_path


def test_letters_are_answered(folder: Path) -> None:
    assert ask(folder, b"abc") == b"cba"
    assert ask(folder, b"x" * 3_000_000) == b"x" * 3_000_000


def test_only_who_knows_the_key_is_answered(folder: Path) -> None:
    place = folder / "worker.json"
    assert place.stat().st_mode & 0o777 == 0o600
    with pytest.raises(AuthenticationError):
        Client(("127.0.0.1", json.loads(place.read_text())["port"]), authkey=b"guess")
    assert ask(folder, b"abc") == b"cba"


def test_a_caller_that_goes_away_does_not_end_it(folder: Path) -> None:
    told = json.loads((folder / "worker.json").read_text())
    Client(("127.0.0.1", told["port"]), authkey=bytes.fromhex(told["key"])).close()
    assert ask(folder, b"abc") == b"cba"


def test_no_worker_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ask(tmp_path, b"abc")
