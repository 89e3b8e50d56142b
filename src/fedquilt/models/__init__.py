"""Small networks of the papers. `MODELS` has them by name; `MODELS["mlp"]()` builds one with its defaults.

Every network gives logits over all classes, names its units, says what it takes in `input_shape` (one sample), and runs
under `torch.func.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fedquilt.models.blocks import Modular, dense
from fedquilt.models.convolutional import (
    FeddlImages,
    FeddlSignals,
    FedemCNN,
    FedrepCNN,
    ModflCifar,
    ModflStl,
    ThesisCNN,
)
from fedquilt.models.digits import DigitsNet
from fedquilt.models.lora import LoraLinear, adapter_units, with_lora
from fedquilt.models.mobilenet import MobileNetV2
from fedquilt.models.plain import MLP, SmallCNN
from fedquilt.models.recurrent import LSTM, ModflLSTM, modfl_hapt, modfl_realworld, modfl_wisdm

MODELS: dict[str, Callable[..., nn.Module]] = {
    "digits": DigitsNet,
    "modfl-cifar": ModflCifar,
    "modfl-stl": ModflStl,
    "modfl-hapt": modfl_hapt,
    "modfl-realworld": modfl_realworld,
    "modfl-wisdm": modfl_wisdm,
    "feddl-images": FeddlImages,
    "feddl-signals": FeddlSignals,
    "thesis-cnn": ThesisCNN,
    "fedem-cnn": FedemCNN,
    "fedrep-cnn": FedrepCNN,
    "mobilenet-v2": MobileNetV2,
    "small-cnn": SmallCNN,
    "mlp": MLP,
}

__all__ = [
    "LSTM",
    "MLP",
    "MODELS",
    "DigitsNet",
    "FeddlImages",
    "FeddlSignals",
    "FedemCNN",
    "FedrepCNN",
    "LoraLinear",
    "MobileNetV2",
    "ModflCifar",
    "ModflLSTM",
    "ModflStl",
    "Modular",
    "SmallCNN",
    "ThesisCNN",
    "adapter_units",
    "dense",
    "modfl_hapt",
    "modfl_realworld",
    "modfl_wisdm",
    "with_lora",
]
