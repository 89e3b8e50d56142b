"""The data sets by name: load one, fetch one, list what is there."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fedquilt.data import (
    animals10,
    cache,
    cifar10,
    cifar100,
    digits,
    download,
    emnist,
    femnist,
    hapt,
    harbox,
    mnist,
    realworld,
    stl10,
    uci_har,
    wisdm,
)
from fedquilt.data.dataset import Dataset
from fedquilt.data.errors import DataDamaged, DataError, DataMissing
from fedquilt.data.source import Source

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        digits.SOURCE,
        mnist.SOURCE,
        cifar10.SOURCE,
        cifar100.SOURCE,
        stl10.SOURCE,
        emnist.SOURCE,
        femnist.SOURCE,
        uci_har.SOURCE,
        hapt.SOURCE,
        wisdm.SOURCE,
        realworld.SOURCE,
        harbox.SOURCE,
        animals10.SOURCE,
        animals10.FOUR,
    )
}


@dataclass(frozen=True)
class Listing:
    """One line of `fedquilt data list`. `path` is where the cache is, or would be; None for a bundled data set."""

    name: str
    title: str
    present: bool
    path: Path | None
    size: int | None
    source: str
    licence: str


def find_source(name: str) -> Source:
    """The source of a data set, or a sentence with the names there are."""
    if name not in SOURCES:
        raise DataError(f"there is no data set '{name}'; there are {', '.join(SOURCES)}")
    return SOURCES[name]


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    fetch: bool = True,
    progress: bool = True,
) -> Dataset:
    """A data set from its cache, else from its official archive, which is fetched, parsed and cached.

    An archive that already lies in the data folder is used instead of downloading it (and is left there). With
    `fetch=False` nothing is downloaded.

    >>> load("digits")
    Dataset 'digits': 1797 images of 8 x 8 uint8, 10 labels
    """
    source = find_source(name)
    if source.bundled:
        return source.parse()
    folder = cache.data_folder(data_dir)
    path = folder / source.cache
    if path.is_file():
        return cache.read(path, source)
    return _make(source, folder, fetch=fetch, progress=progress)


def get(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    again: bool = False,
    progress: bool = True,
) -> Listing:
    """Make sure the cache of a data set is there, and say where; `again` makes it anew from the official archive.

    >>> get("digits").present
    True
    """
    source = find_source(name)
    folder = cache.data_folder(data_dir)
    if not source.bundled and (again or not (folder / source.cache).is_file()):
        _make(source, folder, fetch=True, progress=progress)
    return _listing(source, folder)


def available(data_dir: str | os.PathLike[str] | None = None) -> list[Listing]:
    """All data sets: which are present, where, how large, from where and under which licence.

    >>> [row.name for row in available("nowhere") if row.present]
    ['digits']
    """
    folder = cache.data_folder(data_dir)
    return [_listing(source, folder) for source in SOURCES.values()]


def _listing(source: Source, folder: Path) -> Listing:
    if source.bundled:
        return Listing(source.name, source.title, True, None, None, source.homepage, source.licence)
    path = folder / source.cache
    present = path.is_file()
    size = path.stat().st_size if present else None
    return Listing(source.name, source.title, present, path, size, source.homepage, source.licence)


def _make(source: Source, folder: Path, *, fetch: bool, progress: bool) -> Dataset:
    """Parse the official archives, fetching those that are not in the folder, and write the cache."""
    absent = [a for a in source.archives if not (folder / a.file).is_file()]
    if absent and not fetch:
        raise _missing(source, folder, "and fetching is switched off")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not folder.stat().st_mode & 0o222:
            raise PermissionError("it is read-only")  # said here, since the administrator could write all the same
        work = tempfile.TemporaryDirectory(prefix=f".{source.name}-", dir=folder)
    except OSError as error:
        raise _missing(source, folder, f"and that folder cannot be written ({error})") from error
    with work as name:
        paths = []
        for archive in source.archives:
            if archive in absent:
                try:
                    paths.append(download.fetch(archive, Path(name), folder, progress=progress))
                except DataMissing as error:
                    raise _missing(source, folder, f"and {error}") from None  # all of it is said
            else:
                download.verify(archive, folder / archive.file, folder)
                paths.append(folder / archive.file)
        dataset = source.parse(*paths)
        if source.samples is not None and len(dataset) != source.samples:
            raise DataDamaged(
                f"{source.archives[0].file} is not usable: it holds {len(dataset)} samples, {source.title} has "
                f"{source.samples}; delete it and fetch the official archive again from {source.homepage}"
            )
        for archive, path in zip(source.archives, paths, strict=True):
            download.remember(archive, path, folder)
        cache.write(folder / source.cache, dataset)
    return dataset


def _missing(source: Source, folder: Path, why: str) -> DataMissing:
    files = " and ".join(f"{archive.file} (from {archive.url})" for archive in source.archives)
    return DataMissing(
        f"data set '{source.name}' is not in {folder}, {why}. Put its cache {source.cache}, or the official {files}, "
        f"into {folder}, or name another folder with data_dir or FEDQUILT_DATA. About the data: {source.homepage}. "
        "With `pip install fedquilt[data]` and a connection it is fetched for you."
    )
