"""Auto: with whom each unit is shared is found from evidence while training; nothing has to be declared.

All units start in one circle, as in FedAvg. After a tenth of the rounds, and again until four fifths of them:

    look     clients train once on either half of their samples and say where that moves each unit, as sketches; from
             these, agglomeration that stops where noise outweighs disagreement proposes circles (sharing/evidence.py)
    ballot   for the unit nearest to the output that has proposals, clients are told the means of the proposed circles
             and report their validation losses with them; circles must beat what all share, and either one's own copy
             too or, by a gain that lasts, what an earlier ballot found (methods/decisions.py)
    wait     what was decided needs some rounds to show: clients that disagree about the output seem to disagree about
             everything, and agree on the units below once they differ above

A circle is split only for a gain of `sure` standard errors, and joined again for two: some rounds after a split the
reverse is put to the vote. Where nobody has validation samples the look decides alone. Clients that are new, that
declared a change, or whose patch fits less well than another's, are offered the patches that others wear (`fit`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedquilt.families.parts import Parts
from fedquilt.families.units import layers_of
from fedquilt.interface.messages import ClientInfo, Roster, Updates
from fedquilt.interface.method import Method, State
from fedquilt.interface.steps import Do, Install, Step, Train
from fedquilt.methods import candidates, decisions
from fedquilt.methods.ballots import BALLOT, CANDIDATES, LOOK, PATCH, ballot, fit, look
from fedquilt.methods.candidates import backwards, measured, new_ballot, sketch_sizes, values_of, with_answers
from fedquilt.methods.decisions import Decision, in_words, nothing_split
from fedquilt.methods.fedavg import circles_of_shape
from fedquilt.methods.hypotheses import enough, hypotheses, seen_in, top_down
from fedquilt.methods.patches import choose, cost_of, most_of, offers, patches_of, rows_of, with_most
from fedquilt.sharing import PRIVATE, Plan, UnitPlan

WAITS, LOOKS, VOTES, FITS = "waits", "looks", "votes", "fits"
_SHARE = 0.08  # of the traffic of FedAvg in 100 rounds, or in as many as there are: what evidence may cost
_UNTIL = 0.8  # of the rounds: what is found later has no time to show
_PATIENCE = 6  # rounds that a look or a ballot takes at most, where only some clients take part in each


@dataclass(frozen=True)
class Auto(Method):
    """Circles for each unit, found from evidence.

    `lam` says how much of a disagreement counts: a client that trains on by itself makes up for the rest. A circle is
    split for a gain of `sure` standard errors: three of them are one chance in 700, and a run tests some dozens of
    splits. A look sends `sketch` numbers a unit and half. A model is cut into at
    most `units` units, layer by layer from the top, the rest in one. With `traits`, what clients declare is one more
    hypothesis, tested like the others.
    """

    name: ClassVar[str] = "auto"
    depends_on_rounds: ClassVar[bool] = True
    lam: float = 0.3
    sure: float = 3.0
    sketch: int = 256
    units: int = 6
    traits: bool = False

    def __post_init__(self) -> None:
        if not self.lam > 0:
            raise ValueError(f"auto with lam={self.lam} sees no disagreement: use the method 'fedavg'")
        if not self.sure > 0 or math.isinf(self.sure):
            raise ValueError(f"auto with sure={self.sure}: give a number of standard errors above 0, such as 3")
        if self.sketch < 16 or self.units < 1:
            raise ValueError(f"auto: sketch={self.sketch} must be 16 or more, and units={self.units} 1 or more")

    # --- client half -----------------------------------------------------------------------------------------------

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        return Parts(model, units=layers_of(model, self.units))

    def local(self) -> tuple[Step, ...]:
        votes = Do(ballot, data="validation", reports=("losses", "judged"), told=BALLOT)
        fits = Do(fit, data="train", reports=("fits", "errors"), told=PATCH)
        return votes, Install(), fits, *look(self.sketch), Train()

    # --- server half: what it remembers ----------------------------------------------------------------------------

    def begin(self, roster: Roster) -> State:
        return {
            "round": 0,
            "circle": {unit: circles_of_shape(roster, unit) for unit in roster.units},
            "doing": WAITS,
            "due": max(2, math.ceil(roster.rounds / 10)),
            "fruitless": 0,  # looks in a row after which nothing was changed
            "visits": {},  # by unit, what clients measured, round by round of a look
            "judged": torch.full((len(roster), 2), torch.inf),  # validation samples of either half, as far as is known
            "waiting": torch.zeros(len(roster), dtype=torch.bool),  # clients without a place that they chose
            "asked": torch.zeros(len(roster), dtype=torch.bool),  # those that have one, and are asked whether it fits
            "fitted": 0,  # the round in which all were asked that
            "heard": 0.0,  # rounds so far, one in which half of the clients took part being half a round
            "spent": 0.0,  # numbers, of the mean client, that evidence has cost
            "decisions": [],
        }

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        part = sum(len(up.ids) for up in updates.ups) / len(roster)
        spent = state["spent"] + part * self._cost(state, roster)
        state = self._move(state, updates, roster)
        state |= {"round": updates.round, "heard": state["heard"] + part, "spent": spent}
        if state["doing"] == LOOKS:
            state = self._looked(state, updates, roster)
        elif state["doing"] == VOTES:
            state = self._voted(state, updates, roster)
        elif state["doing"] == FITS:
            state = self._fitted(state, roster)
        due = state["doing"] == WAITS and state["due"] <= updates.round < _UNTIL * roster.rounds
        if due and self._affords(state, roster, self._cost({**state, "doing": LOOKS}, roster)):
            state |= {"doing": LOOKS, "visits": {unit: [] for unit in roster.units}, "tries": 0}
        return state

    def _rest(self, state: State, roster: Roster, found: bool) -> State:
        """Wait: some rounds after something was found, longer and longer where nothing was."""
        fruitless = 0 if found else state["fruitless"] + 1
        pause = max(1, roster.rounds // 20) * 2**fruitless
        kept = {k: v for k, v in state.items() if k not in ("seen", "ballot", "queue", "tries")} | {"visits": {}}
        return kept | {"doing": WAITS, "due": state["round"] + pause, "fruitless": fruitless}

    def _affords(self, state: State, roster: Roster, cost: float) -> bool:
        size = sum(float(sizes.float().mean()) for sizes in roster.sizes().values())
        rounds = max(100, roster.rounds) * state["heard"] / state["round"]  # of all clients
        return bool(state["spent"] + cost <= _SHARE * 2 * size * rounds)

    def _cost(self, state: State, roster: Roster) -> float:
        """Numbers that evidence costs the mean client in a round in which all take part."""
        circles = state["circle"]
        cost = cost_of(offers(circles, state["waiting"], state["asked"], roster), circles, roster)
        if state["doing"] == LOOKS:
            cost += sum(2.0 * numbers for numbers in sketch_sizes(roster, self.sketch).values())
        elif state["doing"] == VOTES:
            cost += len(state["ballot"]["circles"]) * float(roster.sizes()[state["ballot"]["unit"]].float().mean())
        return cost

    # --- looks -----------------------------------------------------------------------------------------------------

    def _looked(self, state: State, updates: Updates, roster: Roster) -> State:
        visits = {u: [*known, *measured(u, updates, roster, self.sketch)] for u, known in state["visits"].items()}
        seen = {unit: seen_in(known, state["circle"][unit]) for unit, known in visits.items()}
        state = {**state, "visits": visits, "tries": state["tries"] + 1}
        if self._waits(state) and not all(enough(seen[u], state["circle"][u]) for u in roster.units):
            return state
        return self._ask({**state, "seen": seen, "visits": {}, "queue": top_down(roster)}, updates, roster)

    def _waits(self, state: State) -> bool:
        """Whether a look or a ballot may go on: until clients have taken part twice in the mean, or six rounds."""
        return bool(state["tries"] < max(_PATIENCE, math.ceil(2 * state["round"] / state["heard"])))

    def _ask(self, state: State, updates: Updates, roster: Roster) -> State:
        """Put the next unit that has hypotheses to the vote, or decide at once where nobody could judge."""
        queue = list(state["queue"])
        while queue:
            unit = queue.pop(0)
            options = hypotheses(unit, state["circle"], state["seen"], roster, self.lam, self.traits)
            back = backwards(unit, state["circle"][unit], state["decisions"], updates, roster)
            state, changed = self._decide_unjudged(unit, state, roster)
            if changed:
                return self._rest(state, roster, found=True)
            judges = ~self._blind(unit, state, roster) & roster.has(unit)
            if options | back and bool(judges.any()):
                most = max(1, round(CANDIDATES * state["heard"] / state["round"]))  # where few take part, less is moved
                options = dict(list(options.items())[: max(0, most - len(back))])
                cost = len(options | back) * float(roster.sizes()[unit].float().mean())
                if self._affords(state, roster, cost):
                    asked = new_ballot(unit, options, back, updates, roster)
                    return {**state, "doing": VOTES, "ballot": asked, "queue": queue, "tries": 0}
        offered = offers(state["circle"], state["waiting"], torch.ones_like(state["asked"]), roster)
        due = state["round"] - state["fitted"] >= max(5, roster.rounds // 5) and decisions.judged(state["judged"])
        if due and offered and self._affords(state, roster, cost_of(offered, state["circle"], roster)):
            return self._fit(state)
        return self._rest(state, roster, found=False)

    # --- ballots ---------------------------------------------------------------------------------------------------

    def _voted(self, state: State, updates: Updates, roster: Roster) -> State:
        asked = with_answers(state["ballot"], updates)
        known = torch.where(asked["heard"][:, None], asked["judged"].to(state["judged"]), state["judged"])
        unit = asked["unit"]
        state = {**state, "ballot": asked, "tries": state["tries"] + 1, "judged": known}
        if self._waits(state) and float(asked["heard"][roster.has(unit)].double().mean()) < 0.75:
            return {**state, "ballot": asked | values_of(asked["circles"], unit, updates, roster, asked)}
        how = (state["round"], self.sure, state["decisions"], self._blind(unit, state, roster))
        state, changed = self._adopt(unit, *decisions.by_ballot(asked, state["circle"][unit], *how), state)
        state, unjudged = self._decide_unjudged(unit, state, roster)
        return self._rest(state, roster, found=True) if changed or unjudged else self._ask(state, updates, roster)

    def _blind(self, unit: str, state: State, roster: Roster) -> Tensor:
        """(K,) clients of a shape of which too few validation samples are known for a ballot."""
        shapes, blind = circles_of_shape(roster, unit), torch.zeros(len(roster), dtype=torch.bool)
        for _, who in decisions.circles_of(shapes):
            blind |= who & (not decisions.judged(state["judged"], who))
        return blind

    def _decide_unjudged(self, unit: str, state: State, roster: Roster) -> tuple[State, bool]:
        """Decide by the look alone about circles of clients that could not judge."""
        options = hypotheses(unit, state["circle"], state["seen"], roster, self.lam, self.traits)
        blind = torch.where(self._blind(unit, state, roster), state["circle"][unit], PRIVATE)
        how = (state["seen"][unit], roster.samples, self.lam, state["round"], self.sure)
        circle, made = decisions.by_look(unit, options, state["circle"][unit], blind, *how)
        return self._adopt(unit, circle, made, state)

    def _adopt(self, unit: str, circle: Tensor, made: Sequence[Decision], state: State) -> tuple[State, bool]:
        """The plan as it was decided, if anything was; whoever was not seen in the look finds its place by itself."""
        changed = any(decision["changed"] for decision in made)
        state = {**state, "decisions": [*state["decisions"], *made]}
        if changed:
            unseen = (state["seen"][unit]["times"] == 0) & (state["circle"][unit] != PRIVATE)
            circle = with_most(circle, state["circle"][unit], unseen)
            state |= {"circle": {**state["circle"], unit: circle}, "waiting": state["waiting"] | unseen}
        return state, changed

    # --- patches ---------------------------------------------------------------------------------------------------

    def _fit(self, state: State) -> State:
        """Ask everybody whether its patch fits."""
        everybody = torch.ones_like(state["asked"])
        return {**state, "doing": FITS, "asked": everybody, "fitted": state["round"], "tries": 0}

    def _fitted(self, state: State, roster: Roster) -> State:
        """Go on until nearly all have answered; whoever has a choice and has not is asked when it next takes part."""
        tries, asked = state["tries"] + 1, state["asked"]
        if tries < _PATIENCE and float(asked.double().mean()) > 0.25:
            return {**state, "tries": tries}
        nobody = torch.zeros_like(asked)
        choices = offers(state["circle"], nobody, asked, roster).values()
        return self._rest({**state, "asked": torch.stack([nobody, *choices]).any(0)}, roster, found=True)

    def _move(self, state: State, updates: Updates, roster: Roster) -> State:
        """Clients that were offered patches take the one that fits best; those with a place only for a clear gain."""
        circles, waiting, asked, taken = choose(updates, state["circle"], state["waiting"], state["asked"], roster)
        made = [decisions.moved(roster.names[i], updates.round, *gain) for i, gain in taken.items()]
        state = {**state, "waiting": waiting, "asked": asked}
        return state | ({"circle": circles, "decisions": [*state["decisions"], *made]} if made else {})

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        """Newcomers and whoever changed wait for a place, at first in the biggest circles of their shapes.

        Where nothing that is declared has changed, data have: all are asked whether their patch still fits.
        """
        same = [old == new for old, new in zip(before.members, roster.members, strict=False)]
        anew = torch.tensor([*(not known for known in same), *[True] * (len(roster) - len(before))])
        waiting = torch.cat([state["waiting"], torch.zeros(len(roster) - len(before), dtype=torch.bool)])
        circles = {}
        for unit in roster.units:
            known = state["circle"].get(unit, torch.full((len(before),), PRIVATE))
            circles[unit] = most_of(unit, known, before, roster)
        state = {**state, "circle": circles, "waiting": waiting | anew, "asked": torch.zeros_like(anew)}
        more = torch.full((len(roster) - len(before), 2), torch.inf)
        state |= {"judged": torch.cat([state["judged"], more]).where(~anew[:, None], torch.inf)}
        state = self._rest(state, roster, found=True)
        if not bool(anew.any()):
            state = self._fit(state)
        return self._move(state, updates, roster)

    # --- what follows ----------------------------------------------------------------------------------------------

    def plan(self, state: State, roster: Roster) -> Plan:
        samples = roster.samples
        plans = {unit: UnitPlan(circle, samples) for unit, circle in state["circle"].items()}
        return Plan(plans, offered=offers(state["circle"], state["waiting"], state["asked"], roster))

    def tell(self, state: State, roster: Roster, ids: tuple[int, ...]) -> Mapping[str, Tensor]:
        told: dict[str, Tensor] = {}
        if state["doing"] == LOOKS:
            told[LOOK] = torch.ones(len(ids), 1, dtype=torch.bool)
        elif state["doing"] == VOTES and state["ballot"]["unit"] in roster.members[ids[0]].units:
            asked = state["ballot"]
            shape = str(int(circles_of_shape(roster, asked["unit"])[ids[0]]))
            if shape in asked["values"]:
                told[BALLOT + asked["unit"]] = asked["values"][shape][asked["rows"][:, list(ids)].T]
        if bool((state["waiting"] | state["asked"])[list(ids)].any()):
            rows = [rows_of(state["circle"], *patches_of(state["circle"], state["waiting"], roster, i)) for i in ids]
            told |= {PATCH + unit: torch.stack([row[unit] for row in rows]) for unit in rows[0]}
        return told

    def report_shapes(self, roster: Roster, number: int, told: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
        return candidates.shapes_told(roster, number, told, self.sketch)

    def describe(self, state: State, plan: Plan, roster: Roster) -> Mapping[str, Any]:
        """Each decision in a sentence, and what was tried and left."""
        size = sum(float(sizes.float().mean()) for sizes in roster.sizes().values())
        made = state["decisions"]
        changes = [in_words(decision) for decision in made if decision["changed"]]
        why = {} if changes else {"nothing_split": nothing_split(made, self.sure, looked=state["spent"] > 0)}
        return {
            "decisions": [in_words(decision) for decision in made],
            "changes": changes,
            **why,
            "looking_cost": state["spent"] / (2 * size * max(1.0, state["heard"])),
        }
