"""Clients of unlike hardware: speeds and bandwidths that are drawn, for the virtual time of simulations."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from fedquilt.client import Client
from fedquilt.scenario import Scenario


def with_hardware(
    scenario: Scenario,
    speed: tuple[float, float] = (50.0, 500.0),
    bandwidth: tuple[float, float] = (0.1, 10.0),
    seed: int = 0,
) -> Scenario:
    """The scenario with clients that declare a `speed`, training samples a second, and a `bandwidth`, MB a second.

    Both are drawn from a range, log-uniformly: ten times slower is as likely at either end.

    >>> import fedquilt as fq
    >>> made = with_hardware(fq.scenarios.build("digits", clients=4), speed=(100, 100), bandwidth=(1, 1))
    >>> made.clients[0].traits["speed"], made.clients[0].traits["bandwidth"]
    ('100', '1')
    """
    for name, (low, high) in (("speed", speed), ("bandwidth", bandwidth)):
        if not 0 < low <= high < math.inf:
            raise ValueError(f"{name}=({low}, {high}) is no range; give two numbers above 0, the lower one first")
    draw = np.random.default_rng(seed)
    clients = []
    for client in scenario.clients:
        fast, wide = (math.exp(draw.uniform(math.log(low), math.log(high))) for low, high in (speed, bandwidth))
        clients.append(_declaring(client, {"speed": f"{fast:.6g}", "bandwidth": f"{wide:.6g}"}))
    return replace(scenario, clients=tuple(clients), origin={})  # its builder makes clients without


def _declaring(client: Client, traits: dict[str, str]) -> Client:
    """The client with more traits."""
    return Client(
        client.name, client.model, client.train, client.validation, client.test, {**client.traits, **traits},
        client.labels, client.changes,
    )  # fmt: skip
