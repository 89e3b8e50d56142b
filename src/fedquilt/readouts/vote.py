"""Vote: a client answers with a mixture of all that it could answer with, as far as its validation samples say.

    p(y | x) = sum_m pi_im p_m(y | x)
    r_vm = pi_im p_m(y_v | x_v) / sum_l pi_il p_l(y_v | x_v)          over the client's n_i validation samples v
    pi_im <- (sum_v r_vm + c pi_m) / (n_i + c)                         `steps` times, from pi_m on; c = `pseudo`

The experts m are the model as received, as adapted, half-way between their weights, fine-tuned for `epochs` epochs, the
nearest neighbours among the client's training samples (see knn.py), and the client's model trained alone where it holds
one: a part of that name. pi_m is the mean of what all clients with validation samples find in the same way with equal
pi_m: whoever has few samples stays near to it, whoever has none votes by it. A device by itself does not know the
others' mixtures: there pi_m is the same for all experts.

Picking the one expert that is best on two dozen samples is far noisier than mixing them. Test labels are never seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.interface.readout import EvaluationContext, Readout
from fedquilt.readouts.fine_tuned import after_epochs
from fedquilt.readouts.knn import KNN, nearest

EXPERTS = ("received", "half-way", "adapted", "fine-tuned", "knn", "alone")


def mixture(likelihood: Tensor, mask: Tensor, prior: Tensor, pseudo: float, steps: int) -> Tensor:
    """(k, experts) how much each is believed, by EM from `prior` (experts,), which counts as `pseudo` samples.

    `likelihood` (k, experts, n) is what experts give the labels of validation samples, `mask` (k, n) 0 for padding.

    >>> mixture(torch.tensor([[[0.5], [0.5]]]), torch.ones(1, 1), torch.tensor([0.75, 0.25]), 2.0, 10)
    tensor([[0.7500, 0.2500]])
    """
    pi = prior.expand(len(likelihood), -1)
    for _ in range(steps):
        joint = pi[:, :, None] * likelihood
        share = joint / joint.sum(1, keepdim=True).clamp(min=torch.finfo(joint.dtype).tiny)
        counted = (share * mask[:, None]).sum(2) + pseudo * prior
        pi = counted / counted.sum(1, keepdim=True)
    return pi


@dataclass(frozen=True)
class Vote(Readout):
    """Received, half-way, adapted, fine-tuned, neighbours and alone, mixed by the likelihood of validation samples."""

    kind: ClassVar[str] = "vote"
    needs_last_round: ClassVar[bool] = True
    pools: ClassVar[bool] = True
    epochs: int = 10
    steps: int = 10
    pseudo: float = 2.0

    def logs(self, look: EvaluationContext, split: str) -> Tensor:
        said = self.experts(look, split)
        pi = self.weights(look)
        parts = [pi[:, at].view(-1, *[1] * (each.ndim - 1)) * each for at, each in enumerate(said.values())]
        return look.task.unmixed(torch.stack(parts).sum(0))

    def weights(self, look: EvaluationContext) -> Tensor:
        """(k, experts) how much each of a client's experts is believed, in the order of `experts`."""
        return self._mixture(look, self._prior(look))

    def experts(self, look: EvaluationContext, split: str) -> dict[str, Tensor]:
        """What each expert says about a split, (k, n, classes) probabilities; those that clients have."""
        look.must_be_logits(self.name)
        own = look.alone(split)
        scores = {
            "received": look.scores("received", split),
            "half-way": look.scores_of("half-way", split, lambda: _half_way(look)),
            "adapted": look.scores("adapted", split),
            "fine-tuned": after_epochs(look, split, [self.epochs], "all")[0],
        } | ({} if own is None else {"alone": own})
        said = {name: look.task.mixable(each) for name, each in scores.items()}
        near = nearest(look, split, KNN.k, KNN.scale)
        return {name: each for name in EXPERTS if (each := said.get(name, near if name == "knn" else None)) is not None}

    def evidence(self, look: EvaluationContext) -> Tensor:
        """(k, all experts, 2) each client's mixture where all count alike at first, and for whom it is one."""
        here = list(self.experts(look, "validation"))
        heard = (look.table("validation").mask.sum(1) > 0).double()  # (k,)
        found = heard.new_zeros(len(heard), len(EXPERTS), 2)
        at = [EXPERTS.index(name) for name in here]
        found[:, at, 0] = heard[:, None] * self._mixture(look, heard.new_full((len(here),), 1 / len(here)))
        found[:, at, 1] = heard[:, None]
        return found

    def _prior(self, look: EvaluationContext) -> Tensor:
        """(experts,) the federation's mean mixture, of the experts that are here."""
        here = [EXPERTS.index(name) for name in self.experts(look, "validation")]
        pooled = look.pooled.get(self.name)
        if pooled is None or not bool(pooled.any()):
            return torch.full((len(here),), 1 / len(here), dtype=torch.float64, device=look.received.rows.device)
        mean = (pooled[here, 0] / pooled[here, 1].clamp(min=1)).to(look.received.rows.device)
        return mean / mean.sum()

    def _mixture(self, look: EvaluationContext, prior: Tensor) -> Tensor:
        table = look.table("validation")
        said = torch.stack(list(self.experts(look, "validation").values()), dim=1)
        return mixture(*look.task.likelihoods(said, table.y, table.mask), prior, self.pseudo, self.steps)


def _half_way(look: EvaluationContext) -> Tensor:
    received, adapted = look.received.rows, look.adapted.rows
    return torch.where(received == adapted, received, torch.lerp(received, adapted, 0.5))  # infinite ones stay home
