"""Layers of dropout that draw hashes, in the engine's own copy of a model; see `draws`.

What draws elsewhere in a model does so too, but must be intercepted, which takes time: see `intercept`.
"""

from __future__ import annotations

from torch import Tensor, nn

from fedquilt.layers.draws import dropped


def _drops(layer: nn.modules.dropout._DropoutNd) -> bool:
    return layer.training and layer.p > 0


class _Dropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return dropped(input, self.p, inplace=self.inplace) if _drops(self) else input


class _Dropout1d(nn.Dropout1d):
    def forward(self, input: Tensor) -> Tensor:
        channels = _drops(self) and input.ndim == 3
        return dropped(input, self.p, True, self.inplace) if channels else super().forward(input)


class _Dropout2d(nn.Dropout2d):
    def forward(self, input: Tensor) -> Tensor:
        channels = _drops(self) and input.ndim == 4
        return dropped(input, self.p, True, self.inplace) if channels else super().forward(input)


class _Dropout3d(nn.Dropout3d):
    def forward(self, input: Tensor) -> Tensor:
        channels = _drops(self) and input.ndim == 5
        return dropped(input, self.p, True, self.inplace) if channels else super().forward(input)


_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: _Dropout,
    nn.Dropout1d: _Dropout1d,
    nn.Dropout2d: _Dropout2d,
    nn.Dropout3d: _Dropout3d,
}


def has_dropout(module: nn.Module) -> bool:
    """Whether a module has layers of dropout."""
    return any(isinstance(layer, nn.modules.dropout._DropoutNd) for layer in module.modules())


def swap_dropout(module: nn.Module) -> None:
    """Swap, in place, all dropout layers of an engine's own copy of a model."""
    for layer in module.modules():
        layer.__class__ = _OURS.get(type(layer), type(layer))
