"""The server's values under plans that change: they follow their circles, and nobody is sent a value that is none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from core_help import Planned
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedquilt.core.server import Server
from fedquilt.core.values import CircleValues
from fedquilt.families.layout import Signature
from fedquilt.interface.messages import ClientInfo, Roster, UnitValues, Update
from fedquilt.sharing import MixedUnit, Plan, UnitPlan, inherit, mean

ONE: Signature = ((1,),)
TWO: Signature = ((2,),)


def roster(*units: dict[str, Signature]) -> Roster:
    members = tuple(ClientInfo(f"client-{i}", 1, {}, (0,), own) for i, own in enumerate(units))
    return Roster(members, 2, 10)


def serve(everyone: Roster, *plans: Plan) -> Server:
    """A server whose first value of everything is -1."""
    signatures = {(unit, s) for member in everyone.members for unit, s in member.units.items()}
    first = {key: torch.full((sum(shape[0] for shape in key[1]),), -1.0) for key in signatures}
    return Server(Planned(plans=plans), everyone, lambda _: first, mean)


def send(server: Server, ids: Sequence[int], **values: Sequence[float]) -> Update:
    """These clients' copies of the units that the server's plan has them send, one number a unit."""
    blocks = []
    for unit, numbers in values.items():
        given_by = [at for at, i in enumerate(ids) if bool(server.plan.sends(unit)[i])]
        if given_by:
            value = torch.tensor([[numbers[at]] for at in given_by])
            places = None if len(given_by) == len(ids) else torch.tensor(given_by)
            blocks.append(UnitValues((unit,), (1,), places, value))
    return Update(server.round + 1, tuple(ids), tuple(blocks))


def gets(server: Server, client: int, unit: str) -> tuple[float | None, float]:
    """What a client would be sent of a unit (the first number), and its pull."""
    down = server.instructions([client])
    for block, pull in zip(down.blocks, down.pulls, strict=True):
        value = block.columns((unit,))
        if value is not None:
            return float(value[0, 0]), 1.0 if pull is None else float(pull[0])
    return None, 0.0


def plan(*circles: Sequence[int], asked: dict[str, list[bool]] | None = None) -> Plan:
    return Plan({name: UnitPlan(c) for name, c in zip("uvw", circles, strict=False)}, asked)


four = roster(*({"u": ONE} for _ in range(4)))


def test_a_circle_that_splits_hands_its_value_on() -> None:
    server = serve(four, plan([0, 0, 0, 0]), plan([0, 0, 3, 3]))
    server.merge([send(server, [0, 1], u=[2.0, 4.0])])  # the plan changes here; nobody of circle 3 was heard
    assert [gets(server, i, "u") for i in range(4)] == [(3.0, 1.0), (3.0, 1.0), (-1.0, 1.0), (-1.0, 1.0)]
    server.merge([send(server, [2, 3], u=[8.0, 10.0])])
    assert [gets(server, i, "u")[0] for i in range(4)] == [3.0, 3.0, 9.0, 9.0]


def test_circles_that_join_keep_the_value_of_the_id_that_goes_on() -> None:
    server = serve(four, plan([0, 0, 7, 7]), plan([0, 0, 7, 7]), plan([7, 7, 7, 7]))
    server.merge([send(server, [0, 1, 2, 3], u=[1.0, 3.0, 5.0, 7.0])])
    assert [gets(server, i, "u")[0] for i in range(4)] == [2.0, 2.0, 6.0, 6.0]
    server.merge([Update(2, (0,), ())])  # nobody is heard
    assert [gets(server, i, "u")[0] for i in range(4)] == [6.0] * 4


def test_a_new_id_inherits_from_where_most_members_were() -> None:
    server = serve(four, plan([0, 0, 1, 1]), plan([0, 0, 1, 1]), plan([5, 5, 5, -1]))
    server.merge([send(server, [0, 1, 2, 3], u=[1.0, 3.0, 5.0, 7.0])])
    server.merge([Update(2, (3,), ())])
    assert [gets(server, i, "u")[0] for i in range(3)] == [2.0] * 3
    assert gets(server, 3, "u") == (None, 0.0)


def test_a_circle_without_a_value_is_not_installed() -> None:
    """A unit that was private has no value on the server until somebody in its circle is heard."""
    private = Plan({"u": UnitPlan([-1] * 4)})
    server = serve(four, private, plan([0, 0, 1, 1]), plan([0, 0, 1, 1]))
    assert server.all_values == []
    server.merge([Update(1, (0, 1, 2, 3), ())])
    assert [gets(server, i, "u")[1] for i in range(4)] == [0.0] * 4  # pull 0: zeros are not a value
    server.merge([send(server, [0, 2], u=[2.0, 5.0])])
    assert [gets(server, i, "u") for i in range(4)] == [(2.0, 1.0), (2.0, 1.0), (5.0, 1.0), (5.0, 1.0)]


def test_asked_first_shared_then() -> None:
    """Copies that were asked for are merged by the plan that is made of them, in the same round."""
    ask = plan([-1] * 4, asked={"u": [True, True, True, False]})
    server = serve(four, ask, plan([0, 0, 1, 1]))
    assert server.plan.sends("u").tolist() == [True, True, True, False]
    server.merge([send(server, [0, 1, 2, 3], u=[2.0, 4.0, 9.0, 0.0])])
    assert [gets(server, i, "u")[0] for i in range(4)] == [3.0, 3.0, 9.0, 9.0]


def test_only_what_is_asked_changes_and_values_stay() -> None:
    server = serve(four, plan([0, 0, 1, 1]), plan([0, 0, 1, 1], asked={"u": [True] * 4}), plan([0, 0, 1, 1]))
    server.merge([send(server, [0, 1, 2, 3], u=[1.0, 3.0, 5.0, 7.0])])
    server.merge([Update(2, (1,), ())])
    assert [gets(server, i, "u")[0] for i in range(4)] == [2.0, 2.0, 6.0, 6.0]


# --- families --------------------------------------------------------------------------------------------------------

half = roster({"u": ONE, "v": ONE}, {"u": ONE, "v": ONE}, {"u": ONE, "v": TWO}, {"u": ONE, "v": TWO})


def halves(ask: bool = False) -> Plan:
    """u and v planned alike, by kind; u has one shape everywhere, v has two."""
    by_kind = UnitPlan([0, 0, 1, 1])
    return Plan({"u": by_kind, "v": by_kind}, {"u": [True] * 4} if ask else None)


def test_a_unit_of_one_shape_lies_in_one_place() -> None:
    server = serve(half, halves())
    keys = [key for circle_values in server.all_values for key in circle_values.keys]
    assert len(keys) == len(set(keys)) == 3


@pytest.mark.parametrize("changing", [False, True])
def test_a_kind_that_rests_keeps_its_value_when_plans_change(changing: bool) -> None:
    server = serve(half, halves(), halves(), halves(ask=changing), halves())
    server.merge([Update(1, (0, 1), (UnitValues(("u", "v"), (1, 1), None, torch.tensor([[1.0, 5.0], [3.0, 7.0]])),))])
    server.merge(
        [Update(2, (2, 3), (UnitValues(("u", "v"), (1, 2), None, torch.tensor([[8.0, 1.0, 1.0], [6.0, 1.0, 1.0]])),))]
    )
    server.merge(
        [Update(3, (2, 3), (UnitValues(("u",), (1,), None, torch.tensor([[9.0], [9.0]])),))]
    )  # v was not sent here
    assert gets(server, 0, "u") == (2.0, 1.0)
    assert gets(server, 0, "v") == (6.0, 1.0)
    assert gets(server, 2, "u") == (9.0, 1.0)
    assert gets(server, 2, "v") == (1.0, 1.0)


def test_an_id_taken_over_by_another_shape_inherits_no_first_value() -> None:
    one = Plan({"u": UnitPlan([0, 0, 1, 1]), "v": UnitPlan([0, 0, 1, 1])})
    two = Plan({"u": UnitPlan([0, 0, 1, 1]), "v": UnitPlan([1, 1, 0, 0])})
    server = serve(half, one, one, two)
    server.merge([Update(1, (0, 1), (UnitValues(("u", "v"), (1, 1), None, torch.tensor([[1.0, 5.0], [3.0, 7.0]])),))])
    server.merge([Update(2, (2,), ())])
    # circle 1 never had a value in this shape
    assert gets(server, 0, "v")[1] == 0.0


def test_families_share_a_circle() -> None:
    together = Plan({"u": UnitPlan([0, 0, 0, 0], [1, 1, 2, 4]), "v": UnitPlan([0, 0, 1, 1])})
    server = serve(half, together)
    server.merge([
        Update(1, (0, 1), (UnitValues(("u",), (1,), None, torch.tensor([[1.0], [3.0]])),)),
        Update(1, (2, 3), (UnitValues(("u",), (1,), None, torch.tensor([[8.0], [9.0]])),)),
    ])  # fmt: skip
    assert gets(server, 0, "u")[0] == pytest.approx((1 + 3 + 16 + 36) / 8)
    assert gets(server, 3, "u") == gets(server, 0, "u")


# --- mixtures --------------------------------------------------------------------------------------------------------


def test_mixtures_and_circles_do_not_inherit_by_number() -> None:
    circles = UnitPlan([1, 1, 0, 0])
    mixed = MixedUnit(torch.full((4, 4), 0.25))
    assert inherit(mixed, circles).tolist() == [1, 1, 0, 0]  # the row of the circle each client was in
    assert inherit(circles, mixed).tolist()[1] in (0, 1)
    server = serve(four, Plan({"u": circles}), Plan({"u": circles}), Plan({"u": mixed}))
    server.merge([send(server, [0, 1, 2, 3], u=[1.0, 3.0, 5.0, 7.0])])
    server.merge([Update(2, (0,), ())])
    assert [gets(server, i, "u")[0] for i in range(4)] == [4.0] * 4  # of what each received before: 2, 2, 6, 6


def test_a_mixture_of_what_clients_sent_last() -> None:
    mixed = Plan({"u": MixedUnit([[0.5, 0.25, 0.25, 0], [0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5], [0, 0, 0, 0]])})
    server = serve(four, mixed)
    server.merge([send(server, [0, 1], u=[2.0, 8.0])])
    assert gets(server, 0, "u")[0] == pytest.approx(0.5 * 2 + 0.25 * 8 - 0.25 * 1)  # 2 has its first weights, -1
    server.merge([send(server, [2], u=[6.0])])
    assert gets(server, 0, "u")[0] == pytest.approx(0.5 * 2 + 0.25 * 8 + 0.25 * 6)  # 0 and 1 as they were
    assert gets(server, 1, "u")[0] == pytest.approx(0.5 * 8 + 0.5 * 6)
    assert gets(server, 3, "u") == (None, 0.0)
    assert server.held("u", torch.tensor([1, 0]))[:, 0].tolist() == pytest.approx([7.0, 4.5])


def test_a_newcomer_is_in_mixtures_once_it_has_a_copy() -> None:
    rows = [[0.5, 0.5, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]]
    older = MixedUnit([row[:2] for row in rows[:2]])
    values = CircleValues(MixedUnit(rows), (("u", ((1,),)),), torch.tensor([[2.0], [6.0], [0.0]]), torch.ones(3).bool())
    assert inherit(values.plan, older).tolist() == [0, 1, -1]
    values.known[2] = False
    value, known = values.received(lambda whole: whole)
    assert value[:, 0].tolist() == [4.0, 4.0, 4.0]
    assert bool(known.all())


# --- in general ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_values_under_any_sequence_of_plans(data: st.DataObject) -> None:
    """Against a plain dictionary: circle id -> value, with majority inheritance for new ids."""
    circles = st.lists(st.integers(-1, 3), min_size=4, max_size=4)
    sequence = [data.draw(circles) for _ in range(5)]
    server = serve(four, *(plan(c) for c in sequence))
    held: dict[int, float] = {c: -1.0 for c in sequence[0] if c >= 0}
    for turn in range(4):
        before, after = sequence[turn], sequence[turn + 1]
        ids = sorted(data.draw(st.sets(st.integers(0, 3), min_size=1)))
        numbers = [float(10 * turn + i) for i in ids]
        sends = server.plan.sends("u")
        heard = {i: number for i, number in zip(ids, numbers, strict=True) if bool(sends[i])}
        server.merge([send(server, ids, u=numbers)])
        now: dict[int, float] = {}
        for c in {c for c in after if c >= 0}:
            mine = [heard[i] for i in heard if after[i] == c]
            came = [before[i] for i in range(4) if after[i] == c and before[i] >= 0]
            if mine:
                now[c] = sum(mine) / len(mine)
            elif c in {b for b in before if b >= 0}:
                if c in held:
                    now[c] = held[c]
            elif came:
                votes = {b: came.count(b) for b in set(came)}
                best = min(b for b in votes if votes[b] == max(votes.values()))
                if best in held:
                    now[c] = held[best]
        held = now
        for i in range(4):
            value, pull = gets(server, i, "u")
            shares = after[i] >= 0 and after.count(after[i]) > 1
            if shares and after[i] in held:
                assert pull == 1.0
                assert value == pytest.approx(held[after[i]])
            else:
                assert pull == 0.0


def test_what_a_plan_may_not_say() -> None:
    with pytest.raises(ValueError, match="clients 'client-0' and 'client-2' share it, but one has the shapes"):
        serve(half, Plan({"v": UnitPlan([0, 0, 0, 0])}))
    with pytest.raises(ValueError, match="for 3 clients but there are 4"):
        serve(half, Plan({"u": UnitPlan([0, 0, 0])}))
    with pytest.raises(ValueError, match="no client's model has it"):
        serve(half, Plan({"z": UnitPlan([0, 0, 0, 0])}))


def test_held_values() -> None:
    server = serve(four, plan([0, 0, 1, 1]))
    server.merge([send(server, [0, 1, 2, 3], u=[1.0, 3.0, 5.0, 7.0])])
    found: Tensor = server.held("u", torch.tensor([3, 0]))
    assert found.tolist() == [[6.0], [2.0]]
    with pytest.raises(KeyError, match="in no circle of client 'client-0'"):
        serve(four, plan([-1] * 4)).held("u", torch.tensor([0]))
