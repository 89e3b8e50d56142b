"""Fine-tuned (Jiang et al. 2019: FedAvg+): what was received, trained on for one more round, and never sent.

It differs from `adapted` by where training starts: `adapted` started from what the round before gave, this starts from
what the last round gave. The extra training happens once, after the last round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedquilt.readouts.base import Look, Readout


@dataclass(frozen=True)
class FineTuned(Readout):
    """The received model after one more round of local training."""

    kind: ClassVar[str] = "fine-tuned"
    needs_last_round: ClassVar[bool] = True

    def predictions(self, look: Look, split: str) -> Tensor:
        fine_tune = look.fine_tune
        if fine_tune is None:
            raise ValueError("the read-out 'fine-tuned' trains on, and there is nothing here to train with")
        look.rows("fine-tuned", lambda: fine_tune(look.received.rows))
        return look.scores("fine-tuned", split).argmax(2)
