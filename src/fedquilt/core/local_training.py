"""What trains clients: for each family and step of training an engine, found the first time and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedquilt._util.randomness import key_of
from fedquilt._util.suggest import did_you_mean
from fedquilt.core.family_state import FamilyState, resting_of, scale_of, unit_names
from fedquilt.core.terms import Terms
from fedquilt.engines.check_models import check_model, check_public
from fedquilt.engines.cuda_graph import captures
from fedquilt.engines.engine import Engine, Samples, TrainingJob, TrainingSpec
from fedquilt.engines.memory_budget import how_many_at_once
from fedquilt.engines.sample_noise import SampleNoise
from fedquilt.engines.select import ENGINES, select_again, select_engine
from fedquilt.families.common import form_for
from fedquilt.interface.client_stack import SAMPLES_AT_ONCE, ClientStack
from fedquilt.interface.me import each, stacks_of
from fedquilt.interface.steps import Do, Given, Step, Train


class LocalTraining:
    """The engines of a simulation's families. `engine` is the name of one for all, or one for each, with commas."""

    def __init__(
        self, terms: Terms, steps: Sequence[Step], device: torch.device, engine: str, clients_at_once: int | None
    ) -> None:
        if clients_at_once is not None and clients_at_once < 1:
            raise ValueError(f"clients_at_once={clients_at_once} trains nobody; give at least 1")
        for name in engine.split(","):
            if name not in (*ENGINES, "auto"):
                raise ValueError(did_you_mean(name, ("auto", *ENGINES), "engine"))
            if name == "captured" and not captures(device):
                raise ValueError("the engine 'captured' replays CUDA graphs, so it is for a GPU; take engine='auto'")
        self.terms, self.steps, self.device = terms, list(steps), device  # after them those of fine-tuning that differ
        self._rounds, self._tunings = len(steps), dict[tuple[int, frozenset[str]], int]()
        looks = [step.data for step in steps if isinstance(step, Train | Do)]
        self._looks_at_public = not {"common", "public"}.isdisjoint(looks)
        self.names, self.clients_at_once = engine.split(","), clients_at_once
        self._known: dict[int, tuple[str, int]] = {}  # the engine found for a template, and how many clients at once

    def found(self, family_states: Sequence[FamilyState]) -> list[str]:
        """The engine of each family, once found."""
        templates = [id(family_state.family.template) for family_state in family_states]
        return [self._known[template][0] for template in templates if template in self._known]

    def agree(self, family_state: FamilyState, name: str) -> None:
        """Take over the engine that a family has elsewhere."""
        self._known.setdefault(id(family_state.family.template), (name, family_state.at_once))

    def kept(self, family_state: FamilyState) -> dict[str, object]:
        """How a family trains, to go on with it elsewhere in the same way."""
        known = self._known.get(id(family_state.family.template))
        engines = sorted(number for number in family_state.engines if number < self._rounds)
        room = {"at_once": family_state.at_once, "samples_at_once": family_state.samples_at_once}
        return {"known": known, **room, "engines": engines}

    def restore(self, family_state: FamilyState, kept: Mapping[str, Any]) -> None:
        """Take back what `kept` gave."""
        family_state.at_once = kept["at_once"]
        family_state.samples_at_once = kept.get("samples_at_once", SAMPLES_AT_ONCE)  # none: begun before there was one
        if kept["known"] is not None:
            self._known[id(family_state.family.template)] = (kept["known"][0], kept["known"][1])
        for number in kept["engines"]:  # at once: whether what a step computes is stacked depends on them
            family_state.engines[number] = ENGINES[kept["known"][0]](self.spec(family_state, number))

    def train(
        self, family_state: FamilyState, number: int, job: TrainingJob, seen: Callable[[], ClientStack]
    ) -> Tensor:
        """Train the clients of a job, in place, by the step of a number; their mean losses, (k,).

        `seen` is what the step sees of them, where it wants to.
        """
        step = self.steps[number]
        assert isinstance(step, Train)
        given = {} if step.given is None else _given(step.given, step.looks, seen())
        rates = {} if step.rates is None else each(seen(), step.rates)
        given = {**given, **{name: key for name, key in job.extras.items() if self._private(step) is not None}}
        if given or rates or job.extras or step.lr is not None:
            scale = scale_of(family_state.family, rates, job.rows)
            job = replace(job, lr=step.lr or job.lr, scale=scale, extras=given)
        engine = family_state.engines.get(number) or self._start(family_state, number, job.rows, given)
        rest = resting_of(family_state.family, family_state.still[number], rates, job.rows)
        loss = self._work(engine, family_state.at_once, job)
        for now, before, who in rest:
            now.copy_(before if who is None else torch.where(who[:, None], before, now))
        return loss

    def _private(self, step: Train) -> SampleNoise | None:
        """How a step hides the samples that it trains on, where that is promised; public ones need not be."""
        privacy = self.terms.privacy
        if privacy is None or privacy.level != "sample" or step.data != "train":
            return None
        return SampleNoise(privacy.clip, privacy.found)

    def tuning(self, family_state: FamilyState, number: int, units: str) -> int | None:
        """The number of a step that is that of a number for an epoch, of all of its units or of the head alone.

        None where it does not train the head.
        """
        step, head = self.steps[number], family_state.family.head.name
        assert isinstance(step, Train)
        picked = step.picks(unit_names(family_state))
        if units == "head":
            picked &= {head}
        if not picked:
            return None
        if (number, picked) not in self._tunings:
            self._tunings[number, picked] = len(self.steps)
            self.steps.append(replace(step, epochs=1, units=lambda _: picked))
        return self._tunings[number, picked]

    def _start(self, family_state: FamilyState, number: int, rows: Tensor, given: Mapping[str, Tensor]) -> Engine:
        """Try a family's models, and find the engine that trains them; the first step of training decides for all."""
        self.check(family_state)
        spec, template = self.spec(family_state, number), id(family_state.family.template)
        most = how_many_at_once(spec, given)
        family_state.at_once = family_state.at_once or self.clients_at_once or most
        batch = min(spec.training.batch, max(spec.samples.count))
        family_state.samples_at_once = min(family_state.samples_at_once, batch * min(family_state.at_once, most))
        if template in self._known:  # another step, or clients changed: how to train such models is known
            engine = select_again(self._known[template][0], spec, rows, given)
        else:
            engine = select_engine(
                self.names[family_state.number % len(self.names)], spec, rows, given, family_state.at_once
            )
        self._known[template] = (engine.name, family_state.at_once)
        family_state.engines[number] = engine
        return engine

    def _picks(self, family_state: FamilyState, step: Train) -> frozenset[str]:
        """The units of a family's models that a step trains."""
        units = unit_names(family_state)
        picked = step.picks(units)
        if not picked:
            raise ValueError(
                f"the method '{self.terms.method.name}' trains none of the units {', '.join(units)} of client "
                f"'{family_state.clients[0].name}'; name some that are there"
            )
        return picked

    def _work(self, engine: Engine, step: int, job: TrainingJob) -> Tensor:
        """Train the clients of a job, in place, `step` at a time; their mean losses, (k,)."""
        if engine.name not in ("vectorised", "compiled"):  # the others hold a client, or a small stack, a worker
            step = self.clients_at_once or len(job.rows)
        losses = [engine.train(job.part(some.start, some.stop)) for some in stacks_of(len(job.rows), step)]
        return losses[0] if len(losses) == 1 else torch.cat(losses)

    def spec(self, family_state: FamilyState, number: int) -> TrainingSpec:
        """What the engine of a step is built for."""
        step, training, layout = self.steps[number], self.terms.training, family_state.family.layout
        assert isinstance(step, Train)
        samples = family_state.samples if step.data == "train" else self._common(family_state)
        if step.epochs is not None:
            training = replace(training, epochs=step.epochs)
        picked = self._picks(family_state, step)
        family_state.still[number] = tuple(unit.name for unit in layout.units if unit.name not in picked)
        trains = frozenset(name for unit in layout.units if unit.name in picked for name in unit.parameters)
        family, apart = family_state.family, family_state.family.habits.why if family_state.family.habits.apart else ""
        return TrainingSpec(
            family.template, layout, samples, training, step.objective, self.device, trains, apart=apart,
            task=self.terms.task,
            private=self._private(step),
        )  # fmt: skip

    def _common(self, family_state: FamilyState) -> Samples:
        """The samples that all clients hold, as those of a family."""
        common = form_for(self.terms.common, family_state.clients[0])
        if common is None:
            raise ValueError(
                f"the method '{self.terms.method.name}' trains on samples that all clients hold, and there are none; "
                "give the scenario common=(x, y)"
            )
        k = len(family_state.clients)
        keys = tuple(key_of(self.terms.seed, client.name, "common") for client in family_state.clients)
        return Samples(((common.x, common.y),), (0,) * k, (len(common),) * k, keys).to(self.device)

    def check(self, family_state: FamilyState) -> None:
        """Refuse models that do not suit their clients' samples, once, before any work."""
        if not family_state.tried:
            check_model(family_state.family, family_state.clients, self.terms.classes, self.device, self.terms.task)
            if self._looks_at_public:
                first = family_state.clients[0]
                check_public(family_state.family, first.name, self.terms.public(first), self.device)
        family_state.tried = True


def _given(function: Given, split: str | None, view: ClientStack) -> dict[str, Tensor]:
    """What a step of training is given for each client, with a split to look at where it names one."""
    return each(view, function, None if split is None else view.data(split), padded=True)
