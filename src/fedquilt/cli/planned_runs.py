"""The runs of a comparison: each a value that says everything, has its own directory, and can be handed over."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.cli.comparison import ALONE
from fedquilt.cli.output import Refused
from fedquilt.cli.request import Choices, Request, take_request

if TYPE_CHECKING:
    from fedquilt.core.federation import Callback
    from fedquilt.methods import Method
    from fedquilt.runs.result import Run
    from fedquilt.scenario import Scenario


@dataclass(frozen=True)
class PlannedRun:
    """One run: a method with its settings on a scenario with a seed, as plain values. `label` names its settings."""

    scenario: str
    scenario_settings: dict[str, Any]
    training: dict[str, Any]
    method: dict[str, Any]
    seed: int
    readouts: tuple[str, ...]
    merge: dict[str, Any]
    evaluate_every: int
    dp: dict[str, Any] = field(default_factory=dict)
    secure: dict[str, Any] = field(default_factory=dict)
    attack: dict[str, Any] = field(default_factory=dict)
    everyone: bool = False
    unseen: int = 0
    compress: dict[str, Any] = field(default_factory=dict)
    code: str = ""  # a checksum of a method of the user's own, whose results are not those of its code of yesterday
    source: str = ""  # one of the file of the user's own that the clients are made of, for the same reason
    label: str = field(default="", compare=False)
    hardware: dict[str, Any] = field(default_factory=dict, compare=False)  # device, engine, clients at once

    @property
    def name(self) -> str:
        """The method's name."""
        return str(self.method["name"])

    @property
    def variant(self) -> str:
        """A checksum of everything that decides results but the seed."""
        decisive = asdict(self)
        may_be_unsaid = ("code", "source", "dp", "secure", "attack", "everyone", "unseen", "compress")
        unsaid = [key for key in may_be_unsaid if not decisive[key]]
        for key in ("seed", "label", "hardware", *unsaid):
            del decisive[key]
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def folder(self) -> str:
        """The name of its directory, always the same for the same work."""
        return f"{self.name}-{self.variant}-seed{self.seed}"

    def build(self) -> Scenario:
        """Its clients."""
        from fedquilt._util.toml import values_of
        from fedquilt.cli.scenario import find
        from fedquilt.runs.settings import training_from

        made = find(self.scenario).build(self.seed, values_of(self.scenario_settings))
        changed = training_from({**asdict(made.training), **self.training})
        return replace(made, training=changed)

    def run(self, out: Path, scenario: Scenario, callbacks: Sequence[Callback], checkpoint_every: int) -> Run:
        """Run it in a directory, or go on with it there."""
        from fedquilt.privacy import Privacy
        from fedquilt.runs.rule_texts import attack_from, rule_from
        from fedquilt.runs.run import resume, run
        from fedquilt.runs.settings import method_from
        from fedquilt.secure import SecureSums
        from fedquilt.sharing import Compression

        method = method_from(self.method, trust=True)  # the user named it, on the command line
        if (out / "run.toml").is_file():
            return resume(out, scenario, callbacks)
        return run(
            scenario, method, seed=self.seed, readouts=self.readouts, merge=rule_from(self.merge),
            privacy=Privacy.of(self.dp), secure=SecureSums(**self.secure) if self.secure else False,
            attack=attack_from(self.attack or None), compress=Compression.of(self.compress),
            evaluate_every=self.evaluate_every, everyone=self.everyone, unseen=self.unseen, alone=False,
            callbacks=callbacks, out=out, checkpoint_every=checkpoint_every, **self.hardware,
        )  # fmt: skip


def planned_runs(order: Request, seeds: Sequence[int], label: str = "") -> list[PlannedRun]:
    """The runs that an order amounts to, seed by seed."""
    from fedquilt.runs.code_digest import method_code
    from fedquilt.runs.rule_texts import attack_to, plain, rule_to
    from fedquilt.runs.settings import method_to
    from fedquilt.sharing import mean

    choices = order.choices
    attack = {} if order.attack is None else attack_to(order.attack)
    hardware = {"device": choices.device, "engine": choices.engine, "clients_at_once": choices.clients_at_once}
    source = order.source.checksum
    hardware |= {} if choices.threads is None else {"threads": choices.threads}
    privacy = {} if order.privacy is None else plain(order.privacy.text)
    secure = {} if order.secure is None else order.secure.text
    compress = {} if order.compress is None else order.compress.text
    shared = (rule_to(order.rule), privacy, secure, attack, compress)
    nothing: dict[str, Any] = {}  # what is done to what is shared is not done to clients alone
    alone = (rule_to(mean), nothing, nothing, nothing, nothing)
    return [
        PlannedRun(
            order.source.address, plain(order.scenario_settings), plain(order.training), method_to(method), seed,
            tuple(readout.name for readout in order.readouts), merge, choices.evaluate_every, dp, hidden, lies,
            choices.everyone, choices.unseen, smaller, method_code(method), source, label, hardware,
        )
        for seed in seeds
        for method in order.methods
        for merge, dp, hidden, lies, smaller in [alone if method.name == ALONE else shared]
    ]  # fmt: skip


def sweep(scenario: str, methods: Sequence[str], choices: Choices, swept: Sequence[str]) -> list[PlannedRun]:
    """The runs of every combination of swept settings, each once: a method that does not know a key runs without it."""
    found: dict[str, PlannedRun] = {}
    plain_order = take_request(scenario, methods, choices)
    bar = {job.folder for job in planned_runs(plain_order, choices.seeds) if job.name == ALONE}
    for point in itertools.product(*(_values(word) for word in swept)):
        order = take_request(scenario, methods, replace(choices, settings=(*choices.settings, *point)))
        if order.scenario_settings != plain_order.scenario_settings:
            raise Refused(
                f"--sweep {' '.join(point)}: a setting of the scenario changes the task; sweep settings of methods, "
                "training or the merge, and compare scenarios with --set"
            )
        for job in planned_runs(order, choices.seeds):
            words = (word for word in point if job.name in _whose(word, order.methods))
            told = "" if job.folder in bar else " ".join(words)
            found.setdefault(job.folder, replace(job, label=told))
    return sorted(found.values(), key=lambda job: job.seed)


def _whose(word: str, methods: Sequence[Method]) -> set[str]:
    """The methods that a setting concerns: those that it names or that know it, else all of them."""
    path = word.partition("=")[0].split(".")
    names = {method.name for method in methods}
    if path[0] in names:
        return {path[0]}
    return {m.name for m in methods if {f.name for f in fields(m)} & set(path)} or names


def _values(word: str) -> list[str]:
    """The settings that a swept one stands for; values that are lists themselves are told apart by semicolons.

    >>> _values("mu=0.01,0.1"), _values("decay_at=0.5,0.75;0.9")
    (['mu=0.01', 'mu=0.1'], ['decay_at=0.5,0.75', 'decay_at=0.9'])
    """
    key, equals, text = word.partition("=")
    values = [part.strip() for part in text.split(";" if ";" in text else ",") if part.strip()]
    if not equals or not values:
        raise Refused(f"--sweep {word}: write key=a,b,c")
    return [f"{key}={value}" for value in values]
