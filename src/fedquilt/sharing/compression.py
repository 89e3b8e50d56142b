"""Fewer bytes: how the change of a unit's parameters is written down, and what is left over of it.

A client that started from the values x that it received and ended at y sends, in place of y, a code of its change and
of what earlier codes left out (error feedback: Seide et al. 2014, Stich et al. 2018, Karimireddy et al. 2019):

    c = y - x + e;      sent is code(c), the server reads x + decode(code(c));      e <- c - decode(code(c))

so nothing is lost for good, it waits. The codes, of a unit with n parameters:

    float16   n half-precision numbers; beyond 65504 the rest waits
    int8      a scale s = max |c| / 127, and n whole numbers round(c / s)
    topk      the `kept` share of them with the largest |c| (Aji and Heafield 2017), as they are, and where they belong:
              their places, ascending, in as many bytes as n asks for, or a bit for each of the n, whichever is shorter

How long a code is follows from n alone, so that bytes are counted without looking at values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from fedquilt._util.plain_values import python
from fedquilt._util.suggest import did_you_mean

Code = Mapping[str, Tensor]  # value (k, m); scale (k, 1) of int8; where (k, m), ascending, of topk
BITS = "bits"  # the places of numbers as a bit for each that there is
_HALF = 65504.0  # the largest number of half precision
_ITEM = {"float32": 4, "float16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, BITS: 1}
UPS, DOWNS = ("float32", "float16", "int8", "topk"), ("float32", "float16")


@dataclass(frozen=True)
class Compression:
    """How parameters travel: `up` what clients send (float32, float16, int8 or topk), `down` what they receive (float32
    or float16). Of topk the share `kept` of each unit's numbers is sent.

    >>> Compression("topk", kept=0.01)
    Compression(up='topk', kept=0.01)
    >>> Compression("int8").bytes(1000), Compression("topk", kept=0.01).bytes(1000)
    (1004, 60)
    """

    up: Literal["float32", "float16", "int8", "topk"] = "float32"
    down: Literal["float32", "float16"] = "float32"
    kept: float = 0.05

    def __post_init__(self) -> None:
        for key in (f.name for f in fields(self)):
            object.__setattr__(self, key, python(getattr(self, key)))
        for key, known in (("up", UPS), ("down", DOWNS)):
            if getattr(self, key) not in known:
                raise ValueError(did_you_mean(str(getattr(self, key)), known, f"kind of compress.{key}"))
        told: object = self.kept
        if isinstance(told, bool) or not isinstance(told, Real) or not 0 < float(told) <= 1:
            raise ValueError(f"compress.kept={told!r} must be a share above 0 and at most 1")
        if self.kept != type(self).kept and self.up != "topk":
            raise ValueError(f"compress.kept={self.kept:g} is of topk; set compress.up=topk, or leave it out")

    def __repr__(self) -> str:
        return f"Compression({', '.join(f'{key}={value!r}' for key, value in self.text.items())})"

    @staticmethod
    def of(told: Compression | Mapping[str, Any] | str | None) -> Compression:
        """What was asked for: a kind of `up`, settings, or nothing.

        >>> Compression.of("int8"), Compression.of(None)
        (Compression(up='int8'), Compression())
        """
        if isinstance(told, Compression):
            return told
        return Compression(**told) if isinstance(told, Mapping) else Compression(told or "float32")  # type: ignore[arg-type]

    @property
    def text(self) -> dict[str, Any]:
        """What is not as usual, and of topk how much is kept, as plain values; `of` turns it back."""
        usual, said = asdict(Compression()), ("kept",) if self.up == "topk" else ()
        return {key: value for key, value in asdict(self).items() if value != usual[key] or key in said}

    @property
    def codes(self) -> bool:
        """Whether clients send codes of changes."""
        return self.up != "float32"

    @property
    def told(self) -> str:
        """What it is, in a sentence for results; empty where there is none.

        >>> Compression("topk", "float16", 0.01).told
        'Clients sent the largest 1 % of the changes of parameters, and received parameters as float16.'
        """
        share = f"the largest {100 * self.kept:.3g} % of the changes of parameters"
        up = [] if not self.codes else [f"sent {share if self.up == 'topk' else f'changes of parameters as {self.up}'}"]
        down = [f"received parameters as {self.down}"] if self.down != "float32" else []
        return f"Clients {', and '.join([*up, *down])}." if up or down else ""

    # --- how long ----------------------------------------------------------------------------------------------------

    def count(self, n: int) -> int:
        """How many of n numbers topk sends: at least one."""
        return max(1, math.ceil(self.kept * n - 1e-9)) if n else 0

    def form(self, n: int) -> dict[str, tuple[str, int]]:
        """The code of n numbers as it travels: of each of its arrays the kind of number and the length.

        >>> Compression("topk", kept=0.01).form(1000), Compression("topk", kept=0.5).form(1000)["where"]
        ({'value': ('float32', 10), 'where': ('uint16', 10)}, ('bits', 125))
        """
        if self.up != "topk":
            return {"value": (self.up, n), **({"scale": ("float32", 1)} if self.up == "int8" else {})}
        m, bits = self.count(n), -(-n // 8)
        if m == n:
            return {"value": ("float32", n)}
        kind = "uint8" if n <= 2**8 else "uint16" if n <= 2**16 else "uint32"
        return {"value": ("float32", m), "where": (kind, m) if m * _ITEM[kind] <= bits else (BITS, bits)}

    def bytes(self, n: int) -> int:
        """How long the code of n numbers is."""
        return sum(_ITEM[kind] * length for kind, length in self.form(n).values()) if n else 0

    # --- there and back ----------------------------------------------------------------------------------------------

    def encode(self, change: Tensor) -> Code:
        """The codes of rows (k, n). One with a number that is not finite has a code that is not either."""
        if self.up == "float16":
            return {"value": half(change)}
        if self.up == "int8":
            scale = change.abs().amax(1, keepdim=True) / 127
            whole = (change / torch.where(scale > 0, scale, 1.0)).round().clamp(-127, 127)
            return {"value": whole.nan_to_num(0.0).to(torch.int8), "scale": scale}
        m = self.count(change.shape[1])
        if m == change.shape[1]:
            return {"value": change}
        where = change.abs().topk(m, dim=1, sorted=False).indices.sort(dim=1).values
        return {"value": change.gather(1, where), "where": where}

    def decode(self, code: Code, n: int) -> Tensor:
        """(k, n) what a code says.

        >>> c = Compression("topk", kept=0.5)
        >>> c.decode(c.encode(torch.tensor([[3.0, -1.0, 0.5, -4.0]])), 4).tolist()
        [[3.0, 0.0, 0.0, -4.0]]
        """
        value = code["value"].float()
        if "scale" in code:
            return value * code["scale"]
        if "where" in code:
            return value.new_zeros(len(value), n).scatter(1, code["where"], value)
        return value


def half(value: Tensor) -> Tensor:
    """Numbers in half precision; finite ones beyond its range as the last ones inside it."""
    return torch.where(value.isfinite(), value.clamp(-_HALF, _HALF), value).half()
