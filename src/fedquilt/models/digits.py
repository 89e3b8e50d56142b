"""The networks of the bundled `digits` scenario: one input side for each sensor, one task side for all."""

from __future__ import annotations

from functools import partial

from torch import nn

from fedquilt.models.blocks import Modular, dense


def _fine() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 32), nn.ReLU()
    )


def _coarse() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 16, 2), nn.ReLU(), nn.Flatten(), nn.Linear(144, 32), nn.ReLU())


class DigitsNet(Modular):
    """A small CNN for digits of 8 x 8 or 4 x 4 pixels; the operation module is the same for both.

    >>> import torch
    >>> DigitsNet(pixels=4)(torch.zeros(2, 1, 4, 4)).shape
    torch.Size([2, 10])
    """

    def __init__(self, pixels: int = 8, classes: int = 10) -> None:
        if pixels not in (4, 8):
            raise ValueError(f"DigitsNet sees 8 x 8 or 4 x 4 pixels, not {pixels} x {pixels}")
        super().__init__(_fine if pixels == 8 else _coarse, partial(dense, 32, 32, classes))
        self.input_shape = (1, pixels, pixels)
