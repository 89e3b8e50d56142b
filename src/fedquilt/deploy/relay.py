"""The client's half of the Flower app: it passes letters on to the worker, and imports nothing that it need not.

Flower starts a process for every message, and this file is what it runs there. It travels to the devices as it is, by
itself, so it knows nothing of the rest of the library.
"""

from __future__ import annotations

import json
import os
import time
from multiprocessing.connection import Client
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

RECORD = "fedquilt"  # the one record of a Flower message that we use
WORKER = "worker.json"  # where a worker says how to reach it
FOLDER_VARIABLE = "FEDQUILT_NODE_FOLDER"
_PATIENCE = 60.0  # seconds that a worker gets to come up

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One letter and its answer. If it fails, an empty answer leaves the device, never the text of an exception."""
    try:
        answer = _ask_patiently(Path(os.environ[FOLDER_VARIABLE]), read_record(message))
    except Exception:
        answer = b""
    return Message(to_record(answer), reply_to=message)


def to_record(content: bytes) -> RecordDict:
    """Our bytes as the content of a Flower message."""
    return RecordDict({RECORD: ArrayRecord({"bytes": Array(np.frombuffer(content, np.uint8))})})


def read_record(message: Message) -> bytes:
    """Our bytes in a Flower message."""
    return message.content.array_records[RECORD]["bytes"].numpy().tobytes()


def ask(folder: Path, letter: bytes) -> bytes:
    """The worker's answer; an `OSError` or `EOFError` if there is no worker or it dies before it answers."""
    place = json.loads((folder / WORKER).read_text())
    with Client(("127.0.0.1", place["port"]), authkey=bytes.fromhex(place["key"])) as worker:
        worker.send_bytes(letter)
        return worker.recv_bytes()


def _ask_patiently(folder: Path, letter: bytes) -> bytes:
    """The same of a worker that may be just starting."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return ask(folder, letter)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
