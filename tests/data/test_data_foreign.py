"""Caches that are not what they should be: refused with a sentence, whatever NumPy would have made of them."""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt import data
from fedquilt.data import DataDamaged, Dataset
from fedquilt.data.npz import NotArrays, read_arrays

GOOD: dict[str, Any] = {
    "x": np.zeros((6, 28, 28), np.uint8),
    "y": np.arange(6),
    "label_names": np.array([str(d) for d in range(10)]),
}


def npy(array: Any, shape: tuple[int, ...] | None = None) -> bytes:
    """An array as a file, maybe with another shape in its header."""
    out = io.BytesIO()
    told = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape if shape is None else shape}
    np.lib.format.write_array_header_1_0(out, told)
    whole: bytes = out.getvalue() + array.tobytes()
    return whole


def packed(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**{key: npy(value) for key, value in GOOD.items()}, **members}.items():
            archive.writestr(f"{name}.npy", content)
    return path


def encrypted(path: Path) -> None:
    """As an archive would be whose members are said to be encrypted."""
    raw = bytearray(packed(path).read_bytes())
    at = raw.find(b"PK\x01\x02")
    while at >= 0:
        raw[at + 8] |= 1
        at = raw.find(b"PK\x01\x02", at + 4)
    path.write_bytes(raw)


def odd_packing(path: Path) -> None:
    raw = bytearray(packed(path).read_bytes())
    at = raw.find(b"PK\x01\x02")
    raw[at + 10] = 99  # a way to pack that nobody knows
    path.write_bytes(raw)


def saved(**changes: Any) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **{**GOOD, **changes})


FOREIGN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "x is no array": (lambda p: packed(p, x=b"not an array at all"), "x is not an array"),
    "x is empty": (lambda p: packed(p, x=b""), "x is not an array"),
    "a huge shape": (lambda p: packed(p, x=npy(GOOD["x"], (2**40, 28, 28))), "x says that it is uint8 of shape"),
    "a negative shape": (lambda p: packed(p, x=npy(GOOD["x"], (-6, 28, -28))), "x says that it is|x is not an array"),
    "objects": (lambda p: packed(p, y=npy(np.array([1, 2], dtype="O").astype("O")[:0])), "Python objects"),
    "encrypted": (encrypted, "is encrypted"),
    "odd packing": (odd_packing, "no archive of arrays"),
    "no archive": (lambda p: p.write_bytes(b"hello"), "no archive of arrays"),
    "one name": (saved(label_names=np.array("cat")), "label_names is not a list of names"),
    "y of two dimensions": (saved(y=np.zeros((6, 1), int)), r"y has the shape \(6, 1\)"),
    "y of texts": (saved(y=np.array(["a"] * 6)), "y holds <U1 where whole numbers belong"),
    "y of halves": (saved(y=np.full(6, 0.5)), "y holds float64 where whole numbers belong"),
    "no samples": (saved(x=GOOD["x"][:0], y=GOOD["y"][:0]), "it holds no samples"),
    "a half is missing": (
        lambda p: np.savez(p, x_train=GOOD["x"], y_train=GOOD["y"], label_names=GOOD["label_names"]),
        "it lacks 'x_test'",
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_cache_is_refused_with_a_sentence(what: str, tmp_path: Path) -> None:
    make, sentence = FOREIGN[what]
    make(tmp_path / "mnist.npz")
    with pytest.raises(DataDamaged, match=f"the cache .*mnist.npz is not usable: .*(?:{sentence}).*; delete it"):
        data.load("mnist", tmp_path)


def test_a_good_one_is_read(tmp_path: Path) -> None:
    packed(tmp_path / "mnist.npz")
    found = data.load("mnist", tmp_path)
    assert (len(found), found.y.tolist(), found.classes) == (6, [0, 1, 2, 3, 4, 5], 10)


def test_a_small_file_does_not_unpack_to_a_huge_one(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as file:
        file.write(npy(np.zeros(0, np.uint8), (300 * 2**20,)))
        for _ in range(300):
            file.write(bytes(2**20))
    start = time.perf_counter()
    with pytest.raises(NotArrays, match=r"its [\d,]+ bytes would unpack to 314,572,928"):
        read_arrays(path)
    assert time.perf_counter() - start < 1


def test_a_data_set_has_one_label_a_sample() -> None:
    with pytest.raises(ValueError, match=r"data set 'toy': y has the shape \(4, 1\); give one number for each sample"):
        Dataset("toy", np.zeros((4, 2, 2), np.uint8), np.zeros((4, 1), int), ("cat",))
