"""Sharing: plans, the circles they are made of, merging, and what moves. Knows tensors, no models."""

from fedquilt.sharing.circles import circles_by_labels, circles_by_trait
from fedquilt.sharing.merge import MERGES, Mean, Rule, Sum, install, mean, median, merge, pick
from fedquilt.sharing.patterns import by_labels, by_trait, everyone, nobody
from fedquilt.sharing.plan import Plan
from fedquilt.sharing.robust import Krum, Median, TrimmedMean
from fedquilt.sharing.sums import Merged, Sums
from fedquilt.sharing.unitplan import AnyUnit, MixedUnit, UnitPlan

__all__ = [
    "MERGES",
    "AnyUnit",
    "Krum",
    "Mean",
    "Median",
    "Merged",
    "MixedUnit",
    "Plan",
    "Rule",
    "Sum",
    "Sums",
    "TrimmedMean",
    "UnitPlan",
    "by_labels",
    "by_trait",
    "circles_by_labels",
    "circles_by_trait",
    "everyone",
    "install",
    "mean",
    "median",
    "merge",
    "nobody",
    "pick",
]
