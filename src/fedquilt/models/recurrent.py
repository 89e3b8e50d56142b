"""An LSTM that batches over clients, and ModFL's three networks for activity recognition made with it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from fedquilt.models.blocks import Modular, dense


class LSTM(nn.Module):
    """One LSTM layer: the function of `nn.LSTM(..., batch_first=True)`, written so that `torch.func.vmap` batches it.

    The input's part of all gates at all times is one matrix product; the loop over time has only the state's part.
    (n, time, features) becomes the last state (n, hidden), or with `last=False` every state (n, time, hidden).
    PyTorch's two biases, whose sum is all that counts, are one here. By itself on a CPU it is PyTorch's own layer, in
    one piece, which takes a twentieth of the loop's time.

    >>> LSTM(3, 5)(torch.zeros(2, 7, 3)).shape
    torch.Size([2, 5])
    """

    def __init__(self, features: int, hidden: int, last: bool = True) -> None:
        super().__init__()
        self.hidden = hidden
        self.last = last
        bound = hidden**-0.5  # as nn.LSTM starts
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, features).uniform_(-bound, bound))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(4 * hidden).uniform_(-bound, bound) * 2**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self._whole(x) if self._by_itself(x) else self._loop(x)

    def _by_itself(self, x: Tensor) -> bool:
        """Whether these are numbers on a CPU, not a stack's or those of a program that is being written down."""
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        if torch.compiler.is_compiling() or wrapped(x) or wrapped(self.weight_hh):
            return False
        return x.device.type == "cpu"

    def _whole(self, x: Tensor) -> Tensor:
        nothing = x.new_zeros(1, x.shape[0], self.hidden)
        weights = [self.weight_ih, self.weight_hh, self.bias, torch.zeros_like(self.bias)]
        states, end, _ = torch.lstm(x, (nothing, nothing), weights, True, 1, 0.0, self.training, False, True)
        return end[0] if self.last else states

    def _loop(self, x: Tensor) -> Tensor:
        inputs = x @ self.weight_ih.t() + self.bias  # (n, time, 4 hidden): gates i, f, g, o side by side
        back = self.weight_hh.t()
        state = cell = x.new_zeros(x.shape[0], self.hidden)
        states = []
        for now in inputs.unbind(1):
            i, f, g, o = (now + state @ back).chunk(4, dim=1)  # each (n, hidden)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            state = o.sigmoid() * cell.tanh()
            if not self.last:
                states.append(state)
        return state if self.last else torch.stack(states, dim=1)


class SignalLSTM(nn.Module):
    """An LSTM over signals (n, channels, time), then fully connected tanh layers: ModFL's configuration module."""

    def __init__(self, channels: int, hidden: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.lstm = LSTM(channels, hidden)
        self.dense = dense(hidden, *sizes, activation=nn.Tanh, last=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dense(self.lstm(x.transpose(1, 2)))
        return out


class ModflLSTM(Modular):
    """ModFL's recurrent network: an LSTM and tanh layers as configuration, FC 16 and the output as operation.

    `sizes` are the configuration module's fully connected layers; the last has to be 16, the operation module's input.

    >>> ModflLSTM(channels=6, hidden=24, sizes=(32, 16))(torch.zeros(2, 6, 50)).shape
    torch.Size([2, 5])
    """

    def __init__(self, channels: int, hidden: int, sizes: tuple[int, ...], classes: int = 5, length: int = 128) -> None:
        if not sizes or sizes[-1] != 16:
            raise ValueError(f"the configuration module ends with {sizes[-1:]} units; the operation module takes 16")
        task = partial(dense, 16, 16, classes, activation=nn.Tanh)
        super().__init__(partial(SignalLSTM, channels, hidden, sizes), task)
        self.input_shape = (channels, length)


def modfl_hapt(classes: int = 5, channels: int = 6, length: int = 128) -> ModflLSTM:
    """ModFL's network for HAPT: LSTM 16, FC 16 | FC 16, output."""
    return ModflLSTM(channels, 16, (16,), classes, length)


def modfl_realworld(classes: int = 5, channels: int = 6, length: int = 128) -> ModflLSTM:
    """ModFL's network for RealWorld: LSTM 24, FC 32-16 | FC 16, output."""
    return ModflLSTM(channels, 24, (32, 16), classes, length)


def modfl_wisdm(classes: int = 5, channels: int = 3, length: int = 51) -> ModflLSTM:
    """ModFL's network for WISDM: LSTM 8, FC 16 | FC 16, output."""
    return ModflLSTM(channels, 8, (16,), classes, length)
