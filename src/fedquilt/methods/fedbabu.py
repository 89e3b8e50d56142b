"""FedBABU (Oh et al. 2022). The body is learnt together under a head that nobody trains; heads are made at the end.

    phi_i <- local training of the body alone, under the first, random head h_0;    phi <- sum_i (n_i / n) phi_i
    a client's model = (phi, h_0) after `tuning_epochs` epochs on its training samples, of all units or of the head

The head never travels: clients of one architecture start from one draw, so that h_0 is the same for all of them. It
rests whatever the optimiser does, weight decay included. Results are reported by the read-out `fine-tuned`. Deviation:
bodies are weighted by samples, where the authors' code weighs all clients alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedquilt.interface.steps import Install, Step, Train, but_last, last
from fedquilt.methods.fedper import FedPer


@dataclass(frozen=True)
class FedBABU(FedPer):
    """FedPer whose heads, the last `personal` units, rest until what was received is fine-tuned.

    `tunes` says what is fine-tuned, all units or the head; `tuning_epochs` for how long.
    """

    name: ClassVar[str] = "fedbabu"
    readout: ClassVar[str] = "fine-tuned"
    tunes: Literal["all", "head"] = "all"
    tuning_epochs: int = 5

    def __post_init__(self) -> None:
        if self.personal < 1:
            raise ValueError(f"FedBABU with personal={self.personal} has no head that rests: use the method 'fedavg'")
        super().__post_init__()
        if self.tuning_epochs < 1:
            raise ValueError(
                f"FedBABU with tuning_epochs={self.tuning_epochs} would predict with a random head; give at least 1"
            )

    def local(self) -> tuple[Step, ...]:
        body = Train(units=but_last(self.personal), when="round")
        tuned = last(self.personal) if self.tunes == "head" else "*"
        return Install(), body, Train(units=tuned, epochs=self.tuning_epochs, when="tuning")
