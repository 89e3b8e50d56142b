"""A registered client that plays by Flower's rules and not by ours: it holds its key, and answers as it likes."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supernode.fleet_http_connection import http_request_response

from fedquilt.deploy.device.device import Device
from fedquilt.deploy.project import Project
from fedquilt.deploy.transport.flower_records import read_record, to_record


class Hostile:
    """Answers the first letter (who are you?) honestly, and the others in one of these ways:

    * stall: it announces an answer and never uploads it
    * badobject: what it uploads is not what it announced
    * bomb: it uploads a hundred times what is expected
    """

    def __init__(self, project: Project, name: str, way: str) -> None:
        folder = project.client_folder(name)
        self.project, self.way = project, way
        self.device = Device(folder, folder / "data.npz")
        self.key: Any = load_ssh_private_key((folder / "node.key").read_bytes(), password=None)
        self.certificate = (folder / "ca.crt").read_bytes()
        self.letters, self.uploaded, self.refused = 0, 0, ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Hostile:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(20)

    def _work(self) -> None:
        where = f"localhost:{self.project.server.port}"
        keys = (self.key, self.key.public_key())
        with http_request_response(where, False, self.certificate, keys, 3, 30) as connection:
            _, receive, send, _, _, pull, push, confirm = connection
            while not self._over.is_set():
                found = receive()
                if found is None:
                    time.sleep(0.3)
                    continue
                message, tree = found
                run = message.metadata.run_id
                names = [part.object_id for part in iterate_object_tree(tree)]
                parts = pull_objects(names, partial(pull, run))
                confirm(run, message.metadata.message_id)
                letter: Any = inflate_object_from_contents(message.metadata.message_id, parts)
                letter.metadata.__dict__["_message_id"] = message.metadata.message_id
                self.letters += 1
                try:
                    self._answer(letter, run, send, push)
                except Exception as error:
                    self.refused = str(error)

    def _answer(self, letter: Any, run: int, send: Any, push: Any) -> None:
        content = self.device.handle(read_record(letter))
        honest = self.letters == 1
        if self.way == "bomb" and not honest:
            content = bytes(range(256)) * (600 << 12)
        reply = Message(to_record(content), reply_to=letter)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        parts = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
        wanted, session = send(reply, get_object_tree(reply), 0.1)
        for name in wanted if honest or self.way != "stall" else ():
            bad = self.way == "badobject" and not honest and parts[name].startswith(b"RecordDict")
            piece = parts[name].split(b"\0")[0] + b"\0{not json" if bad else parts[name]
            push(run, session, name, piece)
            self.uploaded += len(piece)
