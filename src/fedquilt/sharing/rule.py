"""What a merge rule is, and what it may know beside the copies that it merges."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from fedquilt.sharing.weighted_sums import Merged


class Rule(Protocol):
    """A way of merging."""

    def __call__(self, values: Tensor, circle: Tensor, weight: Tensor, circles: int) -> Merged: ...


class MergeContext(NamedTuple):
    """What a rule may know beside the copies that it merges."""

    held: Tensor | None = None  # (C, size) the circles' values until now
    known: Tensor | None = None  # (C,) bool: which circles have one; None: all of them
    key: int = 0  # a hash of the seed and the round, for whatever has to look random
    trusted: Tensor | None = None  # (k,) bool: whose copies the server trusts

    def of(self, ids: Tensor) -> MergeContext:
        """The same for the copies of some clients; `trusted` is over all clients before."""
        if self.trusted is None:
            return self
        return self._replace(trusted=self.trusted.to(ids.device, non_blocking=True)[ids])


NOTHING_KNOWN = MergeContext()


@runtime_checkable
class ContextRule(Protocol):
    """A way of merging that looks at more than copies."""

    needs_context: ClassVar[bool]

    def __call__(
        self, values: Tensor, circle: Tensor, weight: Tensor, circles: int, context: MergeContext = NOTHING_KNOWN
    ) -> Merged: ...  # fmt: skip


def apply_rule(
    rule: Rule, values: Tensor, circle: Tensor, weight: Tensor, circles: int, context: MergeContext
) -> Merged:  # fmt: skip
    """What a rule makes of copies; it is told the context if it asks for one."""
    if isinstance(rule, ContextRule):
        return rule(values, circle, weight, circles, context)
    return rule(values, circle, weight, circles)
