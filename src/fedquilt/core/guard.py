"""Privacy at the server: sums of clipped changes get noise, and are divided by the weight that was expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedquilt._util.randomness import GOLDEN, key_of, mix, signed
from fedquilt.core.privacy_rules import senders
from fedquilt.core.protection import CLIP, WITHIN
from fedquilt.interface.messages import Update
from fedquilt.privacy import Privacy
from fedquilt.privacy.mechanism import gaussian
from fedquilt.sharing import Merged, UnitPlan
from fedquilt.sharing.weighted_sums import Sums

if TYPE_CHECKING:
    from fedquilt.core.values import CircleValues

_COHORT = 20  # one part of the clients of a round is the noise of the count that the clip follows


def guard_of(privacy: Privacy | None, rate: float, clients: int, secret: int) -> Guard | None:
    """What merges with noise, where it is the server that adds it."""
    return Guard(privacy, rate, clients, secret) if privacy is not None and privacy.level == "client" else None


class Guard:
    """Merges with noise. `rate` is the part of the clients that a round is expected to hear, `secret` what noise is
    drawn by: in a simulation the seed, on devices a number that nobody else knows.

    One client moves the sums of all circles together by at most the clip, since it is in one circle of each unit and
    its change was clipped over all of them: so every circle gets noise of one and the same length, and a round is one
    Gaussian event, however many circles there are.
    """

    def __init__(self, privacy: Privacy, rate: float, clients: int, secret: int) -> None:
        self.privacy, self.rate, self.secret = privacy, rate, secret
        self.clip = privacy.clip
        self.round = 1  # the coming one
        self.expects(clients)

    def expects(self, clients: int) -> None:
        """Of so many clients a round is to hear its part."""
        self.cohort, noise = self.rate * clients, self.privacy.found
        # Of one promise a part is spent on counting who was within the clip (Andrew et al. 2021, section 3.2).
        self.count_noise = max(self.cohort / _COHORT, noise) if self.privacy.adaptive else 0.0
        if self.privacy.adaptive and noise > 0:
            noise = (noise**-2 - (2 * self.count_noise) ** -2) ** -0.5
        self.noise = noise

    def merge(self, values: CircleValues, parts: Sequence[tuple[Tensor, Tensor]]) -> Merged:
        """The circles' values, moved by the changes of those who were heard; nobody need have been."""
        device, plan = values.value.device, values.plan
        assert isinstance(plan, UnitPlan)
        here = plan.to(device)
        sums = Sums.nothing(plan.count, values.value.shape[1], device)
        for ids, copies in parts:
            rows = here.row[ids.to(device, non_blocking=True)]
            sums = sums + Sums.of(copies, rows, torch.ones(len(ids), device=device), plan.count)
        return self.moved(values, sums)

    def moved(self, values: CircleValues, sums: Sums) -> Merged:
        """The same from sums of copies that count 1 each."""
        device, plan = values.value.device, values.plan
        assert isinstance(plan, UnitPlan)
        labels = plan.to(device).labels
        noise = torch.cat(
            [self._noise(key, size, labels) for key, size in zip(values.keys, values.sizes, strict=True)], 1
        )
        expected = self.rate * senders(plan.row, plan.sends, plan.count).double()
        return sums.moved(values.value, self.noise * self.clip * noise, expected.to(device))

    def _noise(self, key: object, size: int, labels: Tensor) -> Tensor:
        """(C, size) of one unit in one shape: a function of the secret, the round, the unit and the circle."""
        start = key_of("noise", self.secret, self.round, key)
        return gaussian(mix(start + labels * signed(GOLDEN)), size)

    def tells(self, clients: int) -> dict[str, Tensor]:
        """What clients are told of it: the clip, where that is another one in every round."""
        if not self.privacy.adaptive:
            return {}
        return {CLIP: torch.full((clients, 1), self.clip, dtype=torch.float64)}

    def next(self, ups: Sequence[Update]) -> None:
        """A round is over: let the clip follow how many of its clients were within it."""
        if self.privacy.adaptive:
            # yes or no, whatever a client says: noise is for a half up or down
            within = sum(float(((up.reports[WITHIN] > 0.5).float() - 0.5).sum()) for up in ups)
            noise = float(gaussian(torch.tensor([key_of("count", self.secret, self.round)]), 1))
            share = (within + self.count_noise * noise) / self.cohort + 0.5
            self.clip *= math.exp(-self.privacy.clip_rate * (share - self.privacy.quantile))
        self.round += 1
