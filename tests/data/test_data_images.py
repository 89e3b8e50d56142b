"""Image data sets, parsed from small files in their official formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import official_files as official
import pytest

from fedquilt import data
from fedquilt.data import animals10, cifar10, cifar100, emnist, femnist, mnist, stl10
from fedquilt.data.errors import DataDamaged


def test_digits_are_bundled_and_scaled_by_their_own_peak() -> None:
    digits = data.load("digits")
    assert digits.x.shape == (1797, 8, 8)
    assert digits.images().max() == 1.0
    assert sum(digits.counts().values()) == 1797


def test_mnist_has_pixels_labels_and_the_official_test_flag(tmp_path: Path) -> None:
    parsed = mnist.parse(*official.mnist(tmp_path))
    assert np.array_equal(parsed.x[:5], official.numbers(5, 28, 28))
    assert np.array_equal(parsed.x[5:], official.numbers(2, 28, 28, seed=1))
    assert parsed.y.tolist() == [3, 1, 4, 1, 5, 9, 0]
    assert parsed.is_test is not None
    assert parsed.is_test.tolist() == [False] * 5 + [True] * 2


def test_mnist_refuses_labels_of_another_file(tmp_path: Path) -> None:
    images, labels, test_images, test_labels = official.mnist(tmp_path)
    with pytest.raises(DataDamaged, match="do not go with the 5 images"):
        mnist.parse(images, test_labels, test_images, labels)


def test_cifar10_puts_colour_last_and_the_test_batch_last(tmp_path: Path) -> None:
    parsed = cifar10.parse(*official.cifar10(tmp_path))
    assert np.array_equal(parsed.x, official.numbers(6, 32, 32, 3))
    assert parsed.y.tolist() == [0, 1, 2, 3, 4, 5]
    assert parsed.is_test is not None
    assert parsed.is_test.tolist() == [False] * 5 + [True]
    first = parsed.images([0])
    assert first.shape == (1, 3, 32, 32)
    assert first.dtype == np.float32
    assert first[0, 2, 5, 7] == pytest.approx(int(parsed.x[0, 5, 7, 2]) / 255)


def test_cifar10_refuses_half_an_image(tmp_path: Path) -> None:
    members = {f"cifar-10-batches-bin/data_batch_{n}.bin": bytes(3073) for n in range(1, 6)}
    members["cifar-10-batches-bin/test_batch.bin"] = bytes(3000)
    with pytest.raises(DataDamaged, match="not a whole number of images"):
        cifar10.parse(official.make_tar(tmp_path / "a.tar.gz", members))


def test_cifar100_keeps_fine_and_coarse_labels_apart(tmp_path: Path) -> None:
    parsed = cifar100.parse(*official.cifar100(tmp_path))
    assert parsed.label_names == ("apple", "aquarium_fish", "baby")
    assert parsed.y.tolist() == [2, 1, 0]
    assert parsed.coarse is not None
    assert parsed.coarse.tolist() == [1, 0, 1]
    assert parsed.coarse_names == ("fish", "people")
    assert np.array_equal(parsed.x, official.numbers(3, 32, 32, 3))


def test_stl10_turns_columns_into_rows_and_counts_labels_from_0(tmp_path: Path) -> None:
    parsed = stl10.parse(*official.stl10(tmp_path))
    assert np.array_equal(parsed.x, official.numbers(3, 96, 96, 3))
    assert parsed.y.tolist() == [0, 1, 9]
    assert parsed.label_names[9] == "truck"


def test_emnist_stands_upright(tmp_path: Path) -> None:
    parsed = emnist.parse(*official.emnist(tmp_path))
    assert np.array_equal(parsed.x, official.numbers(3, 28, 28))
    assert [parsed.label_names[i] for i in parsed.y] == ["A", "z", "0"]
    assert parsed.classes == 62


def test_femnist_joins_writer_and_class_by_the_image(tmp_path: Path) -> None:
    parsed = femnist.parse(*official.femnist(tmp_path))
    assert [parsed.label_names[i] for i in parsed.y] == ["0", "z", "A"]
    assert parsed.subject is not None
    assert parsed.subject.tolist() == [0, 0, 1]
    assert parsed.x.shape == (3, 28, 28)
    assert parsed.x[:, 14, 14].tolist() == [255, 0, 100]


def test_femnist_refuses_an_image_nobody_has_classified(tmp_path: Path) -> None:
    by_class, _ = official.femnist(tmp_path)
    page = official.png(official.numbers(128, 128, 3))
    stranger = official.make_zip(tmp_path / "w.zip", {"by_write/hsf_0/f0000_14/d0000_14/d0000_14_00000.png": page})
    with pytest.raises(DataDamaged, match=r"is not in by_class\.zip"):
        femnist.parse(by_class, stranger)


def test_animals_are_cropped_to_the_middle_and_named_in_english(tmp_path: Path) -> None:
    (archive,) = official.animals10(tmp_path)
    parsed = animals10.parse(archive, size=16)
    assert parsed.x.shape == (20, 16, 16, 3)
    expected = 20 * np.arange(10)
    assert np.abs(parsed.x[1::2].mean(axis=(1, 2, 3)) - expected).max() < 0.01  # png: exact
    assert np.abs(parsed.x[::2].mean(axis=(1, 2, 3)) - expected).max() < 8  # jpeg: blurred near the crop
    four = animals10.parse(archive, size=8, labels=("cat", "dog"), per_label=1, name="animals4")
    assert four.counts() == {"cat": 1, "dog": 1}
    assert four.name == "animals4"


def test_animals_refuse_a_picture_that_is_none(tmp_path: Path) -> None:
    archive = official.make_zip(tmp_path / "a.zip", {"raw-img/gatto/a.jpeg": b"<html>sign in</html>"})
    with pytest.raises(DataDamaged, match="cannot be decoded"):
        animals10.parse(archive, labels=("cat",))
