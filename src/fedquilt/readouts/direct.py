"""What every client has after a round: the model it received, the one it trained, and that without the method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedquilt.interface.readout import EvaluationContext, Readout


@dataclass(frozen=True)
class Received(Readout):
    """The client's model after installing what the server sent."""

    kind: ClassVar[str] = "received"

    def predictions(self, look: EvaluationContext, split: str) -> Tensor:
        return look.predictions("received", split)

    def logs(self, look: EvaluationContext, split: str) -> Tensor | None:
        return look.logs("received", split)


@dataclass(frozen=True)
class Adapted(Readout):
    """The client's model after its local training, before anything is installed on it."""

    kind: ClassVar[str] = "adapted"

    def predictions(self, look: EvaluationContext, split: str) -> Tensor:
        return look.predictions("adapted", split)

    def logs(self, look: EvaluationContext, split: str) -> Tensor | None:
        return look.logs("adapted", split)


@dataclass(frozen=True)
class Own(Readout):
    """The client's model after its local training, also where a method predicts with more than that (score sharing)."""

    kind: ClassVar[str] = "own"

    def predictions(self, look: EvaluationContext, split: str) -> Tensor:
        return look.predictions("own", split)

    def logs(self, look: EvaluationContext, split: str) -> Tensor | None:
        return look.logs("own", split)
