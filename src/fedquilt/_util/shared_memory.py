"""Host memory: in common with forked processes, such that a GPU fetches from it by itself, or kept when freed."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import platform
import sys
import tempfile
import weakref
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Linux would else set memory aside for all of it. Not every Python has a name for that flag.
_KNOWN = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if _KNOWN else 0)
_HOW = {"flags": mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE} if os.name == "posix" else {}
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h has them
_starts: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()


def common_zeros(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, on_disk: bool = False) -> Tensor:
    """Zeros that processes forked later share. What is never written takes no memory, so there may be more than fits.

    Anonymous memory, not a file: the file system for shared memory is tiny in many containers. `on_disk`: in a file
    without a name among the temporary ones (TMPDIR says where), which the system writes out where memory is scarce.

    >>> common_zeros((2, 3)).sum()
    tensor(0.)
    """
    if math.prod(shape) == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = _file_of(math.prod(shape) * dtype.itemsize) if on_disk else _memory_of(math.prod(shape) * dtype.itemsize)
    tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
    _starts[tensor.untyped_storage().data_ptr()] = memory  # lives as long as a tensor holds it
    return tensor


def _memory_of(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, **_HOW)


def _file_of(size: int) -> mmap.mmap:
    """A file of zeros in memory; what is never written takes no room on the disk either."""
    with tempfile.TemporaryFile(prefix="fedquilt-") as file:
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)


def place_on(numbers: Sequence[int] | NDArray[np.int64], device: torch.device) -> Tensor:
    """A few whole numbers as a tensor on a device, without waiting for it; it is only to be read.

    >>> place_on([3, 4], torch.device("cpu"))
    tensor([3, 4])
    """
    if device.type != "cpu" and isinstance(numbers, tuple):
        return _placed(numbers, device)
    return _fetchable(numbers, device).to(device, non_blocking=True)


@lru_cache(maxsize=4)
def _placed(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """The clients of a round are asked for several times, and each way to a GPU takes longer than to find this."""
    return _fetchable(numbers, device).to(device, non_blocking=True)


def write_to(tensor: Tensor, numbers: Sequence[int] | NDArray[np.int64]) -> None:
    """Write a few whole numbers into a tensor that is on some device, without waiting for it."""
    tensor.copy_(_fetchable(numbers, tensor.device), non_blocking=True)


def _fetchable(numbers: Sequence[int] | NDArray[np.int64], device: torch.device) -> Tensor:
    """In pinned memory where it is for a GPU: that fetches it in its turn, from other memory we would wait."""
    given = np.asarray(numbers, dtype=np.int64)
    if device.type == "cpu":
        return torch.from_numpy(given)
    pinned = torch.empty(given.shape, dtype=torch.int64, pin_memory=True)
    pinned.numpy()[...] = given
    return pinned


def keep_freed_memory() -> None:
    """Have this process keep memory that it frees: else every step of training asks the system for it anew.

    Only for processes that are ours alone, and only where the C library is GNU's.
    """
    with contextlib.suppress(OSError, AttributeError):
        change = ctypes.CDLL(None).mallopt
        change(_MMAP_THRESHOLD, 2**25)  # the highest that there is
        change(_TRIM_THRESHOLD, 2**27)


def is_common(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory that forked processes have in common."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _starts
