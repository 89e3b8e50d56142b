"""What a model does beside turning samples into scores, found out by trying it on a few samples before any work.

A step of training has to be a function of parameters, buffers, the batch and declared randomness. A model that keeps
more than that from step to step (a counter, a generator, a plain tensor) trains one by one, from a fresh copy for each
client and round; one that depends on what no copy of it holds is refused.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedquilt.families.architecture import attributes
from fedquilt.families.copies import copy_of

_FEW = 4  # samples that a model is tried on
_SEARCHED = 64  # samples among which one is looked for that differs from the first
_NOISE = 1e-4  # of the greatest score: what another number of samples may change by the order of sums alone


@dataclass(frozen=True)
class Habits:
    """What a model was seen to do.

    `constant` are buffers and frozen parameters that nothing writes: they are each client's own and never travel.
    `keeps` names what else changes while it runs; `draws`: it takes random numbers from Python's or NumPy's generators.
    `mixes`: in eval mode what it makes of a sample depends on the others of the batch; `guesses`: there it draws random
    numbers.
    """

    constant: frozenset[str] = frozenset()
    keeps: tuple[str, ...] = ()
    draws: bool = False
    mixes: bool = False
    guesses: bool = False

    @property
    def apart(self) -> bool:
        """Whether its clients have to train one by one, each from a fresh copy."""
        return bool(self.keeps) or self.draws

    @property
    def why(self) -> str:
        """What makes it so, and what to do about it."""
        if not self.keeps:
            return (
                "it draws from Python's or NumPy's generators, which are seeded for each client and round; draw with "
                "torch, or use layers of dropout"
            )
        return (
            f"it changes {', '.join(repr(name) for name in self.keeps[:3])} while it runs, which is outside of "
            "parameters and buffers; every client starts each round, and each look at it, with that as it was built; "
            "register as a buffer what shall last"
        )


class Fickle(ValueError):
    """A model that gives two results for the same parameters, buffers, samples and seeds."""


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """While this holds, all that draw from PyTorch's, Python's or NumPy's generators draw by this key."""
    before = random.getstate(), np.random.get_state(), torch.random.get_rng_state()  # noqa: NPY002
    random.seed(key)
    np.random.seed(key % 2**32)  # noqa: NPY002  # the one that models may draw from
    torch.default_generator.manual_seed(key)  # `torch.manual_seed` would visit every kind of device there may be
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(key)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.random.set_rng_state(before[2])


def python_draws() -> tuple[object, ...]:
    """The state of Python's and NumPy's generators."""
    _, words, *more = np.random.get_state()  # noqa: NPY002
    return random.getstate(), np.asarray(words).tobytes(), *more


def habits_of(module: nn.Module, x: Tensor, y: Tensor) -> Habits:
    """What a model does with a few of these samples.

    A model that does not take them has no habits here: it is refused elsewhere, in better words.

    >>> habits_of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), torch.randn(5, 2), torch.zeros(5).long())
    Habits(constant=frozenset(), keeps=(), draws=False, mixes=False, guesses=False)
    """
    some, kept = few(x, y), attributes(module)
    try:
        tried = copy_of(module)
        before = attributes(tried)
        first, again = _Pass(tried, *some), _Pass(copy_of(module), *some)
    except Exception:  # whatever a model says that was given the wrong samples
        return Habits()
    if first.found != again.found or attributes(module) != kept:
        raise Fickle(
            "its model gives two results for the same parameters, buffers, samples and seeds, or changes what its "
            "copies have in common: it depends on something outside of itself (a global counter, the clock, another "
            "generator); keep that in a buffer"
        )
    # Of a part that did not run (a router, say, that only a method calls) nobody knows what it writes.
    known = [name for name, _ in module.named_buffers() if name.rpartition(".")[0] in first.ran]
    constant = frozenset(name for name in (*known, *frozen_of(module)) if name not in first.written)
    after = attributes(tried)
    keeps = tuple(name for name in before | after if before.get(name) != after.get(name))
    return Habits(constant, keeps, first.draws, _mixes(module, x), first.guesses)


def behaviour(module: nn.Module, x: Tensor, y: Tensor, numbers: Mapping[str, Tensor] | None = None) -> bytes | None:
    """What a model makes of a few samples, in training and in eval mode, to the last bit; None: it does not take them.

    `numbers` are parameters and buffers to be tried in place of its own.

    >>> x, y, one = torch.ones(2, 3), torch.zeros(2).long(), nn.Linear(3, 2)
    >>> behaviour(one, x, y) == behaviour(copy_of(one), x, y) != behaviour(nn.Linear(3, 2), x, y)
    True
    """
    try:
        tried = copy_of(module)
        own = dict(tried.named_parameters()) | dict(tried.named_buffers())
        with torch.no_grad():
            for name, value in (numbers or {}).items():
                own[name].copy_(value)
        return _Pass(tried, *few(x, y)).found
    except Exception:  # as above
        return None


def frozen_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that do not train, by name.

    >>> list(frozen_of(nn.Sequential(nn.Linear(2, 3).requires_grad_(False), nn.Linear(3, 1))))
    ['0.weight', '0.bias']
    """
    return {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}


def few(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The first samples, two at least: a norm of the batch takes no single one."""
    places = torch.arange(min(max(len(y), 2), _FEW)) % len(y)
    return x[places.to(x.device)].cpu(), y[places.to(y.device)].cpu()


def _some_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """A loss that gradients can be looked at of: which one does not matter."""
    if outputs.ndim != 2 or y.ndim != 1 or y.is_floating_point():
        return outputs.float().square().mean()
    return F.cross_entropy(outputs, y % outputs.shape[1])


class _Pass:
    """A step of training and then a look in eval mode, with a copy of a module to be used up, and what they wrote."""

    def __init__(self, tried: nn.Module, x: Tensor, y: Tensor) -> None:
        tried.train()
        # what holds several models runs each of them
        runs: list[dict[str, str]] = getattr(tried, "fedquilt_runs", [{}])
        was = dict(tried.named_buffers()) | frozen_of(tried)
        self.ran: set[str] = set()
        watching = [
            part.register_forward_pre_hook(lambda *_, path=path: self.ran.add(path))
            for path, part in tried.named_modules()
        ]
        versions, buffers = {n: b._version for n, b in was.items()}, {n: b.detach().clone() for n, b in was.items()}
        with seeded(0), _eagerly():
            python = python_draws()
            outputs = [tried(x.clone(), **how) for how in runs]
            loss = torch.stack([_some_loss(scores, y) for scores in outputs]).sum()
            parameters = [p for p in tried.parameters() if p.requires_grad] if loss.requires_grad else []
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True) if parameters else ()
            self.draws = python != python_draws()
            python, here = python_draws(), torch.random.get_rng_state()
            with torch.no_grad():
                tried.eval()
                scores = [tried(x.clone(), **how) for how in runs]
            self.guesses = python != python_draws() or not torch.equal(here, torch.random.get_rng_state())
        for watch in watching:
            watch.remove()
        named = (*tried.named_buffers(remove_duplicate=False), *frozen_of(tried).items())
        now = {name: buffer for name, buffer in named if name in buffers}
        self.written = {  # also where the same numbers were written
            name for name, buffer in was.items()
            if now.get(name) is not buffer or buffer._version != versions[name] or not same_bits(buffer, buffers[name])
        }  # fmt: skip
        digest = hashlib.blake2b()
        found = (tensor for name, tensor in now.items() if name in self.written)
        for tensor in (*outputs, *scores, *found, *(g for g in gradients if g is not None)):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(bits_of(tensor))
        self.found = digest.digest()


def _eagerly() -> AbstractContextManager[object]:
    """While this holds, compiled modules run as they are: compiling takes longer than all that is tried."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same to the last bit, NaNs included."""
    return one is other or (one.dtype == other.dtype and one.shape == other.shape and bits_of(one) == bits_of(other))


def bits_of(tensor: Tensor) -> bytes:
    """A tensor's numbers as they lie in memory."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _mixes(module: nn.Module, x: Tensor) -> bool:
    """Whether the scores of a sample in eval mode depend on the samples beside it, or on their number."""
    looked, some = copy_of(module).eval(), x[:_SEARCHED].cpu()
    first = some[:1]
    made_up = 1 - 2 * first if first.is_floating_point() else torch.zeros_like(first)
    other = next((sample[None] for sample in some if not torch.equal(sample, some[0])), made_up)
    scores = []
    for companions in ([first], [other], [other, other]):
        try:
            with seeded(0), torch.no_grad(), _eagerly():
                scores.append(looked(torch.cat([first, *companions]))[0])
        except Exception:  # it does not take what was made up; in doubt it does
            return True
    beside, longer = (_apart(scores[0], others) for others in scores[1:])
    return beside > 0 or longer > _NOISE


def _apart(one: Tensor, other: Tensor) -> float:
    """How far two rows of scores are apart, in parts of the greatest; infinite values must be the same."""
    same = one == other
    if bool((~same & ~(torch.isfinite(one) & torch.isfinite(other)) & ~(one.isnan() & other.isnan())).any()):
        return float("inf")
    gaps, sizes = torch.where(same | one.isnan(), 0.0, (one - other).abs()), one[torch.isfinite(one)].abs()
    return float(gaps.max() / sizes.max().clamp(min=1e-12)) if len(sizes) else 0.0
