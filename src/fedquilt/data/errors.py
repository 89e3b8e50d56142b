"""What can go wrong with a data set: it is not there, or what is there cannot be trusted."""

from __future__ import annotations


class DataError(Exception):
    """Anything that keeps a data set from being used; the message names the file and the cure."""


class DataMissing(DataError, FileNotFoundError):
    """The data set is not in the data folder and could not be fetched."""


class DataDamaged(DataError, ValueError):
    """An archive or a cache is truncated, foreign or tampered with; it has not been used."""
