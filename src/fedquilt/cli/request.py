"""What the user ordered, checked to the last word before any work is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fedquilt._util.suggest import did_you_mean
from fedquilt.cli.output import Refused
from fedquilt.cli.scenario import Source, find
from fedquilt.cli.settings import SettingSpec, assign, convert, spec_of

if TYPE_CHECKING:
    from fedquilt.attacks import Attack
    from fedquilt.methods import Method
    from fedquilt.privacy import Privacy
    from fedquilt.readouts import Readout
    from fedquilt.scenario import Scenario
    from fedquilt.secure import SecureSums
    from fedquilt.sharing import Compression, Rule

# settings of training that make sense or not only together with others, which a scenario may bring
_TOGETHER = ("optimiser", "momentum", "nesterov", "betas")


@dataclass(frozen=True)
class Choices:
    """The options that every command that runs something has."""

    rounds: int | None = None
    settings: Sequence[str] = ()
    readouts: str | None = None
    merge: str = "mean"
    device: str = "auto"
    engine: str = "auto"
    clients_at_once: int | None = None
    evaluate_every: int = 1
    seeds: Sequence[int] = (0,)
    attack: str | None = None
    secure: bool = False
    threads: int | None = None
    everyone: bool = False
    unseen: int = 0


@dataclass(frozen=True)
class Request:
    """A scenario, methods, and how to run them; `scenario(seed)` builds the clients of a seed."""

    source: Source
    methods: tuple[Method, ...]
    scenario_settings: Mapping[str, Any]
    training: Mapping[str, Any]
    readouts: tuple[Readout, ...]
    rule: Rule
    choices: Choices
    attack: Attack | None = None
    privacy: Privacy | None = None
    secure: SecureSums | None = None
    compress: Compression | None = None

    def how(self) -> dict[str, Any]:
        """The arguments of `fedquilt.run` that this order decides."""
        choices = self.choices
        return {
            "readouts": self.readouts, "device": choices.device, "engine": choices.engine, "merge": self.rule,
            "attack": self.attack,
            "privacy": self.privacy,
            "clients_at_once": choices.clients_at_once, "threads": choices.threads,
            "evaluate_every": choices.evaluate_every, "secure": self.secure or False,
            "everyone": choices.everyone, "unseen": choices.unseen, "compress": self.compress,
        }  # fmt: skip

    def scenario(self, seed: int) -> Scenario:
        """The scenario of a seed, its training settings overridden and checked."""
        made = self.source.build(seed, self.scenario_settings)
        return replace(made, training=made.training.but(self.training))


def take_request(scenario: str, methods: Sequence[str], choices: Choices) -> Request:
    """Check everything the user wrote; the first thing that is wrong is refused with a sentence."""
    from fedquilt.attacks import attack_of
    from fedquilt.engines.settings import Training
    from fedquilt.methods.find import find as find_method
    from fedquilt.privacy import Privacy
    from fedquilt.runs.rebuilding import make_method, make_readouts
    from fedquilt.secure import SecureSums
    from fedquilt.sharing import Compression, merge_of

    kinds = [find_method(word) for word in methods]
    names = [kind.name for kind in kinds]
    twice = [at for at, name in enumerate(names) if name in names[:at]]
    if twice and kinds[twice[0]] is kinds[names.index(names[twice[0]])]:
        raise Refused(f"the method '{names[twice[0]]}' is named twice; once is enough")
    if twice:
        raise Refused(f"two methods are called '{names[twice[0]]}'; give one of them another name")
    merge = merge_of(choices.merge)
    check_hardware(choices)
    source = find(scenario)
    specs = {
        "scenario": spec_of(source.builder),
        "training": spec_of(Training),
        "merge": spec_of(merge),
        "dp": spec_of(Privacy),
        "secure": spec_of(SecureSums),
        "compress": spec_of(Compression),
    }
    if choices.attack is not None:
        specs["attack"] = spec_of(attack_of(choices.attack))
    rounds, words = rounds_of(choices, specs["training"])
    own = {kind.name: spec_of(kind) for kind in kinds}
    placed = assign(words, {**specs, **own}, names)
    if rounds is not None:
        placed["training"]["rounds"] = rounds
        if "rounds" in specs["scenario"].hints:  # a scenario whose data are a stream over the rounds
            placed["scenario"].setdefault("rounds", rounds)
    for key, value in placed["training"].items():
        if key not in _TOGETHER:
            Training().but({key: value})
    return Request(
        source,
        tuple(make_method(word, placed[name]) for word, name in zip(methods, names, strict=True)),
        placed["scenario"],
        placed["training"],
        make_readouts(_words(choices.readouts) or ("received", "adapted")),
        merge(**placed["merge"]),
        choices,
        None if choices.attack is None else attack_of(choices.attack)(**placed["attack"]),
        Privacy(**placed["dp"]) if placed["dp"] else None,
        SecureSums(**placed["secure"]) if choices.secure or placed["secure"] else None,
        Compression(**placed["compress"]),
    )


def check_hardware(choices: Choices) -> None:
    """Refuse a device or an engine that is not there, and numbers that make no sense."""
    from fedquilt.core.federation import pick_device
    from fedquilt.engines.select import ENGINES

    if choices.engine not in ("auto", *ENGINES):
        raise Refused(did_you_mean(choices.engine, ("auto", *ENGINES), "engine"))
    try:
        pick_device(choices.device)
    except RuntimeError:
        raise Refused(f"there is no device '{choices.device}'; take auto, cpu or cuda") from None
    if min(choices.seeds, default=0) < 0 or not choices.seeds:
        raise Refused("seeds are whole numbers from 0 on, and there must be at least one")
    if choices.clients_at_once is not None and choices.clients_at_once < 1:
        raise Refused(f"--clients-at-once {choices.clients_at_once}: give at least 1")
    if choices.threads is not None and choices.threads < 1:
        raise Refused(f"--threads {choices.threads}: give at least 1")
    if choices.unseen < 0:
        raise Refused(f"--unseen {choices.unseen}: give how many clients are held out")
    if choices.evaluate_every < 1:
        raise Refused(f"--evaluate-every {choices.evaluate_every}: give at least 1")


def rounds_of(choices: Choices, training: SettingSpec) -> tuple[int | None, list[str]]:
    """The rounds, whether said as `--rounds` or as a setting, and the other settings."""
    said = [word.partition("=")[2] for word in choices.settings if word.startswith("rounds=")]
    words = [word for word in choices.settings if not word.startswith("rounds=")]
    if said and choices.rounds is not None:
        raise Refused(f"--rounds {choices.rounds} and --set rounds={said[-1]} are both given; give one of them")
    return (convert(said[-1], training.hints["rounds"], "rounds") if said else choices.rounds), words


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text else ()
