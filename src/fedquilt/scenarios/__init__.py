"""The papers' federations, and the bundled one: `build("digits", seed=0)`; `SCENARIOS` has them all by name."""

from __future__ import annotations

from typing import Any

from fedquilt._util.wording import first_line as describe
from fedquilt._util.wording import settings_of
from fedquilt.scenario import Scenario
from fedquilt.scenarios import (
    animals,
    characters,
    diabetes,
    digits,
    feddl,
    fedem,
    fedrep,
    har_forecast,
    modfl_images,
    modfl_signals,
    thesis,
)
from fedquilt.scenarios.registry import Builder, build_from

SCENARIOS: dict[str, Builder] = {
    "digits": digits.digits,
    "diabetes": diabetes.diabetes,
    "characters": characters.characters,
    "har-forecast": har_forecast.har_forecast,
    "modfl-images": modfl_images.modfl_images,
    "modfl-cameras": modfl_images.modfl_cameras,
    "modfl-har": modfl_signals.modfl_har,
    "modfl-wearables": modfl_signals.modfl_wearables,
    "feddl-har": feddl.feddl_har,
    "feddl-harbox": feddl.feddl_harbox,
    "fedem-cifar10": fedem.fedem_cifar10,
    "fedem-cifar100": fedem.fedem_cifar100,
    "fedem-emnist": fedem.fedem_emnist,
    "femnist": fedem.femnist,
    "fedrep-cifar10": fedrep.fedrep_cifar10,
    "thesis-mnist": thesis.thesis_mnist,
    "thesis-cifar10": thesis.thesis_cifar10,
    "animals-labels": animals.animals_labels,
}


def build(name: str, seed: int = 0, **settings: Any) -> Scenario:
    """The scenario of that name, built with these settings; a wrong name or setting is refused with the nearest one.

    >>> len(build("digits", clients=8).clients)
    8
    >>> build("digitz")
    Traceback (most recent call last):
    ...
    ValueError: there is no scenario 'digitz'; did you mean 'digits'?
    """
    return build_from(SCENARIOS, name, seed, settings)


__all__ = ["SCENARIOS", "build", "describe", "settings_of"]
