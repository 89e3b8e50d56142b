"""The experiments of docs/results.md have what their papers have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedquilt.families.units import cut
from fedquilt.models import FeddlSignals
from fedquilt.runs.rebuilding import make_method

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from experiments import EXPERIMENTS


@pytest.mark.parametrize("title", ["feddl-har-8-steps", "feddl-har-8-epochs"])
def test_fedper_beside_feddl_shares_the_lower_three_layers(title: str) -> None:
    name, settings = EXPERIMENTS[title].methods["fedper"]
    units = [unit.name for unit in cut(FeddlSignals())]
    assert (name, units[: -settings["personal"]]) == ("fedper", ["conv1", "conv2", "fc1"])


@pytest.mark.parametrize("title", ["modfl-cameras-9", "modfl-wearables-5", "modfl-wearables-5-2000"])
def test_where_clients_are_alike_fedavg_beside_modfl_is_by_device(title: str) -> None:
    name, settings = EXPERIMENTS[title].methods["fedavg-per-device"]
    assert (name, set(settings["by"].values())) == ("modfl", {"device"})


@pytest.mark.parametrize("title", EXPERIMENTS)
def test_settings_are_those_that_methods_have(title: str) -> None:
    for name, settings in EXPERIMENTS[title].methods.values():
        make_method(name, settings)
