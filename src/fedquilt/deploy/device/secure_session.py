"""A device's part in the secure sums of one round: its secrets are in memory only, and end with the round.

A device that is stopped between two letters has lost them and is left out of that round, as one that leaves is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.deploy.transport.secure_codec import Told, read_bytes, write_bytes
from fedquilt.deploy.transport.wire import Refused
from fedquilt.interface.messages import Update
from fedquilt.secure import SecureSums
from fedquilt.secure.protocol import Party, Unsafe

Arrays = dict[str, NDArray[Any]]


class SecureSession:
    """One round of one client: a party and its numbers in each circle that it was told of."""

    def __init__(self, number: int, up: Update, told: Sequence[Told], settings: SecureSums) -> None:
        self.parties = [Party(number, settings) for _ in told]
        self.numbers = []
        asked = {unit for circle in told for unit in circle.units}
        if asked != {unit for block in up.blocks for unit in block.units}:
            raise Refused("unsafe-sum", "units outside of circles")
        for circle in told:
            copies = [part for unit in circle.units if (part := up.part([unit])) is not None]
            copy = np.concatenate([value[0].numpy(force=True) for _, value in copies]).astype(np.float64)
            if not bool(np.isfinite(copy).all()):
                raise Refused("not-finite")
            if copy.size and float(np.abs(copy).max()) > settings.range:
                raise Refused("out-of-range")
            if not 0 < circle.share <= 1:
                raise Refused("unsafe-sum", "a share beyond 1")
            self.numbers.append(settings.point(circle.planned).encode(copy * circle.share))

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
                party, numbers = self.parties[int(name)], self.numbers[int(name)]
                if phase == "shares":
                    shares = party.shares(read_bytes(arrays[f"peers/{name}"], text["peers"]), text["members"])
                    found[f"shares/{name}"] = write_bytes([shares[peer] for peer in text["peers"]])
                elif phase == "masked":
                    found[f"masked/{name}"] = party.masked(numbers, read_bytes(arrays[f"peers/{name}"], text["peers"]))
                elif phase == "unmask":
                    given = party.unmask(text["arrived"], text["left"])
                    found[f"share/{name}"] = write_bytes([given[peer] for peer in [*text["arrived"], *text["left"]]])
                else:
                    raise Refused("bad-letter")
        except Unsafe as error:
            raise Refused("unsafe-sum", str(error)) from None
        return found
