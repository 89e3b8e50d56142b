"""Small files in exactly the formats of the official archives, made from known numbers."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Members = Mapping[str, bytes]


def make_tar(path: Path, members: Members) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def zip_bytes(members: Members) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def make_zip(path: Path, members: Members) -> Path:
    path.write_bytes(zip_bytes(members))
    return path


def idx_bytes(values: NDArray[np.uint8]) -> bytes:
    head = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return gzip.compress(head + values.tobytes())


def numbers(*shape: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def text(rows: NDArray[Any], form: str = "%.8e") -> bytes:
    buffer = io.BytesIO()
    np.savetxt(buffer, rows, fmt=form)
    return buffer.getvalue()


def png(pixels: NDArray[np.uint8], kind: str = "PNG") -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def mnist(folder: Path) -> tuple[Path, ...]:
    parts = {
        "train-images-idx3-ubyte.gz": numbers(5, 28, 28),
        "train-labels-idx1-ubyte.gz": np.array([3, 1, 4, 1, 5], np.uint8),
        "t10k-images-idx3-ubyte.gz": numbers(2, 28, 28, seed=1),
        "t10k-labels-idx1-ubyte.gz": np.array([9, 0], np.uint8),
    }
    for name, values in parts.items():
        (folder / name).write_bytes(idx_bytes(values))
    return tuple(folder / name for name in parts)


def cifar_record(labels: list[int], image: NDArray[np.uint8]) -> bytes:
    """An image (32, 32, 3) as the official files have it: labels, then the red, green and blue planes."""
    return bytes(labels) + b"".join(image[:, :, colour].tobytes() for colour in range(3))


def cifar10(folder: Path) -> tuple[Path, ...]:
    images = numbers(6, 32, 32, 3)
    names = [f"data_batch_{n}.bin" for n in range(1, 6)] + ["test_batch.bin"]
    members = {f"cifar-10-batches-bin/{n}": cifar_record([i], images[i]) for i, n in enumerate(names)}
    members = {"cifar-10-batches-bin/batches.meta.txt": b"airplane\n", **members}
    return (make_tar(folder / "cifar-10-binary.tar.gz", members),)


def cifar100(folder: Path) -> tuple[Path, ...]:
    images = numbers(3, 32, 32, 3)
    members = {
        "cifar-100-binary/train.bin": cifar_record([1, 2], images[0]) + cifar_record([0, 1], images[1]),
        "cifar-100-binary/test.bin": cifar_record([1, 0], images[2]),
        "cifar-100-binary/fine_label_names.txt": b"apple\naquarium_fish\nbaby\n",
        "cifar-100-binary/coarse_label_names.txt": b"fish\npeople\n",
    }
    return (make_tar(folder / "cifar-100-binary.tar.gz", members),)


def stl10(folder: Path) -> tuple[Path, ...]:
    images = numbers(3, 96, 96, 3)
    flat = [image.transpose(2, 1, 0).tobytes() for image in images]  # colour, column, row
    members = {
        "stl10_binary/test_X.bin": flat[2],
        "stl10_binary/test_y.bin": bytes([10]),
        "stl10_binary/train_X.bin": flat[0] + flat[1],
        "stl10_binary/train_y.bin": bytes([1, 2]),
        "stl10_binary/unlabeled_X.bin": b"",
        "stl10_binary/class_names.txt": b"airplane\nbird\ncar\ncat\ndeer\ndog\nhorse\nmonkey\nship\ntruck\n",
    }
    return (make_tar(folder / "stl10_binary.tar.gz", members),)


def emnist(folder: Path) -> tuple[Path, ...]:
    upright = numbers(3, 28, 28)
    lying = np.ascontiguousarray(upright.transpose(0, 2, 1))
    members = {
        "gzip/emnist-byclass-train-images-idx3-ubyte.gz": idx_bytes(lying[:2]),
        "gzip/emnist-byclass-train-labels-idx1-ubyte.gz": idx_bytes(np.array([10, 61], np.uint8)),
        "gzip/emnist-byclass-test-images-idx3-ubyte.gz": idx_bytes(lying[2:]),
        "gzip/emnist-byclass-test-labels-idx1-ubyte.gz": idx_bytes(np.array([0], np.uint8)),
        "gzip/emnist-balanced-train-labels-idx1-ubyte.gz": idx_bytes(np.array([46], np.uint8)),
    }
    return (make_zip(folder / "gzip.zip", members),)


def femnist(folder: Path) -> tuple[Path, ...]:
    pages = [png(np.full((128, 128, 3), grey, np.uint8)) for grey in (255, 100, 0)]
    by_class = {
        "by_class/30/hsf_0/hsf_0_00000.png": pages[0],
        "by_class/41/hsf_1/hsf_1_00000.png": pages[1],
        "by_class/7a/hsf_4/hsf_4_00000.png": pages[2],
        "by_class/7a/train_7a/train_7a_00000.png": pages[0],  # a second copy for training, not to be counted
        "by_class/41/hsf_1.mit": b"",
    }
    by_write = {
        "by_write/hsf_1/f0500_26/u0500_26/u0500_26_00000.png": pages[1],
        "by_write/hsf_0/f0000_14/d0000_14/d0000_14_00000.png": pages[0],
        "by_write/hsf_0/f0000_14/l0000_14/l0000_14_00001.png": pages[2],
    }
    return make_zip(folder / "by_class.zip", by_class), make_zip(folder / "by_write.zip", by_write)


def animals10(folder: Path) -> tuple[Path, ...]:
    from fedquilt.data.animals10 import FOLDERS

    members = {"translate.py": b"translate = {}"}
    for n, italian in enumerate(FOLDERS.values()):
        picture = np.zeros((60, 100, 3), np.uint8)
        picture[:, 20:80] = 20 * n  # the middle square; the rest is cropped away
        members[f"raw-img/{italian}/a.jpeg"] = png(picture, "JPEG")
        members[f"raw-img/{italian}/b.png"] = png(picture.transpose(1, 0, 2).copy())
    return (make_zip(folder / "animals10.zip", members),)


def uci_har(folder: Path) -> tuple[Path, ...]:
    from fedquilt.data.uci_har import CHANNELS

    members = {}
    for half, windows in (("train", 3), ("test", 2)):
        for c, channel in enumerate(CHANNELS):
            signal = np.arange(64 * (windows + 1)) / 100 + c
            rows = np.stack([signal[64 * w : 64 * w + 128] for w in range(windows)])
            if half == "train":
                rows[2] += 0.5  # the third window of train is from another time
            members[f"UCI HAR Dataset/{half}/Inertial Signals/{channel}_{half}.txt"] = text(rows, " %.7e")
        members[f"UCI HAR Dataset/{half}/y_{half}.txt"] = b"5\n5\n6\n" if half == "train" else b"1\n1\n"
        members[f"UCI HAR Dataset/{half}/subject_{half}.txt"] = b"1\n1\n3\n" if half == "train" else b"2\n2\n"
    inner = zip_bytes({**members, "__MACOSX/UCI HAR Dataset/train/._y_train.txt": b"\x00"})
    outer = {"UCI HAR Dataset.names": b"about", "UCI HAR Dataset.zip": inner}
    return (make_zip(folder / "human+activity+recognition+using+smartphones.zip", outer),)


def hapt(folder: Path) -> tuple[Path, ...]:
    first, second = np.arange(300.0)[:, None] * [1, 2, 3], np.ones((200, 3))
    members = {
        "RawData/acc_exp01_user01.txt": text(first),
        "RawData/gyro_exp01_user01.txt": text(first / 10),
        "RawData/acc_exp02_user01.txt": text(second),
        "RawData/gyro_exp02_user01.txt": text(second),
        "RawData/labels.txt": b"1 1 5 11 150 \n1 1 7 151 200 \n2 1 1 1 200 \n",
        "activity_labels.txt": b" 1 WALKING           \n",
    }
    return (make_zip(folder / "smartphone+based+recognition.zip", members),)


WISDM_TEXT = """33,Jogging,49105962326000,-0.6946377,12.680544,0.50395286;
33,Jogging,49106062271000,5.012288,11.264028,0.95342433;
33,Jogging,49106112167000,4.903325,10.882658,-0.08172209;33,Jogging,49106222305000,-0.61291564,18.496431,3.0237172;
33,Walking,49106332290000,-1.1849703,12.108489,7.205164;
33,Walking,59106442306000,1.3756552,-2.4925237,-6.510526;

17,Sitting,0,0,0,0.0;
17,Standing,100,1,2,3.5,;
"""


def wisdm(folder: Path) -> tuple[Path, ...]:
    members = {"WISDM_ar_v1.1/readme.txt": b"", "WISDM_ar_v1.1/WISDM_ar_v1.1_raw.txt": WISDM_TEXT.encode()}
    return (make_tar(folder / "WISDM_ar_latest.tar.gz", members),)


def realworld_csv(times: NDArray[Any], slope: float) -> bytes:
    lines = [f"{i},{t:.0f},{slope * t},{1.0},{2.0}" for i, t in enumerate(times, 1)]
    return ("id,attr_time,attr_x,attr_y,attr_z\n" + "\n".join(lines) + "\n").encode()


def realworld(folder: Path) -> tuple[Path, ...]:
    clock = np.arange(0, 1000, 20)
    broken = np.concatenate([clock, clock + 2000])  # a second and a half in which nothing was recorded
    part = {f"acc_climbingup_{n}_csv.zip": zip_bytes({f"acc_climbingup{end}_waist.csv": realworld_csv(clock, 1)})
            for n, end in ((1, ""), (2, "_2"))}  # fmt: skip
    gyro_part = {
        f"gyr_climbingup{end}_csv.zip": zip_bytes({f"Gyroscope_climbingup{end}_waist.csv": realworld_csv(clock, 2)})
        for end in ("", "_2")
    }
    members = {
        "proband1/data/acc_walking_csv.zip": zip_bytes(
            {"acc_walking_waist.csv": realworld_csv(broken, 1), "acc_walking_head.csv": b"", "readMe": b""}
        ),
        "proband1/data/gyr_walking_csv.zip": zip_bytes({"Gyroscope_walking_waist.csv": realworld_csv(broken + 5, 2)}),
        "proband1/data/mag_walking_csv.zip": b"not read",
        "proband4/data/acc_climbingup_csv.zip": zip_bytes(part),
        "proband4/data/gyr_climbingup_csv.zip": zip_bytes(gyro_part),
        "proband4/data/acc_sitting_csv.zip": zip_bytes({"acc_sitting_2_waist.csv": realworld_csv(clock, 1)}),
    }
    return (make_zip(folder / "realworld2016_dataset.zip", members),)


def harbox(folder: Path) -> tuple[Path, ...]:
    rows = np.arange(2000.0).reshape(200, 10)
    members = {
        "large_scale_HARBox/2/Walk_train.txt": text(rows, "%.4f"),
        "large_scale_HARBox/10/Call_train.txt": text(rows[:100], "%.4f"),
        "large_scale_HARBox/2/typing_train.txt": text(rows[:100], "%.4f"),
        "large_scale_HARBox/data_pre.py": b"",
        "__MACOSX/large_scale_HARBox/2/Walk_train.txt": b"\x00",
    }
    return (make_zip(folder / "large_scale_HARBox.zip", members),)


MAKERS: dict[str, Callable[[Path], tuple[Path, ...]]] = {
    "mnist": mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "stl10": stl10,
    "emnist": emnist,
    "femnist": femnist,
    "animals10": animals10,
    "uci_har": uci_har,
    "hapt": hapt,
    "wisdm": wisdm,
    "realworld": realworld,
    "harbox": harbox,
}
