"""Optimisers of stacks: one fused operation updates every parameter of every client of a family.

Fused operations read memory as it lies, whatever a tensor's strides say, and autograd gives gradients in any layout
(channels last, transposed, one number expanded): here, and nowhere else, they are brought into that of the parameters.

A client's state is fresh in each round, so there is nothing to keep between rounds. A learning rate may be scaled per
client or per parameter by `scale`; zero leaves a number exactly as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedquilt.engines.settings import Training
from fedquilt.layers.stacked_products import there

_LARGE = 2**16  # numbers: of more than that PyTorch's own steps keep few blocks of a GPU busy, our kernels all


class Optimiser:
    """SGD, Adam or AdamW on lists of tensors: `[matrix]` of a whole family, or one client's parameters.

    >>> theta = torch.ones(2, 3)
    >>> Optimiser(Training(lr=0.5), [theta]).step([torch.ones(2, 3)], lr=0.5)
    >>> theta[0].tolist()
    [0.5, 0.5, 0.5]
    """

    def __init__(self, training: Training, parameters: Sequence[Tensor]) -> None:
        self.training = training
        self.parameters = list(parameters)
        assert all(p.is_contiguous() for p in self.parameters), "fused operations read parameters as they lie in memory"
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []
        self.steps: list[Tensor] = []
        if training.optimiser != "sgd" or training.momentum > 0:
            self.first = [torch.zeros_like(p) for p in parameters]
        if training.optimiser != "sgd":
            self.second = [torch.zeros_like(p) for p in parameters]
            self.steps = [torch.zeros((), device=p.device) for p in parameters]
        large = [at for at, p in enumerate(self.parameters) if p.is_cuda and there() and p.numel() >= _LARGE]
        self.large = frozenset(large)
        if self.large:
            self.betas = torch.tensor(training.betas, dtype=torch.float64, device=self.parameters[0].device)

    def reset(self) -> None:
        """Forget everything, as at the start of a round."""
        if self.first:
            torch._foreach_zero_(self.first + self.second + self.steps)

    def step(self, gradients: Sequence[Tensor | None], lr: float | Tensor) -> None:
        """One step; `lr` is a number, or a tensor of no dimensions where a captured graph reads it anew.

        As in PyTorch, a parameter that a loss does not depend on (None) rests: neither momentum nor decay moves it.
        """
        t = self.training
        # A fused operation on a GPU takes no tensors without numbers.
        used = [at for at, gradient in enumerate(gradients) if gradient is not None and gradient.numel()]
        if not used:
            return
        given = (gradients[at] for at in used)
        own = [g if g.is_contiguous() and not g.is_neg() else as_it_reads(g) for g in given if g is not None]
        if self.steps:
            torch._foreach_add_([self.steps[at] for at in used], 1.0)
        if isinstance(lr, Tensor) and not self.large.isdisjoint(used):
            for at, gradient in zip(used, own, strict=True):
                if at in self.large:
                    self.step_by_kernel(at, gradient, lr)
            left = [(at, gradient) for at, gradient in zip(used, own, strict=True) if at not in self.large]
            used, own = [at for at, _ in left], [gradient for _, gradient in left]
        if not used:
            return

        def of(tensors: list[Tensor]) -> list[Tensor]:
            return [tensors[at] for at in used] if tensors else []

        if t.optimiser == "sgd":
            # A buffer of zeros makes the first step momentum * 0 + gradient: no special first step is needed.
            torch._fused_sgd_(
                of(self.parameters),
                own,
                of(self.first),
                weight_decay=t.weight_decay,
                momentum=t.momentum,
                lr=lr,
                dampening=0.0,
                nesterov=t.nesterov,
                maximize=False,
                is_first_step=False,
            )
            return
        update = torch._fused_adam_ if t.optimiser == "adam" else torch._fused_adamw_
        update(
            of(self.parameters),
            own,
            of(self.first),
            of(self.second),
            [],
            of(self.steps),
            lr=lr,
            beta1=t.betas[0],
            beta2=t.betas[1],
            weight_decay=t.weight_decay,
            eps=t.eps,
            amsgrad=False,
            maximize=False,
        )

    def step_by_kernel(self, at: int, gradient: Tensor, lr: Tensor) -> None:
        """A step of one large tensor, whose count of steps was moved already."""
        from fedquilt.layers.step_kernels import adam, sgd

        t, theta = self.training, self.parameters[at]
        if t.optimiser == "sgd":
            sgd(theta, gradient, self.first[at] if self.first else None, lr, t.momentum, t.nesterov, t.weight_decay)
        else:
            corrections = 1.0 - self.betas ** self.steps[at]
            moments, apart = (self.first[at], self.second[at]), t.optimiser == "adamw"
            adam(theta, gradient, *moments, corrections, lr, t.betas, t.weight_decay, t.eps, apart)


def as_it_reads(gradient: Tensor) -> Tensor:
    """A gradient whose memory holds its numbers in the order in which they are read.

    >>> as_it_reads(torch.arange(4.0).view(2, 2).T).stride(), as_it_reads(torch.ones(1).expand(3, 2)).stride()
    ((2, 1), (2, 1))
    """
    if gradient.layout != torch.strided:  # of an embedding that asks for sparse ones
        return gradient.to_dense()
    return gradient.resolve_neg().contiguous()  # the imaginary part of a conjugate is there with its sign to be turned


def hold_back(before: Tensor, after: Tensor, scale: Tensor) -> None:
    """Scale a step, in place: `after` becomes before + scale * (after - before), and exactly `before` where scale is 0.

    Exactly so even where the step went to infinity, which a product with 0 would turn into NaN.

    >>> after = torch.tensor([3.0, float("inf")])
    >>> hold_back(torch.tensor([1.0, 1.0]), after, torch.tensor([0.5, 0.0]))
    >>> after
    tensor([2., 1.])
    """
    scale = scale.expand_as(after)
    torch.lerp(before, after, scale, out=after)
    torch.where(scale == 0, before, after, out=after)
