"""MobileNet-v2 (Sandler et al. 2018) for images of 32 x 32."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

# expansion, channels, blocks, stride of the first block: Table 2 of the paper, with stride 1 where 32 x 32 pixels are
# too few to be halved five times (the stem, and the second stage)
STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def _conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class InvertedResidual(nn.Module):
    """Expand, filter each channel by itself, project; the input is added where the shape stays."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        widen = [*_conv(inputs, wide), nn.ReLU6()] if expansion > 1 else []
        self.body = nn.Sequential(*widen, *_conv(wide, wide, 3, stride, groups=wide), nn.ReLU6(), *_conv(wide, outputs))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return x + out if self.adds else out


class MobileNetV2(nn.Module):
    """MobileNet-v2 for 32 x 32: a stem, seven stages of inverted residuals, the top and the output, each a unit.

    It starts from random weights; FedEM's and FedMN's CIFAR results start from ImageNet weights. `width` scales the
    number of channels.

    >>> import torch
    >>> net = MobileNetV2(width=0.25).eval()
    >>> net(torch.zeros(2, 3, 32, 32)).shape, list(net.units)[:2]
    (torch.Size([2, 10]), ['stem', 'stage1'])
    """

    units: ClassVar[dict[str, list[str]]] = {
        name: [name] for name in ("stem", *(f"stage{i}" for i in range(1, 8)), "top", "output")
    }

    def __init__(self, classes: int = 10, width: float = 1.0, dropout: float = 0.2) -> None:
        super().__init__()
        self.input_shape = (3, 32, 32)
        now = _scaled(32, width)
        self.stem = nn.Sequential(*_conv(3, now, 3), nn.ReLU6())
        for number, (expansion, channels, blocks, stride) in enumerate(STAGES, start=1):
            out = _scaled(channels, width)
            stage = [
                InvertedResidual(now if b == 0 else out, out, stride if b == 0 else 1, expansion) for b in range(blocks)
            ]
            self.add_module(f"stage{number}", nn.Sequential(*stage))
            now = out
        features = _scaled(1280, max(width, 1.0))
        self.top = nn.Sequential(*_conv(now, features), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(features, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number in range(1, len(STAGES) + 1):
            x = self.get_submodule(f"stage{number}")(x)
        out: Tensor = self.output(self.dropout(self.top(x)))
        return out


def _scaled(channels: int, width: float) -> int:
    """A number of channels divisible by 8 and never more than a tenth below the wanted one."""
    wanted = channels * width
    whole = max(8, int(wanted + 4) // 8 * 8)
    return whole + 8 if whole < 0.9 * wanted else whole
