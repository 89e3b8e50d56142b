"""Ways to predict from what a client has, by name."""

from fedquilt.readouts.base import Adapted, Look, Readout, Received

READOUTS: dict[str, type[Readout]] = {readout.name: readout for readout in (Received, Adapted)}

__all__ = ["READOUTS", "Adapted", "Look", "Readout", "Received"]
