"""Which checkpoints hold clients' rows: one writes what changed since the last, so it costs what took part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedquilt.core.federation import Federation
from fedquilt.core.row_store import RowStore
from fedquilt.runs.checkpoint import Tensors, rows_in


class KeptRows:
    """The checkpoints, oldest first, whose rows hold where later ones do not have them."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def lean(self, federation: Federation) -> list[dict[str, Any]]:
        """The checkpoints that the next one can lean on; none where it has to hold all rows.

        They are kept while they are not mostly out of date.
        """
        stores = _stores(federation)
        seen = sum(len(store.which) - len(store.fresh) for store in stores)
        changed = [len(store.changed) for store in stores if store.changed is not None]
        kept = sum(entry["rows"] for entry in self.entries) + sum(changed)
        return self.entries if len(changed) == len(stores) and kept < 2 * seen else []

    def wrote(self, federation: Federation, *entries: dict[str, Any]) -> None:
        """These checkpoints hold all rows as they are now."""
        self.entries = list(entries)
        for store in _stores(federation):
            store.changed = set()

    def found(self, federation: Federation, tensors: Tensors, text: Mapping[str, Any]) -> None:
        """A federation was put where a checkpoint left it."""
        last = {"tensors": text["tensors"], "sha256": text["sha256"], "rows": rows_in(tensors)}
        self.wrote(federation, *text.get("earlier", ()), last)

    @property
    def names(self) -> list[str]:
        """Their files."""
        return [str(entry["tensors"]) for entry in self.entries]


def _stores(federation: Federation) -> list[RowStore]:
    return [family_state.store for family_state in federation.simulation.family_states]
