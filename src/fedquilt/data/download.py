"""Fetching official archives: progress bar, checksums, and clear words when there is no way to fetch."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fedquilt._util.files import written_whole
from fedquilt.data.archives import refuse
from fedquilt.data.errors import DataDamaged, DataMissing
from fedquilt.data.source import Archive

SUMS = "SHA256SUMS"  # checksums of first downloads, in the format of the sha256sum command


def digest(path: Path, algorithm: str = "sha256") -> str:
    """Checksum of a file, as "algorithm:hex"."""
    with path.open("rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"


def known_sums(folder: Path) -> dict[str, str]:
    """What the first downloads into this folder hashed to, by file name."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    pairs = (line.split(maxsplit=1) for line in lines if line.strip())
    return {pair[1]: f"sha256:{pair[0]}" for pair in pairs if len(pair) == 2}


def remember(archive: Archive, path: Path, folder: Path) -> None:
    """Keep the checksum of a first download that parsed well, where none is published."""
    sums = known_sums(folder)
    if archive.checksum is not None or archive.file in sums:
        return
    sums[archive.file] = digest(path)
    text = "".join(f"{value.removeprefix('sha256:')}  {name}\n" for name, value in sorted(sums.items()))
    with written_whole(folder / SUMS, by_many=True) as new:
        new.write_text(text, encoding="utf-8")


def verify(archive: Archive, path: Path, folder: Path) -> None:
    """Compare a file with its published checksum, else with that of the first download."""
    if archive.checksum is not None:
        actual = digest(path, archive.checksum.partition(":")[0])
        if actual != archive.checksum:
            raise refuse(path, f"its checksum is {actual}, the published one is {archive.checksum}")
        return
    first = known_sums(folder).get(archive.file)
    if first is not None and (actual := digest(path)) != first:
        raise DataDamaged(
            f"{path.name} is not usable: its checksum is {actual}, that of the first download was {first}; if its "
            f"publisher has changed it and you trust the change, remove its line from {folder / SUMS}"
        )


class _Bar:
    """A progress bar of rich in the shape pooch wants: `total`, `update`, `reset`, `close`."""

    def __init__(self, title: str, show: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
            TimeRemainingColumn(), console=Console(stderr=True), disable=not show,
        )  # fmt: skip
        self._task = self._progress.add_task(title, total=None)

    @property
    def total(self) -> int:
        return int(self._progress.tasks[0].total or 0)

    @total.setter
    def total(self, value: int) -> None:
        self._progress.update(self._task, total=value or None)

    def update(self, amount: int) -> None:
        self._progress.advance(self._task, amount)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        self._progress.stop()

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()


def _reason(error: Exception) -> str:
    """A network error in a few words: what requests prints is a nest of its own objects."""
    kind = type(error).__name__
    if "Timeout" in kind:
        return "no answer in time"
    return "no connection, or it broke" if kind in ("ConnectionError", "ChunkedEncodingError") else f"{kind}: {error}"


def fetch(archive: Archive, into: Path, folder: Path, *, progress: bool = True) -> Path:
    """Download one archive into `into` and verify it; `folder` is where the checksums of first downloads are kept."""
    try:
        import pooch
    except ImportError as error:
        raise DataMissing(
            "the downloader is not installed: `pip install fedquilt[data]` brings it, or fetch the file by hand"
        ) from error
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.WARNING)  # pooch would print the checksum and advice meant for its own users
    try:
        with _Bar(archive.file, progress) as bar:
            downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 16, timeout=60)
            name = pooch.retrieve(archive.url, known_hash=None, fname=archive.file, path=into, downloader=downloader)
    except OSError as error:  # all errors of requests, which pooch fetches with, are of this kind
        raise DataMissing(f"{archive.url} could not be downloaded ({_reason(error)})") from error
    finally:
        logger.setLevel(level)
    path = Path(name)
    verify(archive, path, folder)
    return path
