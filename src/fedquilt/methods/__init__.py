"""The methods, by name and in families."""

from fedquilt.interface.method import Heard, Method, State
from fedquilt.methods.apfl import APFL
from fedquilt.methods.auto import Auto
from fedquilt.methods.clustered import Clustered
from fedquilt.methods.ditto import Ditto
from fedquilt.methods.fedala import FedALA
from fedquilt.methods.fedamp import FedAMP
from fedquilt.methods.fedavg import FedAvg
from fedquilt.methods.fedavg_plus import FedAvgPlus
from fedquilt.methods.fedbabu import FedBABU
from fedquilt.methods.fedbn import FedBN
from fedquilt.methods.feddf import FedDF
from fedquilt.methods.feddl import FedDL
from fedquilt.methods.feddyn import FedDyn
from fedquilt.methods.fedem import FedEM
from fedquilt.methods.fedfomo import FedFomo
from fedquilt.methods.fedmn import FedMN
from fedquilt.methods.fednova import FedNova
from fedquilt.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedquilt.methods.fedpac import FedPAC
from fedquilt.methods.fedper import FedPer
from fedquilt.methods.fedproto import FedProto
from fedquilt.methods.fedprox import FedProx
from fedquilt.methods.fedrep import FedRep
from fedquilt.methods.fedrod import FedRoD
from fedquilt.methods.fml import FML
from fedquilt.methods.gossip import Gossip
from fedquilt.methods.ifca import IFCA
from fedquilt.methods.lgfedavg import LGFedAvg
from fedquilt.methods.local import Local
from fedquilt.methods.lora import FedIT, FedSALora, FFALora
from fedquilt.methods.modfl import ModFL
from fedquilt.methods.perfedavg import PerFedAvg
from fedquilt.methods.pfedhn import PFedHN
from fedquilt.methods.pfedme import PFedMe
from fedquilt.methods.scaffold import Scaffold
from fedquilt.methods.score_sharing import ScoreSharing

# by what they do to one model for all; each with the paper it is from
FAMILIES: dict[str, dict[type[Method], str]] = {
    "alone": {Local: ""},
    "server side: one model for all": {
        FedAvg: "McMahan et al. 2017",
        FedProx: "Li et al. 2020",
        FedAvgM: "Hsu et al. 2019",
        FedAdagrad: "Reddi et al. 2021",
        FedAdam: "Reddi et al. 2021",
        FedYogi: "Reddi et al. 2021",
        Scaffold: "Karimireddy et al. 2020",
        FedDyn: "Acar et al. 2021",
        FedNova: "Wang et al. 2020",
        FedDF: "Lin et al. 2020",
    },
    "twin: a model of one's own beside the shared one": {
        Ditto: "Li et al. 2021",
        APFL: "Deng et al. 2020",
        PFedMe: "T. Dinh et al. 2020",
        FML: "Shen et al. 2020",
    },
    "cuts: a part of the model stays home": {
        FedPer: "Arivazhagan et al. 2019",
        FedRep: "Collins et al. 2021",
        FedBABU: "Oh et al. 2022",
        LGFedAvg: "Liang et al. 2020",
        FedBN: "Li et al. 2021",
        FedRoD: "Chen and Chao 2022",
    },
    "adapters: a frozen base for all, small matrices on top": {
        FedIT: "Zhang et al. 2023",
        FFALora: "Sun et al. 2024",
        FedSALora: "Guo et al. 2025",
    },
    "meta: a start from which clients go on by themselves": {
        FedAvgPlus: "Jiang et al. 2019",
        PerFedAvg: "Fallah et al. 2020",
    },
    "groups: one model for each group of clients": {
        IFCA: "Ghosh et al. 2020",
        Clustered: "Sattler et al. 2021",
        FedEM: "Marfoq et al. 2021",
    },
    "mixtures: for each client a mixture of its own": {
        FedAMP: "Huang et al. 2021",
        FedFomo: "Zhang et al. 2021",
        FedALA: "Zhang et al. 2023",
        FedPAC: "Xu et al. 2023",
        Gossip: "Lian et al. 2017",
    },
    "made: the server makes a model for each client": {PFedHN: "Shamsian et al. 2021"},
    "auto: circles found from evidence": {Auto: ""},
    "systems: unlike sensors, layers, blocks and labels": {
        ModFL: "Liang et al. 2022",
        FedDL: "Tu et al. 2021",
        FedMN: "Wang et al. 2022",
        ScoreSharing: "Gudur et al. 2020",
        FedProto: "Tan et al. 2022",
    },
}
METHODS: dict[str, type[Method]] = {method.name: method for family in FAMILIES.values() for method in family}

__all__ = [
    "APFL",
    "FAMILIES",
    "FML",
    "IFCA",
    "METHODS",
    "Auto",
    "Clustered",
    "Ditto",
    "FFALora",
    "FedALA",
    "FedAMP",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedAvgPlus",
    "FedBABU",
    "FedBN",
    "FedDF",
    "FedDL",
    "FedDyn",
    "FedEM",
    "FedFomo",
    "FedIT",
    "FedMN",
    "FedNova",
    "FedPAC",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedSALora",
    "FedYogi",
    "Gossip",
    "Heard",
    "LGFedAvg",
    "Local",
    "Method",
    "ModFL",
    "PFedHN",
    "PFedMe",
    "PerFedAvg",
    "Scaffold",
    "ScoreSharing",
    "State",
]
