"""Best of both (client-side personalisation, section 5.5.4): the model that is better at the class it names decides.

Eq. 5.1-5.3 give each model an F-measure for each class. Where the models disagree, the one whose F-measure for the
class it predicts is higher is believed; on a tie the received one. A class that the validation split does not show has
the F-measure 0.

Deviation: F-measures come from the client's validation split, never from the samples that are predicted; the thesis
computed them on its test samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.interface.readout import EvaluationContext, Readout


def most_trusted(predictions: Sequence[Tensor], measures: Sequence[Tensor]) -> Tensor:
    """(k, n) of several models' predictions (k, n) that of the one with the highest F-measure for the class it names.

    `measures` (k, classes) go with the models; on a tie the earlier model is believed.

    >>> first, second = torch.tensor([[0, 1, 0]]), torch.tensor([[0, 0, 1]])
    >>> most_trusted([first, second], [torch.tensor([[0.6, 0.9]]), torch.tensor([[0.8, 0.6]])]).tolist()
    [[0, 1, 0]]
    """
    best, trust = predictions[0], measures[0].gather(1, predictions[0])  # (k, n)
    for said, f in zip(predictions[1:], measures[1:], strict=True):
        how_good = f.gather(1, said)
        best, trust = torch.where(how_good > trust, said, best), torch.maximum(how_good, trust)
    return best


@dataclass(frozen=True)
class BestOfBoth(Readout):
    """Received or adapted, whichever is better at the class it predicts, by the client's validation samples."""

    kind: ClassVar[str] = "best-of-both"
    needs_classes: ClassVar[str] = "believes whichever model is better at the class that it names"

    def predictions(self, look: EvaluationContext, split: str) -> Tensor:
        models = ("received", "adapted")
        measures = [look.measures(look.scores(model, "validation").argmax(2)) for model in models]
        return most_trusted([look.scores(model, split).argmax(2) for model in models], measures)
