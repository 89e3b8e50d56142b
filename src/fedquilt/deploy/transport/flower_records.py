"""Our bytes in Flower's messages: one record with one array of bytes, which Flower moves in pieces of 5 MiB."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict

RECORD = "fedquilt"


def to_record(content: bytes) -> RecordDict:
    """Our bytes as the content of a Flower message."""
    return RecordDict({RECORD: ArrayRecord({"bytes": Array(np.frombuffer(content, np.uint8))})})


def read_record(message: Message) -> bytes:
    """Our bytes in a Flower message."""
    return message.content.array_records[RECORD]["bytes"].numpy().tobytes()
