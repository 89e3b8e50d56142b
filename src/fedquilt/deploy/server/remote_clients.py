"""Clients on machines of their own, as a backend of a federation: letters in place of function calls.

The server keeps a stub of each client: its architecture, its labels, its sample count, and no sample. The stubs make
what the loop needs (rosters, first values, architectures for methods that look at sent models), so that methods, plans
and results are the very same code as in a simulation.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from fedquilt._util.randomness import key_of, some_of
from fedquilt.client import Client
from fedquilt.core.federation import Federation
from fedquilt.core.protection import report_shapes
from fedquilt.core.secure_round import masked
from fedquilt.core.server import Server
from fedquilt.core.simulation import Simulation
from fedquilt.core.terms import Terms
from fedquilt.deploy.device.state import FRESH
from fedquilt.deploy.project import Rounds, Transfer
from fedquilt.deploy.server.answers import Exchange, collect, largest_answer
from fedquilt.deploy.server.bounds import clipped, outliers
from fedquilt.deploy.server.scores import Losses, Said, evaluations, loss_of
from fedquilt.deploy.server.secure_exchange import Letters, Read, SecureExchange, question
from fedquilt.deploy.server.silence import Silence, no_quorum
from fedquilt.deploy.transport.agreed import write_terms
from fedquilt.deploy.transport.codec import LOOK, Form, agree, has_form, read_up, senders, stack, write_down
from fedquilt.deploy.transport.transport import Patience, Transport
from fedquilt.deploy.transport.wire import Refused, pack
from fedquilt.interface.messages import Instructions, Update
from fedquilt.interface.readout import SPLITS
from fedquilt.interface.steps import Send, reported
from fedquilt.readouts import Readout
from fedquilt.results import Evaluation
from fedquilt.secure.protocol import TooFew

_INTRODUCTION = 60.0  # seconds that a newcomer gets for its first training
Answers = dict[int, tuple[dict[str, Tensor], dict[str, Tensor]]]


class RemoteClients:
    """Clients that letters reach. A round is repeated until enough of them have answered with what may be merged."""

    where, engines, late = "devices", ["flower"], True

    def __init__(
        self,
        run: str,
        clients: Sequence[Client],
        terms: Terms,
        post: Transport,
        rounds: Rounds,
        transfer: Transfer,
        log: Callable[[Exchange], None] = lambda _: None,
    ) -> None:
        self.run_name, self.post, self.rounds, self.transfer, self.log = run, post, rounds, transfer, log
        self.stubs = Simulation(clients, terms, "cpu", "sequential")
        self.names = [client.name for client in clients]
        self.accepted = dict.fromkeys(self.names, FRESH)  # the token of the last accepted update of each client
        self.told = dict.fromkeys(self.names, "")  # why its last update was left out, for each client
        self.left_out: dict[str, dict[str, int]] = {}  # client -> code -> how often
        self.silence = Silence()
        self.waits_for: Callable[[str], None] = lambda _: None  # told whom a round waits for
        self._form: Form | None = None  # of reports, as the last round had them
        self.chooses = any(isinstance(step, Send) for step in self.stubs.steps)
        self._terms = write_terms(terms)
        self._before: dict[int, Instructions] = {}  # what clients that change now looked at before
        self._said: dict[int, Said] = {}  # what the last answers said of the round before
        self._trained: tuple[Losses, Losses] = ({}, {})  # losses of training, of the round before the last and of it
        self.members, self.first_values = self.stubs.members, self.stubs.first_values
        self.sent_models, self.architectures = self.stubs.sent_models, self.stubs.architectures

    def turn(self, server: Server, round_: int) -> None:
        """Go to a round; clients that change there get what they must have to look at the round before as they were."""
        changing = [n for n, client in enumerate(self.stubs.clients) if round_ in client.changes]
        self._before = {number: server.instructions([number]) for number in changing}
        self.stubs.turn(server, round_)

    def exchange(
        self, server: Server, chosen: Sequence[int], readouts: Sequence[Readout]
    ) -> list[tuple[Instructions, Update]]:  # fmt: skip
        """One round, repeated until enough clients have answered."""
        belong = self.post.members()
        chosen = [number for number in chosen if self.names[number] in belong]  # who was removed is not waited for
        needed = max(1, math.ceil(self.rounds.quorum * len(chosen)))
        for attempt in range(1, self.rounds.attempts + 1):
            asked = self._ask([*chosen, *self._spare(server, chosen)], needed, server.round + 1)
            downs, settings = {number: server.instructions([number]) for number in asked}, self.stubs.terms.secure
            secure = None if settings is None else SecureExchange(server, asked, settings, self.transfer.largest_change)
            answers, tokens = self._letters(server, downs, readouts, attempt, False, len(chosen), needed, secure=secure)
            codes = [self.told[self.names[number]] for number in asked]
            if len(answers) < needed and not (secure and secure.over(codes, needed)):
                continue
            if secure is None:
                break
            try:
                opened, sums, left = secure.run(partial(self._secure, server, tokens, attempt), needed)
            except TooFew:
                continue
            if faults := secure.faults(server.round + 1, attempt, self.names):
                self._note(faults, server)
            answers = {number: answer for number, answer in answers.items() if number not in left}
            break
        else:
            told = {self.names[number]: self.told[self.names[number]] for number in asked}
            raise no_quorum(server.round + 1, self.rounds.attempts, self.rounds.quorum, told)
        self.accepted |= {self.names[number]: tokens[number] for number in answers}
        losses = {self.names[number]: loss_of(self._said[number].get("training_loss")) for number in answers}
        self._trained = (self._trained[1], {name: loss for name, loss in losses.items() if math.isfinite(loss)})
        family = {number: place for number, (place, _) in self.stubs.home.items()}
        ups = stack(server.round + 1, answers, family, senders(downs, server.roster, server.compress))
        if settings is not None:
            shown = [masked(up.ids, opened, settings, () if at else sums) for at, up in enumerate(ups)]
            ups = [replace(up, masked=hidden) for up, hidden in zip(ups, shown, strict=True)]
        return [(downs[up.ids[0]], up) for up in ups]

    def evaluate(self, server: Server, readouts: Sequence[Readout], last: bool) -> list[Evaluation]:
        """What the last answers said of the round before; `last`: clients look at what they end with, and keep it."""
        if last:
            asked = self._ask(range(len(self.names)), 0, server.round + 1)
            downs = {number: server.instructions([number]) for number in asked}
            self._letters(server, downs, readouts, 1, last=True)
        terms, trained, of_round = self.stubs.terms, self._trained[last], server.round - (not last)
        return evaluations(of_round, readouts, self.names, terms.classes, self._said, trained, terms.task)

    def introduction(self, server: Server, down: Instructions) -> list[Update]:
        """What a newcomer has to show: one letter, whose outcome the client forgets again; nothing where none came."""
        answers, _ = self._letters(server, {down.ids[0]: down}, (), 1, what="newcomer", patience=_INTRODUCTION)
        return stack(server.round + 1, answers, {down.ids[0]: 0})

    def kept(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the server."""
        return {
            "accepted": self.accepted, "told": self.told, "left_out": self.left_out, "trained": dict(self._trained[1]),
            "silence": self.silence.kept(), "form": self._form,
        }  # fmt: skip

    def remember(self, kept: Mapping[str, Any]) -> None:
        """Takes back what `kept` gave."""
        self.accepted, self.told = dict(kept["accepted"]), dict(kept["told"])
        self.silence = Silence(kept.get("silence"))
        self.left_out = {name: dict(codes) for name, codes in kept["left_out"].items()}
        self._trained = ({}, dict(kept.get("trained", {})))
        form = kept.get("form")
        self._form = form and tuple((name, tuple(shape), dtype) for name, shape, dtype in form)

    def model(self, number: int, down: Instructions | None = None) -> nn.Module:
        """Not here: a client's personal model holds private units, and these never leave it."""
        raise ValueError(
            f"the model of client '{self.names[number]}' is on its own device, in the folder models of its client "
            "folder"
        )

    def close(self) -> None:
        """Nothing: clients stay where they are."""

    def _spare(self, server: Server, chosen: Sequence[int]) -> list[int]:
        """Some clients more, where a round takes a part of all: those who answer first count."""
        others = sorted({*range(len(self.names))} - set(chosen))
        count = min(len(others), math.ceil(self.rounds.spare * len(chosen)))
        if not count or self.stubs.terms.training.sampling == "poisson":  # where chance alone says who takes part
            return []
        return [others[at] for at in some_of(len(others), count, key_of("spare", self.stubs.terms.seed, server.round))]

    def _ask(self, chosen: Sequence[int], needed: int, round_: int) -> list[int]:
        """Those of the chosen clients that are there."""
        there, timeout = {self.names[number]: number for number in chosen}, self.rounds.timeout
        found = self.silence.wait_for(self.post.reachable, list(there), needed, round_, timeout, self.waits_for)
        return [there[name] for name in found]

    def _letters(
        self,
        server: Server,
        downs: Mapping[int, Instructions],
        readouts: Sequence[Readout],
        attempt: int,
        last: bool = False,
        wanted: int = 0,
        needed: int = 0,
        what: str = "round",
        patience: float | None = None,
        secure: SecureExchange | None = None,
    ) -> tuple[Answers, dict[int, str]]:
        """Sends letters, checks what comes back, and leaves out what must be; answers and letters' tokens."""
        tokens = {number: secrets.token_hex(16) for number in downs}
        told = {n: None if secure is None else secure.told(n) for n in downs}
        write = partial(self._letter, server, readouts, last)
        letters = {self.names[n]: write(down, tokens[n], told[n]) for n, down in downs.items()}
        record = Exchange(server.round + 1, "end" if last else what, attempt, list(letters))
        answers: Answers = {}
        self._said = {}
        sizes = server.roster.sizes()
        seconds = min(self.rounds.timeout, patience or self.rounds.timeout)
        waiting = Patience(seconds, needed, self.rounds.grace, self._largest(server, downs, len(readouts)))

        def read(number: int, arrays: Mapping[str, Any], text: Said) -> bool:
            if secure is not None:
                secure.take_keys(number, arrays)
                answers[number] = {}, {}
            elif not last:
                own, member = {unit: int(size[number]) for unit, size in sizes.items()}, server.roster.members[number]
                asked = downs[number], own, member.parameters, server.compress, self.transfer.largest_change
                found = read_up(arrays, *asked, self.chooses)
                answers[number] = clipped(found, downs[number], self.stubs.terms.privacy)
            self._said[number] = text
            return bool(wanted) and len(answers) == wanted < len(letters)

        collect(self.post, letters, self.names, tokens, record, waiting, read)
        self._compare(answers, server, downs, record)
        self._note(record, server)
        return answers, tokens

    def _largest(self, server: Server, asked: Collection[int], readouts: int) -> dict[str, int]:
        """Bytes that each client's answer may have."""
        tables, classes, sizes = readouts * len(SPLITS), self.stubs.terms.classes, server.roster.sizes().values()
        return {self.names[n]: largest_answer(sum(int(s[n]) for s in sizes), classes, tables) for n in asked}

    def _compare(
        self, answers: Answers, server: Server, downs: Mapping[int, Instructions], record: Exchange
    ) -> None:  # fmt: skip
        """Leaves out answers that do not go with those of the others, or are not what the method says they are."""
        names = reported(self.stubs.steps, {name for down in downs.values() for name in down.told})
        privacy = self.stubs.terms.privacy
        shapes = {n: report_shapes(privacy, server.method, server.roster, n, downs[n].told) for n in answers}
        strange, self._form = agree({n: a for n, a in answers.items() if shapes[n] is None}, self._form, names)
        strange |= {n for n, known in shapes.items() if known is not None and not has_form(answers[n][1], known)}
        for number in strange:
            del answers[number]
            record.refused[self.names[number]] = "wrong-shape"
        for number, where in outliers(answers, downs, self.transfer.most_times_others, privacy).items():
            del answers[number]
            record.refused[self.names[number]] = "far-from-others"
            record.details[self.names[number]] = str(Refused("far-from-others", where[:60]))

    def _note(self, record: Exchange, server: Server) -> None:
        """Counts what was left out, notes what each sender is to be told, and who said nothing; then logs it."""
        silent = [name for name, code in record.refused.items() if code == "no-answer" and name in self.told]
        self.silence.note(record.round, silent, [name for name in self.told if record.bytes_up.get(name)])
        for name in record.asked:
            self.told[name] = ""
        for name, code in record.refused.items():
            codes = self.left_out.setdefault(name, {})
            codes[code] = codes.get(code, 0) + 1
            if name in self.told:
                self.told[name] = code
                server.refused[self.names.index(name)] += code != "no-answer"
            if code == "lost-state":
                self.accepted[name] = FRESH
        self.log(record)

    def _secure(
        self, server: Server, tokens: Mapping[int, str], attempt: int, phase: str, letters: Letters, read: Read
    ) -> None:  # fmt: skip
        """One more exchange of a round's secure sums; who does not answer it is left out of what follows."""
        packed = {self.names[n]: question(*letters[n], tokens[n], phase, server.round + 1) for n in letters}
        record = Exchange(server.round + 1, phase, attempt, list(packed))
        needed = math.ceil(self.rounds.quorum * len(packed))
        waiting = Patience(self.rounds.timeout, needed, self.rounds.grace, self._largest(server, letters, 0))
        collect(self.post, packed, self.names, tokens, record, waiting, lambda n, arrays, _: read(n, arrays))
        self._note(record, server)

    def _letter(
        self, server: Server, readouts: Sequence[Readout], last: bool, down: Instructions, token: str,
        circles: list[dict[str, Any]] | None,
    ) -> bytes:  # fmt: skip
        name, halves = self.names[down.ids[0]], server.halved.units(down.ids[0])
        arrays, text = write_down(down, halves)
        look = self._before.get(down.ids[0])
        if look is not None and readouts and not last:
            more, text["look"] = write_down(look, halves)
            arrays |= {LOOK + name: array for name, array in more.items()}
        text |= {
            "kind": "round",
            "run": self.run_name,
            "terms": self._terms,
            "token": token,
            "accepted": self.accepted[name],
            "refused": self.told[name],
            "readouts": [readout.name for readout in readouts],
            "evaluate": bool(readouts),
            "last": last,
        }
        settings = self.stubs.terms.secure
        if circles is not None and settings is not None:
            text["secure"] = {"settings": settings.text, "circles": circles}
        return pack(arrays, text)


def remote(federation: Federation) -> RemoteClients:
    """The clients of a federation over a network."""
    assert isinstance(federation.backend, RemoteClients)
    return federation.backend
