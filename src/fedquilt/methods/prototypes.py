"""Prototypes as units: for each label the mean of the features of its samples, sent with how many those are.

What a client holds beside its model are the units `label-0`, `label-1`, ..., 0 where nothing is known of a label, and
how many samples of each it has, `counts`, which it reports as `samples`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedquilt.engines.objective import Batch, Learner, Objective
from fedquilt.families.heads import head_of, width_of
from fedquilt.families.parts import Parts
from fedquilt.interface.me import Me
from fedquilt.interface.messages import ClientInfo, Roster
from fedquilt.layers.prepare import cross_entropies
from fedquilt.methods.fedavg import circles_of_shape
from fedquilt.sharing import Plan, UnitPlan
from fedquilt.sharing.scores import Sheet

COUNTS = "counts"


def with_prototypes(model: nn.Module, member: ClientInfo, classes: int) -> Parts:
    """A client's model and room for the prototypes of its features."""
    head = head_of(model, member.name)
    prototypes = Sheet(classes).units(torch.zeros(classes, width_of(model, head, member.name)))
    return Parts(model, state=prototypes | {COUNTS: torch.zeros(classes)}, head=head)


def known_prototypes(me: Me) -> Tensor:
    """(classes, width) what a client knows of the labels; 0 where nothing is known."""
    return Sheet(me.classes).table(me.values)


def given_prototypes(me: Me) -> Mapping[str, Tensor]:
    """What `near_prototypes` is given."""
    return {"prototypes": known_prototypes(me)}


def near_prototypes(lam: float) -> Objective:
    """Cross-entropy, and lam times the mean squared distance of features to the prototype of their label, if known."""

    def term(me: Learner, batch: Batch) -> Tensor:
        features, scores = me.model.features(batch.x)
        target = me.given["prototypes"].index_select(0, batch.y)  # (n, width)
        far = (features - target).square().mean(1) * (target != 0).any(1)
        return batch.mean(cross_entropies(scores, batch.y) + lam * far)

    return Objective((term,))


def own_prototypes(me: Me) -> Mapping[str, Tensor]:
    """A step on training samples: the client's own prototypes, where it has samples, and how many those are."""
    assert me.data is not None
    features, _ = me.model.features(me.data.x)
    of_label = me.data.of_labels(me.classes)  # (classes, n)
    counts = of_label.sum(1)
    own = torch.where(counts[:, None] > 0, of_label @ features / counts.clamp(min=1)[:, None], known_prototypes(me))
    return Sheet(me.classes).units(own) | {COUNTS: counts, "samples": counts}


def with_samples(me: Me) -> Mapping[str, Tensor]:
    """What to send: prototypes of labels that the client has samples of."""
    return dict(zip(Sheet(me.classes).names, me.values[COUNTS] > 0, strict=True))


def shared_prototypes(roster: Roster, counts: Tensor) -> Plan:
    """All prototypes go to everyone whose features are as wide; who has samples of a label counts by their number.

    `counts` (K, classes) are those heard so far: a label that nobody was heard of has nothing to receive.
    """
    plans, asked = {}, {}
    for label, unit in enumerate(Sheet(roster.classes).names):
        heard = counts[:, label]
        plans[unit] = UnitPlan(circles_of_shape(roster, unit), heard, 1.0 if bool(heard.any()) else 0.0)
        asked[unit] = torch.tensor([label in member.labels for member in roster.members])
    return Plan(plans, asked)
