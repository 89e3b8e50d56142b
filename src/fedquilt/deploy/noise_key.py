"""What noise is drawn by on devices and at a server: a secret of their own, which nobody else may read.

Whoever knew it could draw the same noise and take it off again; a run's seed is known to everybody.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def noise_key(path: Path, run: str, question: Mapping[str, NDArray[np.generic]] | None = None) -> int:
    """What noise of a run is drawn by: a hash of the secret in a file, which is made where there is none.

    With a `question`, all that a letter brought, it is other noise for every other question, and the same for the same
    one: who asks again learns nothing new.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "noise.key"
    >>> noise_key(path, "run") == noise_key(path, "run") != noise_key(path, "other")
    True
    >>> oct(path.stat().st_mode & 0o777)
    '0o600'
    """
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process was faster
            os.link(new, path)
        new.unlink()
    hashed = hashlib.blake2b(run.encode(), key=path.read_bytes(), digest_size=8)
    for name, array in sorted((question or {}).items()):
        hashed.update(repr((name, array.shape, array.dtype.str)).encode())
        hashed.update(np.ascontiguousarray(array).tobytes())
    return int.from_bytes(hashed.digest(), "little") >> 1
