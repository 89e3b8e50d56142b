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
  measure on. The paper takes beta from the samples it measures on: `protocol="paper"`. It is the accuracy of f_i, by
  the letter of the algorithm; the text can be read as that of s_i. Where beta is 0 for all owners the consensus stays.
- x_0 with the superscript l_m in Algorithm 1 can also be read as the public samples whose label client m owns, and a
  unit as what all owners of a label say about the samples that have it. Who scores a sample then gives its label away:
  about a dog both {cat, dog} and {dog, sheep} speak of dogs and only one speaks of cats, so dog wins. This reading,
  `scored="own"`, gives the paper's numbers; they mean nothing where labels are not known beforehand.
- A label whose one owner made its consensus is sent but not received: the client has that value. Whoever owns a label
  anew receives what was agreed on before, also where nobody owned it in between.
- `distil` trains each model, before its own data, for so many epochs on the reference samples with the consensus as
  soft targets (FedMD, Li and Wang 2019), which makes the models themselves better; the paper tried it and left it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from fedquilt.engines.objective import Batch, Learner, Objective
from fedquilt.families.parts import Parts
from fedquilt.interface.me import Me
from fedquilt.interface.messages import ClientInfo, Roster, Updates
from fedquilt.interface.method import Heard, Method, State
from fedquilt.interface.steps import Do, Install, Step, Train
from fedquilt.sharing import Plan, UnitPlan, mean, nobody, traffic
from fedquilt.sharing.scores import NEVER, Sheet, accuracy_by_label, masked, public_labels

_AT_ONCE = 512  # public samples scored at a time


def _learn(me: Learner, batch: Batch) -> Tensor:
    """Cross-entropy over the labels that the client owns."""
    outputs = masked(me.model(batch.x), me.given["owned"])
    return batch.mean(nn.functional.cross_entropy(outputs, batch.y, reduction="none"))


def _digest(me: Learner, batch: Batch) -> Tensor:
    """Cross-entropy with the consensus about each sample."""
    target = me.given["consensus"][cast(Tensor, batch.index)]  # (B, classes)
    return batch.mean(-(target * masked(me.model(batch.x), me.given["owned"]).log_softmax(1)).sum(1))


@dataclass(frozen=True)
class ScoreSharing(Method):
    """Clients share what their models say about public samples, label by label; models and labels are their own.

    `alpha` None is the paper's n_i / n_public. Read-outs on public samples: "received" is the consensus restricted to
    the client's labels (the paper's global update), "adapted" the client's scores after its local update, "own" its
    model; on other samples all of them are its model.
    """

    name: ClassVar[str] = "score-sharing"
    needs_classes: ClassVar[str] = "shares scores of labels on public samples"
    predicts_logits: ClassVar[bool] = False
    sends_parameters: ClassVar[bool] = False
    alpha: float | None = None
    normalise: bool = True
    protocol: Literal["leak-free", "paper"] = "leak-free"
    scored: Literal["all", "own"] = "all"
    distil: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None and not self.alpha > 0:
            raise ValueError(f"score sharing with alpha={self.alpha} never asks a client's model; give one above 0")
        if self.distil < 0:
            raise ValueError(f"score sharing with distil={self.distil}: give the epochs of distillation, 0 for none")

    # --- client half -----------------------------------------------------------------------------------------------

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        labels = public_labels(member.public, classes, member.name)
        scores = self._sheet(classes, labels).units(torch.zeros(classes, len(labels)))
        return Parts(model, state=scores | {"heard": torch.zeros(classes)}, units={"model": ["*"]})

    def local(self) -> tuple[Step, ...]:
        build = Train(Objective((_learn,)), given=lambda me: {"owned": me.owned})
        if not self.distil:
            return Install(), build, Do(self._score, data="public")
        digest = Objective((_digest,), needs_index=True)
        distil = Train(digest, data="common", epochs=self.distil, given=self._lesson, from_round=2)
        return Install(), distil, build, Do(self._score, data="public")

    def _lesson(self, me: Me) -> Mapping[str, Tensor]:
        """(n, classes) the consensus about the reference samples, as probabilities."""
        consensus = self._decisive(me).clamp(min=0).T  # (public, classes)
        return {"consensus": consensus / consensus.sum(1, keepdim=True).clamp(min=1e-12), "owned": me.owned}

    def _score(self, me: Me) -> Mapping[str, Tensor]:
        """Build's scores s_i, and the local update: what the client sends, and how much of it is more than 0."""
        assert me.public is not None
        said = torch.cat([masked(me.model(x), me.owned).softmax(1) for x in me.public.split(_AT_ONCE)]).T
        consensus, heard = self._consensus(me)
        alpha = self._alpha(me.samples, said.shape[1])
        updated = (consensus + alpha * said) / (1 + alpha if self.normalise else 1.0)  # (classes, public)
        return self._sheet(me.classes, me.public_y).units(updated) | {"heard": (heard + alpha) / (1 + alpha)}

    def predict(self, me: Me, batch: Batch) -> Tensor:
        own = masked(me.model(batch.x), me.owned)
        if batch.public is None:
            return own
        agreed = self._decisive(me).T[batch.public.clamp(min=0)]  # (n, classes)
        return torch.where((batch.public >= 0)[:, None], agreed, own)

    def _consensus(self, me: Me) -> tuple[Tensor, Tensor]:
        """(classes, public) f_G and (classes,) how much of it was heard: as received, else what the client has."""
        sheet, never = self._sheet(me.classes, me.public_y), torch.zeros_like(me.owned[0])
        receives = torch.stack([me.receives.get(unit, never) for unit in sheet.names])
        heard = torch.where(receives, me.told.get("heard", me.values["heard"]), me.values["heard"])
        return sheet.table(me.received) * me.owned[:, None], heard * me.owned

    def _decisive(self, me: Me) -> Tensor:
        """(classes, public) scores to decide by: of the consensus, or the client's own before installing."""
        scores, heard = self._sheet(me.classes, me.public_y).table(me.values), me.values["heard"]
        if me.installed:
            scores, heard = self._consensus(me)
        if self._corrects:
            scores = scores / heard.clamp(min=1e-12)[:, None]
        return torch.where(me.owned[:, None], scores, NEVER)

    def _sheet(self, classes: int, labels: Tensor | None) -> Sheet:
        return Sheet(classes, labels if self.scored == "own" else None)

    @property
    def _corrects(self) -> bool:
        """Whether decisions divide scores by `heard`; in units by sample it is one number a sample."""
        return self.normalise and self.scored == "all"

    def _alpha(self, samples: Tensor, public: int) -> Tensor:
        return samples / public if self.alpha is None else torch.full_like(samples, self.alpha, dtype=torch.float32)

    # --- server half -----------------------------------------------------------------------------------------------

    def update(
        self, unit: str, held: Tensor, merged: Tensor, heard: Heard, memory: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:  # fmt: skip
        """The global update: the mean, or to the letter the sum of beta_i f_i."""
        return merged if self.normalise else merged * heard.weight, memory

    def begin(self, roster: Roster) -> State:
        return {
            "round": 0,
            "beta": torch.ones(len(roster), roster.classes),
            "heard": torch.zeros(roster.classes),  # which share of a label's consensus is scores, and not the first 0
            "alone": torch.zeros(len(roster), roster.classes, dtype=torch.bool),  # who made a label's consensus alone
        }

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        owned, ids = roster.owns, updates.ids
        heard = (state["heard"] + self._alphas(roster)[:, None]) / (1 + self._alphas(roster)[:, None])  # (K, classes)
        accuracy = self._accuracy(updates, roster, heard if self._corrects else torch.ones_like(heard))
        beta = state["beta"].clone()
        beta[ids] = torch.where(owned.sum(0) > 1, accuracy, 1.0)[ids]
        share = mean(
            heard[ids].T.reshape(-1, 1), torch.arange(roster.classes).repeat_interleave(len(ids)),
            (beta * owned)[ids].T.reshape(-1), roster.classes,
        ).onto(state["heard"][:, None])[:, 0]  # fmt: skip
        sent = torch.zeros_like(owned)
        sent[ids] = owned[ids]
        made = sent & (sent.sum(0) == 1) & (beta > 0 if self.normalise else beta == 1)  # a sum is as loud as beta
        alone = torch.where(sent.any(0), made, state["alone"])
        alone &= owned  # who gives a label up has its scores no longer
        return {"round": updates.round, "beta": beta, "heard": share, "alone": alone}

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        new = torch.ones(len(roster) - len(before), roster.classes)
        alone = torch.cat([state["alone"], torch.zeros_like(new, dtype=torch.bool)])
        return {**state, "beta": torch.cat([state["beta"], new]), "alone": alone}

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

    def plan(self, state: State, roster: Roster) -> Plan:
        # at first there is nothing to receive
        pull = 1 / (1 + self._alphas(roster)) if state["round"] else torch.zeros(len(roster))
        known = set(self._reference(roster).tolist())
        for member in roster.members:
            if not set(member.labels) <= known:
                missing = min(set(member.labels) - known)
                raise ValueError(
                    f"score sharing: client '{member.name}' owns label {missing}, of which there are no public "
                    "reference samples; add some to common"
                )
        owned = roster.owns
        # Whoever is a label's one owner, and made its consensus, has it; a new owner has not.
        has = (owned.sum(0) == 1) & state["alone"]
        scores = {}
        for label, unit in enumerate(Sheet(roster.classes).names):
            circle = torch.where(owned[:, label], 0, -1)
            # Of a pool: the consensus of a label that nobody owns waits for its next owner.
            scores[unit] = UnitPlan(circle, state["beta"][:, label], torch.where(has[:, label], 0.0, pull), pool=1)
        # Every owner sends: beta 0 is no reason to fall silent.
        asked = {unit: owned[:, label] for label, unit in enumerate(scores)}
        return nobody(["model", "heard"], len(roster)) | Plan(scores, asked)

    def _accuracy(self, updates: Updates, roster: Roster, heard: Tensor) -> Tensor:
        """(K, classes) how often those who sent are right about the reference samples of each label."""
        sheet, labels = self._sheet(roster.classes, roster.public_y), self._reference(roster)
        nothing = sheet.units(torch.full((roster.classes, len(roster.public_y)), NEVER))
        sent = {unit: updates.of_everyone(unit, never.expand(len(roster), -1)) for unit, never in nothing.items()}
        scores = sheet.table(sent)[:, :, : len(labels)] / heard[:, :, None].clamp(min=1e-12)
        return accuracy_by_label(torch.where(roster.owns[:, :, None], scores, NEVER), labels)

    def _reference(self, roster: Roster) -> Tensor:
        """(n,) the labels of the public samples that beta comes from: the first of all."""
        assert roster.common is not None  # clients without public samples were refused
        return roster.public_y if self.protocol == "paper" else roster.common.y

    def _alphas(self, roster: Roster) -> Tensor:
        return self._alpha(roster.samples, len(roster.public_y))
