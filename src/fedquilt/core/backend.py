"""Where clients are: simulated in this process, or on machines of their own. The loop of rounds knows only this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from fedquilt.client import Client
from fedquilt.core.server import Server
from fedquilt.families.common import Common
from fedquilt.families.layout import Signature
from fedquilt.interface.messages import ClientInfo, Instructions, Update, Updates
from fedquilt.interface.readout import Readout
from fedquilt.interface.sent_models import SentModels
from fedquilt.results import Evaluation


class Backend(Protocol):
    """A federation's clients, wherever they are."""

    @property
    def where(self) -> str:
        """Where clients train, in a word: for summaries."""

    @property
    def engines(self) -> list[str]:
        """What they are trained by, family by family, as far as that is known."""

    @property
    def late(self) -> bool:
        """Whether what clients score after a round comes with their answers of the next one."""

    def members(self) -> Mapping[int, ClientInfo]:
        """What each client declares, by its number."""

    def first_values(self, draw: int = 0) -> Mapping[tuple[str, Signature], Tensor]:
        """The value of every unit, in every shape, that the server starts from; another draw gives others."""

    def architectures(self) -> list[tuple[Client, nn.Module]]:
        """Of each family its first client and the module that its clients have in common."""

    def sent_models(self, updates: Updates, samples: Common) -> list[SentModels]:
        """The whole models that were sent, to be run on samples of the server's in their clients' form."""

    def turn(self, server: Server, round_: int) -> None:
        """Go to a round: clients that change there become what they are from now on, and the server hears of it."""

    def exchange(
        self, server: Server, chosen: Sequence[int], readouts: Sequence[Readout]
    ) -> list[tuple[Instructions, Update]]:  # fmt: skip
        """A round of some clients: what went to them and what came back, family by family.

        Where scores come late, clients are asked for those of `readouts` after the round before.
        """

    def evaluate(self, server: Server, readouts: Sequence[Readout], last: bool) -> list[Evaluation]:
        """What clients score, by read-out and split; where that comes late, what the last answers brought of it.

        `last` says that no round follows.
        """

    def model(self, number: int, down: Instructions | None = None) -> nn.Module:
        """A client's personal model: what it has, after installing what is sent to it."""

    def close(self) -> None:
        """Give back processes and memory."""
