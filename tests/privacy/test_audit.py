"""An empirical audit: whoever sees the models tries to tell whether one client took part.

A canary sends the greatest change that the clip allows, in a direction that nobody else goes. Many small federations
with and without it give a score each, how far the model went that way. The best threshold, with confidence bounds on
both errors (Clopper and Pearson 1934), gives an epsilon that the mechanism has at least: (1 - delta - miss) / false
alarm <= e^epsilon. It has to stay below the accountant's, and to be far above without noise: an audit that cannot fail
says nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("dp_accounting")

from privacy_help import audited

import fedquilt as fq
from fedquilt._util.randomness import each_of
from fedquilt.core.guard import Guard
from fedquilt.core.protection import protect
from fedquilt.core.server import Server
from fedquilt.interface.messages import ClientInfo, Roster, UnitValues, Update
from fedquilt.methods import FedAvg
from fedquilt.privacy import Budget, Use

TRIALS, ROUNDS, CLIENTS, SIZE = 600, 2, 4, 3


def outputs(privacy: fq.Privacy, rate: float, canary: bool) -> Tensor:
    """(trials, rounds * size) how the server's value moved in each round of each trial; client 0 is the canary."""
    members = [ClientInfo(f"c{i}", 1, {}, (0,), {"w": ((SIZE,),)}) for i in range(CLIENTS)]
    found = []
    for trial in range(TRIALS):
        secret = 2 * trial + canary  # both sides have noise and samples of their own
        guard = Guard(privacy, rate, CLIENTS, secret)
        server = Server(
            FedAvg(), Roster(tuple(members), 1, ROUNDS), lambda _: {("w", ((SIZE,),)): torch.zeros(SIZE)},
            privacy=privacy, guard=guard,
        )  # fmt: skip
        for round_ in range(1, ROUNDS + 1):
            chosen = [i for i in each_of(CLIENTS, rate, hash((secret, round_)) % 2**62) if i or canary]
            before = server.all_values[0].value.clone()
            ups = []
            if chosen:
                down = server.instructions(chosen)
                moved = before.repeat(len(chosen), 1)
                for row, i in zip(moved, chosen, strict=True):
                    row[0 if i == 0 else 1] += 100.0 if i == 0 else 1.0
                up = Update(round_, tuple(chosen), (UnitValues(("w",), (SIZE,), None, moved),))
                ups = [protect(up, down, privacy, [0] * len(chosen))]
            server.merge(ups)
            found.append((server.all_values[0].value - before)[0])
    return torch.stack(found).view(TRIALS, ROUNDS * SIZE)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_the_audit_stays_below_the_accountant_and_finds_out_where_noise_is_missing(rate: float) -> None:
    delta = 1e-5

    def score(privacy: fq.Privacy, canary: bool) -> Tensor:
        moved = outputs(privacy, rate, canary).view(TRIALS, ROUNDS, SIZE)
        return moved[:, :, 0].sum(1)  # the way that only the canary goes

    promised = fq.Privacy(noise=2.0, clip=1.0, smallest=2, delta=delta)
    epsilon = Budget(promised, Use(rate)).epsilon(ROUNDS)
    seen = audited(score(promised, True), score(promised, False), delta)
    assert seen < epsilon
    bare = fq.Privacy(noise=1e-6, clip=1.0, smallest=2, delta=delta)
    assert audited(score(bare, True), score(bare, False), delta) > epsilon  # the promise is found out


def test_the_audit_finds_out_where_a_client_is_not_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    privacy = fq.Privacy(noise=2.0, clip=1.0, smallest=2)
    epsilon = Budget(privacy, Use()).epsilon(ROUNDS)
    monkeypatch.setattr(f"{__name__}.protect", lambda up, *_: up)
    scores = [outputs(privacy, 1.0, canary).view(TRIALS, ROUNDS, SIZE)[:, :, 0].sum(1) for canary in (True, False)]
    assert audited(scores[0], scores[1], privacy.delta) > epsilon
