"""Differential privacy: what is promised, what noise it takes, and what it has cost so far."""

from fedquilt.privacy.accountant import Budget, Use, found, noise_for
from fedquilt.privacy.settings import LEVELS, Privacy

__all__ = ["LEVELS", "Budget", "Privacy", "Use", "found", "noise_for"]
