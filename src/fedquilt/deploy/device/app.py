"""The client's half of the Flower app: letters in, answers out."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedquilt.deploy.transport.flower_records import read_record, to_record


def make_app(handle: Callable[[bytes], bytes]) -> ClientApp:
    """A ClientApp that answers with what `handle` makes of a letter.

    If that fails, an empty answer leaves the device: Flower would send the text of an exception to the server.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        try:
            answer = handle(read_record(message))
        except Exception:
            traceback.print_exc()  # to this device's own log
            answer = b""
        return Message(to_record(answer), reply_to=message)

    return app
