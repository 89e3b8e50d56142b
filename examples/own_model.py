"""A model of your own, cut the way you want, and a plan of your own for its parts.

    python examples/own_model.py

It prints how the network was cut, the plan, and what that is worth to the clients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

import fedquilt as fq
from fedquilt.interface.messages import Roster
from fedquilt.methods import State
from fedquilt.sharing import by_trait, everyone, nobody


class Reader(nn.Module):
    """A network in three named parts. `units` cuts it: each pattern takes parameters and buffers by name."""

    units: Mapping[str, Sequence[str]] = {"eye": ["conv*", "norm*"], "middle": ["hidden*"], "head": ["head*"]}

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)  # its running statistics are buffers, and travel with the unit they belong to
        self.hidden = nn.Linear(8 * 4 * 4, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        seen = nn.functional.max_pool2d(self.norm(self.conv(x)).relu(), 2)  # (n, 8, 4, 4)
        scores: Tensor = self.head(self.hidden(seen.flatten(1)).relu())
        return scores


@dataclass(frozen=True)
class EyesForAll(fq.Method):
    """The eye is everybody's, the middle is the cohort's, the head stays home: a method is a plan, and this is one."""

    name: ClassVar[str] = "eyes-for-all"

    def plan(self, state: State, roster: Roster) -> fq.Plan:
        samples = roster.samples
        middle = by_trait(["middle"], roster.trait("cohort"), samples)
        return everyone(["eye"], samples) | middle | nobody(["head"], len(roster))


def build(seed: int = 0) -> fq.Scenario:
    """The bundled digits, all clients with the finer sensor, each with the network above."""
    digits = fq.scenarios.build("digits", seed=seed)
    clients = [
        fq.Client(c.name, Reader, c.train, c.validation, c.test, traits=c.traits, labels=c.labels)
        for c in digits.clients
        if c.traits["device"] == "gen2"
    ]
    training = fq.Training(rounds=10, epochs=4, batch=8, lr=0.1)
    return fq.Scenario("readers", clients, training, label_names=digits.label_names)


def main(rounds: int = 10) -> None:
    """Print how the network was cut, the plan, and what it is worth."""
    for unit in fq.cut(Reader()):
        print(f"{unit.name:<8} parameters {', '.join(unit.parameters)}; buffers {', '.join(unit.buffers) or 'none'}")
    run = fq.run(build(), EyesForAll(), rounds=rounds)
    print(run.plan)
    print(f"mean accuracy {run.summary['accuracy_mean']:.3f}, alone {run.summary['alone_mean']:.3f}")


if __name__ == "__main__":
    main()
