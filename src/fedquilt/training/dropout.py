"""Dropout whose masks are hashes of (client, round, step, layer, place): the same in every engine and every stack.

PyTorch's own draws from one generator for a whole stack, so that what a client drops would depend on who else is in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedquilt.training.batches import mix

_FACTOR, _STEP = 0x45D9F3B, 0x9E3779B  # odd
_BITS = 24  # of a hash that are compared with the share that is dropped
_draw: list[tuple[Tensor, list[int]] | None] = [None]


@contextmanager
def drawing(stream: Tensor | None) -> Iterator[None]:
    """While this holds, dropout draws from a stream, an int64 without dimensions: a client's in one step."""
    before, _draw[0] = _draw[0], None if stream is None else (stream, [0])
    try:
        yield
    finally:
        _draw[0] = before


def _kept(shape: torch.Size, p: float) -> Tensor:
    """Which of so many places are kept; every call takes the next part of the stream."""
    assert _draw[0] is not None
    stream, calls = _draw[0]
    calls[0] += 1
    start = (mix(mix(stream) + calls[0]) & 0x7FFFFFFF).int()
    z = torch.arange(shape.numel(), dtype=torch.int32, device=stream.device) * _STEP + start
    for _ in range(2):  # 32 bits are enough here, and a CPU is twice as fast with them
        z = (z ^ ((z >> 16) & 0xFFFF)) * _FACTOR
    z = (z ^ (z >> 16)) & (2**_BITS - 1)
    kept: Tensor = (z >= round(p * 2**_BITS)).view(shape)
    return kept


def _drops(layer: nn.modules.dropout._DropoutNd) -> bool:
    return layer.training and layer.p > 0 and _draw[0] is not None


def _dropped(x: Tensor, shape: Sequence[int], p: float) -> Tensor:
    return x * (_kept(torch.Size(shape), p) * (1 / (1 - p) if p < 1 else 0.0))


def _channels_dropped(layer: nn.modules.dropout._DropoutNd, x: Tensor) -> Tensor:
    return _dropped(x, [*x.shape[:2], *[1] * (x.ndim - 2)], layer.p)


class _Dropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return _dropped(input, input.shape, self.p) if _drops(self) else super().forward(input)


class _Dropout1d(nn.Dropout1d):
    def forward(self, input: Tensor) -> Tensor:
        return _channels_dropped(self, input) if _drops(self) and input.ndim == 3 else super().forward(input)


class _Dropout2d(nn.Dropout2d):
    def forward(self, input: Tensor) -> Tensor:
        return _channels_dropped(self, input) if _drops(self) and input.ndim == 4 else super().forward(input)


class _Dropout3d(nn.Dropout3d):
    def forward(self, input: Tensor) -> Tensor:
        return _channels_dropped(self, input) if _drops(self) and input.ndim == 5 else super().forward(input)


_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: _Dropout,
    nn.Dropout1d: _Dropout1d,
    nn.Dropout2d: _Dropout2d,
    nn.Dropout3d: _Dropout3d,
}


def swap_dropout(module: nn.Module) -> None:
    """Swap, in place, all dropout layers of an engine's own copy of a model."""
    for layer in module.modules():
        layer.__class__ = _OURS.get(type(layer), type(layer))
