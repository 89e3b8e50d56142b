"""FedAvg+ (Jiang et al. 2019, Wang et al. 2019). FedAvg, and at the end each client fine-tunes what it received.

    theta_i <- w after e_i epochs on the client's training samples, of all units or of the head alone

e_i and the units are each client's choice by its validation samples: the read-out `fine-tuned-chosen`, by which results
are reported. Nothing of it is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedquilt.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedAvgPlus(FedAvg):
    """FedAvg whose clients fine-tune at the end, as long and as much of the model as their validation data say."""

    name: ClassVar[str] = "fedavg-plus"
    readout: ClassVar[str] = "fine-tuned-chosen"
