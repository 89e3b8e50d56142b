"""ModFL: the paper's example by hand, its special cases to the bit, cohorts found, and where it is the right method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from crossed import TwoModules, crossed
from server_half import begun, joined, learnt
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.core.server import Server
from fedquilt.core.values import Key
from fedquilt.interface.messages import ClientInfo, Roster, UnitValues, Update, Updates
from fedquilt.methods import METHODS, Method
from fedquilt.methods.cohorts import Task, by_updates, nothing_known
from fedquilt.methods.modfl import ModFL
from fedquilt.models.digits import DigitsNet

FOUND = {"configuration": "device", "operation": "found"}


def circles(plan: fq.Plan, unit: str) -> list[int]:
    unit_plan = plan[unit]
    assert isinstance(unit_plan, fq.UnitPlan)
    return unit_plan.circle.tolist()


def run(scenario: fq.Scenario, method: Method, rounds: int = 3) -> fq.Run:
    return fq.run(scenario, method, rounds, engine="sequential", alone=False, evaluate_every=rounds, device="cpu")


def models(result: fq.Run) -> list[Tensor]:
    """Every client's personal model as one row of numbers."""
    clients = result.federation.scenario.clients
    return [torch.cat([p.detach().reshape(-1) for p in result.model(c.name).parameters()]) for c in clients]


def same(one: fq.Run, other: fq.Run) -> bool:
    return all(torch.equal(a, b) for a, b in zip(models(one), models(other), strict=True))


# --- the paper's example: gen1 = {0, 1}, gen2 = {2, 3}, sporty = {0, 2}, couch-potato = {1, 3} ------------------------

GEN1, GEN2, HEAD = ((1,),), ((2,),), ((1,),)
EXAMPLE = Roster(
    tuple(
        ClientInfo(
            name, samples, {"device": device, "cohort": cohort}, (0, 1), {"configuration": shape, "operation": HEAD}
        )
        for name, samples, device, cohort, shape in (
            ("one", 10, "gen1", "sporty", GEN1),
            ("two", 30, "gen1", "couch-potato", GEN1),
            ("three", 20, "gen2", "sporty", GEN2),
            ("four", 40, "gen2", "couch-potato", GEN2),
        )
    ),
    classes=2,
    rounds=3,
)


def up(round_: int, ids: tuple[int, ...], **values: Sequence[Sequence[float]]) -> Update:
    blocks = [UnitValues((unit,), (len(copies[0]),), None, torch.tensor(copies)) for unit, copies in values.items()]
    return Update(round_, ids, tuple(blocks))


def test_the_example_of_the_paper_by_hand() -> None:
    first: dict[Key, Tensor] = {
        ("configuration", GEN1): torch.zeros(1),
        ("configuration", GEN2): torch.zeros(2),
        ("operation", HEAD): torch.zeros(1),
    }
    server = Server(ModFL(), EXAMPLE, lambda _: first)
    gen1 = up(1, (0, 1), configuration=[[1.0], [5.0]], operation=[[3.0], [1.0]])
    gen2 = up(1, (2, 3), configuration=[[2.0, 0.0], [8.0, 3.0]], operation=[[9.0], [8.0]])
    server.merge([gen1, gen2])
    # configuration: gen1 (10 * 1 + 30 * 5) / 40 = 4; gen2 (20 * 2 + 40 * 8) / 60 = 6 and (0 + 40 * 3) / 60 = 2
    # operation: sporty (10 * 3 + 20 * 9) / 30 = 7; couch-potato (30 * 1 + 40 * 8) / 70 = 5
    for ids, configuration, operation in (
        ((0, 1), [[4.0], [4.0]], [[7.0], [5.0]]),
        ((2, 3), [[6.0, 2.0], [6.0, 2.0]], [[7.0], [5.0]]),
    ):
        got = {block.units: block.value.tolist() for block in server.instructions(ids).blocks}
        assert got == {("configuration",): configuration, ("operation",): operation}


# --- special cases ----------------------------------------------------------------------------------------------------


def one_device(few: bool = False) -> fq.Scenario:
    whole = crossed(few=few)
    return fq.Scenario("one device", whole.clients[:6], whole.training)


def test_one_device_and_one_cohort_is_fedavg() -> None:
    one = run(one_device(), ModFL(by={"configuration": "device", "operation": "planet"}))
    assert same(one, run(one_device(), METHODS["fedavg"]()))
    assert not same(one, run(one_device(), ModFL()))  # with its two cohorts it is not


def test_a_private_operation_module_is_fedper() -> None:
    for scenario in (one_device(), crossed(each=2)):
        by = {"configuration": "device", "operation": "private"}
        assert same(run(scenario, ModFL(by=by)), run(scenario, METHODS["fedper"]()))


def test_split_cuts_where_it_says() -> None:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4))

    clients = [fq.Client(c.name, plain, c.train, c.validation, c.test, c.traits) for c in one_device().clients]
    scenario = fq.Scenario("no modules", clients, one_device().training)
    by = {"configuration": "device", "operation": "private"}
    for split, personal in ((1, 2), (2, 1), (-1, 1)):
        one = run(scenario, ModFL(by=by, split=split))
        assert list(one.plan.units) == ["configuration", "operation"]
        assert same(one, run(scenario, fq.methods.FedPer(personal=personal)))


def cut_by(method: ModFL, model: nn.Module) -> tuple[fq.Unit, ...]:
    return method.parts(model, EXAMPLE.members[0], 2).cut()


def test_split_goes_between_layers_of_declared_modules() -> None:
    for pixels in (4, 8):
        units = cut_by(ModFL(split=-1), DigitsNet(pixels))
        assert [unit.name for unit in units] == ["configuration", "operation"]
        assert units[1].parameters == ("operation.2.weight", "operation.2.bias")
    assert {len(unit.parameters) for unit in cut_by(ModFL(), DigitsNet(8))} == {4}
    with pytest.raises(ValueError, match=r"split=4 leaves one module of DigitsNet empty, which has 4 units; give"):
        cut_by(ModFL(split=4), DigitsNet(8))


# --- cohorts that nobody declared -------------------------------------------------------------------------------------


def test_found_cohorts_are_as_good_as_declared_ones() -> None:
    declared, found = run(crossed(few=True), ModFL()), run(crossed(few=True), ModFL(by=FOUND, cohorts=2))
    assert circles(found.plan, "operation") == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert same(declared, found)  # right from the first round on, so everything is the same
    assert found.summary["adjusted_rand"] == {"operation": 1.0}
    assert found.summary["cohorts_found"] == {"operation": 2}
    assert "adjusted_rand" not in declared.summary


def test_the_number_of_cohorts_is_found_too() -> None:
    whole = crossed(few=True, samples=100)
    scenario = fq.Scenario("one device", whole.clients[:6], whole.training)
    result = run(scenario, ModFL(by={"operation": "found"}))  # what is not said is as in the paper
    assert circles(result.plan, "configuration") == [0] * 6
    assert circles(result.plan, "operation") == [0, 0, 0, 1, 1, 1]


def ring(cohorts: int, labels: int, each: int = 4, classes: int = 9) -> fq.Scenario:
    """Cohorts that own so many neighbouring labels of a ring, on devices of two kinds, with forty samples a client."""
    draw = torch.Generator().manual_seed(7)
    clouds = torch.randn(classes, 12, generator=draw)
    lenses = [torch.randn(12, width, generator=draw) / 5 for width in (12, 16)]  # to numbers of about 1
    clients = []
    for i in range(cohorts * each):
        cohort, device = i % cohorts, i // cohorts % 2
        y = (cohort + torch.arange(40) % labels) % classes
        x = (clouds[y] + torch.randn(40, 12, generator=draw)) @ lenses[device]
        model = partial(TwoModules, x.shape[1], classes=classes)
        traits = {"device": str(device), "cohort": str(cohort)}
        clients.append(fq.Client(f"c{i}", model, (x, y), traits=traits, labels=range(classes)))
    return fq.Scenario("ring", clients, fq.Training(epochs=1, batch=8, lr=0.1), label_names=[str(c) for c in range(9)])


@pytest.mark.parametrize(("cohorts", "labels"), [(9, 6), (9, 3), (1, 9)])
def test_nine_cohorts_are_nine_and_one_is_one(cohorts: int, labels: int) -> None:
    """Where the silhouette counted 18 or 20: devices times cohorts, or so."""
    federation = fq.Federation(ring(cohorts, labels, 36 // cohorts), ModFL(by=FOUND), device="cpu", engine="sequential")
    asked = []
    for _ in range(3):
        asked.append(bool(federation.server.instructions((0,)).told))
        federation.step(evaluate=False)
        server = federation.server
        facts = federation.method.describe(server.state, server.plan, server.roster)
        assert facts == {"cohorts_found": {"operation": cohorts}, "adjusted_rand": {"operation": 1.0}}
    assert asked == [True, False, False]  # once, where all are at one point


def test_the_index_tells_when_what_was_found_is_something_else() -> None:
    result = run(crossed(few=True), ModFL(by=FOUND, cohorts=2, compare="device"))
    assert result.summary["adjusted_rand"]["operation"] < 0.1  # devices and cohorts are crossed


def test_cohorts_are_found_where_few_take_part() -> None:
    scenario = crossed(few=True, rounds=12)
    method = ModFL(by=FOUND, cohorts=2)
    result = fq.run(scenario, method, engine="sequential", alone=False, evaluate_every=12, training={"share": 0.5})
    assert result.summary["adjusted_rand"] == {"operation": 1.0}
    assert result.federation.server.state["known"]["operation"]["decided"].all()


def looked_at(copies: Mapping[int, list[float]], received: Mapping[int, list[float]], round_: int = 1) -> Updates:
    ids = tuple(copies)
    sent = up(round_, ids, head=list(copies.values()))
    return Updates(round_, (sent,), held=lambda _, who: torch.tensor([received[i] for i in who.tolist()]))


TASK: Task = (("head", ((2,),)),)


def test_updates_are_measured_from_one_point_for_all() -> None:
    tasks = [TASK] * 4
    start = {i: [1.0, 1.0] for i in range(4)}
    known = nothing_known(tasks)
    assert known["circle"].tolist() == [0, 0, 0, 0]
    # Round 1: all start at (1, 1); 0 and 1 go right, 2 and 3 go up.
    sent = looked_at({0: [3.0, 1.0], 1: [3.0, 1.2], 2: [1.0, 3.0], 3: [1.2, 3.0]}, start)
    known = by_updates(known, tasks, sent, due=True, number=2, hysteresis=0.1)
    assert known["circle"].tolist() == [0, 0, 1, 1]
    assert known["first"][repr(TASK)].tolist() == [1, 1]
    # Round 2: they received (3, 1) and (1, 3), so the point for all is (2, 2). In each circle one goes left and one
    # goes right: less what they received, 0 would be with 2 and 1 with 3. Less (2, 2) cohorts are what they were.
    received = {0: [3.0, 1.0], 1: [3.0, 1.0], 2: [1.0, 3.0], 3: [1.0, 3.0]}
    sent = looked_at({0: [2.5, 1.0], 1: [3.5, 1.0], 2: [0.5, 3.0], 3: [1.5, 3.0]}, received)
    assert by_updates(known, tasks, sent, due=True, number=2, hysteresis=0.0)["circle"].tolist() == [0, 0, 1, 1]
    # Round 3: client 1 changes sides for good.
    sent = looked_at({0: [3.0, 1.0], 1: [1.0, 3.1], 2: [1.0, 3.0], 3: [1.0, 3.0]}, received)
    assert by_updates(known, tasks, sent, due=True, number=2, hysteresis=0.1)["circle"].tolist() == [0, 1, 1, 1]
    assert by_updates(known, tasks, sent, due=False, number=2, hysteresis=0.1)["circle"].tolist() == [0, 0, 1, 1]


def test_whoever_comes_late_joins_who_went_its_way() -> None:
    tasks = [TASK] * 6
    start = {i: [1.0, 1.0] for i in range(6)}
    sent = looked_at({0: [3.0, 1.0], 1: [3.0, 1.2], 2: [1.0, 3.0], 3: [1.2, 3.0]}, start)
    known = by_updates(nothing_known(tasks), tasks, sent, due=True, number=2, hysteresis=0.1)
    assert known["circle"].tolist()[4:] == [0, 0]  # not heard: together, and in nobody else's circle
    assert sorted(set(known["circle"].tolist()[:4])) == [1, 2]
    assert known["decided"].tolist() == [True] * 4 + [False] * 2
    # The others are far off by now. 4 comes from the start and goes up a little: up is 2 and 3.
    received = {0: [30.0, 4.0], 1: [30.0, 4.0], 2: [4.0, 30.0], 3: [4.0, 30.0], 4: [1.0, 1.0]}
    sent = looked_at({0: [30.0, 4.0], 4: [1.1, 1.5]}, received)
    known = by_updates(known, tasks, sent, due=True, number=2, hysteresis=0.1)
    assert known["circle"][4] == known["circle"][2]
    assert known["decided"].tolist() == [True] * 5 + [False]


def test_a_newcomer_waits_until_it_is_heard() -> None:
    result = run(crossed(each=2), ModFL(by=FOUND, cohorts=2))
    server = result.federation.server
    method, roster = result.federation.method, server.roster
    newcomer = ClientInfo("late", 11, {"device": "old", "cohort": "south"}, (0, 1), roster.members[0].units)
    longer = Roster((*roster.members, newcomer), roster.classes, roster.rounds)
    before = circles(server.plan, "operation")
    _, plan = joined(method, server.state, longer, Updates(4, ()))
    assert circles(plan, "operation")[:8] == before
    assert circles(plan, "operation")[8] not in before
    assert plan.sends("operation").tolist() == [True] * 9  # it is asked for its copy
    assert circles(plan, "configuration") == [0, 0, 0, 0, 1, 1, 1, 1, 0]


def test_every_few_rounds() -> None:
    method = ModFL(by={"head": "found"}, every=3, cohorts=2)
    members = tuple(ClientInfo(f"c{i}", 10, {}, (0, 1), {"head": ((2,),)}) for i in range(4))
    roster = Roster(members, 2, 9)
    state, plan = begun(method, roster)
    assert circles(plan, "head") == [0, 0, 0, 0]
    ways = {i: [1.0, 0.1 * i] if i < 2 else [0.1 * i, 1.0] for i in range(4)}
    crossways = {i: [0.0, 1.0] if i in (0, 2) else [1.0, 0.0] for i in range(4)}
    seen = []
    for round_ in range(1, 8):
        received = {i: [0.0, 0.0] for i in range(4)}
        sent = looked_at(ways if round_ < 5 else crossways, received, round_)
        state, plan = learnt(method, state, sent, roster)
        seen.append(circles(plan, "head"))
    assert seen == [[0, 0, 1, 1]] * 6 + [[1, 0, 1, 0]]  # clustered after rounds 1, 4 and 7


def test_a_client_that_sends_no_numbers_keeps_its_cohort() -> None:
    method = ModFL(by={"head": "found"}, every=1, cohorts=2)
    roster = Roster(tuple(ClientInfo(f"c{i}", 10, {}, (0, 1), {"head": ((2,),)}) for i in range(4)), 2, 9)
    state, plan = begun(method, roster)
    ways = {i: [1.0, 0.1 * i] if i < 2 else [0.1 * i, 1.0] for i in range(4)}
    for round_, copies in enumerate([ways, ways | {3: [float("nan"), 0.0]}], start=1):
        sent = looked_at(copies, {i: [0.0, 0.0] for i in range(4)}, round_)
        state, plan = learnt(method, state, sent, roster)
        assert circles(plan, "head") == [0, 0, 1, 1]


# --- any modules, any tasks -------------------------------------------------------------------------------------------


def test_any_number_of_modules_and_groupings() -> None:
    units = {"conv1": ((2,),), "conv2": ((2,),), "fc": ((3,),), "norm": ((1,),), "out": ((4,),)}
    traits = [{"device": d, "site": s} for d, s in (("a", "x"), ("b", "x"), ("a", "y"), ("b", "y"))]
    roster = Roster(tuple(ClientInfo(f"c{i}", 10, t, (0, 1), units) for i, t in enumerate(traits)), 2, 9)
    by = {"conv*": "device", "norm": "private", "fc": "everyone", "out": "site", "*": "private"}
    _, plan = begun(ModFL(by=by), roster)
    assert {unit: circles(plan, unit) for unit in units} == {
        "conv1": [0, 1, 0, 1],
        "conv2": [0, 1, 0, 1],
        "fc": [0, 0, 0, 0],
        "norm": [-1] * 4,
        "out": [0, 0, 1, 1],
    }


def test_modules_of_unlike_tasks_share_no_circle() -> None:
    small, large = {"configuration": ((2,),), "operation": ((3,),)}, {"configuration": ((2,),), "operation": ((5,),)}
    kinds = (small, large, small, large)
    members = tuple(
        ClientInfo(f"c{i}", 10, {"device": "a", "cohort": "x"}, (0, 1), units) for i, units in enumerate(kinds)
    )
    _, plan = begun(ModFL(), Roster(members, 2, 9))
    assert (circles(plan, "configuration"), circles(plan, "operation")) == ([0, 0, 0, 0], [0, 1, 0, 1])


def test_tasks_with_other_outputs_learn_side_by_side() -> None:
    """Cohort south does a task with two outputs: clients of one device still share the input side."""
    clients = []
    for client in crossed(each=2).clients:
        outputs = 2 if client.traits["cohort"] == "south" else 4
        data = client.train.x, client.train.y % outputs
        model = partial(TwoModules, client.train.x.shape[1], classes=outputs)
        clients.append(fq.Client(client.name, model, data, test=data, traits=client.traits))
    result = run(fq.Scenario("two tasks", clients, crossed().training), ModFL(by=FOUND, cohorts=2), rounds=4)
    by_task: dict[str, set[int]] = {"north": set(), "south": set()}
    for client, circle in zip(clients, circles(result.plan, "operation"), strict=True):
        by_task[client.traits["cohort"]].add(circle)
    assert by_task["north"].isdisjoint(by_task["south"])
    assert circles(result.plan, "configuration") == [0, 0, 0, 0, 1, 1, 1, 1]
    assert result.summary["accuracy_mean"] > 0.6


# --- where it is the right method -------------------------------------------------------------------------------------


def test_it_wins_where_device_and_cohort_are_crossed() -> None:
    scenario = crossed(rounds=10)
    won = run(scenario, ModFL(), rounds=10).summary["accuracy_mean"]
    for other in ("local", "fedavg", "fedper"):
        seen = run(scenario, METHODS[other](), rounds=10).evaluations
        assert won > max(e.score for e in seen if e.split == "test") + 0.05, other


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"the module 'fc' is in no circle; add it to `by` \(e.g. by.fc=cohort\)"):
        begun(ModFL(), Roster((ClientInfo("a", 1, {}, (0,), {"fc": ((1,),)}),), 2, 1))
    with pytest.raises(ValueError, match=r"^client 'a' declares no trait 'device'"):
        begun(ModFL(), Roster((ClientInfo("a", 1, {}, (0,), {"configuration": ((1,),)}),), 2, 1))
    with pytest.raises(ValueError, match=r"circles by affinity compare models on samples that the server holds"):
        begun(ModFL(by={"*": "affinity"}), EXAMPLE)
    with pytest.raises(ValueError, match=r"cohorts=3, but no module has its cohorts found"):
        ModFL(cohorts=3)
    with pytest.raises(ValueError, match=r"cohorts=1 is one circle for all"):
        ModFL(by=FOUND, cohorts=1)
    with pytest.raises(ValueError, match=r"split=0 leaves no configuration module"):
        ModFL(split=0)
    with pytest.raises(ValueError, match=r"every=0 never finds cohorts"):
        ModFL(every=0)
