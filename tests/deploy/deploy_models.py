"""Unlike models for 8 x 8 digits; devices import them by name."""

from __future__ import annotations

from torch import nn


def convolving(channels: int = 8, classes: int = 10) -> nn.Sequential:
    """Two units that only others like it have, then two that every model here has."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, stride=2, padding=1),
        nn.Flatten(),
        nn.Linear(16 * channels, 16),
        nn.ReLU(),
        nn.Linear(16, classes),
    )


def dense(hidden: int = 24, classes: int = 10) -> nn.Sequential:
    """The same task with other layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )
