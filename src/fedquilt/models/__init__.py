"""Small networks of the papers; `MODELS` has them by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fedquilt.models.blocks import Modular, dense
from fedquilt.models.digits import DigitsNet

MODELS: dict[str, Callable[..., nn.Module]] = {
    "digits": DigitsNet,
}

__all__ = ["MODELS", "DigitsNet", "Modular", "dense"]
