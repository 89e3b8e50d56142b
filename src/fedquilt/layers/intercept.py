"""What a model draws by functions: dropout inside of attention and between recurrent layers, `F.dropout`, `torch.rand`.
While a step runs these functions give the hashes of `draws` instead of numbers from a generator.

Intercepting slows every operation a little, so an engine does it only for models that draw in this way.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedquilt.layers.draws import alpha_dropped, dropped, exponential, normal, uniform

Function = Callable[..., Any]


class Interception(TorchFunctionMode):
    """While this holds, functions that draw give hashes. It notes what it met.

    `drew`: hashes were drawn; `own_generator`: something was drawn from a generator of the model's own, which is left
    to it; `renormalised`: rows of an embedding were shrunk in place; `averaged`: images were pooled by PyTorch's mean.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drew = self.own_generator = self.renormalised = self.averaged = False

    def __torch_function__(
        self, func: Function, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _INSIDE:  # a function in Python, whose parts are to be intercepted
            with self:
                return _INSIDE[func](*args, **kwargs)
        self.renormalised |= func is torch.embedding_renorm_
        self.averaged |= func is F.avg_pool2d
        if func not in _HASHED:
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            self.own_generator = True
            return func(*args, **kwargs)
        result = _HASHED[func](func, *args, **kwargs)
        self.drew |= result is not NotImplemented
        return func(*args, **kwargs) if result is NotImplemented else result


def _without_overrides(function: types.FunctionType) -> Function:
    """A function of PyTorch's in Python that runs at once, instead of asking whom it is intercepted by once more."""

    def nobody(*args: object) -> bool:
        return False

    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    its_own = function.__globals__ | dict.fromkeys(names, nobody)
    twin = types.FunctionType(function.__code__, its_own, function.__name__, function.__defaults__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


_INSIDE: dict[Any, Function] = {
    function: _without_overrides(function)
    for function in (*vars(F).values(), torch.autograd.grad)
    if isinstance(function, types.FunctionType)
    and function.__module__ in (F.__name__, torch.autograd.__name__)
    and not function.__closure__
}


def _dropping(how: Callable[[Tensor, float, bool, bool], Tensor], channels: bool, inplace: bool) -> Function:
    def drop(func: Function, input: Tensor, p: float, train: bool) -> Any:
        return how(input, p, channels, inplace) if train and 0 < p <= 1 else NotImplemented

    return drop


def _made(draw: Callable[[Sequence[int]], Tensor]) -> Function:
    """A function that makes a tensor of a size and fills it."""

    def make(
        func: Function, *sides: Any, size: Any = None, dtype: torch.dtype | None = None, device: Any = None, **more: Any
    ) -> Any:
        if any(value not in (None, False) for value in more.values()):
            return NotImplemented
        size = sides if size is None else size
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return draw(shape).to(device or torch.get_default_device(), dtype or torch.get_default_dtype())

    return make


def _made_like(draw: Callable[[Sequence[int]], Tensor]) -> Function:
    def make(
        func: Function, input: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **more: Any
    ) -> Any:
        if any(value not in (None, False, torch.preserve_format, torch.contiguous_format) for value in more.values()):
            return NotImplemented
        return draw(input.shape).to(device or input.device, dtype or input.dtype)

    return make


def _bernoulli(func: Function, input: Tensor, p: float | None = None, *, generator: None = None) -> Tensor:
    return (uniform(input.shape) < (input if p is None else p)).to(input.dtype)


def _bernoulli_(func: Function, input: Tensor, p: Any = 0.5, *, generator: None = None) -> Tensor:
    return input.copy_(uniform(input.shape) < p)


def _uniform_(
    func: Function, input: Tensor, low: float = 0.0, high: float = 1.0, *, generator: None = None, **named: float
) -> Tensor:
    low, high = named.get("from", low), named.get("to", high)  # the first is a word of Python
    return input.copy_(low + (high - low) * uniform(input.shape))


def _normal_(func: Function, input: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: None = None) -> Tensor:
    return input.copy_(mean + std * normal(input.shape))


def _exponential_(func: Function, input: Tensor, lambd: float = 1.0, *, generator: None = None) -> Tensor:
    return input.copy_(exponential(input.shape) / lambd)


def _rrelu(
    func: Function, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, **more: Any
) -> Any:
    if not training:
        return NotImplemented
    y = input * torch.where(input >= 0, 1.0, lower + (upper - lower) * uniform(input.shape))
    return input.copy_(y) if func is torch.rrelu_ else y


def _attention(
    func: Function, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attention as PyTorch's own page of it writes it, with dropout of its weights."""
    if dropout_p == 0 or enable_gqa:
        return NotImplemented
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return dropped(scores.softmax(-1), dropout_p) @ value


def _recurrent(
    func: Function, input: Tensor, hx: Any, weights: Any, biases: Any = None, layers: Any = None, p: Any = None,
    train: Any = None, both_ways: Any = None, batch_first: Any = None,
) -> Any:  # fmt: skip
    """Recurrent layers one by one, with dropout between them; sequences that are packed are left to PyTorch."""
    if not isinstance(weights, list | tuple) or not train or p == 0 or layers == 1:
        return NotImplemented
    ways = 2 if both_ways else 1
    each = len(weights) // layers
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    found = []
    for layer in range(layers):
        if layer:
            input = dropped(input, p)
        own = [state[layer * ways : (layer + 1) * ways] for state in states]
        mine = weights[layer * each : (layer + 1) * each]
        start = own[0] if isinstance(hx, Tensor) else own
        input, *last = func(input, start, mine, biases, 1, 0.0, train, both_ways, batch_first)
        found.append(last)
    return (input, *(torch.cat(parts) for parts in zip(*found, strict=True)))


_HASHED: dict[Any, Function] = {
    torch.dropout: _dropping(dropped, channels=False, inplace=False),
    torch.dropout_: _dropping(dropped, channels=False, inplace=True),
    torch.feature_dropout: _dropping(dropped, channels=True, inplace=False),
    torch.feature_dropout_: _dropping(dropped, channels=True, inplace=True),
    torch.alpha_dropout: _dropping(alpha_dropped, channels=False, inplace=False),
    torch.alpha_dropout_: _dropping(alpha_dropped, channels=False, inplace=True),
    torch.feature_alpha_dropout: _dropping(alpha_dropped, channels=True, inplace=False),
    torch.feature_alpha_dropout_: _dropping(alpha_dropped, channels=True, inplace=True),
    torch.rand: _made(uniform),
    torch.randn: _made(normal),
    torch.rand_like: _made_like(uniform),
    torch.randn_like: _made_like(normal),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.exponential_: _exponential_,
    torch.rrelu: _rrelu,
    torch.rrelu_: _rrelu,
    F.scaled_dot_product_attention: _attention,
    torch.gru: _recurrent,
    torch.lstm: _recurrent,
    torch.rnn_tanh: _recurrent,
    torch.rnn_relu: _recurrent,
}
