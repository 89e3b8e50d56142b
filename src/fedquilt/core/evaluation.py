"""What clients score: every read-out on the samples that were kept aside, the same in a simulation and on a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedquilt._util.suggest import did_you_mean
from fedquilt.client import Split, as_samples
from fedquilt.core.everyone import everyone_of
from fedquilt.core.family_state import table_of
from fedquilt.core.server import Server
from fedquilt.families.common import Common, form_for
from fedquilt.interface.client_stack import ClientStack
from fedquilt.interface.messages import Instructions, Updates
from fedquilt.interface.method import Method
from fedquilt.interface.readout import EVERYONE, SPLITS, EvaluationContext, Readout
from fedquilt.interface.sent_models import SentModels
from fedquilt.readouts import READOUTS, named
from fedquilt.results import Evaluation

if TYPE_CHECKING:
    from fedquilt.core.simulation import Simulation

Known = dict[tuple[str, str], Tensor]  # scores, by model and split


def look_at(
    simulation: Simulation, down: Instructions, memory: dict[str, Tensor] | None = None, last: bool = False
) -> EvaluationContext:
    """The clients that a message is for, as read-outs see them: before and after installing what it brings.

    `memory` is what their read-outs keep from round to round, `last` whether no round follows.
    """
    ((received, adapted),) = simulation.looks({down.ids: down})

    def fine_tune(rows: Tensor, epoch: int | None = None, units: str = "all") -> Tensor:
        return simulation.fine_tune(down.ids, rows, down.round, epoch, units)

    twins = simulation.twins
    return EvaluationContext(
        received,
        adapted,
        predict=simulation.terms.method.predicts,
        memory={} if memory is None else memory,
        fine_tune=fine_tune,
        last=last,
        logits=simulation.terms.method.predicts_logits,
        twin=None if twins is None else lambda: twins.as_they_are(down.ids),
    )


def due(readouts: Iterable[Readout], last: bool) -> list[Readout]:
    """The read-outs that are made after a round: some only after the last."""
    return [readout for readout in readouts if last or not readout.needs_last_round]


def pool(
    simulation: Simulation, server: Server, readouts: Sequence[Readout], last: bool
) -> tuple[dict[str, Tensor], dict[tuple[int, ...], Known]]:
    """What all clients' validation samples say together, by read-out, and the scores that were made for it.

    Models are not kept from this look to the next: those of all clients together may be more than there is room for.
    Under privacy clients say nothing: no noise would cover it.
    """
    private = simulation.terms.privacy is not None
    pooling = [] if private else [readout for readout in due(readouts, last) if readout.pools]
    sums: dict[str, Tensor] = {}
    known: dict[tuple[int, ...], Known] = {}
    for turn in range(max((readout.pools for readout in pooling), default=0)):
        asked = [readout for readout in pooling if readout.pools > turn]
        said: list[tuple[int, str, Tensor]] = []
        for ids in simulation.groups():
            look = look_at(simulation, server.instructions(ids), simulation.memory.setdefault(ids, {}), last)
            look.pooled, look.known = sums, known.get(ids, {})
            said += [(ids[0], readout.name, readout.evidence(look).sum(0).cpu()) for readout in asked]
            known[ids] = look.known
        now: dict[str, Tensor] = {}
        for _, name, mine in simulation.in_order(said):
            now[name] = now[name] + mine if name in now else mine
        sums = {**sums, **now}
    return sums, known


class Measured(NamedTuple):
    """What clients scored with a read-out on a split."""

    counts: Tensor  # what the task counts: by true and predicted class, a sparse (k, classes, classes), say
    losses: Tensor | None  # (k,) None where a read-out names classes only
    own: Tensor | None = None  # (k, metrics) of a user's own


Scored = dict[tuple[str, str], list[Measured]]  # by read-out and split, group by group


def measure(look: EvaluationContext, readouts: Iterable[Readout]) -> dict[tuple[str, str], Measured]:
    """What clients scored, by read-out and split; read-outs that need the last round are left out before it."""
    found: dict[tuple[str, str], Measured] = {}
    task = look.task
    for readout in due(readouts, look.last):
        for split in look.splits:
            if split == EVERYONE and readout.remembers:  # what earlier models said of it is not known
                continue
            table, predicted = look.table(split), readout.predictions(look, split)
            counts = task.counts(predicted, table.y, table.mask, look.received.classes)
            logs = readout.logs(look, split)
            losses = None if logs is None else task.mean_losses(logs, table.y, table.mask)
            own = task.own(logs, table.y, table.mask) if logs is not None and task.metrics else None
            found[readout.name, split] = Measured(counts, losses, own)
    return found


def training_losses(simulation: Simulation, numbers: Sequence[int]) -> Tensor:
    """(k,) the mean loss over the steps of some clients' last training; NaN for who did not train in this round.

    Under privacy it stays with the client: NaN for all.
    """
    losses = torch.full((len(numbers),), torch.nan, dtype=torch.float64)
    if simulation.terms.privacy is not None:
        return losses
    at = {number: place for place, number in enumerate(numbers)}
    for family_state in simulation.family_states:
        round_, places = family_state.lost
        if family_state.loss is not None and round_ == simulation.round:
            who = [at[family_state.family.ids[place]] for place in places]
            losses[who] = family_state.loss.double().cpu()
    return losses


def evaluate(simulation: Simulation, server: Server, readouts: Sequence[Readout], last: bool) -> list[Evaluation]:
    """What all clients score after the round that is over, with what they would receive now."""
    scored: Scored = {}
    order: list[int] = []
    pooled, known = pool(simulation, server, readouts, last)
    for ids in simulation.groups():
        look = look_at(simulation, server.instructions(ids), simulation.memory.setdefault(ids, {}), last)
        look.pooled, look.known = pooled, known.get(ids, {})
        look.splits = (*SPLITS, EVERYONE) if last and simulation.terms.everyone else SPLITS
        for which, found in measure(look, readouts).items():
            scored.setdefault(which, []).append(found)
        order += ids
    order, scored = simulation.scored(order, scored)
    place = torch.tensor(order).argsort()  # clients came family by family
    names = tuple(client.name for client in simulation.clients)
    training = training_losses(simulation, simulation.numbers)
    evaluations = []
    for (readout, split), parts in scored.items():
        counts = torch.cat([part.counts.cpu() for part in parts]).index_select(0, place)
        losses = [part.losses.cpu() for part in parts if part.losses is not None]
        own = [part.own.cpu() for part in parts if part.own is not None]
        of_each = torch.cat(losses)[place] if losses else None
        counts = counts.coalesce() if counts.is_sparse else counts
        users = torch.cat(own)[place] if own else None
        task = simulation.terms.task
        beside = _left_out(simulation) if split == EVERYONE else ()
        evaluations.append(
            Evaluation(server.round, readout, split, names, counts, of_each, training, task, users, left_out=beside)
        )
    return evaluations


def _left_out(simulation: Simulation) -> tuple[int, ...]:
    """How many of everyone's samples each client's model does not take: others' sensors, labels it cannot name."""
    found: dict[int, int] = {}
    total = everyone_of(simulation).total
    for family_state in simulation.family_states:
        taken = int(simulation.of_everyone(family_state).count)
        found |= dict.fromkeys(family_state.family.ids, total - taken)
    return tuple(found[number] for number in simulation.numbers)


def predict(simulation: Simulation, server: Server, readout: Readout, number: int, x: Any) -> Tensor:
    """(n, ...) what a client predicts of samples (n, ...), classes say, as if they were its test samples."""
    index, at = simulation.home[number]
    client = simulation.family_states[index].clients[at]
    samples = as_samples(x, client)
    down = server.instructions([number])
    pooled, _ = pool(simulation, server, [readout], last=True)
    look = look_at(simulation, down, last=True)
    asked = copy(client)
    unknown = client.train.y[:1].expand(len(samples), *client.train.y.shape[1:])
    object.__setattr__(asked, "test", Split(samples, unknown))
    table = table_of([asked], "test", simulation.terms.public(client)).to(simulation.device)

    def shown(view: ClientStack) -> ClientStack:
        return replace(view, tables=lambda split: table if split == "test" else view.tables(split))

    look.received, look.adapted, twin = shown(look.received), shown(look.adapted), look.twin
    look.twin = None if twin is None else lambda: shown(twin())
    look.pooled = pooled
    try:
        answer = readout.predictions(look, "test")[0].cpu()
    finally:
        simulation.close()
    if look.memory:
        raise ValueError(
            f"the read-out '{readout.name}' remembers what models of earlier rounds said of the samples that there "
            "were; of others it cannot say it"
        )
    return answer


def sent_models(simulation: Simulation, updates: Updates, samples: Common) -> list[SentModels]:
    """The whole models that were sent, family by family, with the server's samples in their clients' form."""
    terms, found = simulation.terms, []
    if not terms.task.has_classes:
        raise ValueError(
            f"the method '{terms.method.name}' compares class probabilities, and there are no classes in "
            f"{terms.task.kind}; use settings, or a method, that go by weights or losses"
        )
    for up in updates.ups:
        family_state = simulation.family_states[simulation.home[up.ids[0]][0]]
        family = family_state.family
        parts = {unit.name: up.part([unit.name]) for unit in family.layout.units if not unit.state}
        senders = [set() if part is None else set(part[0].tolist()) for part in parts.values()]
        whole = [i for i in up.ids if all(i in some for some in senders)]
        if not whole:
            continue
        rows = family_state.store.started(family_state.places(tuple(whole))).to(
            simulation.device
        )  # what stays home is as it was built
        for unit, part in parts.items():
            assert part is not None
            place = {i: at for at, i in enumerate(part[0].tolist())}
            index = torch.tensor([place[i] for i in whole], device=part[1].device)
            for own, value in family.layout.pieces(rows, part[1][index], unit):
                own.copy_(value)
        here = form_for(samples, family_state.clients[0]).x.to(simulation.device)  # a family's clients hold one form
        first = family_state.clients[family_state.places((whole[0],))[0]].name
        found.append(SentModels(torch.tensor(whole), first, here, terms.classes, family, rows))
    if not found:
        raise ValueError(f"in round {updates.round} nobody sent a whole model; ask for all units in the plan before")
    return found


def with_own(method: Method, readouts: tuple[Readout, ...]) -> tuple[Readout, ...]:
    """Read-outs, and the one that results of a method are reported with, where that is not what all methods have."""
    if method.readout == Method.readout or method.readout in {readout.name for readout in readouts}:
        return readouts
    own = named(method.readout)
    if own is None:
        raise ValueError(f"the method '{method.name}': {did_you_mean(method.readout, READOUTS, 'read-out')}")
    return (*readouts, own)
