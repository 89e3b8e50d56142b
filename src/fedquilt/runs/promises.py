"""What a run says of privacy: what was spent after each round, and in the end what is promised to whom."""

from __future__ import annotations

import math
from typing import Any

from fedquilt.core.federation import Federation, RoundReport
from fedquilt.core.privacy_rules import signal_to_noise


def spent(federation: Federation, report: RoundReport) -> list[dict[str, Any]]:
    """A line on what privacy has cost after a round, where it was asked for; an epsilon without a bound is None."""
    privacy = federation.terms.privacy
    if privacy is None or report.epsilon is None:
        return []
    epsilon = report.epsilon if math.isfinite(report.epsilon) else None
    told = {"delta": privacy.delta, "noise": privacy.found, "clip": _clip(federation)}
    return [{"round": report.round, "epsilon": epsilon, **told}]


def promised(federation: Federation) -> dict[str, Any]:
    """What a summary says: epsilon and delta, noise and clip, how much a round is noise, and a sentence; or nothing."""
    budget, server = federation.budget, federation.server
    if budget is None:
        return {}
    cost, privacy = budget.epsilon(server.round, fine=True), budget.privacy
    sums = privacy.level != "sample"
    ratio = signal_to_noise(privacy, federation.training.share, server.plan, server.sizes) if sums else None
    return {
        "epsilon": cost if math.isfinite(cost) else None,
        "delta": privacy.delta,
        "noise_multiplier": privacy.found,
        "clip": _clip(federation),
        **({} if ratio is None else {"signal_to_noise": ratio}),
        "privacy": budget.told(server.round),
    }


def _clip(federation: Federation) -> float:
    """The clip now, which may follow the clients."""
    privacy, guard = federation.terms.privacy, federation.server.guard
    assert privacy is not None
    return privacy.clip if guard is None else guard.clip
