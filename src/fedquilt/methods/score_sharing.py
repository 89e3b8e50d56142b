"""Score sharing (Gudur, Balaji, Perepu 2020, Algorithm 1): unlike labels, unlike models, and only scores travel.

Every client holds the public samples. What it shares is what its model says about them, label by label: a unit is one
label's column of scores, one number a public sample; its circle is the clients that own the label. The model itself is
private. A round is the algorithm's:

- Build: the client trains its model on this round's private data and scores the public samples, s_i: softmax over the
  labels it owns.
- Local update: f_i = f_G + alpha s_i on its labels, alpha = n_i / n_public; f_G = 0 in the first round.
- Global update, label by label: f_G = sum of beta_i f_i; beta = 1 for a label that one client owns, else the client's
  accuracy on that label's public samples.

Deviations:
- f_i is divided by 1 + alpha, which makes it a pull of 1 / (1 + alpha) towards f_G and changes no decision, and f_G by
  the sum of beta. The paper's sums let a label grow louder the more clients own it, and exponentially so, round after
  round: with beta of 0.8 twice it grows by 1.6 a round, while a label of one client grows by a constant.
  `normalise=False` is the letter.
- Scores that start from 0 are at first small, and smaller for a label that joined later. Decisions (not what is sent)
  are made on scores divided by the share of them that has been heard, `heard`; where all labels start together and all
  clients have the same alpha this changes none. The letter does without.
- `protocol="leak-free"` takes beta from the reference part of the public samples (`common`); `public_test` is left to
  measure on. The paper takes beta from the samples it measures on: `protocol="paper"`.
- x_0 with the superscript l_m in Algorithm 1 may also mean that a client scores only the public samples whose label it
  owns. Who scores a sample then gives its label away. `scored="own"` is this reading, to show what it does; its
  accuracies mean nothing where labels are not known beforehand.
- A label that one client owns is sent but not received: the client has that value.
- `distil` trains each model, before its own data, for so many epochs on the reference samples with the consensus as
  soft targets (FedMD, Li and Wang 2019), which makes the models themselves better; the paper tried it and left it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedquilt.messages import Member, Roster, Sent
from fedquilt.methods.base import Lesson, Method, Prepared, State
from fedquilt.sharing import Mean, Plan, Rule, Sum, by_labels, mean, nobody, traffic
from fedquilt.training.objective import Batch, Call, Context, Objective
from fedquilt.units import Unit

if TYPE_CHECKING:
    from fedquilt.view import StackView

_NEVER = -1e9  # the logit of a label that is not owned; finite, so that 0 times it is 0
_AT_ONCE = 512  # public samples scored at a time


class ScoringModel(nn.Module):
    """A client's own model, silent about labels it does not own, and its scores of the public samples beside it.

    >>> model = ScoringModel(nn.Linear(2, 3), labels=(0, 2), classes=3, public=5)
    >>> model(torch.zeros(1, 2)).softmax(1)[0, 1].item(), model.label_2.shape
    (0.0, torch.Size([5]))
    """

    def __init__(self, model: nn.Module, labels: tuple[int, ...], classes: int, public: int) -> None:
        super().__init__()
        self.model, self.classes = model, classes
        self.register_buffer("owned", torch.tensor([float(label in labels) for label in range(classes)]))
        self.register_buffer("heard", torch.zeros(classes))
        for label in range(classes):
            self.register_buffer(f"label_{label}", torch.zeros(public))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.model(x)
        if outputs.shape[-1] != self.classes:
            raise ValueError(
                f"score sharing: a model gives {outputs.shape[-1]} outputs, but there are {self.classes} labels; give "
                "it an output for every label of the federation, those that its client does not own are masked"
            )
        return torch.where(self.get_buffer("owned") > 0, outputs, _NEVER)


def _score(call: Call, x: Tensor) -> Tensor:
    return call(x).softmax(1).T  # (classes, n)


def _digest(call: Call, batch: Batch, context: Context) -> Tensor:
    """Cross-entropy with the consensus; a sample's y is its number."""
    target = context.extras["consensus"][batch.y]  # (B, classes)
    return batch.mean(-(target * call(batch.x).log_softmax(1)).sum(1))


DIGEST = Objective((_digest,))


@dataclass(frozen=True)
class ScoreSharing(Method):
    """Clients share what their models say about public samples, label by label; models and labels are their own.

    `alpha` None is the paper's n_i / n_public. Read-outs on public samples: "received" is the consensus restricted to
    the client's labels (the paper's global update), "adapted" the client's scores after its local update, "own" its
    model; on other samples all of them are its model.
    """

    name: ClassVar[str] = "score-sharing"
    alpha: float | None = None
    normalise: bool = True
    protocol: Literal["leak-free", "paper"] = "leak-free"
    scored: Literal["all", "own"] = "all"
    distil: int = 0

    def __post_init__(self) -> None:
        if self.alpha is not None and not self.alpha > 0:
            raise ValueError(f"score sharing with alpha={self.alpha} never asks a client's model; give one above 0")
        if self.protocol not in ("leak-free", "paper") or self.scored not in ("all", "own"):
            raise ValueError(
                f"score sharing: protocol is leak-free or paper, not '{self.protocol}'; scored is all or own, "
                f"not '{self.scored}'"
            )
        if self.distil < 0:
            raise ValueError(f"score sharing with distil={self.distil}: give the epochs of distillation, 0 for none")

    # --- client half -----------------------------------------------------------------------------------------------

    def wrap(self, model: nn.Module, member: Member, classes: int) -> nn.Module:
        if member.public == 0:
            raise ValueError(
                f"score sharing: client '{member.name}' holds no public samples; give the scenario common=(x, y), and "
                "public_test=(x, y) to measure on"
            )
        return ScoringModel(model, member.labels, classes, member.public)

    def cut(self, module: nn.Module) -> tuple[Unit, ...]:
        assert isinstance(module, ScoringModel)
        parameters = tuple(name for name, _ in module.named_parameters())
        buffers = tuple(f"model.{name}" for name, _ in module.model.named_buffers())
        private = (Unit("model", parameters, buffers), Unit("owned", (), ("owned", "heard")))
        return private + tuple(Unit(f"label-{label}", (), (f"label_{label}",)) for label in range(module.classes))

    def lasting(self, unit: str) -> bool:
        return unit.startswith("label-")

    def prepare(self, view: StackView) -> Prepared:
        if not self.distil or view.round == 1 or view.common is None:
            return Prepared()
        consensus = self._decisive(view)[:, :, : len(view.common)].clamp(min=0).transpose(1, 2)  # (k, n, classes)
        consensus = consensus / consensus.sum(2, keepdim=True).clamp(min=1e-12)
        numbers = torch.arange(len(view.common))
        return Prepared(lesson=Lesson(view.common.x, numbers, DIGEST, self.distil, {"consensus": consensus}))

    def report(self, view: StackView) -> Mapping[str, Tensor]:
        own, (consensus, heard) = self._own_scores(view), _consensus(view)
        alpha = self._alpha(torch.tensor(view.samples, device=own.device), own.shape[2])[:, None]  # (k, 1)
        scale = 1 + alpha if self.normalise else torch.ones_like(alpha)
        _scores(view).copy_((consensus + alpha[:, :, None] * own) / scale[:, :, None])  # the local update
        view.buffer("heard").copy_((heard + alpha) / (1 + alpha))
        return {}

    def predict(self, view: StackView, split: str) -> Tensor | None:
        table = view.data(split)
        if table.public is None or not bool((table.public >= 0).any()):
            return None
        scores = self._decisive(view).transpose(1, 2)  # (k, public, classes)
        place = table.public.clamp(min=0)[:, :, None].expand(-1, -1, view.classes)
        scores, public = scores.gather(1, place), table.public >= 0  # (k, n, classes), (k, n)
        if bool((public | (table.mask == 0)).all()):
            return scores
        own = [view.map(lambda call, x: call(x), part) for part in torch.split(table.x, _AT_ONCE, dim=1)]
        return torch.where(public[:, :, None], scores, torch.cat(own, dim=1))

    def _own_scores(self, view: StackView) -> Tensor:
        """(k, classes, public) what the clients' models say about the public samples."""
        x = view.public
        assert x is not None  # `wrap` has seen to it
        parts = [view.map(partial(_score, x=part)) for part in torch.split(x, _AT_ONCE)]
        own = torch.cat(parts, dim=2)
        if self.scored == "own":
            y = torch.cat([split.y for split in (view.common, view.public_test) if split is not None])
            own *= view.buffer("owned")[:, y.to(own.device)][:, None]  # (k, 1, public)
        return own

    def _decisive(self, view: StackView) -> Tensor:
        """(k, classes, public) scores to decide by: of the consensus, or the clients' own before installing."""
        scores, heard = _consensus(view) if view.installed else (_scores(view), view.buffer("heard"))
        if self.normalise:
            scores = scores / heard.clamp(min=1e-12)[:, :, None]
        return torch.where(view.buffer("owned")[:, :, None] > 0, scores, _NEVER)

    def _alpha(self, samples: Tensor, public: int) -> Tensor:
        return samples / public if self.alpha is None else torch.full_like(samples, self.alpha, dtype=torch.float32)

    # --- server half -----------------------------------------------------------------------------------------------

    def merging(self, rule: Rule) -> Rule:
        if self.normalise:
            return rule
        if not isinstance(rule, Mean):
            raise ValueError(f"score sharing with normalise=False is a sum, which {rule} cannot give; take the mean")
        return Sum()

    def begin(self, roster: Roster) -> tuple[State, Plan]:
        state: State = {
            "round": 0,
            "beta": torch.ones(len(roster), roster.classes),
            "heard": torch.zeros(roster.classes),  # which share of a label's consensus is scores, and not the first 0
        }
        return state, self._plan(state, roster)

    def next(self, state: State, plan: Plan, sent: Sent, roster: Roster) -> tuple[State, Plan]:
        owned, ids = _owned(roster), sent.ids
        heard = (state["heard"] + self._alphas(roster)[:, None]) / (1 + self._alphas(roster)[:, None])  # (K, classes)
        accuracy = self._accuracy(sent, roster, heard if self.normalise else torch.ones_like(heard))
        beta = state["beta"].clone()
        beta[ids] = torch.where(owned.sum(0) > 1, accuracy, 1.0)[ids]
        share = mean(
            heard[ids].T.reshape(-1, 1), torch.arange(roster.classes).repeat_interleave(len(ids)),
            (beta * owned)[ids].T.reshape(-1), roster.classes,
        ).onto(state["heard"][:, None])[:, 0]  # fmt: skip
        state = {"round": sent.round, "beta": beta, "heard": share}
        return state, self._plan(state, roster)

    def declared(self, state: State, plan: Plan, before: Roster, roster: Roster) -> tuple[State, Plan]:
        return state, self._plan(state, roster)

    def welcome(self, state: State, plan: Plan, roster: Roster, sent: Sent) -> tuple[State, Plan]:
        state = {**state, "beta": torch.cat([state["beta"], torch.ones(1, roster.classes)])}
        return state, self._plan(state, roster)

    def tell(self, state: State, roster: Roster, ids: tuple[int, ...]) -> Mapping[str, Tensor]:
        return {"heard": state["heard"].expand(len(ids), -1)}

    def describe(self, state: State, plan: Plan, roster: Roster) -> Mapping[str, Any]:
        """The protocol, and the bytes of a round, up and down, of scores and of the models that stayed at home."""
        sizes = roster.sizes()
        moved = traffic(plan, sizes)
        measured = {"leak-free": "apart from beta's", "paper": "those that beta comes from"}[self.protocol]
        if self.scored == "own":
            measured += "; who scores a sample gives its label away"
        return {
            "protocol": self.protocol,
            "measured_on": f"public samples, {measured}",
            "bytes_of_scores_a_round": moved.total_up + moved.total_down,
            "bytes_of_models_a_round": 2 * 4 * int(sizes["model"].sum()),
        }

    def _plan(self, state: State, roster: Roster) -> Plan:
        pull = 1 / (1 + self._alphas(roster)) if state["round"] else 0.0  # at first there is nothing to receive
        labels, known = [member.labels for member in roster.members], set(self._reference(roster).tolist())
        for member in roster.members:
            if not set(member.labels) <= known:
                missing = min(set(member.labels) - known)
                raise ValueError(
                    f"score sharing: client '{member.name}' owns label {missing}, of which there are no public "
                    "reference samples; add some to common"
                )
        scores = by_labels(labels, roster.classes, state["beta"], pull)
        # Every owner sends: beta 0 is no reason to fall silent, and a label of one client waits for its next owner.
        asked = {unit: _owned(roster)[:, at] & ~scores.sends(unit) for at, unit in enumerate(scores.units)}
        return nobody(["model", "owned"], len(roster)) | scores.but(asked=asked)

    def _accuracy(self, sent: Sent, roster: Roster, heard: Tensor) -> Tensor:
        """(K, classes) how often those who sent are right about the reference samples of each label."""
        labels = self._reference(roster)
        scores = torch.full((len(roster), roster.classes, len(labels)), _NEVER)
        for label, unit in enumerate(_units(roster.classes)):
            ids, values = sent.value(unit)
            if not len(ids):
                continue
            scores[ids, label] = values[:, : len(labels)].cpu() / heard[ids, label, None].clamp(min=1e-12)
        guess = scores.masked_fill(~_owned(roster)[:, :, None], _NEVER).argmax(1)  # (K, n)
        of_label = (labels == torch.arange(roster.classes)[:, None]).float()  # (classes, n)
        return (guess == labels).float() @ of_label.T / of_label.sum(1).clamp(min=1)

    def _reference(self, roster: Roster) -> Tensor:
        """(n,) the labels of the public samples that beta comes from: the first of all."""
        if roster.common is None:
            raise ValueError("score sharing needs public samples; give the scenario common=(x, y)")
        if self.protocol == "paper" and roster.public_test is not None:
            return torch.cat([roster.common.y, roster.public_test.y])
        return roster.common.y

    def _alphas(self, roster: Roster) -> Tensor:
        public = int(roster.sizes()["label-0"][0])
        return self._alpha(roster.samples, public)


def _units(classes: int) -> list[str]:
    return [f"label-{label}" for label in range(classes)]


def _owned(roster: Roster) -> Tensor:
    """(K, classes) who owns which label."""
    return torch.tensor([[label in m.labels for label in range(roster.classes)] for m in roster.members])


def _scores(view: StackView) -> Tensor:
    """(k, classes, public) the clients' scores of the public samples; may be written to."""
    return torch.unflatten(view.family.layout.take(view.rows, *_units(view.classes)), 1, (view.classes, -1))


def _consensus(view: StackView) -> tuple[Tensor, Tensor]:
    """(k, classes, public) f_G and (k, classes) how much of it was heard: as received, else what the client has."""
    scores, heard = _scores(view).clone(), view.buffer("heard").clone()
    for label, unit in enumerate(_units(view.classes)):
        value = view.received(unit)
        if value is not None and view.down is not None:
            here = view.receives(unit).to(scores.device)
            scores[:, label] = torch.where(here[:, None], value.to(scores.device), scores[:, label])
            told = view.down.told["heard"][:, label].to(scores.device)
            heard[:, label] = torch.where(here, told, heard[:, label])
    return scores, heard
