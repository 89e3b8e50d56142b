"""What a merge rule asks of a federation: circles that are big enough, and clients that the server trusts."""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch
from torch import Tensor

from fedquilt._util.suggest import did_you_mean
from fedquilt.client import Client, Split
from fedquilt.families.common import form_for
from fedquilt.interface.messages import Roster
from fedquilt.interface.method import Method
from fedquilt.scenario import Scenario
from fedquilt.sharing import Mean, MixedUnit, Plan, Rule, UnitPlan, named_settings

SERVER = "server"  # the client that a server makes of the samples it holds


def trusted_names(rule: Rule) -> tuple[str, ...]:
    """The names of clients that a rule trusts."""
    return tuple(getattr(rule, "trusted", ()))


def with_server_client(scenario: Scenario, rule: Rule) -> Scenario:
    """The scenario with one client more where a rule trusts the server's own: it trains on `common`, as clients do.

    So the server's update is whatever the method makes of it, in the circles that the first client's kind is in. It has
    as many samples as the median client, of all labels alike: moves are cut to the length of its own, so it has to take
    about as many steps as others do. It has no test samples, so it is not measured.
    """
    names = [client.name for client in scenario.clients]
    if SERVER not in trusted_names(rule) or SERVER in names:
        return scenario
    if scenario.common is None:
        raise ValueError(
            "fltrust compares with an update of the server's own, and it holds no samples; give the scenario "
            "common=(x, y), or name clients that it trusts: --set trusted=NAME"
        )
    first = scenario.clients[0]
    held = form_for(scenario.common, first)
    usual = statistics.median_low(client.samples for client in scenario.clients)
    by_label = held.y.argsort(stable=True)
    some = by_label[torch.linspace(0, len(held) - 1, min(usual, len(held))).round().long()]
    held = Split(held.x[some], held.y[some])
    return replace(scenario, clients=(*scenario.clients, Client(SERVER, first.model, held, traits=first.traits)))


def trusted_among(rule: Rule, roster: Roster) -> Tensor | None:
    """(K,) whose copies a rule trusts; None where it asks for nobody's."""
    wanted = trusted_names(rule)
    if not wanted:
        return None
    for name in wanted:
        if name not in roster.names:
            told = did_you_mean(name, roster.names, "client to trust")
            raise ValueError(f"the merge trusts somebody who is not here: {told}; say --set trusted=NAME")
    return torch.tensor([name in wanted for name in roster.names])


def check_circles(rule: Rule, plan: Plan, method: Method) -> None:
    """Refuse a rule that could not guard a single circle of a plan, before any work.

    Where some circles are big enough, those that are not take their median.
    """
    if not method.merges and not isinstance(rule, Mean):
        raise ValueError(
            f"the method '{method.name}' merges no copies, so the merge {called(rule)} would guard nobody; use 'mean'"
        )
    least = int(getattr(rule, "least", 1))
    shared = {unit: each for unit, each in plan.units.items() if isinstance(each, UnitPlan) and each.count}
    if least > 1 and shared:
        biggest = {unit: int(each.members.max()) for unit, each in shared.items()}
        unit = max(biggest, key=lambda unit: biggest[unit])
        if 1 < biggest[unit] < least:  # circles of one send nothing
            raise ValueError(
                f"the merge {called(rule)} bears a liar in circles of {least} clients or more, and the biggest here, "
                f"of unit '{unit}', has {biggest[unit]}; use the merge 'mean', or plan bigger circles"
            )
    mixed = [unit for unit, each in plan.units.items() if isinstance(each, MixedUnit)]
    if mixed and not isinstance(rule, Mean):
        raise ValueError(
            f"unit '{mixed[0]}' is mixed for each client and has no circles, so {called(rule)} cannot merge it; "
            "use 'mean'"
        )


def called(rule: Rule) -> str:
    """What users call a rule, with its settings."""
    named = named_settings(rule)
    return str(rule) if named is None else " ".join([f"'{named.pop('name')}'", *(f"{k}={v}" for k, v in named.items())])
