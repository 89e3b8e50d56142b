"""Sharing: plans, the circles they are made of, merging, and what moves. Knows tensors, no models."""

from fedquilt.sharing.clustering import cluster_updates, cosine_distance, keep_ids
from fedquilt.sharing.grouping import (
    adjusted_rand,
    affinity,
    circles_by_labels,
    circles_by_trait,
    group_by_affinity,
    refine,
)
from fedquilt.sharing.merge import MERGES, Mean, Rule, inherit, install, mean, median, merge_unit, mix, pick
from fedquilt.sharing.mixedunit import AnyUnit, MixedUnit
from fedquilt.sharing.patterns import by_labels, by_trait, everyone, in_use, nobody
from fedquilt.sharing.plan import Plan
from fedquilt.sharing.robust import Krum, Median, TrimmedMean, squared_distances
from fedquilt.sharing.traffic import Traffic, traffic
from fedquilt.sharing.unitplan import PRIVATE, UnitPlan
from fedquilt.sharing.weighted_sums import Merged, Sums

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
    "in_use",
    "inherit",
    "install",
    "keep_ids",
    "mean",
    "median",
    "merge_unit",
    "mix",
    "nobody",
    "pick",
    "refine",
    "squared_distances",
    "traffic",
]
