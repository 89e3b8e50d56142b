"""FedMN (Wang et al. 2022): a pool of blocks for all, and a router that picks each client's own from its data.

Equations 1 and 11 are `models.pool.ModulePool`, 5 is `models.gates.binary_concrete`, 7-10 are `models.pool.Router`, 6
is `_loss`; section II-E is `plan`. A client trains, sends and receives only the blocks its route puts to use, and
the router.

Deviations, each because the letter does not do what it is for:
- `joint="product"` (eq. 8) instead of the concatenation (eq. 9), which cannot tell clients apart by their joint
  distribution: see `Router`. `joint="concat"` is the letter.
- Blocks are averaged over the clients that have them active; the paper's sum over all clients would shrink them. A
  block nobody has active keeps its value.
- Where a client's decision leaves no complete path, its most probable one is opened.
- In training the router speaks on the batch at hand: its mean embedding estimates that of all the client's data without
  bias (the logits, after normalising, nearly so), and this is what carries the loss to the router. Decisions are made
  on all of a client's training data, after training.
- A block that a client gives up in a round is not merged from it in that round, though it trained it.
- The router learns ten times as fast as the blocks (`router_rate`), and gates start little more than half open
  (`start`). With the blocks' rate and gates that start at 0.9, clients keep nearly all blocks, and the pool is FedAvg.

What was found where only the joint distribution differs (24 clients, three names for each class: tests/methods), means
of ten seeds that nothing was chosen on: 82 %, the worst seed 75 %; with `temperatures=(1.0, 0.5)` 84 % and 79 %, and
steadier under other learning rates too, where ending at the paper's 0.1 left two groups on one path in about one run of
twelve. Local training has 59 %, FedAvg 30 % (63 % after a round of local training), the letter of the paper 30 %. The
pool moved 26 MB where FedAvg's one small network moved 11, and 42 would be all of the pool.

What passes beside the values of units (one truth value a block up, and E numbers a client each way with `spread`) is in
the communication count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fedquilt.me import Me
from fedquilt.messages import Member, Roster, Updates
from fedquilt.methods.base import Method, State
from fedquilt.methods.fedavg import circles_of_shape
from fedquilt.models.gates import Gates, active_blocks, block_names, check_blocks, decide, paths
from fedquilt.models.pool import Joint, RoutedNetwork, split_head
from fedquilt.parts import Parts
from fedquilt.sharing import Plan, UnitPlan
from fedquilt.steps import Do, Install, Step, Train
from fedquilt.training.batches import key_of
from fedquilt.training.objective import Batch, Learner, Objective

Blocks = Sequence[int]


@dataclass(frozen=True)
class FedMN(Method):
    """A client's network is assembled from the blocks of a pool, along a route that a shared router finds for it.

    `blocks` are the blocks of each layer, or a mapping from values of the trait `by` to such lists: clients of unlike
    devices then have pools, routers and circles of their own. A client's model becomes the encoder by losing its linear
    layers at the top, at most one for each layer of the pool above the encoders (`split_head`); a model that is a
    `RoutedNetwork` is taken as it is. `width` is that of the blocks between encoders and outputs (default: the model's
    last hidden layer). `pretrain` rounds at the start circulate the encoders only, with all gates open. `spread`
    above 0 adds a reward for routes that differ between clients (see `against_one_route`).
    """

    name: ClassVar[str] = "fedmn"
    blocks: Blocks | Mapping[str, Blocks] = (3, 3, 3)
    by: str = "device"
    width: int | None = None
    dropout: float = 0.2
    joint: Joint = "product"
    normalise: bool = True
    gates: Gates = "relaxed"
    start: float = 0.6
    temperatures: tuple[float, float] = (1.0, 0.1)
    router_rate: float = 10.0
    spread: float = 0.0
    pretrain: int = 0

    def __post_init__(self) -> None:
        for blocks in self.blocks.values() if isinstance(self.blocks, Mapping) else [self.blocks]:
            check_blocks(blocks)
        if self.router_rate <= 0:
            raise ValueError(f"FedMN with router_rate={self.router_rate} never learns a route; give a rate above 0")
        if min(self.temperatures) <= 0 or self.spread < 0 or self.pretrain < 0:
            raise ValueError("fedmn: temperatures must be above 0, spread and pretrain must not be negative")

    # --- client half -----------------------------------------------------------------------------------------------

    def parts(self, model: nn.Module, member: Member, classes: int) -> Parts:
        if isinstance(model, RoutedNetwork):
            return Parts(model, writes=("route",))
        blocks = self._blocks_of(member)
        encoder, features, width = split_head(model, len(blocks) - 1)
        return Parts(
            RoutedNetwork(
                encoder, blocks, features=features, classes=classes, width=self.width or width, dropout=self.dropout,
                joint=self.joint, normalise=self.normalise, start=self.start, gates=self.gates,
            ),
            writes=("route",),
        )  # fmt: skip

    def local(self) -> tuple[Step, ...]:
        decided = Do(self._decide, data="train", reports=("active", "probabilities"))
        return Install(), Train(Objective((self._loss,)), given=self._given, rates=self._rates), decided

    def _loss(self, me: Learner, batch: Batch) -> Tensor:
        """Eq. 6, with gates drawn once an epoch."""
        given, epoch = me.given, cast(Tensor, me.epoch)
        logits = me.model(batch.x, y=batch.y, mask=batch.mask) + given["opened"]
        noise = given["noise"].index_select(0, epoch.view(1)).squeeze(0)  # (E,)
        scores = me.model(batch.x, logits=logits, noise=noise, temperature=given["temperature"])
        loss = batch.mean(nn.functional.cross_entropy(scores, batch.y, reduction="none"))
        return loss + self.spread * against_one_route(logits, given["usual"]) if self.spread else loss

    def _given(self, me: Me) -> Mapping[str, Tensor]:
        """The noise of the gates, their temperature in this round, and what opens them all while encoders pretrain."""
        gates = paths(_pool_of(me))
        done = min(1.0, max(0.0, (me.round - 1 - self.pretrain) / max(1, me.rounds - 1 - self.pretrain)))
        hot, cold = self.temperatures
        opened = 1e3 if me.round <= self.pretrain else 0.0  # far beyond any logit: all gates are open, alike
        given = {
            "noise": me.draw("gates", me.epochs, gates),
            "temperature": me.number(hot * (cold / hot) ** done),
            "opened": me.number(opened),
        }
        usual = me.told.get("usual", me.number(0.5).expand(gates))
        return given | {"usual": usual} if self.spread else given

    def _rates(self, me: Me) -> Mapping[str, Tensor]:
        """Only active blocks learn, and the router at a rate of its own."""
        active = active_blocks(me.values["route"], _pool_of(me)).float()
        router = 0.0 if me.round <= self.pretrain else self.router_rate
        rates = {name: active[at] for at, name in enumerate(block_names(_pool_of(me)))}
        return rates | {"router": me.number(router)}

    def _decide(self, me: Me) -> Mapping[str, Tensor]:
        """The client's route, from all its training data, and which blocks it puts to use."""
        if me.round <= self.pretrain:
            return {}
        data, blocks = cast(Batch, me.data), _pool_of(me)
        logits = me.model(data.x, y=data.y, mask=data.mask)  # (E,)
        route = decide(logits, blocks)
        found = {"route": route, "active": active_blocks(route, blocks)}
        return found | {"probabilities": logits.sigmoid()} if self.spread else found

    def _blocks_of(self, member: Member) -> Blocks:
        if not isinstance(self.blocks, Mapping):
            return self.blocks
        value = member.traits.get(self.by, "")
        if value not in self.blocks:
            raise ValueError(
                f"fedmn: client '{member.name}' has {self.by} '{value}', for which blocks names no pool; "
                f"it names {', '.join(self.blocks)}"
            )
        return self.blocks[value]

    # --- server half -----------------------------------------------------------------------------------------------

    def begin(self, roster: Roster) -> State:
        return {"active": {unit: roster.has(unit) for unit in roster.units}, "usual": {}, "round": 0}

    def learn(self, state: State, updates: Updates, roster: Roster) -> State:
        active = {unit: state["active"].get(unit, roster.has(unit)).clone() for unit in roster.units}
        usual = dict(state["usual"])
        for up in updates.ups:
            units = roster.members[up.ids[0]].units
            if "active" in up.reports:
                now = up.reports["active"].cpu()  # (k, blocks)
                for at, unit in enumerate(unit for unit in units if unit not in ("router", "route")):
                    active[unit][list(up.ids)] = now[:, at]
            if "probabilities" in up.reports:
                usual[_kind(units)] = up.reports["probabilities"].mean(dim=0).cpu()
        return {"active": active, "usual": usual, "round": updates.round}

    def tell(self, state: State, roster: Roster, ids: tuple[int, ...]) -> Mapping[str, Tensor]:
        usual = state["usual"].get(_kind(roster.members[ids[0]].units))
        return {} if usual is None else {"usual": usual.expand(len(ids), -1)}

    def enrol(self, state: State, before: Roster, roster: Roster, updates: Updates) -> State:
        """Whoever is new has all blocks, unless it has said already which its route puts to use; others keep theirs."""
        pairs = zip(before.members, roster.members, strict=False)
        new = torch.tensor([old.units != new.units for old, new in pairs] + [True] * (len(roster) - len(before)))
        active = {}
        for unit in roster.units:
            known = torch.zeros(len(roster), dtype=torch.bool)
            if unit in state["active"]:
                known[: len(state["active"][unit])] = state["active"][unit]
            active[unit] = torch.where(new, roster.has(unit), known)
        joined = {**state, "active": active}
        if any("active" in up.reports for up in updates.ups):
            joined = {**self.learn(joined, updates, roster), "usual": state["usual"]}  # the others' habits stay
        return joined

    def describe(self, state: State, plan: Plan, roster: Roster) -> Mapping[str, Any]:
        blocks = [unit for unit in roster.units if unit not in ("router", "route")]
        use = torch.stack([state["active"][unit] for unit in blocks], dim=1)  # (K, blocks)
        has = torch.stack([roster.has(unit) for unit in blocks], dim=1)
        return {
            "blocks_in_use": float(use.sum() / has.sum()),
            "selections_of_blocks": len(set(map(tuple, use.tolist()))),
        }

    def plan(self, state: State, roster: Roster) -> Plan:
        """Section II-E: a block is shared by the clients that have it active now, weighted by their samples."""
        within = roster.trait(self.by) if isinstance(self.blocks, Mapping) else None
        opening = state["round"] < self.pretrain
        plans, asked = {"route": UnitPlan(torch.full((len(roster),), -1))}, {}
        for unit in roster.units:
            if unit == "route":
                continue
            circle = circles_of_shape(roster, unit, within)
            active = state["active"][unit] & (circle >= 0)
            if opening and not unit.startswith("encoder."):
                active = torch.zeros_like(active)
            inside, alone = active.clone(), torch.zeros_like(active)
            for number in sorted(set(circle.tolist()) - {-1}):
                members = circle == number
                if not bool(active[members].any()):
                    inside[members.nonzero()[0]] = True  # weight and pull 0: nothing moves, but the value is kept
                elif int(active[members].sum()) == 1:
                    alone |= active & members  # sends too, as in the paper: the next to join starts from its copy
            plans[unit] = UnitPlan(torch.where(inside, circle, -1), roster.samples * active, active.float())
            asked[unit] = alone
        return Plan({unit: plans[unit] for unit in roster.units}, asked)


def against_one_route(logits: Tensor, usual: Tensor) -> Tensor:
    """What `spread` weighs: minus the information that a gate has about whose it is, as far as one client moves it.

    The mutual information between client and gate is H(mean of Pi) - mean of H(Pi). Its gradient in one client's Pi
    needs the mean over clients only (`usual`, from the round before): log-odds of the mean, less those of Pi.

    >>> at_odds = against_one_route(torch.tensor([-3.0]), torch.tensor([0.9]))
    >>> alike = against_one_route(torch.tensor([3.0]), torch.tensor([0.9]))
    >>> bool(at_odds < alike)
    True
    """
    pi = logits.sigmoid()
    entropy = nn.functional.softplus(logits) - pi * logits  # of a Bernoulli variable, in nats
    return (pi * usual.clamp(0.01, 0.99).logit() + entropy).mean()


def _pool_of(me: Me) -> Blocks:
    return cast(RoutedNetwork, me.model.module).pool.blocks


def _kind(units: Mapping[str, object]) -> str:
    """A name for clients of one architecture."""
    return str(key_of(*units.items()))
