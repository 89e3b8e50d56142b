"""Opening image files found in archives."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fedquilt.data.archives import refuse
from fedquilt.data.errors import DataMissing


def pillow(name: str) -> Any:
    """Pillow's Image module, or a sentence that says how to get it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataMissing(
            f"data set '{name}' is made of image files, and reading them needs Pillow: `pip install fedquilt[data]`"
        ) from error
    return Image


@contextmanager
def opened(archive: Path, member: str, content: IO[bytes]) -> Iterator[Any]:
    """A decoded PNG or JPEG picture; anything else, or a broken one, is refused."""
    image_module = pillow(archive.name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", image_module.DecompressionBombWarning)
            picture = image_module.open(content, formats=("PNG", "JPEG"))
            picture.load()
    except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError, Warning) as error:
        raise refuse(archive, f"its image '{member}' cannot be decoded ({error})") from error
    with picture:
        yield picture
