"""Fine-tuned (Jiang et al. 2019, Wang et al. 2019: FedAvg+): what was received, trained on, and never sent.

`fine-tuned` is one more round of local training, as the method would do it. It differs from `adapted` by where training
starts: `adapted` started from what the round before gave, this starts from what the last round gave. `fine-tuned-5` is
five epochs, `fine-tuned-head-5` five epochs of the last unit alone, one after another as rounds of an epoch would be.

`fine-tuned-chosen` lets each client choose among none, 1, 2, 5 and 10 epochs of all units or of the head: whatever gets
most of its validation samples right (of several the likeliest). Epochs that are the same for all adapt clients of few
samples too far. A client without validation samples takes what is best for all clients together, and on a device by
itself the received model. The extra training happens once, after the last round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedquilt.interface.readout import EvaluationContext, FineTune, Readout
from fedquilt.readouts.chosen import best


def trainer(look: EvaluationContext) -> FineTune:
    """What trains on; without it there is no fine-tuning."""
    if look.fine_tune is None:
        raise ValueError("the read-out 'fine-tuned' trains on, and there is nothing here to train with")
    return look.fine_tune


def after_epochs(look: EvaluationContext, split: str, epochs: Sequence[int], units: str) -> list[Tensor]:
    """Scores (k, n, classes) of the received model after some numbers of epochs: the last of them passes the others."""
    names = {epoch: FineTuned(epoch, "head" if units == "head" else "all").name for epoch in epochs}
    if any((name, split) not in look.known for name in names.values()):
        tune, rows = trainer(look), look.received.rows
        for epoch in range(1, max(epochs) + 1):
            rows = tune(rows, epoch, units)
            if epoch in names:
                look.scores_of(names[epoch], split, rows)
    return [look.known[names[epoch], split] for epoch in epochs]


@dataclass(frozen=True)
class FineTuned(Readout):
    """The received model after one more round of local training, or after `epochs` of all units or of the head."""

    kind: ClassVar[str] = "fine-tuned"
    needs_last_round: ClassVar[bool] = True
    epochs: int | None = None
    units: Literal["all", "head"] = "all"

    def __post_init__(self) -> None:
        if self.units not in ("all", "head"):
            raise ValueError(f"fine-tuned: units is all or head, not '{self.units}'")
        if self.epochs is None and self.units == "head":
            raise ValueError("fine-tuned: the head is trained for some epochs; say how many, as in 'fine-tuned-head-5'")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"fine-tuned for {self.epochs} epochs is the received model: use the read-out 'received'")

    @property
    def name(self) -> str:
        if self.epochs is None:
            return self.kind
        return f"{self.kind}-head-{self.epochs}" if self.units == "head" else f"{self.kind}-{self.epochs}"

    def predictions(self, look: EvaluationContext, split: str) -> Tensor:
        return look.task.predictions(self._scores(look, split))

    def logs(self, look: EvaluationContext, split: str) -> Tensor | None:
        return look.task.answers(self._scores(look, split)) if look.logits else None

    def _scores(self, look: EvaluationContext, split: str) -> Tensor:
        if self.epochs is not None:
            return after_epochs(look, split, [self.epochs], self.units)[0]
        look.rows(self.kind, lambda: trainer(look)(look.received.rows))
        return look.scores(self.kind, split)


@dataclass(frozen=True)
class FineTunedChosen(Readout):
    """The received model, or that after some `epochs` on all units or the head, as the client's validation says."""

    kind: ClassVar[str] = "fine-tuned-chosen"
    needs_last_round: ClassVar[bool] = True
    pools: ClassVar[int] = 1
    epochs: tuple[int, ...] = (1, 2, 5, 10)
    units: tuple[str, ...] = ("all", "head")

    def logs(self, look: EvaluationContext, split: str) -> Tensor:
        ways = self._ways(look, split)
        which = best(self.evidence(look), look.pooled.get(self.name))
        return ways[torch.arange(len(ways), device=ways.device), which]

    def evidence(self, look: EvaluationContext) -> Tensor:
        table = look.table("validation")
        return look.task.judged(self._ways(look, "validation"), table.y, table.mask)

    def _ways(self, look: EvaluationContext, split: str) -> Tensor:
        """(k, ways, n, ...) answers of the received model and of all that it is trained on to."""
        tuned = [scores for units in self.units for scores in after_epochs(look, split, self.epochs, units)]
        look.must_be_logits(self.name)
        return look.task.answers(torch.stack([look.scores("received", split), *tuned], dim=1))
