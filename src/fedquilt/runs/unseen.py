"""Clients that are held out: they take no part in a run, join when it is over, say what it is worth to others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedquilt.client import Client
from fedquilt.core.federation import Federation
from fedquilt.runs.onboarding import Onboarded, join


@dataclass(frozen=True)
class Joined:
    """The clients that were held out, after they joined; `refused` says why they could not, where they could not."""

    clients: tuple[Onboarded, ...] = ()
    refused: str = ""

    @property
    def told(self) -> dict[str, Any]:
        """What a summary says of them: means on their test samples, and each one's score and that alone."""
        if self.refused:
            return {"unseen_refused": self.refused}
        if not self.clients:
            return {}
        scores = {one.name: (one.scores[one.personal]["test"], one.scores["alone"]["test"]) for one in self.clients}
        return {
            "unseen_mean": sum(score for score, _ in scores.values()) / len(scores),
            "unseen_gain_over_alone": sum(one.gain for one in self.clients) / len(scores),
            "unseen": {name: {"score": score, "alone": alone} for name, (score, alone) in scores.items()},
        }


def let_join(unseen: Sequence[Client], federation: Federation, settled: int) -> Joined:
    """Every client that was held out joins by itself; the others hear nothing of it."""
    try:
        return Joined(tuple(join(client, federation, settled) for client in unseen))
    except (ValueError, NotImplementedError) as error:  # the rounds are over, and are not lost for it
        return Joined(refused=f"clients that were held out could not join: {error}")
