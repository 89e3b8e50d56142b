"""The server's half of a federation whose clients are elsewhere: the core's loop with letters in place of a fleet.

The server keeps a shadow of each client: its architecture, its labels, its sample count, and no sample. The shadows
make what the core's `Federation` needs (rosters, first values, architectures for methods that look at sent models), so
that methods, plans and results are the very same code as in a simulation.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt.client import Change, Client, Split
from fedquilt.deploy.letters import LOOK, Text, agree, read_up, stack, write_down, write_terms
from fedquilt.deploy.node_state import FRESH
from fedquilt.deploy.post import Post
from fedquilt.deploy.project import Rounds, Transfer
from fedquilt.deploy.wire import Refused, pack, unpack
from fedquilt.evaluation import SPLITS
from fedquilt.federation import Federation, RoundReport
from fedquilt.messages import Down, Member, Passed, counted
from fedquilt.readouts import Readout
from fedquilt.results import Evaluation
from fedquilt.scenario import Scenario
from fedquilt.sharing import Rule, mean
from fedquilt.steps import Send
from fedquilt.terms import Terms

FROM_DEVICES = ("failed", "lost-state", "unreadable", "wrong-version", "unknown-method", "other-code", "bad-letter")
Answers = dict[int, tuple[dict[str, Tensor], dict[str, Tensor]]]
Counts = Mapping[str, Mapping[str, list[list[int]]]]


@dataclass
class Exchange:
    """What one exchange of letters was: for the log and for `status`."""

    round: int
    what: str  # "round", or "end" where clients only look at what they received
    attempt: int
    asked: list[str]
    answered: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class NoQuorum(RuntimeError):
    """Too few clients answered, again and again."""


@dataclass(frozen=True)
class Architecture:
    """Builds a shadow's model; which of its buffers are constant cannot be tried without samples, so it is declared."""

    build: Callable[[], nn.Module]
    constant: tuple[str, ...]

    def __call__(self) -> nn.Module:
        return self.build()


def shadow(
    member: Member, build: Callable[[int], Callable[[], nn.Module] | None], changes: Mapping[int, Mapping[str, Any]]
) -> Client:
    """A client without data: what it declared, and its architecture. `build(0)` is its model builder, `build(t)` that
    of a change at round t, if the model changes there."""

    def samples(count: int) -> Split:
        return Split(torch.zeros(count, 0), torch.zeros(count, dtype=torch.int64))

    def model(start: int, constant: Sequence[str]) -> Architecture | None:
        builder = build(start)
        return None if builder is None else Architecture(builder, tuple(constant))

    first = model(0, member.constant)
    assert first is not None
    planned = {
        start: Change(model(start, told["constant"]), tuple(told["labels"]), samples(told["samples"]))
        for start, told in changes.items()
    }
    return Client(
        member.name, first, samples(member.samples), traits=member.traits, labels=member.labels, changes=planned
    )


class RemoteFederation(Federation):
    """A federation over a network. `step` sends a round's letters and merges the answers that may be merged."""

    def __init__(
        self,
        run: str,
        scenario: Scenario,
        terms: Terms,
        post: Post,
        rounds: Rounds,
        transfer: Transfer,
        readouts: Sequence[Readout] = (),
        rule: Rule = mean,
        evaluate_every: int = 1,
        log: Callable[[Exchange], None] = lambda _: None,
    ) -> None:
        super().__init__(
            scenario,
            terms.method,
            terms.training,
            terms.seed,
            "cpu",
            "sequential",
            readouts=readouts,
            rule=rule,
            evaluate_every=evaluate_every,
        )
        self.run_name, self.post, self.rounds, self.transfer, self.log = run, post, rounds, transfer, log
        self.readout_names = [readout.name for readout in self.readouts]
        self.names = [client.name for client in scenario.clients]
        self.accepted = dict.fromkeys(self.names, FRESH)  # the token of the last accepted update of each client
        self.told = dict.fromkeys(self.names, "")  # why its last update was left out, for each client
        self.left_out: dict[str, dict[str, int]] = {}  # client -> code -> how often
        self.chooses = any(isinstance(step, Send) for step in self.fleet.steps)
        self._terms = write_terms(terms)

    def step(self, evaluate: bool = True) -> RoundReport:
        """One round, repeated until enough clients have answered. Its evaluations are those of the round before."""
        start = time.perf_counter()
        round_ = self.round + 1
        due = evaluate and self.round > 0 and self.round % self.evaluate_every == 0
        looks = self._looks_before_changes(round_) if due else {}
        changed = self.fleet.changes(round_)
        if changed:
            self.server.declare(changed)
        for attempt in range(1, self.rounds.attempts + 1):
            chosen = self.choose(round_)
            needed = max(1, math.ceil(self.rounds.quorum * len(chosen)))
            asked = self._ask(chosen, needed)
            downs = {number: self.server.down([number]) for number in asked}
            answers, counts, tokens = self._exchange(downs, attempt, due, looks)
            if len(answers) >= needed:
                break
        else:
            raise NoQuorum(
                f"round {round_} was tried {self.rounds.attempts} times and fewer than {self.rounds.quorum:.0%} of its "
                "clients answered; look at `fedquilt deploy status`, then go on with `fedquilt deploy run --resume`"
            )
        family = {n: i for i, crew in enumerate(self.fleet.crews) for n in crew.family.ids}
        ups = stack(round_, answers, family)
        passed = [Passed.of(downs[up.ids[0]], up) for up in ups]
        moved = counted(self.server.plan, self.server.sizes, passed)  # before merging writes the next plan
        self.server.merge(ups)
        self.accepted |= {self.names[number]: tokens[number] for number in answers}
        evaluations = tuple(self._evaluations(round_ - 1, counts))
        refused = int(self.server.refused.sum())
        seconds = time.perf_counter() - start
        return RoundReport(
            round_, self.training.rounds, self.server.plan, lambda: moved, evaluations, tuple(sorted(answers)), seconds,
            refused,
        )  # fmt: skip

    def finish(self) -> tuple[Evaluation, ...]:
        """The last letter: clients look at what they received in the end, and keep it."""
        asked = self._ask(tuple(range(len(self.names))))
        downs = {number: self.server.down([number]) for number in asked}
        _, counts, _ = self._exchange(downs, 1, evaluate=True, last=True)
        return tuple(self._evaluations(self.round, counts))

    def _looks_before_changes(self, round_: int) -> dict[int, Down]:
        """What clients that change in a round must have to look at the round before as they were then."""
        changing = [n for n, client in enumerate(self.scenario.clients) if round_ in client.changes]
        return {number: self.server.down([number]) for number in changing}

    def kept(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the server."""
        return {"accepted": self.accepted, "told": self.told, "left_out": self.left_out}

    def remember(self, kept: Mapping[str, Any]) -> None:
        """Takes back what `kept` gave."""
        self.accepted, self.told = dict(kept["accepted"]), dict(kept["told"])
        self.left_out = {name: dict(codes) for name, codes in kept["left_out"].items()}

    def model(self, client: str) -> nn.Module:
        """Not here: a client's personal model holds private units, and these never leave it."""
        raise ValueError(
            f"the model of client '{client}' is on its own device, in the folder models of its client folder"
        )

    def _ask(self, chosen: Sequence[int], needed: int = 0) -> list[int]:
        """Those of the chosen clients that are there, waiting a while until there are enough; all if there are not."""
        end = time.monotonic() + self.rounds.timeout
        while True:
            there = self.post.reachable()
            found = [number for number in chosen if self.names[number] in there]
            if len(found) >= needed:
                return found
            if time.monotonic() > end:
                return list(chosen)
            time.sleep(1)

    def _exchange(
        self,
        downs: Mapping[int, Down],
        attempt: int,
        evaluate: bool,
        looks: Mapping[int, Down] | None = None,
        last: bool = False,
    ) -> tuple[Answers, dict[int, Counts], dict[int, str]]:
        """Sends letters, checks what comes back, and leaves out what must be."""
        tokens = {number: secrets.token_hex(16) for number in downs}
        letters = {
            self.names[n]: self._letter(down, (looks or {}).get(n), tokens[n], evaluate, last)
            for n, down in downs.items()
        }
        record = Exchange(self.round + 1, "end" if last else "round", attempt, list(letters))
        record.bytes_down = {name: len(letter) for name, letter in letters.items()}
        start = time.perf_counter()
        answers: Answers = {}
        counts: dict[int, Counts] = {}
        for answer in self.post.exchange(letters, self.round + 1, self.rounds.timeout):
            record.bytes_up[answer.client] = record.bytes_up.get(answer.client, 0) + len(answer.content)
            try:
                if answer.code:
                    raise Refused(answer.code)
                if answer.client not in letters:
                    raise Refused("unknown-client")
                number = self.names.index(answer.client)
                if answer.client in record.answered:
                    raise Refused("duplicate")
                arrays, text = _open(answer.content, tokens[number], self.round + 1)
                if not last:
                    sizes = {unit: int(size[number]) for unit, size in self._sizes().items()}
                    answers[number] = read_up(arrays, downs[number], sizes, self.transfer.largest_change, self.chooses)
                counts[number] = text.get("counts", {})
                record.answered.append(answer.client)
            except Refused as refusal:
                record.refused[answer.client] = refusal.code
        for number in agree(answers):
            del answers[number]
            record.refused[self.names[number]] = "wrong-shape"
        self._remember(record)
        record.seconds = time.perf_counter() - start
        self.log(record)
        return answers, counts, tokens

    def _sizes(self) -> dict[str, Tensor]:
        return self.server.roster.sizes()

    def _remember(self, record: Exchange) -> None:
        """Counts what was left out, and notes what each sender is to be told."""
        for name in record.asked:
            self.told[name] = ""
        for name, code in record.refused.items():
            codes = self.left_out.setdefault(name, {})
            codes[code] = codes.get(code, 0) + 1
            if name in self.told:
                self.told[name] = code
                self.server.refused[self.names.index(name)] += code != "no-answer"
            if code == "lost-state":
                self.accepted[name] = FRESH

    def _letter(self, down: Down, look: Down | None, token: str, evaluate: bool, last: bool) -> bytes:
        name = self.names[down.ids[0]]
        arrays, text = write_down(down, self.transfer.dtype)
        if look is not None:
            more, text["look"] = write_down(look, self.transfer.dtype)
            arrays |= {LOOK + name: array for name, array in more.items()}
        text |= {
            "kind": "round",
            "run": self.run_name,
            "terms": self._terms,
            "token": token,
            "accepted": self.accepted[name],
            "refused": self.told[name],
            "dtype": self.transfer.dtype,
            "readouts": self.readout_names,
            "evaluate": evaluate,
            "last": last,
        }
        return pack(arrays, text)

    def _evaluations(self, round_: int, counts: Mapping[int, Counts]) -> list[Evaluation]:
        """The clients' own counts as the core's results; who did not answer has none."""
        classes, found = self.scenario.classes, []
        for readout in self.readout_names:
            for split in SPLITS:
                table = torch.zeros(len(self.names), classes, classes, dtype=torch.int64)
                for number, own in counts.items():
                    table[number] = _counts(own, readout, split, classes)
                if bool(table.any()):
                    found.append(Evaluation(round_, readout, split, tuple(self.names), table.to_sparse()))
        return found


def _open(content: bytes, token: str, round_: int) -> tuple[dict[str, Any], Text]:
    """An answer's arrays and text, if it is the answer to the letter with this token and round."""
    if not content:
        raise Refused("failed")
    arrays, text = unpack(content)
    if text.get("token") != token:
        raise Refused("wrong-round")
    code = text.get("code")
    if code is not None:
        raise Refused(code if code in FROM_DEVICES else "failed")
    if text.get("round") != round_:
        raise Refused("wrong-round")
    return arrays, text


def _counts(own: Counts, readout: str, split: str, classes: int) -> Tensor:
    """A client's counts, if they are counts at all; a client can spoil its own score only."""
    try:
        table = torch.tensor(own[readout][split], dtype=torch.int64)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
        return torch.zeros(classes, classes, dtype=torch.int64)
    good = table.shape == (classes, classes) and bool((table >= 0).all()) and bool((table < 2**31).all())
    return table if good else torch.zeros(classes, classes, dtype=torch.int64)
