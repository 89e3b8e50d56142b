"""Best of the last k rounds: the rule of best-of-both among the received and adapted models of several rounds.

The thesis on client-side personalisation names this as future work. A client would keep its last models; here their
predictions on its validation and test samples are kept, which is the same and smaller. Where not every round is
evaluated, the last k evaluated rounds count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.interface.readout import EvaluationContext, Readout
from fedquilt.readouts.best_of_both import most_trusted


@dataclass(frozen=True)
class BestOfLast(Readout):
    """The models of the last `k` rounds, whichever is better at the class it predicts; on a tie the newer one."""

    kind: ClassVar[str] = "best-of-last"
    remembers: ClassVar[bool] = True
    needs_classes: ClassVar[str] = "believes whichever model is better at the class that it names"
    k: int = 3

    def __post_init__(self) -> None:
        if self.k < 2:
            raise ValueError(f"best-of-last-{self.k} looks at no earlier round: use the read-out 'best-of-both'")

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.k}"

    def predictions(self, look: EvaluationContext, split: str) -> Tensor:
        validation, said = self._last(look, "validation"), self._last(look, split)  # (models, clients, n)
        return most_trusted(list(said), [look.measures(predicted) for predicted in validation])

    def _last(self, look: EvaluationContext, split: str) -> Tensor:
        """(models, clients, n) what the models of the last rounds say about a split, the newest first."""
        said, rounds = f"{self.name} {split}", f"{self.name} {split} rounds"
        now = torch.tensor([look.received.round] * 2)
        if rounds not in look.memory or look.memory[rounds][0] != now[0]:
            new = torch.stack([look.scores(model, split).argmax(2) for model in ("received", "adapted")])
            older = [] if rounds not in look.memory else [look.memory[said].to(new.device)]
            numbers = [] if rounds not in look.memory else [look.memory[rounds]]
            look.memory[said] = torch.cat([new, *older])[: 2 * self.k]
            look.memory[rounds] = torch.cat([now, *numbers])[: 2 * self.k]
        return look.memory[said]
