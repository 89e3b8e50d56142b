"""What users hand in, as Python has it: numbers of NumPy and PyTorch become Python's own where they come in.

A number decides seeds by its text, is written into files and is compared with what was read back from them. `0`,
`numpy.int64(0)` and `torch.tensor(0)` are equal and print differently, so only one of them may get in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
import torch

from fedquilt._util.toml import values_of

T = TypeVar("T")


def python(value: Any) -> Any:
    """A value as Python has it, through lists, tuples and dicts; an array is a tuple. What is nobody's number stays.

    >>> import numpy as np
    >>> python({"mu": np.float64(0.1), "blocks": np.array([3, 3]), "on": np.True_, "name": "a"})
    {'mu': 0.1, 'blocks': (3, 3), 'on': True, 'name': 'a'}
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray | torch.Tensor):
        return values_of(value.tolist())
    if type(value) in (list, tuple):
        parts = [python(part) for part in value]
        return value if _same(parts, value) else type(value)(parts)
    if type(value) is dict:
        pairs = [(python(key), python(part)) for key, part in value.items()]
        return (
            value if _same((p for pair in pairs for p in pair), (p for i in value.items() for p in i)) else dict(pairs)
        )
    return value


def whole(value: Any, what: str) -> int:
    """A whole number as Python's; `what` names it in errors. True and False are no numbers, nor is 1.0 a whole one.

    >>> import numpy as np
    >>> whole(np.int64(3), "rounds")
    3
    >>> whole(True, "seed")
    Traceback (most recent call last):
    ValueError: seed=True must be a whole number
    """
    found = python(value)
    if isinstance(found, bool) or not isinstance(found, Integral):
        raise ValueError(f"{what}={found!r} must be a whole number")
    return int(found)


def labels_of(values: Iterable[Any], whose: str) -> tuple[int, ...]:
    """Labels as Python's numbers: whole ones from 0 up, also where an array of floats holds them.

    >>> labels_of([2.0, 0], "client 'a'")
    (2, 0)
    """
    found = []
    for value in python(values) if isinstance(values, np.ndarray | torch.Tensor) else values:
        label = python(value)
        if isinstance(label, bool) or not isinstance(label, int | float) or label != label // 1 or label < 0:
            raise ValueError(f"{whose}: labels are whole numbers from 0 up, but one is {label!r}")
        found.append(int(label))
    return tuple(found)


def with_python_settings(thing: T) -> T:
    """A value of settings (a method, a merge, a read-out) with those settings as Python has them; else as it is.

    >>> import numpy as np
    >>> from fedquilt.methods import FedProx
    >>> with_python_settings(FedProx(mu=np.float64(0.1)))
    FedProx(mu=0.1)
    """
    if not is_dataclass(thing) or isinstance(thing, type):
        return thing
    given = {field.name: getattr(thing, field.name) for field in fields(thing) if field.init}
    changed = {name: now for name, value in given.items() if (now := python(value)) is not value}
    return replace(thing, **changed) if changed else thing


def _same(now: Iterable[Any], before: Iterable[Any]) -> bool:
    return all(new is old for new, old in zip(now, before, strict=True))
