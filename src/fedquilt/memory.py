"""Host memory of two kinds: in common with forked processes, and such that a GPU fetches from it by itself."""

from __future__ import annotations

import math
import mmap
import os
import platform
import sys
import weakref

import torch
from torch import Tensor

# Linux would else set memory aside for all of it. Not every Python has a name for that flag.
_KNOWN = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if _KNOWN else 0)
_HOW = {"flags": mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE} if os.name == "posix" else {}
_starts: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()


def common_zeros(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros that processes forked later share. What is never written takes no memory, so there may be more than fits.

    Anonymous memory, not a file: the file system for shared memory is tiny in many containers.

    >>> common_zeros((2, 3)).sum()
    tensor(0.)
    """
    if math.prod(shape) == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, **_HOW)
    tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
    _starts[tensor.untyped_storage().data_ptr()] = memory  # lives as long as a tensor holds it
    return tensor


def place_on(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor on a device. From pinned memory a GPU fetches it in its turn; from other memory we would wait."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def is_common(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory that forked processes have in common."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _starts
