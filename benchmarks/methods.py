"""Every method on digits, feddl-har and modfl-cameras, for a few rounds: which run, and what those that cannot say.

    python benchmarks/methods.py                      # the latter two need FEDQUILT_DATA

It is no comparison: a few rounds say nothing about how good a method is. A cell is the mean test accuracy in per cent
with the method's own read-out, or a number that stands for the sentence below the table.
"""

from __future__ import annotations

import argparse
import time

import fedquilt as fq

SCENARIOS: dict[str, dict[str, object]] = {
    "digits": {"common": 10},
    "feddl-har": {},
    "modfl-cameras": {"clients": 4, "cohorts": 2, "labels": 3, "fraction": 0.03},
}


def tried(scenario: fq.Scenario, method: str, rounds: int) -> str:
    """What a method reached, or why it does not go with a scenario."""
    try:
        run = fq.run(
            scenario, method, rounds=rounds, alone=False, evaluate_every=rounds, training={"epochs": 1},
            engine="sequential",
        )  # fmt: skip
    except ValueError as error:
        return str(error)
    return f"{100 * run.summary['accuracy_mean']:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", nargs="*", default=list(SCENARIOS), choices=list(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--methods", nargs="*", default=list(fq.METHODS), choices=list(fq.METHODS), metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    built = {name: fq.scenarios.build(name, seed=0, **SCENARIOS[name]) for name in arguments.scenarios}
    reasons: list[str] = []
    print(f"| method | {' | '.join(built)} | seconds |", "|---" * (len(built) + 2) + "|", sep="\n")
    for method in arguments.methods:
        start, cells = time.perf_counter(), []
        for scenario in built.values():
            said = tried(scenario, method, arguments.rounds)
            if said.replace(".", "").isdigit():
                cells.append(said)
            else:
                reasons += [] if said in reasons else [said]
                cells.append(f"({reasons.index(said) + 1})")
        print(f"| {method} | {' | '.join(cells)} | {time.perf_counter() - start:.1f} |", flush=True)
    print(*("", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))), sep="\n")


if __name__ == "__main__":
    main()
