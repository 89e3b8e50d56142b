"""A device's part in the secure sums of one round: its secrets are in memory only, and end with the round.

A device that is stopped between two letters has lost them and is left out of that round, as one that leaves is. A share
of noise is added when numbers are masked, since it is known then how many gave keys.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.core.noisy_shares import NoisyShares, clipped_changes, enough
from fedquilt.deploy.transport.secure_codec import Told, read_bytes, write_bytes
from fedquilt.deploy.transport.wire import Refused
from fedquilt.interface.messages import Instructions, Update
from fedquilt.privacy import Privacy
from fedquilt.secure import SecureSums, masks
from fedquilt.secure.fixed_point import Whole
from fedquilt.secure.protocol import Party, Unsafe

Arrays = dict[str, NDArray[Any]]


class SecureSession:
    """One round of one client: a party and its numbers in each circle that it was told of.

    `once` says whether no other sums of this round were opened with this client's help: of two whose members differ by
    one, or that one of them is in with another share, the difference is a copy. With `noise` in shares its numbers are
    changes; `spend` says before numbers with noise leave whether these are the first.
    """

    def __init__(
        self,
        up: Update,
        down: Instructions,
        told: Sequence[Told],
        settings: SecureSums,
        once: Callable[[str], bool] = lambda _: True,
        noise: Privacy | None = None,
        spend: Callable[[], bool] = lambda: True,
    ) -> None:
        self.settings, self.once, self.noise, self.spend = settings, once, noise, spend
        self.parties = [Party(up.ids[0], settings) for _ in told]
        self.members: dict[str, int] = {}  # how many of a circle gave keys
        self.sent: dict[str, str] = {}  # a digest of the numbers that were masked, by circle
        # in two sums of a round, one of them with a member less, a unit would be told by their difference
        if sorted(u for circle in told for u in circle.units) != sorted(u for block in up.blocks for u in block.units):
            raise Refused("unsafe-sum", "units outside of circles, or in several")
        if noise is not None:
            up = clipped_changes(up, down, noise.clip)
        self.told, self.copies = told, [_copy(up, circle) for circle in told]
        if noise is None:
            for circle, copy in zip(told, self.copies, strict=True):
                self._check(circle, copy)

    def _check(self, circle: Told, copy: NDArray[np.float64]) -> None:
        if not bool(np.isfinite(copy).all()):
            raise Refused("not-finite")
        if copy.size and float(np.abs(copy).max()) > self.settings.range:
            raise Refused("out-of-range")
        if not 0 < circle.share <= 1:
            raise Refused("unsafe-sum", "a share beyond 1")

    def keys(self) -> Arrays:
        """Question 1, with the letter of the round: public keys for each circle."""
        return {f"keys/{at}": write_bytes([party.keys()]) for at, party in enumerate(self.parties)}

    def answer(
        self, phase: str, arrays: Mapping[str, NDArray[Any]], circles: Mapping[str, Mapping[str, Any]]
    ) -> Arrays:
        """Questions 2 to 4, for some of the circles at once: all are answered, or none is."""
        found: Arrays = {}
        try:
            for name, text in circles.items():
                party = self.parties[int(name)]
                if phase == "shares":
                    shares = party.shares(read_bytes(arrays[f"peers/{name}"], text["peers"]), text["members"])
                    self.members[name] = text["members"]
                    found[f"shares/{name}"] = write_bytes([shares[peer] for peer in text["peers"]])
                elif phase == "masked":
                    received = read_bytes(arrays[f"peers/{name}"], text["peers"])
                    numbers = self._numbers(name)
                    self.sent[name] = hashlib.sha256(numbers.tobytes()).hexdigest()
                    found[f"masked/{name}"] = party.masked(numbers, received)
                elif phase == "unmask":
                    self._check_noise(party, text["arrived"])
                    given = party.unmask(text["arrived"], text["left"])
                    found[f"share/{name}"] = write_bytes([given[peer] for peer in [*text["arrived"], *text["left"]]])
                else:
                    raise Refused("bad-letter")
        except Unsafe as error:
            raise Refused("unsafe-sum", str(error)) from None
        if phase == "masked" and self.noise is not None and not self.spend():
            raise Refused("asked-again")
        if phase == "unmask":
            sums = {name: (self.sent[name], sorted(set(text["arrived"]))) for name, text in sorted(circles.items())}
            if not self.once(repr(sums)):
                raise Refused("unsafe-sum", "other sums of this round were opened")
        return found

    def _numbers(self, name: str) -> Whole:
        """What is masked of a circle: its copy times its share, or its change with a share of the noise."""
        circle, copy = self.told[int(name)], self.copies[int(name)]
        if self.noise is None:
            return self.settings.point(circle.planned).encode(copy * circle.share)
        if name not in self.members:
            raise Unsafe("numbers are asked for before shares")
        shares = NoisyShares(self.noise, self.settings, self.members[name])
        return shares.encode(copy, masks.words(secrets.token_bytes(32)))

    def _check_noise(self, party: Party, arrived: Sequence[int]) -> None:
        """Of those whom this client knows of, so many must be in a sum that their noise is what was promised."""
        if self.noise is not None and len(set(arrived)) < (least := enough(self.noise, party.known)):
            raise Unsafe(f"a sum of {len(set(arrived))} clients has too little noise; {least} would have enough")


def _copy(up: Update, circle: Told) -> NDArray[np.float64]:
    """(size,) the client's copy of the units of a circle."""
    parts = [part for unit in circle.units if (part := up.part([unit])) is not None]
    return np.concatenate([value[0].numpy(force=True) for _, value in parts]).astype(np.float64)
