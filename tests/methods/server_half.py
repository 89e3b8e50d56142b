"""A method's server half by itself: the plan at the start, after a round, and when clients join or change."""

from __future__ import annotations

from dataclasses import replace

from fedquilt.interface.messages import Roster, Updates
from fedquilt.methods import Method, State
from fedquilt.sharing import Plan


def begun(method: Method, roster: Roster) -> tuple[State, Plan]:
    state = method.begin(roster)
    return state, method.plan(state, roster)


def learnt(method: Method, state: State, updates: Updates, roster: Roster) -> tuple[State, Plan]:
    state = method.learn(state, updates, roster)
    return state, method.plan(state, roster)


def joined(method: Method, state: State, roster: Roster, updates: Updates) -> tuple[State, Plan]:
    """The last of the roster is new."""
    return changed(method, state, replace(roster, members=roster.members[:-1]), roster, updates)


def changed(
    method: Method, state: State, before: Roster, roster: Roster, updates: Updates | None = None
) -> tuple[State, Plan]:
    state = method.enrol(state, before, roster, updates or Updates(0, ()))
    return state, method.plan(state, roster)
