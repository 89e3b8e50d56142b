"""What all clients of a federation agree on before it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from fedquilt.client import Split
from fedquilt.engines.settings import Training
from fedquilt.families.common import Common, Declared, form_for
from fedquilt.interface.method import Method
from fedquilt.privacy import Privacy
from fedquilt.secure import SecureSums
from fedquilt.sharing import Compression
from fedquilt.tasks import Classification, Task


@dataclass(frozen=True)
class Terms:
    """What all clients of a federation agree on before it starts."""

    method: Method
    training: Training
    classes: int
    seed: int = 0
    common: Common | None = None
    public_test: Common | None = None
    privacy: Privacy | None = None  # with its noise found
    task: Task = field(default_factory=Classification)
    secure: SecureSums | None = None
    compress: Compression = field(default_factory=Compression)
    everyone: bool = False  # whether models are also looked at on everyone's test samples, after the last round

    def __post_init__(self) -> None:
        if self.method.needs_plain_sgd and (self.training.optimiser != "sgd" or self.training.momentum):
            raise ValueError(
                f"the method '{self.method.name}' reads gradients off the way that clients go, which holds for plain "
                "SGD only; train with optimiser=sgd and momentum=0"
            )
        if self.method.needs_no_decay and self.training.weight_decay:
            raise ValueError(
                f"the method '{self.method.name}' puts weights in place by its steps, and weight decay would move "
                "them on; train with weight_decay=0"
            )

    def public(self, client: Declared) -> list[Split]:
        """The public samples that a client holds, in its form: `common`, then `public_test`."""
        return [form_for(held, client) for held in (self.common, self.public_test) if held is not None]

    @cached_property
    def public_counts(self) -> tuple[int, ...]:
        """How many public samples of each label there are, or in all; none where there are no public samples."""
        labels = [held.y for held in (self.common, self.public_test) if held is not None]
        if labels and not self.task.has_classes:
            return (sum(map(len, labels)),)
        return tuple(torch.cat(labels).bincount(minlength=self.classes).tolist()) if labels else ()
