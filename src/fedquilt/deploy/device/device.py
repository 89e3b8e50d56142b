"""A device: one client's data, its kept state, and a method's client half. It answers letters with bytes.

Everything it needs to know about a run is in the letter, everything it must remember is in its files, so it may be
killed and started again between any two letters.
"""

from __future__ import annotations

import json
import math
import secrets
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor

from fedquilt._util.files import write_bytes
from fedquilt.core.evaluation import look_at, measure, training_losses
from fedquilt.core.simulation import Simulation
from fedquilt.core.terms import Terms
from fedquilt.deploy.device.client_folder import allowed_methods, load_client
from fedquilt.deploy.device.secure_session import SecureSession
from fedquilt.deploy.device.state import LostState, NodeState
from fedquilt.deploy.held import read_common
from fedquilt.deploy.names import plain_name
from fedquilt.deploy.noise_key import noise_key
from fedquilt.deploy.project import Node
from fedquilt.deploy.transport.agreed import read_terms, write_member
from fedquilt.deploy.transport.codec import LOOK, Arrays, Text, read_down, write_up
from fedquilt.deploy.transport.secure_codec import Told
from fedquilt.deploy.transport.wire import REASONS, Refused, pack, unpack
from fedquilt.interface.messages import Instructions
from fedquilt.privacy import Privacy
from fedquilt.readouts import named
from fedquilt.secure import SecureSums

_ROW, _MEMORY = "row", "memory/"
_BESIDE = {"token", "refused", "evaluate", "readouts"}  # what no number of an update follows from


def _to_standard_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Device:
    """One client on its own machine; `note` takes a line for its own log."""

    def __init__(self, folder: Path, data: Path, note: Callable[[str], None] = _to_standard_error) -> None:
        self.node, self.note = Node.read(folder), note
        self.client = load_client(self.node, data)
        self.allowed = allowed_methods(self.node)
        self.session: tuple[str, SecureSession] | None = None  # of the last round, under the token of its letter
        files = (folder / "common.npz", folder / "public_test.npz")
        self.common, self.public_test = (read_common(file) if file.is_file() else None for file in files)

    def handle(self, letter: bytes) -> bytes:
        """The answer to a letter. What goes wrong is written to this device's own log; the server is told a code."""
        echo: Text = {}
        try:
            arrays, text = unpack(letter)
            echo = {"token": text["token"], "kind": text["kind"]}
            if text["kind"] == "who":
                return pack({}, {"name": self.node.name})
            asked = {"hello": self._hello, "round": self._round, "secure": self._secure}.get(text["kind"])
            if asked is None:
                raise Refused("bad-letter")
            answer, said = asked(arrays, text)
            return pack(answer, said | echo)
        except LostState:
            refused = Refused("lost-state")
        except Refused as refusal:
            refused = refusal
        except Exception:
            self.note(traceback.format_exc())
            refused = Refused("failed")
        self.note(f"no update was made: {refused}")
        return pack({}, {"code": refused.code} | echo)

    def _hello(self, arrays: Mapping[str, NDArray[Any]], text: Mapping[str, Any]) -> tuple[Arrays, Text]:
        """What the client declares: who it is, what its model is cut into, and how it will change. Never data."""
        simulation = self._simulation(self._terms(text), 0)
        member, changes = write_member(simulation.members()[0]), {}
        for start in self.client.changes:
            now = self.client.at(start)
            go_to(simulation, start)
            constant = list(simulation.members()[0].constant)
            changes[str(start)] = {"samples": now.samples, "labels": list(now.labels), "constant": constant}
        return {}, {"member": member, "changes": changes}

    def _round(self, arrays: Mapping[str, NDArray[Any]], text: Mapping[str, Any]) -> tuple[Arrays, Text]:
        """One round: look at what was received, train, and stage what must be kept. The last letter only looks."""
        if text["refused"]:
            self.note(f"the server left out the update of a round: {REASONS[text['refused']]}")
        if not plain_name(text["run"]):  # it becomes the name of a folder here
            raise Refused("bad-letter")
        down = read_down(arrays, text)
        state = NodeState(self.node.folder / "state", text["run"])
        with state.alone():
            kept = state.settle(text["accepted"])
            simulation = self._simulation(self._terms(text), down.ids[0])
            self._draw_in_secret(simulation, state, arrays, text)
            memory: dict[str, Tensor] = {}
            if kept is not None:
                restore(simulation, memory, *kept)
            said: Text = {"round": down.round}
            go_to(simulation, down.round - 1)
            if text["evaluate"]:
                look = self._look(arrays, text) if "look" in text else down
                said["counts"], said["losses"] = evaluate(simulation, look, text["readouts"], memory, text["last"])
            answer: Arrays = {}
            noise = self._noise_in_shares(simulation, state, text)
            if text["last"]:
                self._write_model(simulation, down, text["run"])
            else:
                go_to(simulation, down.round)
                opened = partial(_in_turn, state, partial(state.said_once("opened").once, down.round))
                answer, written = self._send(simulation, down, text, noise, opened)
                said |= written | {"training_loss": finite(float(training_losses(simulation, down.ids)))}
            state.stage(text["token"], keep(simulation, memory), {"round": str(simulation.round)})
        return answer, said

    def _draw_in_secret(
        self, simulation: Simulation, state: NodeState, arrays: Mapping[str, NDArray[Any]], text: Mapping[str, Any]
    ) -> None:
        """Let noise be drawn by a secret of this device, if it adds any; a round is answered once."""
        privacy, training, asked = simulation.terms.privacy, simulation.terms.training, state.said_once("asked")
        if text["last"]:
            return
        # Every other answer would be one more release, which nobody has accounted for.
        if privacy is None or privacy.level in ("client", "distributed"):
            if asked.may_have(text["round"]):
                raise Refused("asked-again")
            return
        question = json.dumps({key: text[key] for key in text.keys() - _BESIDE}, sort_keys=True).encode()
        whole = {**arrays, "question": np.frombuffer(question, np.uint8)}
        simulation.secret = noise_key(self.node.folder / "noise.key", text["run"], whole)
        if not asked.once(text["round"], str(simulation.secret)) or not 1 <= text["round"] <= training.rounds:
            raise Refused("asked-again")

    def _noise_in_shares(
        self, simulation: Simulation, state: NodeState, text: Mapping[str, Any]
    ) -> tuple[Privacy, Callable[[], bool]] | None:  # fmt: skip
        """Noise that is added in shares, and what notes that numbers of this round leave: of a round they do so once,
        since every sum that they are in is a release, whether or not this client hears that it was opened."""
        privacy, round_ = simulation.terms.privacy, text["round"]
        if privacy is None or privacy.level != "distributed" or text["last"]:
            return None
        masked = state.said_once("masked")
        if masked.may_have(round_) or not 1 <= round_ <= simulation.terms.training.rounds:
            raise Refused("asked-again")
        return privacy, partial(_in_turn, state, partial(masked.once, round_, secrets.token_hex(16)))

    def _send(
        self,
        simulation: Simulation,
        down: Instructions,
        text: Mapping[str, Any],
        noise: tuple[Privacy, Callable[[], bool]] | None,
        once: Callable[[str], bool],
    ) -> tuple[Arrays, Text]:
        """What leaves the device after training: the units that were asked for, or under secure sums public keys."""
        self.session, up = None, simulation.run(down)
        if "secure" not in text:
            # a report may be all that was learnt, as in pfedhn
            if (self.node.secure or noise is not None) and (up.blocks or up.reports):
                raise Refused("open-copy")
            learned = simulation.members()[down.ids[0]].parameters
            return write_up(up, down, learned, simulation.terms.compress)
        if up.reports:
            raise Refused("unsafe-sum", "reports")
        told = [Told.read(circle) for circle in text["secure"]["circles"]]
        session = SecureSession(up, down, told, SecureSums(**text["secure"]["settings"]), once, *noise or ())
        self.session = (text["token"], session)
        return session.keys(), {"round": up.round}

    def _secure(self, arrays: Mapping[str, NDArray[Any]], text: Mapping[str, Any]) -> tuple[Arrays, Text]:
        """A further question of the round's secure sums; its first brought the keys of this session."""
        if self.session is None or self.session[0] != text["token"]:
            raise Refused("unsafe-sum", "a session that is not there")
        return self.session[1].answer(text["phase"], arrays, text["circles"]), {"round": text["round"]}

    def _look(self, arrays: Mapping[str, NDArray[Any]], text: Mapping[str, Any]) -> Instructions:
        """What the round before is looked at with, where the client is about to change."""
        own = {name.removeprefix(LOOK): array for name, array in arrays.items() if name.startswith(LOOK)}
        return read_down(own, text["look"])

    def _write_model(self, simulation: Simulation, down: Instructions, run: str) -> None:
        """The personal model that the client ends with: what all this was for."""
        folder = self.node.folder / "models"
        folder.mkdir(exist_ok=True)
        model = simulation.model(down.ids[0], down)
        arrays = {name: value.numpy(force=True) for name, value in model.state_dict().items()}
        write_bytes(folder / f"{run}.safetensors", save(arrays))

    def _terms(self, text: Mapping[str, Any]) -> Terms:
        return read_terms(text["terms"], self.common, self.public_test, self.allowed)

    def _simulation(self, terms: Terms, number: int) -> Simulation:
        return Simulation([self.client], terms, "cpu", "sequential", numbers=[number])


def _in_turn(state: NodeState, note: Callable[..., bool], *said: str) -> bool:
    """A note on a round whose letter was answered before: another process of this client may be at work by now."""
    with state.alone():
        return note(*said)


def keep(simulation: Simulation, memory: Mapping[str, Tensor]) -> Arrays:
    """What a client must remember: all its numbers, private units among them, and what its read-outs keep."""
    kept = {_MEMORY + name: value.numpy(force=True) for name, value in memory.items()}
    return {_ROW: simulation.family_states[0].store.take([0])[0].numpy(force=True), **kept}


def restore(simulation: Simulation, memory: dict[str, Tensor], kept: Arrays, text: Mapping[str, str]) -> None:
    """Puts back what `keep` gave, after the architecture of that round."""
    go_to(simulation, int(text["round"]))
    simulation.family_states[0].store.put([0], torch.from_numpy(kept[_ROW].copy())[None])
    memory |= {n.removeprefix(_MEMORY): torch.from_numpy(a.copy()) for n, a in kept.items() if n.startswith(_MEMORY)}


def go_to(simulation: Simulation, round_: int) -> None:
    """Lets the client become what it is in a round, change by change."""
    for next_ in range(simulation.round + 1, round_ + 1):
        simulation.changes(next_)


def evaluate(
    simulation: Simulation, down: Instructions, readouts: list[str], memory: dict[str, Tensor], last: bool
) -> tuple[dict[str, dict[str, list[list[float]]]], dict[str, dict[str, float | None]]]:
    """The client's own scores of the round before, by read-out and split: counts by class, or sums; losses."""
    known = [readout for readout in map(named, readouts) if readout is not None]
    counts: dict[str, dict[str, list[list[float]]]] = {}
    losses: dict[str, dict[str, float | None]] = {}
    for (name, split), found in measure(look_at(simulation, down, memory, last), known).items():
        mine = found.counts[0].to_dense() if found.counts.is_sparse else found.counts[0]
        counts.setdefault(name, {})[split] = mine.tolist()
        losses.setdefault(name, {})[split] = None if found.losses is None else finite(float(found.losses[0]))
    return counts, losses


def finite(number: float) -> float | None:
    """A number as text can hold it."""
    return number if math.isfinite(number) else None
