"""Where a data set comes from: its archives, their checksums, its licence and the function that parses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedquilt.data.dataset import Dataset, Kind


@dataclass(frozen=True)
class Archive:
    """One official file. `checksum` is "md5:..." or "sha256:..." as published; None: the first download is trusted."""

    url: str
    file: str
    checksum: str | None = None


@dataclass(frozen=True)
class Source:
    """How to get one data set: `parse` makes it from the paths of `archives`, in that order.

    `samples` is the published count, which a parsed archive must reach. `complete` adds to a data set read from a cache
    what follows from its arrays alone.

    >>> from fedquilt.data import SOURCES
    >>> SOURCES["mnist"].cache
    'mnist.npz'
    """

    name: str
    title: str
    homepage: str
    licence: str
    parse: Callable[..., Dataset]
    archives: tuple[Archive, ...] = ()
    kind: Kind = "images"
    channels: tuple[str, ...] = ()
    rate: float | None = None
    samples: int | None = None
    complete: Callable[[Dataset], Dataset] | None = None

    @property
    def cache(self) -> str:
        """File name of the library's own cache of this data set."""
        return f"{self.name}.npz"

    @property
    def bundled(self) -> bool:
        """Whether the data come with an installed package, so that nothing is fetched or cached."""
        return not self.archives
