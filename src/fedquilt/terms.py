"""What all clients of a federation agree on before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from fedquilt.client import Split
from fedquilt.methods.base import Method
from fedquilt.training.settings import Training


@dataclass(frozen=True)
class Terms:
    """What all clients of a federation agree on before it starts."""

    method: Method
    training: Training
    classes: int
    seed: int = 0
    common: Split | None = None
    public_test: Split | None = None

    @property
    def public(self) -> list[Split]:
        """The public samples that every client holds: `common`, then `public_test`."""
        return [split for split in (self.common, self.public_test) if split is not None]

    @cached_property
    def public_counts(self) -> tuple[int, ...]:
        """How many public samples of each label there are; none where there are no public samples."""
        if not self.public:
            return ()
        return tuple(torch.cat([split.y for split in self.public]).bincount(minlength=self.classes).tolist())
