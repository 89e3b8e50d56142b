"""Merges by name: a rule, or steps before a rule with a plus between them, as in `nnm+krum`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, get_type_hints

from fedquilt._util.suggest import did_you_mean
from fedquilt._util.wording import settings_of
from fedquilt.sharing.distances import CentredClipping, FLTrust, GeometricMedian, NormBound
from fedquilt.sharing.merge import Mean
from fedquilt.sharing.presteps import Bucketing, Composed, NearestNeighbours, PreStep
from fedquilt.sharing.robust import Krum, Median, TrimmedMean
from fedquilt.sharing.rule import Rule

MERGES: dict[str, Callable[..., Rule]] = {
    "mean": Mean,
    "median": Median,
    "trimmed-mean": TrimmedMean,
    "geometric-median": GeometricMedian,
    "krum": Krum,
    "norm-bound": NormBound,
    "centred-clipping": CentredClipping,
    "fltrust": FLTrust,
}
PRESTEPS: dict[str, Callable[..., PreStep]] = {"nnm": NearestNeighbours, "bucketing": Bucketing}


def merge_of(name: str) -> Callable[..., Rule]:
    """What makes the merge of a name from its settings; parts that know the same setting share it.

    >>> inspect.signature(merge_of("bucketing+trimmed-mean"))
    <Signature (*, size: int = 2, share: float = 0.1)>
    """
    *steps, last = name.split("+")
    for step in steps:
        if step not in PRESTEPS:
            first = f"'{step}' is a merge and comes last, as in nnm+{step}" if step in MERGES else ""
            raise ValueError(first or did_you_mean(step, PRESTEPS, "step before a merge"))
    if last not in MERGES:
        needs = f"'{last}' needs a merge after it, as in {name}+median" if last in PRESTEPS else ""
        raise ValueError(needs or did_you_mean(last, [*MERGES, *PRESTEPS], "merge"))
    if not steps:
        return MERGES[last]
    if last == "mean":
        raise ValueError(f"'{name}' is a mean of means, which any liar steers: put a robust merge after {steps[-1]}")
    kinds: list[Callable[..., Any]] = [*(PRESTEPS[step] for step in steps), MERGES[last]]

    def made(**settings: Any) -> Rule:
        unknown = [key for key in settings if key not in known]
        if unknown:
            raise ValueError(did_you_mean(unknown[0], known, f"setting of the merge {name}"))
        *before, rule = (kind(**{k: v for k, v in settings.items() if k in settings_of(kind)}) for kind in kinds)
        return Composed(tuple(before), rule)

    hints = {key: hint for kind in kinds for key, hint in get_type_hints(kind).items()}
    known = {key: default for kind in kinds for key, default in settings_of(kind).items()}
    made.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY, default=d, annotation=hints[k]) for k, d in known.items()]
    )
    made.__annotations__ = {key: hints[key] for key in known}
    return made


def pick(name: str, **settings: Any) -> Rule:
    """The merge of that name, with its settings.

    >>> pick("trimmed-mean", share=0.2)
    TrimmedMean(share=0.2)
    >>> pick("nnm+krum", byzantine=2)
    Composed(before=(NearestNeighbours(byzantine=2),), rule=Krum(byzantine=2, keep=None))
    """
    return merge_of(name)(**settings)


def named_settings(rule: Rule) -> dict[str, Any] | None:
    """The name of a merge and its settings, from which `pick` makes it again; None where it has no name.

    >>> named_settings(pick("bucketing+median", size=3))
    {'name': 'bucketing+median', 'size': 3}
    """
    parts: tuple[Any, ...] = (*rule.before, rule.rule) if isinstance(rule, Composed) else (rule,)
    kinds = {kind: name for name, kind in (MERGES | PRESTEPS).items()}
    if any(type(part) not in kinds for part in parts):
        return None
    found: dict[str, Any] = {"name": "+".join(kinds[type(part)] for part in parts)}
    for part in parts:
        for key, value in asdict(part).items():
            if found.setdefault(key, value) != value:
                raise ValueError(f"{rule} has two values of '{key}'; by name, all parts of a merge have the same one")
    return found
