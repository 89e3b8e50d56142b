"""Sharing: plans, the circles they are made of, merging, and what moves. Knows tensors, no models."""

from fedquilt.sharing.circles import (
    adjusted_rand,
    affinity,
    circles_by_labels,
    circles_by_trait,
    group_by_affinity,
    refine,
)
from fedquilt.sharing.clusters import cluster_updates, cosine_distance, keep_ids
from fedquilt.sharing.merge import MERGES, Mean, Rule, inherit, install, mean, median, merge_unit, pick
from fedquilt.sharing.patterns import by_labels, by_trait, everyone, nobody
from fedquilt.sharing.plan import Plan
from fedquilt.sharing.robust import Krum, Median, TrimmedMean
from fedquilt.sharing.sums import Merged, Sums
from fedquilt.sharing.traffic import Traffic, traffic
from fedquilt.sharing.unitplan import PRIVATE, AnyUnit, MixedUnit, UnitPlan

__all__ = [
    "MERGES",
    "PRIVATE",
    "AnyUnit",
    "Krum",
    "Mean",
    "Median",
    "Merged",
    "MixedUnit",
    "Plan",
    "Rule",
    "Sums",
    "Traffic",
    "TrimmedMean",
    "UnitPlan",
    "adjusted_rand",
    "affinity",
    "by_labels",
    "by_trait",
    "circles_by_labels",
    "circles_by_trait",
    "cluster_updates",
    "cosine_distance",
    "everyone",
    "group_by_affinity",
    "inherit",
    "install",
    "keep_ids",
    "mean",
    "median",
    "merge_unit",
    "nobody",
    "pick",
    "refine",
    "traffic",
]
