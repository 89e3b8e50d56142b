"""Methods side by side in Python, over seeds, with the differences that are real.

    python examples/compare_methods.py

The command line does the same: fedquilt compare digits local fedavg fedper modfl --seeds 3
"""

from collections.abc import Sequence

import rich

import fedquilt as fq
from fedquilt.report import as_text
from fedquilt.report.compare import Comparison, compare, pair_up
from fedquilt.results import final


def scores(run: fq.Run) -> dict[str, float]:
    """Each client's accuracy on test data after the last round."""
    return {client: row["accuracy"] for client, row in final(run.rows, "received", "test").items()}


def compared(methods: Sequence[str], seeds: int, rounds: int) -> Comparison:
    """Run every method on the same clients with the same seeds."""
    found: dict[str, dict[int, dict[str, float]]] = {method: {} for method in methods}
    for seed in range(seeds):
        scenario = fq.scenarios.build("digits", seed=seed)
        for method in methods:
            run = fq.run(scenario, method, rounds=rounds, seed=seed, readouts=["received"], alone=False)
            found[method][seed] = scores(run)
    _, _, tables, _ = pair_up(found)
    return compare(tables, alone=tables.get("local"), reference="local")


def main(methods: Sequence[str] = ("local", "fedavg", "fedper", "modfl"), seeds: int = 3, rounds: int = 20) -> None:
    """Print the table."""
    rich.print(as_text(compared(methods, seeds, rounds)))


if __name__ == "__main__":
    main()
