"""fedquilt: personalised federated learning among clients that differ in their sensors, data, labels and models.

Names are imported on first use, so that what needs no tensors (`fedquilt --help`) does not wait for PyTorch.

>>> import fedquilt as fq
>>> "fedavg" in fq.METHODS
True
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedquilt import attacks, authoring, data, methods, models, readouts, scenarios, sharing
    from fedquilt.client import Change, Client, Split
    from fedquilt.core.federation import Federation
    from fedquilt.engines.settings import Training
    from fedquilt.families.units import Unit, cut
    from fedquilt.methods import METHODS, Method
    from fedquilt.privacy import Privacy
    from fedquilt.runs.export import export
    from fedquilt.runs.onboarding import Onboarded, onboard
    from fedquilt.runs.predicting import predict_rows
    from fedquilt.runs.result import Run
    from fedquilt.runs.run import extend, resume, run
    from fedquilt.runs.saved_models import load_model
    from fedquilt.scenario import Scenario
    from fedquilt.scenarios.from_data import scenario_from
    from fedquilt.secure import SecureSums
    from fedquilt.sharing import Compression, Plan, UnitPlan

    __version__: str

# GNU OpenMP's idle threads spin by default; on a busy machine that makes small tensor programs many times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__all__ = [
    "METHODS",
    "Change",
    "Client",
    "Compression",
    "Federation",
    "Method",
    "Onboarded",
    "Plan",
    "Privacy",
    "Run",
    "Scenario",
    "SecureSums",
    "Split",
    "Training",
    "Unit",
    "UnitPlan",
    "attacks",
    "authoring",
    "cut",
    "data",
    "export",
    "extend",
    "load_model",
    "methods",
    "models",
    "onboard",
    "predict_rows",
    "readouts",
    "resume",
    "run",
    "scenario_from",
    "scenarios",
    "sharing",
    "tasks",
]

_HOMES = {
    "client": ("Change", "Client", "Split"),
    "core.federation": ("Federation",),
    "engines.settings": ("Training",),
    "families.units": ("Unit", "cut"),
    "methods": ("METHODS", "Method"),
    "privacy": ("Privacy",),
    "runs.saved_models": ("load_model",),
    "runs.export": ("export",),
    "runs.onboarding": ("Onboarded", "onboard"),
    "runs.predicting": ("predict_rows",),
    "runs.result": ("Run",),
    "runs.run": ("extend", "resume", "run"),
    "scenario": ("Scenario",),
    "scenarios.from_data": ("scenario_from",),
    "secure": ("SecureSums",),
    "sharing": ("Compression", "Plan", "UnitPlan"),
}
_PACKAGES = ("attacks", "authoring", "data", "methods", "models", "readouts", "scenarios", "sharing", "tasks")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"{__name__}.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def _version() -> str:
    """What the installed package says, so that pyproject.toml is the one place that a version is written in."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(__name__)
    except PackageNotFoundError:  # a checkout that is on the path without being installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
