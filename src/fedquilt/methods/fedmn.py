"""FedMN (Wang et al. 2022): a pool of blocks for all, and a router that picks each client's own from its data.

Equations 1 and 11 are `models.pool.ModulePool`, 5 is `models.gates.binary_concrete`, 7-10 are `models.pool.Router`, 6
is `_loss`; section II-E is `plan`. A client trains, sends and receives only the blocks its route puts to use, and
the router.

Deviations, each because the letter does not do what it is for:
- `joint="product"` (eq. 8) instead of the concatenation (eq. 9), which cannot tell clients apart by their joint
  distribution: see `Router`. `joint="concat"` is the letter.
- Blocks are averaged over the clients that have them active; the paper's sum over all clients would shrink them. A
  block nobody has active keeps its value.
- A block is active if open paths reach it from an encoder and lead on to the output; the paper counts blocks above the
  encoders whose input is not zero, also those that lead nowhere, and moves all encoders.
- Where a client's decision leaves no complete path, its most probable one is opened.
- In training the router speaks on the batch at hand: its mean embedding estimates that of all the client's data without
  bias (the logits, after normalising, nearly so), and this is what carries the loss to the router. Decisions are made
  on all of a client's training data.
- A client decides after training, with its own router, what is more probable (`decides="settled"`). Algorithm 1 draws
  decisions at the start of a round from the server's router (`decides="drawn"`). A client then cannot say which blocks
  it needs before it has the router: in one exchange a round the whole pool goes down to it, and the blocks that it drew
  come back. Where it is looked at, paths are open that the router it has by then thinks more probable than not.
- A block that a client gives up in a round is not merged from it in that round, though it trained it ("settled").
- Training runs through the blocks that the route puts to use and no others, as in the paper; between these all gates
  are relaxed. `through="pool"` lets blocks that are neither received nor trained speak softly.
- Encoders, and the router's, start with the weights of the client's model, which may be pretrained. The paper pretrains
  them by FedAvg; here that takes `pretrain`.
- The router learns ten times as fast as the blocks (`router_rate`), gates start little more than half open (`start`),
  and the temperature ends at 0.5, where the paper's ends at 0.1. With the blocks' rate and gates that start at 0.9,
  clients keep nearly all blocks, and the pool is FedAvg.

What was found where only the joint distribution differs (24 clients, three names for each class: tests/methods), test
accuracy over the seeds 201 to 210, on which nothing was chosen; mean, worst, and megabytes up and down:

    settled, route    82.6  77.5  18.6 + 18.5    (default)
    settled, pool     81.9  76.2  19.0 + 18.9
    drawn, route      82.4  75.5  18.5 + 28.2    (Algorithm 1 but for the last temperature)

Ending at the paper's temperature of 0.1, seeds 101 to 110: 80.3 (worst 70.7), 81.3 (77.9) and 74.3 (39.2).

What passes beside the values of units (one truth value a block up, and E numbers a client each way with `spread`) is in
the communication count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from fedquilt.engines.objective import Batch, Learner, Objective
from fedquilt.families.parts import Parts
from fedquilt.interface.me import Me
from fedquilt.interface.messages import ClientInfo, Roster, Updates
from fedquilt.interface.method import Method, State
from fedquilt.interface.steps import Do, Install, Send, Step, Train
from fedquilt.methods.fedavg import circles_of_shape
from fedquilt.methods.usage import after_hearing, after_joining, at_first, usage_facts
from fedquilt.models.gates import (
    Gates,
    active_blocks,
    against_one_route,
    block_names,
    check_blocks,
    decide,
    drawn,
    paths,
    paths_between,
    pick_by,
)  # fmt: skip
from fedquilt.models.pool import Joint, RoutedNetwork, routed
from fedquilt.sharing import Plan, UnitPlan, in_use

Blocks = Sequence[int]


@dataclass(frozen=True)
class FedMN(Method):
    """A client's network is assembled from the blocks of a pool, along a route that a shared router finds for it.

    `blocks` are the blocks of each layer, or a mapping from values of the trait `by` to such lists: clients of unlike
    devices then have pools, routers and circles of their own. A client's model becomes the encoder by losing its linear
    layers at the top, at most one for each layer of the pool above the encoders (`split_head`); a model that is a
    `RoutedNetwork` is taken as it is. `width` is that of the blocks between encoders and outputs (default: the model's
    last hidden layer). `pretrain` rounds at the start circulate the encoders only, with all gates open. `spread`
    above 0 adds a reward for routes that differ between clients (see `against_one_route`). `decides` says how a route
    comes about: "settled" after training, from the client's own router, where a path is open if that is more probable
    than not; "drawn" as Algorithm 1 has it, at random at the start of a round from what the server's router says.
    `through` says which blocks training runs through: those of the "route", or all of the "pool", closed ones softly.
    """

    name: ClassVar[str] = "fedmn"
    depends_on_rounds: ClassVar[bool] = True
    needs_classes: ClassVar[str] = "routes samples by their class"
    blocks: Blocks | Mapping[str, Blocks] = (3, 3, 3)
    by: str = "device"
    width: int | None = None
    dropout: float = 0.2
    joint: Joint = "product"
    normalise: bool = True
    gates: Gates = "relaxed"
    start: float = 0.6
    temperatures: tuple[float, float] = (1.0, 0.5)
    router_rate: float = 10.0
    spread: float = 0.0
    pretrain: int = 0
    decides: Literal["drawn", "settled"] = "settled"
    through: Literal["route", "pool"] = "route"

    def __post_init__(self) -> None:
        super().__post_init__()
        for blocks in self.blocks.values() if isinstance(self.blocks, Mapping) else [self.blocks]:
            check_blocks(blocks)
        if self.router_rate <= 0:
            raise ValueError(f"FedMN with router_rate={self.router_rate} never learns a route; give a rate above 0")
        if min(self.temperatures) <= 0 or self.spread < 0 or self.pretrain < 0:
            raise ValueError("fedmn: temperatures must be above 0, spread and pretrain must not be negative")

    # --- client half -----------------------------------------------------------------------------------------------

    def parts(self, model: nn.Module, member: ClientInfo, classes: int) -> Parts:
        blocks = pick_by(self.blocks, self.by, member.traits.get(self.by, ""), member.name)
        network = routed(
            model, blocks, classes, width=self.width, dropout=self.dropout, joint=self.joint,
            normalise=self.normalise, start=self.start, gates=self.gates,
        )  # fmt: skip
        return Parts(network, writes=("route",))

    def local(self) -> tuple[Step, ...]:
        train = Train(Objective((self._loss,)), given=self._given, rates=self._rates)
        said = ("active", "probabilities")
        if self.decides == "settled":
            return Install(), train, Do(self._settle, data="train", reports=said)
        draw = Do(self._draw, data="train", reports=said)
        return Install(), draw, train, Send(self._used), Do(self._settle, data="train", reports=said, when="look")

    def _loss(self, me: Learner, batch: Batch) -> Tensor:
        """Eq. 6, with gates drawn once an epoch."""
        given, epoch = me.given, cast(Tensor, me.epoch)
        logits = me.model(batch.x, y=batch.y, mask=batch.mask) + given["opened"]
        noise = given["noise"].index_select(0, epoch.view(1)).squeeze(0)  # (E,)
        how = {"noise": noise, "temperature": given["temperature"], "within": given["within"]}
        scores = me.model(batch.x, logits=logits, **how)
        loss = batch.mean(nn.functional.cross_entropy(scores, batch.y, reduction="none"))
        return loss + self.spread * against_one_route(logits, given["usual"]) if self.spread else loss

    def _given(self, me: Me) -> Mapping[str, Tensor]:
        """The gates' noise and temperature, what opens them while encoders pretrain, and the paths that there are."""
        gates = paths(_pool_of(me))
        done = min(1.0, max(0.0, (me.round - 1 - self.pretrain) / max(1, me.rounds - 1 - self.pretrain)))
        hot, cold = self.temperatures
        opened = 1e3 if me.round <= self.pretrain else 0.0  # far beyond any logit: all gates are open, alike
        given = {
            "noise": me.draw("gates", me.epochs, gates),
            "temperature": me.number(hot * (cold / hot) ** done),
            "opened": me.number(opened),
            "within": paths_between(self._trained(me), _pool_of(me)),
        }
        usual = me.told.get("usual", me.number(0.5).expand(gates))
        return given | {"usual": usual} if self.spread else given

    def _trained(self, me: Me) -> Tensor:
        """(blocks,) which blocks training runs through."""
        active = active_blocks(me.values["route"], _pool_of(me))
        return active if self.through == "route" else torch.ones_like(active)

    def _rates(self, me: Me) -> Mapping[str, Tensor]:
        """Only active blocks learn, and the router at a rate of its own."""
        rates = {name: used.float() for name, used in self._used(me).items()}
        return rates | {"router": me.number(0.0 if me.round <= self.pretrain else self.router_rate)}

    def _used(self, me: Me) -> Mapping[str, Tensor]:
        """Which blocks the client's route puts to use, by name."""
        active = active_blocks(me.values["route"], _pool_of(me))
        return {name: active[at] for at, name in enumerate(block_names(_pool_of(me)))}

    def _draw(self, me: Me) -> Mapping[str, Tensor]:
        """Algorithm 1, lines 6 and 7: decisions drawn from what the server's router says."""
        return self._settle(me, lambda logits, blocks: drawn(logits, me.draw("route", len(logits)), blocks))

    def _settle(self, me: Me, choose: Callable[[Tensor, Blocks], Tensor] = decide) -> Mapping[str, Tensor]:
        """A route from all training data, and which blocks it puts to use; by default what is more probable."""
        if me.round <= self.pretrain:
            return {}
        data, blocks = cast(Batch, me.data), _pool_of(me)
        logits = me.model(data.x, y=data.y, mask=data.mask)  # (E,)
        route = choose(logits, blocks)
        found = {"route": route, "active": active_blocks(route, blocks)}
        return found | {"probabilities": logits.sigmoid()} if self.spread else found

    # --- server half -----------------------------------------------------------------------------------------------

    def begin(self, roster: Roster) -> State:
        return {"active": at_first(roster), "usual": {}, "round": 0}

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        active, usual = state["active"], dict(state["usual"])
        for up in updates.ups:
            member = roster.members[up.ids[0]]
            if "active" in up.reports:
                active = after_hearing(active, _blocks_of(member.units), up.ids, up.reports["active"])
            if "probabilities" in up.reports:
                usual[member.architecture] = up.reports["probabilities"].mean(dim=0).cpu()
        return {"active": active, "usual": usual, "round": updates.round}

    def tell(self, state: State, roster: Roster, ids: tuple[int, ...]) -> Mapping[str, Tensor]:
        usual = state["usual"].get(roster.members[ids[0]].architecture)
        return {} if usual is None else {"usual": usual.expand(len(ids), -1)}

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        """Whoever is new has all blocks, unless it has said already which its route puts to use; others keep theirs."""
        joined = {**state, "active": after_joining(state["active"], before, roster)}
        if any("active" in up.reports for up in updates.ups):
            joined = {**self.learn(joined, updates, roster), "usual": state["usual"]}  # the others' habits stay
        return joined

    def describe(self, state: State, plan: Plan, roster: Roster) -> Mapping[str, Any]:
        return usage_facts(state["active"], _blocks_of(roster.units), roster)

    def plan(self, state: State, roster: Roster) -> Plan:
        """Section II-E: a block is shared by the clients that have it active, weighted by their samples.

        Who draws its decisions needs the router first, and says by what it sends which blocks it had active.
        """
        within = roster.trait(self.by) if isinstance(self.blocks, Mapping) else None
        plans, asked = {"route": UnitPlan(torch.full((len(roster),), -1))}, {}
        for unit in [unit for unit in roster.units if unit != "route"]:
            using = state["active"][unit] if self.decides == "settled" else roster.has(unit)
            if state["round"] < self.pretrain and not unit.startswith("encoder."):
                using = torch.zeros_like(using)
            plans[unit], asked[unit] = in_use(circles_of_shape(roster, unit, within), using, roster.samples)
        return Plan({unit: plans[unit] for unit in roster.units}, asked)


def _pool_of(me: Me) -> Blocks:
    return cast(RoutedNetwork, me.model.module).pool.blocks


def _blocks_of(units: Iterable[str]) -> list[str]:
    return [unit for unit in units if unit not in ("router", "route")]
