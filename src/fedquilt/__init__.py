"""fedquilt: personalised federated learning among clients that differ in their sensors, data, labels and models.

Names are imported on first use, so that what needs no tensors (`fedquilt --help`) does not wait for PyTorch.

>>> import fedquilt as fq
>>> "fedavg" in fq.METHODS
True
"""

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedquilt import authoring, data, methods, models, readouts, scenarios, sharing
    from fedquilt.client import Change, Client, Split
    from fedquilt.disk import load_model
    from fedquilt.federation import Federation
    from fedquilt.methods import METHODS, Method
    from fedquilt.onboard import Onboarded, onboard
    from fedquilt.run import Run, resume, run
    from fedquilt.scenario import Scenario
    from fedquilt.sharing import Plan, UnitPlan
    from fedquilt.training.settings import Training
    from fedquilt.units import Unit, cut

    __version__: str

# GNU OpenMP's idle threads spin by default; on a busy machine that makes small tensor programs many times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__all__ = [
    "METHODS",
    "Change",
    "Client",
    "Federation",
    "Method",
    "Onboarded",
    "Plan",
    "Run",
    "Scenario",
    "Split",
    "Training",
    "Unit",
    "UnitPlan",
    "authoring",
    "cut",
    "data",
    "load_model",
    "methods",
    "models",
    "onboard",
    "readouts",
    "resume",
    "run",
    "scenarios",
    "sharing",
]

_HOMES = {
    "client": ("Change", "Client", "Split"),
    "federation": ("Federation",),
    "methods": ("METHODS", "Method"),
    "disk": ("load_model",),
    "onboard": ("Onboarded", "onboard"),
    "run": ("Run", "resume", "run"),
    "scenario": ("Scenario",),
    "sharing": ("Plan", "UnitPlan"),
    "training.settings": ("Training",),
    "units": ("Unit", "cut"),
}
_PACKAGES = ("authoring", "data", "methods", "models", "readouts", "scenarios", "sharing")


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


class _Package(ModuleType):
    """This module's own class: `fedquilt.run` is the function, though importing the file run.py sets the name too.

    So is `fedquilt.onboard`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in ("run", "onboard") and isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name) if own else value)


sys.modules[__name__].__class__ = _Package
