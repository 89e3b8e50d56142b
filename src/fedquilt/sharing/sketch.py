"""Long vectors as short ones: inner products survive, and far fewer numbers travel."""

from __future__ import annotations

import torch
from torch import Tensor

from fedquilt._util.randomness import key_of, mix


def sketch(vector: Tensor, size: int, name: str) -> Tensor:
    """A random projection to `size` numbers that keeps inner products in the mean, the same for all of that name.

    The numbers are shuffled, given random signs, and dealt out to `size` sums.

    >>> sketch(torch.ones(1000), 10, "output").shape
    torch.Size([10])
    """
    numbers = mix(torch.arange(len(vector), device=vector.device) + key_of("sketch", name))
    signed = vector[numbers.argsort()] * torch.where(numbers & 1 == 0, 1.0, -1.0)
    rows = -(-len(vector) // size)
    return torch.cat([signed, signed.new_zeros(rows * size - len(vector))]).view(rows, size).sum(0)
