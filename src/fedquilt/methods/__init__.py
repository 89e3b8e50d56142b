"""The methods, by name."""

from fedquilt.methods.base import Heard, Method, State
from fedquilt.methods.fedavg import FedAvg
from fedquilt.methods.feddl import FedDL
from fedquilt.methods.fedmn import FedMN
from fedquilt.methods.fedper import FedPer
from fedquilt.methods.fedprox import FedProx
from fedquilt.methods.local import Local
from fedquilt.methods.modfl import ModFL
from fedquilt.methods.score_sharing import ScoreSharing

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Local,
        FedAvg,
        FedProx,
        FedPer,
        ModFL,
        FedDL,
        FedMN,
        ScoreSharing,
    )
}

__all__ = [
    "METHODS",
    "FedAvg",
    "FedDL",
    "FedMN",
    "FedPer",
    "FedProx",
    "Heard",
    "Local",
    "Method",
    "ModFL",
    "ScoreSharing",
    "State",
]
