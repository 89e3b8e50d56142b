"""A registered client that plays by Flower's rules and not by ours: it holds its key, and answers as it likes."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from fedquilt.deploy.device.device import Device
from fedquilt.deploy.device.fleet import Fleet, Letter
from fedquilt.deploy.project import Node, Project
from fedquilt.deploy.transport.flower_records import to_record
from fedquilt.deploy.transport.wire import Refused, pack, unpack

WAYS = (
    "stall",
    "badobject",
    "bomb",
    "poison",
    "nan",
    "noise",
)  # a soak's; "samples" lies before the first round


class Hostile:
    """Answers the first letter (who are you?) honestly, and the others in one of these ways:

    * stall: it announces an answer and never uploads it
    * badobject: what it uploads is not what it announced
    * bomb: it uploads a hundred times what is expected
    * samples: it says that it has 300 million of them
    * poison, nan, noise: every weight is 900; every weight is NaN; the answer is no message at all
    """

    def __init__(self, project: Project, name: str, way: str, honest: int = 1) -> None:
        folder = project.client_folder(name)
        self.way, self.honest = way, honest
        self.device = Device(folder, folder / "data.npz", lambda _: None)
        self.fleet = Fleet(Node.read(folder))
        self.letters, self.uploaded, self.refused = 0, 0, ""
        self.over = threading.Event()
        self._thread = threading.Thread(target=self.work, daemon=True)

    def __enter__(self) -> Hostile:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join(20)
        self.fleet._client.close()

    def work(self) -> None:
        beaten = 0.0
        while not self.over.is_set():
            try:
                if not self.fleet.number:
                    self.fleet.come_in()
                if time.monotonic() - beaten > 10:
                    self.fleet.beat()
                    beaten = time.monotonic()
                letter = self.fleet.letter()
                if letter is not None:
                    self.letters += 1
                    self._answer(letter)
            except Exception as error:
                self.refused = str(error)
            self.over.wait(0.3)
        self.fleet.leave()

    def _answer(self, letter: Letter) -> None:
        honest = self.letters <= self.honest
        content = self._lie(letter.content, honest)
        reply = Message(to_record(content), reply_to=letter.message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        parts = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
        told = self.fleet._client.PushMessages(
            PushMessagesRequest(
                node=self.fleet._flower,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[0.1],
            )
        )
        for name in told.objects_to_push if honest or self.way != "stall" else ():
            bad = self.way == "badobject" and not honest and parts[name].startswith(b"RecordDict")
            piece = parts[name].split(b"\0")[0] + b"\0{not json" if bad else parts[name]
            request = PushObjectRequest(
                node=self.fleet._flower,
                run_id=letter.message.metadata.run_id,
                object_id=name,
                object_content=piece,
                session_id=told.session_id,
            )
            self.fleet._client.PushObject(request)
            self.uploaded += len(piece)

    def _lie(self, letter: bytes, honest: bool) -> bytes:
        if self.way == "bomb" and not honest:
            return bytes(range(256)) * (600 << 12)
        if self.way == "noise" and not honest:
            return bytes(range(256))
        content = self.device.handle(letter)
        if honest or self.way not in ("poison", "nan", "samples"):
            return content
        try:
            arrays, text = unpack(content)
        except Refused:
            return content
        if "member" in text:
            return pack(arrays, text | {"member": text["member"] | {"samples": 300_000_000}})
        value = np.float32(900.0 if self.way == "poison" else np.nan)
        changed: dict[str, Any] = {
            name: np.full_like(array, value) if name.startswith("value/") else array for name, array in arrays.items()
        }
        return pack(changed, text)


if __name__ == "__main__":  # FOLDER NAME WAY SECONDS: from the first letter on
    hostile = Hostile(Project.read(Path(sys.argv[1])), sys.argv[2], sys.argv[3], honest=0)
    threading.Timer(float(sys.argv[4]), hostile.over.set).start()
    hostile.work()
    print(hostile.letters, flush=True)
