"""Vote: a client answers with a mixture of all that it could answer with, as far as validation samples say.

    p(y | x) = sum_m pi_im p_m(y | x)
    r_vm = pi_im p_m(y_v | x_v) / sum_l pi_il p_l(y_v | x_v)          over the client's n_i validation samples v
    pi_im <- (sum_v r_vm + c pi_m) / (n_i + c)                         `steps` times, from pi_m on

The experts m are the model as received, as adapted, half-way between their weights, fine-tuned for `epochs` epochs, the
nearest neighbours among the client's training samples (see knn.py), and the client's model trained alone, where it has
a part of that name or the run has trained it so (`alone=True`). What is expected of them, pi_m, and how many samples
that counts for, c, are what all clients' validation samples say together; for any set S of experts that count alike

    P(S) ~ prod_iv mean_{m in S} p_m(y_v | x_v)        pi_m = (1 - e) sum_{S with m} P(S) / |S| + e / experts,  e = 0.1
    c: of `pseudo`, that by which clients foresee best what they did not weigh by: a fifth of their samples, five times

Where clients are alike c is the highest, and all of them vote alike; where each needs another expert it is the lowest.
Whoever has no validation samples votes by pi_m. A device by itself does not know what others' samples say: there pi_m
is the same for all experts, and c the first of `pseudo`.

Picking the one expert that is best on two dozen samples is far noisier than mixing them. Test labels are never seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from fedquilt.interface.readout import EvaluationContext, Readout
from fedquilt.readouts.fine_tuned import after_epochs
from fedquilt.readouts.knn import KNN, nearest

EXPERTS = ("received", "half-way", "adapted", "fine-tuned", "knn", "alone")
_SETS = torch.tensor([each for each in product((0.0, 1.0), repeat=len(EXPERTS)) if any(each)], dtype=torch.float64)
_DOUBT = 0.1  # of what is expected of experts: that they are all alike, whatever the sets say
_FOLDS, _BLOCK = 5, 4  # of samples, and how many neighbours are in one fold: windows of a signal overlap


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


def foreseen(likelihood: Tensor, mask: Tensor, samples: Tensor, prior: Tensor, pseudo: float, steps: int) -> Tensor:
    """(k,) how likely, in nats, the events of clients are by mixtures that are weighed without their fold of samples.

    `samples` (n,) says of which sample each event is.

    >>> half = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    >>> foreseen(half, torch.ones(1, 2), torch.tensor([0, 4]), torch.tensor([0.5, 0.5]), 2.0, 10).exp()
    tensor([0.2500])
    """
    fold = samples // _BLOCK % _FOLDS
    found = likelihood.new_zeros(len(likelihood))
    for left_out in fold.unique().tolist():
        pi = mixture(likelihood, mask * (fold != left_out), prior, pseudo, steps)
        found = found + (_logs(pi[:, :, None] * likelihood) * mask * (fold == left_out)).sum(1)
    return found


def _logs(joint: Tensor) -> Tensor:
    """(k, n) from what each expert adds to the likelihood of events, (k, experts, n)."""
    return joint.sum(1).clamp(min=torch.finfo(joint.dtype).tiny).log()


@dataclass(frozen=True)
class Vote(Readout):
    """Received, half-way, adapted, fine-tuned, neighbours and alone, mixed by the likelihood of validation samples."""

    kind: ClassVar[str] = "vote"
    needs_last_round: ClassVar[bool] = True
    pools: ClassVar[int] = 2
    asks_alone: ClassVar[bool] = True
    epochs: int = 10
    steps: int = 10
    pseudo: tuple[float, ...] = (2.0, 8.0, 32.0, 128.0, 1e6)

    def logs(self, look: EvaluationContext, split: str) -> Tensor:
        said = self.experts(look, split)
        pi = self.weights(look)
        parts = [pi[:, at].view(-1, *[1] * (each.ndim - 1)) * each for at, each in enumerate(said.values())]
        return look.task.unmixed(torch.stack(parts).sum(0))

    def weights(self, look: EvaluationContext) -> Tensor:
        """(k, experts) how much each of a client's experts is believed, in the order of `experts`."""
        likelihood, mask, _ = self._said(look)
        pooled = look.pooled.get(self.name)
        best = 0 if pooled is None else int(pooled[len(_SETS) : -len(EXPERTS)].argmax())
        return mixture(likelihood, mask, self._prior(look), self.pseudo[best], self.steps)

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
        """(k, sets + pseudo + experts) how likely samples are by each set of experts, then how well foreseen with each
        c, once what the sets say is known, and which experts there are."""
        likelihood, mask, samples = self._said(look)
        sets = _SETS[:, self._here(look)].to(likelihood.device)  # (sets, experts)
        sets = torch.where(sets.any(1, keepdim=True), sets, 1.0)  # where none of a set is here, all that are
        alike = sets / sets.sum(1, keepdim=True)
        found = [(_logs(weights[:, None] * likelihood) * mask).sum(1) for weights in alike]
        if self.name in look.pooled:
            how = (likelihood, mask, samples, self._prior(look))
            found += [foreseen(*how, pseudo, self.steps) for pseudo in self.pseudo]
        else:
            found += [torch.zeros_like(found[0])] * len(self.pseudo)
        there = [torch.full_like(found[0], float(at in self._here(look))) for at in range(len(EXPERTS))]
        return torch.stack([*found, *there], dim=1)

    def _prior(self, look: EvaluationContext) -> Tensor:
        """(experts,) what all clients' samples say of the experts that are here."""
        here, pooled = self._here(look), look.pooled.get(self.name)
        alike = torch.full((len(here),), 1 / len(here), dtype=torch.float64)
        if pooled is not None:
            pooled = pooled.cpu()
            nobodys = (_SETS * (pooled[-len(EXPERTS) :] == 0)).any(1)
            likely = pooled[: len(_SETS)].masked_fill(nobodys, -torch.inf).softmax(0)
            said = (likely[:, None] * _SETS / _SETS.sum(1, keepdim=True)).sum(0)[here]
            alike = (1 - _DOUBT) * said / said.sum() + _DOUBT * alike
        return alike.to(look.received.rows.device)

    def _here(self, look: EvaluationContext) -> list[int]:
        return [EXPERTS.index(name) for name in self.experts(look, "validation")]

    def _said(self, look: EvaluationContext) -> tuple[Tensor, Tensor, Tensor]:
        """What experts give the events of validation samples, (k, experts, n), which there are, and whose, (n,)."""
        table = look.table("validation")
        said = torch.stack(list(self.experts(look, "validation").values()), dim=1)
        likelihood, mask = look.task.likelihoods(said, table.y, table.mask)
        each = max(1, likelihood.shape[2] // max(1, table.y.shape[1]))
        return likelihood, mask, torch.arange(likelihood.shape[2], device=mask.device) // each


def _half_way(look: EvaluationContext) -> Tensor:
    received, adapted = look.received.rows, look.adapted.rows
    return torch.where(received == adapted, received, torch.lerp(received, adapted, 0.5))  # infinite ones stay home
