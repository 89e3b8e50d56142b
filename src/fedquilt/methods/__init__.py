"""The methods, by name."""

from fedquilt.methods.base import Heard, Method, State
from fedquilt.methods.ditto import Ditto
from fedquilt.methods.fedavg import FedAvg
from fedquilt.methods.feddl import FedDL
from fedquilt.methods.fedmn import FedMN
from fedquilt.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedquilt.methods.fedper import FedPer
from fedquilt.methods.fedprox import FedProx
from fedquilt.methods.fedrep import FedRep
from fedquilt.methods.ifca import IFCA
from fedquilt.methods.local import Local
from fedquilt.methods.modfl import ModFL
from fedquilt.methods.perfedavg import PerFedAvg
from fedquilt.methods.scaffold import Scaffold
from fedquilt.methods.score_sharing import ScoreSharing

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Local,
        FedAvg,
        FedProx,
        FedAvgM,
        FedAdagrad,
        FedAdam,
        FedYogi,
        Scaffold,
        FedPer,
        FedRep,
        Ditto,
        PerFedAvg,
        IFCA,
        ModFL,
        FedDL,
        FedMN,
        ScoreSharing,
    )
}

__all__ = [
    "IFCA",
    "METHODS",
    "Ditto",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDL",
    "FedMN",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedYogi",
    "Heard",
    "Local",
    "Method",
    "ModFL",
    "PerFedAvg",
    "Scaffold",
    "ScoreSharing",
    "State",
]
