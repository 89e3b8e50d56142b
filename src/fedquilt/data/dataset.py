"""A data set as plain arrays: samples, labels, and where they exist subjects, recordings and the official test flag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["images", "windows", "stream"]
PER_SAMPLE = ("x", "y", "subject", "recording", "time", "coarse", "is_test")
_NOUN = {"images": "images", "windows": "windows", "stream": "readings"}


@dataclass(frozen=True, repr=False, eq=False)
class Dataset:
    """One data set. All arrays have one row per sample and keep the order of the original files.

    `kind` says what a sample is: "images" (n, height, width[, 3]) of integers up to `peak`; "windows" (n, channels,
    length) of float32; "stream" (readings, channels) of float32, to be cut by `fedquilt.data.cut_windows`.
    `y` is -1 where a reading has no label. `recording` numbers pieces without a gap in time, and `time` is the position
    of a sample inside its recording (for windows: of its first reading), so two windows of one recording overlap when
    their `time` differs by less than their length. `coarse` are super-classes (CIFAR-100). `rate` is in Hz.

    >>> import numpy as np
    >>> d = Dataset("toy", np.zeros((4, 2, 2), np.uint8), np.array([0, 1, 1, 0]), ("cat", "dog"))
    >>> d
    Dataset 'toy': 4 images of 2 x 2 uint8, 2 labels
    >>> d.images().shape
    (4, 1, 2, 2)
    """

    name: str
    x: NDArray[Any]
    y: NDArray[np.int64]
    label_names: tuple[str, ...]
    kind: Kind = "images"
    subject: NDArray[np.int64] | None = None
    recording: NDArray[np.int64] | None = None
    time: NDArray[np.int64] | None = None
    coarse: NDArray[np.int64] | None = None
    is_test: NDArray[np.bool_] | None = None
    coarse_names: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    rate: float | None = None
    peak: int = 255

    def __post_init__(self) -> None:
        n = self.y.size
        for key in PER_SAMPLE:
            values = getattr(self, key)
            if values is not None and key != "x" and values.ndim != 1:
                raise ValueError(
                    f"data set '{self.name}': {key} has the shape {values.shape}; give one number for each sample"
                )
            if values is not None and len(values) != n:
                raise ValueError(f"data set '{self.name}': {key} has {len(values)} rows, y has {n}; they must agree")
        if n and (int(self.y.max()) >= len(self.label_names) or int(self.y.min()) < -1):
            raise ValueError(
                f"data set '{self.name}': labels run from {int(self.y.min())} to {int(self.y.max())}, "
                f"but there are {len(self.label_names)} label names"
            )
        if self.channels and self.x.shape[1] != len(self.channels):
            raise ValueError(
                f"data set '{self.name}' has {self.x.shape[1]} channels, but {len(self.channels)} channel names"
            )

    def __len__(self) -> int:
        return len(self.y)

    @property
    def classes(self) -> int:
        """How many labels there are."""
        return len(self.label_names)

    def __repr__(self) -> str:
        shape = " x ".join(str(n) for n in self.x.shape[1:])
        parts = [f"{len(self)} {_NOUN[self.kind]} of {shape} {self.x.dtype}", f"{self.classes} labels"]
        if self.subject is not None:
            parts.append(f"{len(np.unique(self.subject))} subjects")
        if self.recording is not None:
            parts.append(f"{len(np.unique(self.recording))} recordings")
        if self.rate is not None:
            parts.append(f"{self.rate:g} Hz")
        if self.is_test is not None:
            parts.append(f"{int((~self.is_test).sum())} train + {int(self.is_test.sum())} test")
        return f"Dataset '{self.name}': " + ", ".join(parts)

    def counts(self) -> dict[str, int]:
        """How many samples each label has.

        >>> import numpy as np
        >>> Dataset("toy", np.zeros((3, 1, 1), np.uint8), np.array([0, 1, 1]), ("cat", "dog")).counts()
        {'cat': 1, 'dog': 2}
        """
        numbers = np.bincount(self.y[self.y >= 0], minlength=self.classes)
        return {name: int(number) for name, number in zip(self.label_names, numbers, strict=True)}

    def take(self, index: Any) -> Dataset:
        """The samples of an index array, a boolean mask or a slice, everything else kept.

        >>> import numpy as np
        >>> d = Dataset("toy", np.zeros((3, 1, 1), np.uint8), np.array([0, 1, 1]), ("cat", "dog"))
        >>> len(d.take(d.y == 1))
        2
        """
        chosen = {f.name: getattr(self, f.name) for f in fields(self)}
        return Dataset(**{k: v[index] if k in PER_SAMPLE and v is not None else v for k, v in chosen.items()})

    def with_labels(self, names: Sequence[str]) -> Dataset:
        """Only the samples of these labels, renumbered in the order given.

        >>> import numpy as np
        >>> d = Dataset("toy", np.zeros((3, 1, 1), np.uint8), np.array([0, 1, 2]), ("cat", "dog", "cow"))
        >>> d.with_labels(["cow", "cat"]).y.tolist()
        [1, 0]
        """
        unknown = [name for name in names if name not in self.label_names]
        if unknown:
            known = ", ".join(self.label_names)
            raise ValueError(f"data set '{self.name}' has no label '{unknown[0]}'; it has {known}")
        number = np.full(self.classes, -1, dtype=np.int64)
        for new, name in enumerate(names):
            number[self.label_names.index(name)] = new
        kept = self.take((self.y >= 0) & (number[self.y] >= 0))
        return replace(kept, y=number[kept.y], label_names=tuple(names))

    def images(self, index: Any = slice(None)) -> NDArray[np.float32]:
        """The chosen images as float32 in [0, 1], channel first: (n, channels, height, width)."""
        if self.kind != "images":
            raise ValueError(f"data set '{self.name}' holds {self.kind}, not images; use .signals()")
        x = self.x[index]
        x = x[:, None] if x.ndim == 3 else np.moveaxis(x, 3, 1)  # (n, channels, height, width)
        out = np.empty(x.shape, dtype=np.float32)
        np.multiply(x, np.float32(1 / self.peak), out=out, casting="unsafe")
        return out

    def signals(self, index: Any = slice(None)) -> NDArray[np.float32]:
        """Windows or readings as contiguous float32."""
        if self.kind == "images":
            raise ValueError(f"data set '{self.name}' holds images, not signals; use .images()")
        return np.ascontiguousarray(self.x[index], dtype=np.float32)

    def inputs(self, index: Any = slice(None)) -> NDArray[np.float32]:
        """What a network is fed: `images` or `signals`, as the kind has it."""
        return self.images(index) if self.kind == "images" else self.signals(index)
