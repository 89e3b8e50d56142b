"""fedquilt: personalised federated learning among clients that differ in their sensors, data, labels and models."""

import os as _os

# GNU OpenMP's idle threads spin by default; on a busy machine that makes small tensor programs many times slower.
_os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from fedquilt import methods, readouts, scenarios, sharing  # noqa: E402
from fedquilt.client import Change, Client, Split  # noqa: E402
from fedquilt.federation import Federation  # noqa: E402
from fedquilt.methods import METHODS, Method  # noqa: E402
from fedquilt.run import Run, run  # noqa: E402
from fedquilt.scenario import Scenario  # noqa: E402
from fedquilt.sharing import Plan, UnitPlan  # noqa: E402
from fedquilt.training.settings import Training  # noqa: E402
from fedquilt.units import Unit, cut  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Change",
    "Client",
    "Federation",
    "Method",
    "Plan",
    "Run",
    "Scenario",
    "Split",
    "Training",
    "Unit",
    "UnitPlan",
    "cut",
    "methods",
    "readouts",
    "run",
    "scenarios",
    "sharing",
]
