"""Our bytes in Flower's messages. Flower moves each object that a message is made of by a request of its own, so few of
them are quick: up to 4 MiB are one value of a record of settings; more are an array, which travels in pieces of 5 MiB.
"""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

RECORD, BYTES = "fedquilt", "bytes"
_WHOLE = 4 << 20  # the gate lets bodies of 8 MiB pass


def to_record(content: bytes) -> RecordDict:
    """Our bytes as the content of a Flower message."""
    if len(content) <= _WHOLE:
        return RecordDict({RECORD: ConfigRecord({BYTES: content})})
    return RecordDict({RECORD: ArrayRecord({BYTES: Array(np.frombuffer(content, np.uint8))})})


def read_record(message: Message) -> bytes:
    """Our bytes in a Flower message."""
    if RECORD not in message.content.config_records:
        return message.content.array_records[RECORD][BYTES].numpy().tobytes()
    found = message.content.config_records[RECORD][BYTES]
    if not isinstance(found, bytes):
        raise TypeError("a message holds something else than bytes")
    return found
