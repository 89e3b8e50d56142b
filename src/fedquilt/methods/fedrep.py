"""FedRep (Collins et al. 2021, Algorithm 1). The head stays home; a round trains it first, then the body under it.

    h_i   <- tau_h epochs of SGD on the head, the received body being frozen
    phi_i <- tau_b epochs of SGD on the body, that head being frozen;    phi <- sum_i (n_i / n) phi_i

A client predicts with the new body and its own head. Deviation: bodies are weighted by samples, as elsewhere here; the
authors' code does so too, except on CIFAR, where it weighs all clients alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedquilt.interface.steps import Install, Step, Train, but_last, last
from fedquilt.methods.fedper import FedPer


@dataclass(frozen=True)
class FedRep(FedPer):
    """FedPer in two phases: `head_epochs` of the last `personal` units alone, then `body_epochs` of the others alone.

    `body_epochs` None takes the epochs of local training.
    """

    name: ClassVar[str] = "fedrep"
    head_epochs: int = 10
    body_epochs: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_epochs < 1 or (self.body_epochs is not None and self.body_epochs < 1):
            raise ValueError(
                f"fedrep: head_epochs={self.head_epochs}, body_epochs={self.body_epochs}: both phases need an epoch"
            )

    def local(self) -> tuple[Step, ...]:
        head, body = last(self.personal), but_last(self.personal)
        return Install(), Train(units=head, epochs=self.head_epochs), Train(units=body, epochs=self.body_epochs)
