"""A small network that spells: the next character from the last few."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NextCharacter(nn.Module):
    """Scores of the next of `symbols` at every place of a text, from the last `context` of them.

    >>> NextCharacter(30, context=4)(torch.zeros(2, 10, dtype=torch.int64)).shape
    torch.Size([2, 10, 30])
    """

    def __init__(self, symbols: int, context: int = 6, width: int = 12, hidden: int = 48) -> None:
        super().__init__()
        self.context = context
        self.letters = nn.Embedding(symbols, width)
        self.hidden = nn.Linear(context * width, hidden)
        self.output = nn.Linear(hidden, symbols)

    def forward(self, x: Tensor) -> Tensor:
        seen = F.pad(self.letters(x), (0, 0, self.context - 1, 0))  # (n, context - 1 + time, width)
        windows = torch.cat([seen[:, at : at + x.shape[1]] for at in range(self.context)], dim=2)
        out: Tensor = self.output(torch.tanh(self.hidden(windows)))
        return out
