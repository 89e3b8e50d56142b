"""FedDL against its equations worked out by hand, its messages, its tree of groups, and where it is right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layered import LAYERS, layered
from server_half import begun, joined, learnt
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.client import Split
from fedquilt.core.server import Server
from fedquilt.core.values import Key
from fedquilt.interface.messages import ClientInfo, Instructions, Roster, UnitValues, Update, Updates
from fedquilt.methods.feddl import FedDL
from fedquilt.sharing import traffic
from fedquilt.sharing.grouping import Linkage

LEFT, RIGHT, TORN = [1.0, 0.0], [0.0, 1.0], [0.5, 0.5]  # answers to the one common sample
SIZES = {"a": 2, "b": 3, "c": 4, "out": 5}
BOTH: list[Linkage] = ["component", "average"]


def roster(clients: int, units: Sequence[str] = tuple(SIZES)) -> Roster:
    members = [
        ClientInfo(f"client-{i}", 10 * (i + 1), {}, (0, 1), {unit: ((SIZES[unit],),) for unit in units})
        for i in range(clients)
    ]
    return Roster(tuple(members), classes=2, rounds=9, common=Split(torch.zeros(1, 1), torch.zeros(1).long()))


def models(ids: Sequence[int], answers: Sequence[list[float]]) -> Any:
    """Whole models that answer like this."""
    return SimpleNamespace(ids=torch.tensor(ids), classes=2, scores=torch.tensor(answers)[:, None].log)


def sent(round_: int, answers: Sequence[list[float]], ids: Sequence[int] | None = None) -> Updates:
    """What the server is given where whole models were sent that answer like this."""
    ids = tuple(ids if ids is not None else range(len(answers)))
    whole = UnitValues(tuple(SIZES), tuple(SIZES.values()), None, torch.zeros(len(ids), sum(SIZES.values())))
    return Updates(round_, (Update(round_, ids, (whole,)),), look=lambda *_: [models(ids, answers)])


def circles(plan: fq.Plan, unit: str) -> list[int]:
    unit_plan = plan[unit]
    assert isinstance(unit_plan, fq.UnitPlan)
    return unit_plan.circle.tolist()


# Four clients that answer left, left, torn, right. With d the divergence of left and torn:
#   d = 1/2 (ln(1 / (3/4)) + 1/2 ln((1/2) / (3/4)) + 1/2 ln((1/2) / (1/4))) = 0.2158
#   D01 = 0, D02 = D12 = D23 = d, D03 = D13 = ln 2; their mean is (3 d + 2 ln 2) / 6 = 0.3389.
# Links: 01, 02, 12, 23. freq = 2, 2, 3, 1.
FOUR = [LEFT, LEFT, TORN, RIGHT]


def test_the_divergences_of_the_example() -> None:
    d = 0.5 * (math.log(4 / 3) + 0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    assert d < (3 * d + 2 * math.log(2)) / 6 < math.log(2)
    found = fq.sharing.affinity(torch.tensor(FOUR)[:, None])
    assert found[0].tolist() == pytest.approx([0, 0, d, math.log(2)], abs=1e-6)
    assert found[3].tolist() == pytest.approx([math.log(2), math.log(2), d, 0], abs=1e-6)


def test_weights_and_pulls_by_hand() -> None:
    method = FedDL(interval=0)
    state, plan = begun(method, roster(4))
    _, plan = learnt(method, state, sent(1, FOUR), roster(4))
    unit = plan["a"]
    assert isinstance(unit, fq.UnitPlan)
    assert unit.circle.tolist() == [0, 0, 0, 0]  # 3 is as far from 0 as can be, but close to 2
    assert unit.weight.tolist() == [2, 2, 3, 1]
    # mu = 1/4, 1/4, 3/8, 1/8; times the 4 members 1, 1, 3/2, 1/2; at most 1
    assert unit.pull.tolist() == [1, 1, 1, 0.5]
    assert [circles(plan, other) for other in ("b", "c", "out")] == [[-1] * 4] * 3


def test_average_linkage_by_hand() -> None:
    # 0 and 1 join at 0, 2 joins them at d, 3 would join at (2 ln 2 + d) / 3 = 0.534, above the threshold.
    # The link of 2 and 3 is not in a circle, so freq = 2, 2, 2 and everyone moves all the way.
    method = FedDL(interval=0, linkage="average")
    state, plan = begun(method, roster(4))
    _, plan = learnt(method, state, sent(1, FOUR), roster(4))
    unit = plan["a"]
    assert isinstance(unit, fq.UnitPlan)
    assert (unit.circle.tolist(), unit.weight.tolist()) == ([0, 0, 0, -1], [2, 2, 2, 0])
    assert unit.pull.tolist() == [1, 1, 1, 0]


def merged(server: Server, values: Sequence[float], answers: Sequence[list[float]]) -> Instructions:
    """One round of a server whose clients send, of what they are told to, these values all over."""
    down = server.instructions(range(4))
    server.look = lambda *_: [models(range(4), answers)]
    server.merge([Update(down.round, down.ids, tuple(blocks(down, values)))])
    return server.instructions(range(4))


def blocks(down: Instructions, values: Sequence[float]) -> list[UnitValues]:
    made = []
    for unit, senders in down.send.items():
        places = senders.nonzero()[:, 0]
        copies = torch.tensor(values)[places][:, None].expand(-1, SIZES[unit])
        made.append(UnitValues((unit,), (SIZES[unit],), places, copies))
    return made


def installed(down: Instructions, own: Tensor, unit: str) -> list[float]:
    """What clients have in the first number of a unit after installing what they received."""
    for block, pull in zip(down.blocks, down.pulls, strict=True):
        value = block.columns((unit,))
        if value is not None:
            share = torch.ones(4) if pull is None else pull
            return ((1 - share) * own + share * value[:, 0]).tolist()
    return own.tolist()


def test_merging_and_aligning_by_hand() -> None:
    first: dict[Key, Tensor] = {(unit, ((size,),)): torch.zeros(size) for unit, size in SIZES.items()}
    server = Server(FedDL(interval=0), roster(4), lambda _: first)
    own = torch.tensor([8.0, 0.0, 16.0, 24.0])
    down = merged(server, own.tolist(), FOUR)
    # eq. 5: 8/4 + 0/4 + 16 * 3/8 + 24/8 = 11; eq. 7: client 3 goes half way from 24, to 17.5; others to 11
    assert installed(down, own, "a") == [11, 11, 11, 17.5]
    assert installed(down, own, "b") == own.tolist()
    # Now two pairs: every freq is 1, mu = 1/2, lambda = 1. Layer a keeps its groups and its weights.
    down = merged(server, [1.0, 3.0, 5.0, 9.0], [LEFT, LEFT, RIGHT, RIGHT])
    own = torch.tensor([1.0, 3.0, 5.0, 9.0])
    assert installed(down, own, "a") == [4, 4, 4, 6.5]  # 1/4 + 3/4 + 15/8 + 9/8 = 4; half way from 9 to 4
    assert installed(down, own, "b") == [2, 2, 7, 7]


def schedule(method: FedDL, rounds: int) -> list[int]:
    """The rounds in which whole models are sent, all answers being alike."""
    state, plan = begun(method, roster(3))
    grouping = []
    for round_ in range(1, rounds + 1):
        if bool(plan.sends("out").all()):
            grouping.append(round_)
        state, plan = learnt(method, state, sent(round_, [LEFT] * 3), roster(3))
    return grouping


def test_grouping_rounds_follow_the_decaying_interval() -> None:
    # Algorithm 2 counts steps from 0: with interval 4 the fifth round groups; then 2 and 1 rounds later; three layers.
    assert schedule(FedDL(interval=4, decay=0.5), 20) == [5, 7, 8]
    assert schedule(FedDL(interval=2, decay=0.0), 20) == [3, 5, 7]
    # 3, then 2.25 and 1.6875, which are reached after 3 and 2 rounds
    assert schedule(FedDL(interval=3, decay=0.25), 20) == [4, 7, 9]


def test_regrouping_starts_again_from_the_bottom() -> None:
    assert schedule(FedDL(interval=1, decay=0.5, regroup_every=4), 16) == [2, 3, 4, 8, 9, 10, 14, 15, 16]
    method = FedDL(interval=0, regroup_every=2)
    state, plan = begun(method, roster(4))
    for round_ in (1, 2, 3):
        state, plan = learnt(method, state, sent(round_, [LEFT, LEFT, RIGHT, RIGHT]), roster(4))
    assert [circles(plan, unit) for unit in "abc"] == [[0, 0, 2, 2]] * 3
    state, plan = learnt(method, state, sent(4, [LEFT] * 4), roster(4))  # a round of merging: nobody is looked at
    assert [circles(plan, unit) for unit in "abc"] == [[0, 0, 2, 2]] * 3
    state, plan = learnt(method, state, sent(5, [LEFT, RIGHT, LEFT, RIGHT]), roster(4))
    assert [circles(plan, unit) for unit in "abc"] == [[0, 1, 0, 1], [-1] * 4, [-1] * 4]


def test_what_is_sent_layer_by_layer() -> None:
    # Layer a: all together. Layer b: client 3 is off. Layer c: client 2 too.
    told = {2: [LEFT] * 4, 3: [LEFT, LEFT, LEFT, RIGHT], 4: [LEFT, LEFT, RIGHT, RIGHT]}
    method = FedDL(interval=1, decay=0.5)
    state, plan = begun(method, roster(4))
    up, down = [], []
    for round_ in range(1, 7):
        moved = traffic(plan, SIZES)
        up.append(moved.up.sum(1).tolist())
        down.append(moved.down.sum(1).tolist())
        state, plan = learnt(method, state, sent(round_, told.get(round_, [TORN] * 4)), roster(4))
    assert circles(plan, "c") == [0, 0, -1, -1]
    whole = 2 + 3 + 4 + 5
    assert up == [
        [0, 0, 0, 0],  # clients train, nothing is shared yet
        [whole] * 4,  # grouping a
        [whole] * 4,  # grouping b
        [whole, whole, whole, 2],  # grouping c: client 3 is alone on b, so it sends a and nothing above, ever
        [9, 9, 5, 2],  # merging: a, b, c; client 2 is alone on c
        [9, 9, 5, 2],
    ]
    assert down == [[0] * 4, [0] * 4, [2] * 4, [5, 5, 5, 2], [9, 9, 5, 2], [9, 9, 5, 2]]


def test_two_stay_together_and_identical_answers_too() -> None:
    method = FedDL(interval=0)
    for answers in ([LEFT, RIGHT], [TORN, TORN, TORN]):
        state, plan = begun(method, roster(len(answers)))
        _, plan = learnt(method, state, sent(1, answers), roster(len(answers)))
        assert circles(plan, "a") == [0] * len(answers)


def test_grouping_stops_when_everyone_is_alone() -> None:
    broken = [math.nan, math.nan]
    method = FedDL(interval=0)
    state, plan = begun(method, roster(3))
    state, plan = learnt(method, state, sent(1, [LEFT, broken, broken]), roster(3))
    assert circles(plan, "a") == [-1, -1, -1]
    assert not any(bool(plan.sends(unit).any()) for unit in SIZES)


def test_clients_of_unlike_shapes_never_share() -> None:
    one, other = {"a": ((2,),), "b": ((3,),), "out": ((5,),)}, {"a": ((2,),), "b": ((7,),), "out": ((5,),)}
    members = tuple(ClientInfo(f"c{i}", 10, {}, (0, 1), units) for i, units in enumerate((one, other, one, other)))
    who = Roster(members, 2, 9, common=Split(torch.zeros(1, 1), torch.zeros(1).long()))
    method = FedDL(interval=0)
    state, plan = begun(method, who)
    for round_ in (1, 2):
        state, plan = learnt(method, state, sent(round_, [LEFT] * 4), who)
        plan.check(who.signatures(), who.names)
    assert (circles(plan, "a"), circles(plan, "b")) == ([0, 0, 0, 0], [0, 1, 0, 1])


def grouped(answers: Sequence[list[float]], layers: int) -> tuple[FedDL, dict[str, object], fq.Plan]:
    method = FedDL(interval=0)
    state, plan = begun(method, roster(len(answers)))
    for round_ in range(1, layers + 1):
        state, plan = learnt(method, state, sent(round_, answers), roster(len(answers)))
    return method, state, plan


def test_a_newcomer_joins_the_closest_groups_and_nobody_else_moves() -> None:
    # D23 = 0.0749, and the newcomer between them: D24 = 0.0360, D34 = 0.0100, both below the mean of the three, 0.0403.
    method, state, before = grouped([LEFT, LEFT, RIGHT, [0.2, 0.8]], layers=2)
    assert circles(before, "b") == [0, 0, 2, 2]
    _, plan = joined(method, state, roster(5), sent(9, [[0.1, 0.9]], ids=[4]))
    for unit in "ab":
        assert circles(plan, unit) == [0, 0, 2, 2, 2]
    unit_plan = plan["a"]
    assert isinstance(unit_plan, fq.UnitPlan)
    assert unit_plan.weight.tolist() == [1, 1, 1, 1, 2]  # close to both, 2 and 3
    # mu = 1/4, 1/4, 1/2 among 2, 3 and 4, times 3 members; 0 and 1 as before
    assert unit_plan.pull.tolist() == [1, 1, 0.75, 0.75, 1]


def test_a_newcomer_far_from_all_stays_alone() -> None:
    method, state, before = grouped([[0.9, 0.1], [0.85, 0.15], [0.8, 0.2], [0.85, 0.15]], layers=2)
    assert circles(before, "a") == [0, 0, 0, 0]
    _, plan = joined(method, state, roster(5), sent(9, [RIGHT], ids=[4]))
    assert circles(plan, "a") == [0, 0, 0, 0, -1]
    assert not bool(plan.sends("a")[4])


def test_a_newcomer_that_sent_nothing_whole_is_asked_to() -> None:
    method, state, _ = grouped([LEFT, LEFT, RIGHT, RIGHT], layers=1)
    state, plan = joined(method, state, roster(5), Updates(9, ()))
    assert circles(plan, "a") == [0, 0, 2, 2, -1]
    state |= {"done": True}  # a round of merging: only the newcomer is looked at
    _, plan = learnt(method, state, sent(10, [LEFT], ids=[4]), roster(5))
    assert circles(plan, "a") == [0, 0, 2, 2, 0]


def test_whoever_was_away_is_asked_and_placed_when_it_comes() -> None:
    method = FedDL(interval=1, decay=0.0)
    state, plan = begun(method, roster(4))
    state, plan = learnt(method, state, sent(1, [LEFT], ids=[0]), roster(4))
    state, plan = learnt(method, state, sent(2, [LEFT, RIGHT, LEFT], ids=[0, 1, 3]), roster(4))
    assert circles(plan, "a") == [0, -1, -1, 0]
    assert bool(plan.sends("out")[2])
    state, plan = learnt(method, state, sent(3, [LEFT, LEFT], ids=[0, 2]), roster(4))
    assert circles(plan, "a") == [0, -1, 0, 0]
    assert circles(plan, "b") == [0, -1, 0, 0]  # 3 was away this time: what it answered last is taken


def refines(plan: fq.Plan, upper: str, lower: str) -> bool:
    above, below = circles(plan, upper), circles(plan, lower)
    pairs = [(i, j) for i in range(len(above)) for j in range(i) if above[i] == above[j] >= 0]
    return all(below[i] == below[j] >= 0 for i, j in pairs)


@pytest.mark.parametrize("linkage", BOTH)
@pytest.mark.parametrize(("seed", "share", "regroup_every"), [(0, 1.0, None), (1, 0.5, None), (2, 1.0, 2), (3, 0.6, 2)])
def test_groups_are_a_tree_in_real_runs(linkage: Linkage, seed: int, share: float, regroup_every: int | None) -> None:
    random = torch.Generator().manual_seed(seed)

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 3))

    clients = []
    for i in range(9):
        x = torch.randn(12, 4, generator=random)
        clients.append(fq.Client(f"c{i}", net, (x, torch.randint(3, (12,), generator=random))))
    scenario = fq.Scenario("chance", clients, common=(torch.randn(20, 4, generator=random), torch.zeros(20)))
    result = fq.run(
        scenario, FedDL(interval=1, linkage=linkage, regroup_every=regroup_every), rounds=10, seed=seed, alone=False,
        engine="sequential", training={"lr": 0.3, "epochs": 2, "share": share},
    )  # fmt: skip
    shared = set()
    for _, plan in result.plans:
        assert circles(plan, "5") == [-1] * 9  # the output layer
        assert refines(plan, "2", "0")
        assert refines(plan, "4", "2")
        shared |= {unit for unit in ("0", "2", "4") if max(circles(plan, unit)) >= 0}
    assert shared == {"0", "2", "4"}


@pytest.mark.parametrize(("seed", "whole"), [(0, True), (1, True), (3, False)])
def test_it_wins_where_groups_differ_by_layer(seed: int, whole: bool) -> None:
    """Where it finds them: of the seeds 0 to 5 it finds the sensors in four, and in two joins nearly everyone."""
    scenario = layered(seed)
    rounds = scenario.training.rounds

    def run(method: str, **settings: object) -> fq.Run:
        return fq.run(
            scenario, method, seed=seed, settings=settings, engine="vectorised", alone=False, evaluate_every=rounds,
            device="cpu",
        )  # fmt: skip

    won = run("feddl")
    assert circles(won.plan, LAYERS[0]) == [0] * 6 + [6] * 6  # the sensors
    assert circles(won.plan, LAYERS[1])[:6] == [0, 0, 0, 3, 3, 3]  # and in the first the namings
    if whole:
        assert circles(won.plan, LAYERS[1])[6:] == [6, 6, 6, 9, 9, 9]  # in the second, too
    others = [run("local"), run("fedavg"), run("fedper"), run("fedper", personal=2)]
    best = max(seen.score for other in others for seen in other.evaluations if seen.split == "test")
    assert won.summary["accuracy_mean"] > best + 0.05  # whatever the others' read-out
    assert sum(won.bytes_up) < sum(others[1].bytes_up)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"^feddl compares models on samples that the server holds, and there are"):
        begun(FedDL(), Roster(roster(2).members, 2, 9))
    with pytest.raises(ValueError, match=r"^client 'client-0' has one layer, its output, which FedDL never shares"):
        begun(FedDL(), roster(2, units=["out"]))
    with pytest.raises(ValueError, match=r"interval=-1 must be 0 or more"):
        FedDL(interval=-1)
    with pytest.raises(ValueError, match=r"decay=1 from 0 to below 1"):
        FedDL(decay=1)
    with pytest.raises(ValueError, match=r"linkage is component or average, not 'single'"):
        FedDL(linkage="single")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"regroup_every=0 never rests"):
        FedDL(regroup_every=0)
