"""Sharing: plans, the circles they are made of, merging, and what moves. Knows tensors, no models."""

from fedquilt.sharing.clustering import cluster_updates, cosine_distance, keep_ids
from fedquilt.sharing.compression import Compression
from fedquilt.sharing.distances import CentredClipping, FLTrust, GeometricMedian, NormBound
from fedquilt.sharing.grouping import (
    adjusted_rand,
    affinity,
    circles_by_labels,
    circles_by_trait,
    group_by_affinity,
    refine,
)
from fedquilt.sharing.merge import Mean, inherit, install, mean, median, merge_unit, mix
from fedquilt.sharing.mixedunit import AnyUnit, MixedUnit
from fedquilt.sharing.names import MERGES, PRESTEPS, merge_of, named_settings, pick
from fedquilt.sharing.patterns import by_labels, by_trait, everyone, in_use, nobody
from fedquilt.sharing.plan import Plan
from fedquilt.sharing.presteps import Bucketing, Composed, NearestNeighbours
from fedquilt.sharing.robust import Krum, Median, TrimmedMean, squared_distances
from fedquilt.sharing.rule import MergeContext, Rule
from fedquilt.sharing.traffic import Traffic, traffic
from fedquilt.sharing.unitplan import PRIVATE, UnitPlan
from fedquilt.sharing.weighted_sums import Merged, Sums

__all__ = [
    "MERGES",
    "PRESTEPS",
    "PRIVATE",
    "AnyUnit",
    "Bucketing",
    "CentredClipping",
    "Composed",
    "Compression",
    "FLTrust",
    "GeometricMedian",
    "Krum",
    "Mean",
    "Median",
    "MergeContext",
    "Merged",
    "MixedUnit",
    "NearestNeighbours",
    "NormBound",
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
    "merge_of",
    "merge_unit",
    "mix",
    "named_settings",
    "nobody",
    "pick",
    "refine",
    "squared_distances",
    "traffic",
]
