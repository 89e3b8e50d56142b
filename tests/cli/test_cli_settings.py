"""Words as settings: spreading, converting, routing, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from fedquilt.cli.output import Refused
from fedquilt.cli.settings import SettingSpec, assign, convert, spec_of, spread


def test_several_words_after_one_set() -> None:
    words = ["run", "digits", "modfl", "--set", "clients=18", "fraction=0.2", "--rounds", "3", "--set", "lr=0.1"]
    assert spread(words) == [
        "run", "digits", "modfl", "--set", "clients=18", "--set", "fraction=0.2", "--rounds", "3", "--set", "lr=0.1",
    ]  # fmt: skip


def test_a_method_after_set_stays_a_method() -> None:
    words = ["compare", "digits", "--set", "lr=0.1", "fedavg"]
    assert spread(words) == words


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("3", int, 3),
        ("1e-3", float, 1e-3),
        ("3", float, 3.0),
        ("true", bool, True),
        ("off", bool, False),
        ("adam", Literal["sgd", "adam"], "adam"),
        ("a=b", str, "a=b"),
        ("0.9,0.99", tuple[float, float], (0.9, 0.99)),
        ("0.5", tuple[float, ...], (0.5,)),
        ("3,3,2", Sequence[int], (3, 3, 2)),
        ("none", int | None, None),
        ("7", int | None, 7),
        ("7", str | int, 7),
        ("seven", str | int, "seven"),
        ("[1, 2]", Any, [1, 2]),
        ("word", Any, "word"),
    ],
)
def test_words_become_values(text: str, hint: Any, value: Any) -> None:
    found = convert(text, hint, "key")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "hint", "sentence"),
    [
        ("3.5", int, "whole number"),
        ("fast", float, "must be a number"),
        ("nan", float, "finite"),
        ("inf", float, "finite"),
        ("maybe", bool, "true or false"),
        ("adan", Literal["sgd", "adam"], "did you mean 'adam'"),
        ("0.9", tuple[float, float], "give 2"),
        ("x", Mapping[str, str], "one at a time"),
    ],
)
def test_nonsense_is_refused(text: str, hint: Any, sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        convert(text, hint, "key")


@dataclass(frozen=True)
class Made:
    """A method with a mapping, as ModFL has."""

    by: Mapping[str, str] = field(default_factory=lambda: {"base": "device"})
    mu: float = 0.1


def specs() -> dict[str, SettingSpec]:
    def build(seed: int = 0, clients: int = 4, share=0.5) -> None:  # type: ignore[no-untyped-def]
        """A builder whose `share` is not annotated."""

    return {"scenario": spec_of(build), "training": SettingSpec({"lr": float, "share": float}), "made": spec_of(Made)}


def test_keys_find_the_part_that_knows_them() -> None:
    placed = assign(["clients=8", "lr=0.5", "mu=1"], specs(), ["made"])
    assert placed == {"scenario": {"clients": 8}, "training": {"lr": 0.5}, "made": {"mu": 1.0}}


def test_the_seed_is_not_a_setting() -> None:
    with pytest.raises(Refused, match="no setting 'seed'"):
        assign(["seed=3"], specs(), ["made"])


def test_an_entry_of_a_mapping_is_added_to_the_default() -> None:
    assert assign(["by.head=cohort"], specs(), ["made"])["made"] == {"by": {"base": "device", "head": "cohort"}}


def test_an_ambiguous_key_has_to_be_said_in_full() -> None:
    with pytest.raises(Refused, match=r"scenario\.share=\.\.\. or training\.share=\.\.\."):
        assign(["share=0.2"], specs(), ["made"])
    assert assign(["training.share=0.2"], specs(), ["made"])["training"] == {"share": 0.2}
    assert assign(["scenario.share=0.2"], specs(), ["made"])["scenario"] == {"share": 0.2}


def test_one_key_goes_to_every_method_that_knows_it_or_to_the_one_named() -> None:
    both = {"a": SettingSpec({"mu": float}), "b": SettingSpec({"mu": float, "tau": int})}
    assert assign(["mu=1"], both, ["a", "b"]) == {"a": {"mu": 1.0}, "b": {"mu": 1.0}}
    assert assign(["b.mu=1", "method.tau=2"], both, ["a", "b"]) == {"a": {}, "b": {"mu": 1.0, "tau": 2}}


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("clinets=8", "did you mean 'clients'"),
        ("clients", "key=value"),
        ("=8", "key=value"),
        ("clients=", "key=value"),
        ("lr.x=1", "single value"),
        ("a.b.c=1", "too many dots"),
        ("training.clients=1", "no setting 'clients'"),
    ],
)
def test_words_that_are_no_settings(word: str, sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        assign([word], specs(), ["made"])
