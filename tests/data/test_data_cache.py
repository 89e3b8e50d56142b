"""Caches, checksums and downloads, against a server on this machine."""

from __future__ import annotations

import builtins
import functools
import http.server
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import official_files as official
import pytest

from fedquilt import data
from fedquilt.data import SOURCES, Archive, DataDamaged, DataError, DataMissing, Source, cache, download
from fedquilt.data import registry as registry_module

Served = tuple[Path, str]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A folder and the address at which it is served."""
    folder = tmp_path / "served"
    folder.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


def offer(monkeypatch: pytest.MonkeyPatch, name: str, served: Served, published: bool = False) -> Source:
    """Let a source be fetched from the test's server, without its published count."""
    folder, address = served
    paths = official.MAKERS[name](folder)
    archives = tuple(Archive(address + p.name, p.name, download.digest(p, "md5") if published else None) for p in paths)
    source = replace(SOURCES[name], archives=archives, samples=None)
    monkeypatch.setitem(registry_module.SOURCES, name, source)
    return source


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("name", official.MAKERS)
def test_fetched_parsed_cached_and_read_again(
    name: str, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = offer(monkeypatch, name, served)
    home = tmp_path / "home"
    first = data.load(name, home, progress=False)
    assert files(home) == sorted(["SHA256SUMS", f"{name}.npz"])
    for archive in source.archives:
        (served[0] / archive.file).unlink()
    again = data.load(name, home)
    assert repr(again) == repr(first)
    for key in ("x", "y", "subject", "recording", "time", "coarse", "is_test"):
        one, two = getattr(first, key), getattr(again, key)
        assert (one is None) == (two is None), key
        assert one is None or (np.array_equal(one, two) and one.dtype == two.dtype), key
    assert (again.label_names, again.coarse_names, again.channels) == (
        first.label_names,
        first.coarse_names,
        first.channels,
    )


def test_an_archive_in_the_folder_is_used_and_left_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry_module.SOURCES, "harbox", replace(SOURCES["harbox"], archives=(
        Archive("http://127.0.0.1:9/nowhere", "large_scale_HARBox.zip"),)))  # fmt: skip
    official.harbox(tmp_path)
    assert len(data.load("harbox", tmp_path, fetch=False)) == 4
    assert files(tmp_path) == ["SHA256SUMS", "harbox.npz", "large_scale_HARBox.zip"]


def test_a_tampered_archive_fails_its_published_checksum(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = offer(monkeypatch, "cifar10", served, published=True)
    path = served[0] / source.archives[0].file
    raw = bytearray(path.read_bytes())
    raw[4] ^= 1  # the time stamp in the gzip header: parses just as well
    path.write_bytes(raw)
    home = tmp_path / "home"
    with pytest.raises(DataDamaged, match=r"its checksum is md5:\w+, the published one is md5:"):
        data.load("cifar10", home, progress=False)
    assert files(home) == []


def test_the_first_download_is_trusted_and_a_changed_one_is_not(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = offer(monkeypatch, "wisdm", served)
    home = tmp_path / "home"
    data.get("wisdm", home, progress=False)
    kept = data.load("wisdm", home).y
    path = served[0] / source.archives[0].file
    sums = (home / "SHA256SUMS").read_text()
    assert sums == f"{download.digest(path).removeprefix('sha256:')}  WISDM_ar_latest.tar.gz\n"
    data.get("wisdm", home, again=True, progress=False)  # the same file again is fine
    members = {"WISDM_ar_v1.1/WISDM_ar_v1.1_raw.txt": b"33,Jogging,49105962326000,-0.6,12.6,0.5;\n"}
    official.make_tar(path, members)
    with pytest.raises(DataDamaged, match="that of the first download was") as error:
        data.get("wisdm", home, again=True, progress=False)
    assert str(home / "SHA256SUMS") in str(error.value)
    assert files(home) == ["SHA256SUMS", "wisdm.npz"]
    assert np.array_equal(data.load("wisdm", home).y, kept)


def test_an_archive_that_does_not_parse_leaves_nothing_behind(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = offer(monkeypatch, "hapt", served)
    path = served[0] / source.archives[0].file
    path.write_bytes(path.read_bytes()[:300])
    home = tmp_path / "home"
    with pytest.raises(DataDamaged, match="truncated or of another format"):
        data.load("hapt", home, progress=False)
    assert files(home) == []


def test_a_parsed_archive_must_reach_the_published_count(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = offer(monkeypatch, "mnist", served)
    monkeypatch.setitem(registry_module.SOURCES, "mnist", replace(source, samples=70000))
    home = tmp_path / "home"
    with pytest.raises(DataDamaged, match="it holds 7 samples, MNIST handwritten digits has 70000"):
        data.load("mnist", home, progress=False)
    assert files(home) == []


def test_a_transfer_that_breaks_off_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stingy(_Quiet):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"x" * 10)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stingy)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_address[1]}/a.zip"
        source = replace(SOURCES["harbox"], archives=(Archive(address, "a.zip"),))
        monkeypatch.setitem(registry_module.SOURCES, "harbox", source)
        with pytest.raises(DataError):
            data.load("harbox", tmp_path, progress=False)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert files(tmp_path) == []


def test_offline_and_absent_names_source_file_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = replace(SOURCES["stl10"], archives=(Archive("http://127.0.0.1:9/stl10.tar.gz", "stl10_binary.tar.gz"),))
    monkeypatch.setitem(registry_module.SOURCES, "stl10", source)
    with pytest.raises(DataMissing) as error:
        data.load("stl10", tmp_path, progress=False)
    said = str(error.value)
    for part in ("stl10.npz", "stl10_binary.tar.gz", "http://127.0.0.1:9/stl10.tar.gz", str(tmp_path), source.homepage):
        assert part in said
    assert "no connection" in said
    assert isinstance(error.value, FileNotFoundError)
    assert files(tmp_path) == []


def test_without_the_downloader_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pooch":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataMissing, match=r"downloader is not installed: `pip install fedquilt\[data\]`"):
        data.load("cifar100", tmp_path)


def test_fetching_can_be_switched_off(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="fetching is switched off"):
        data.load("cifar100", tmp_path, fetch=False)


def test_an_unknown_name_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data set 'minst'; there are digits, mnist"):
        data.load("minst", tmp_path)


def toy(**more: Any) -> data.Dataset:
    return data.Dataset("mnist", official.numbers(4, 28, 28), np.array([0, 1, 2, 3]), tuple("0123456789"), **more)


def test_a_read_only_folder_is_read_but_not_written(tmp_path: Path) -> None:
    cache.write(tmp_path / "mnist.npz", toy())
    (tmp_path / "mnist.npz").chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        assert len(data.load("mnist", tmp_path)) == 4
        with pytest.raises(DataMissing, match="cannot be written"):
            data.load("cifar10", tmp_path)
        assert files(tmp_path) == ["mnist.npz"]
    finally:
        tmp_path.chmod(0o755)


def test_a_cache_in_any_order_of_train_and_test_comes_back(tmp_path: Path) -> None:
    flags = np.array([True, False, True, False])
    cache.write(tmp_path / "mnist.npz", toy(is_test=flags, subject=np.array([7, -1, 300, 70000])))
    back = data.load("mnist", tmp_path)
    assert back.is_test is not None
    assert back.is_test.tolist() == flags.tolist()
    assert back.subject is not None
    assert back.subject.tolist() == [7, -1, 300, 70000]


def test_a_failed_write_leaves_the_old_cache_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mnist.npz"
    cache.write(path, toy())
    before = path.read_bytes()

    def full(file: Any, **arrays: Any) -> None:
        file.write(b"half of it")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="no space"):
        cache.write(path, toy())
    assert path.read_bytes() == before
    assert files(tmp_path) == ["mnist.npz"]


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"x": np.array([{}], dtype=object), "y": np.zeros(1, int)}, "pickle"),
        ({"y": np.zeros(1, int)}, "lacks x, y"),
        ({"x": np.zeros((2, 28, 28), np.uint8), "y": np.zeros(3, int)}, "2 rows, y has 3|x has 2 rows"),
        ({"x": np.zeros((1, 28, 28), np.uint8), "y": np.full(1, 12)}, "10 label names"),
        ({"x": np.zeros((1, 28), np.float32), "y": np.zeros(1, int)}, "2-dimensional float32"),
    ],
)
def test_a_cache_that_is_not_one_is_refused(arrays: dict[str, Any], why: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "mnist.npz", label_names=np.array(list("0123456789")), **arrays)
    with pytest.raises(DataDamaged, match=why):
        data.load("mnist", tmp_path)


def test_a_truncated_cache_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    cache.write(path, toy())
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataDamaged, match="delete it, and it will be made again"):
        data.load("mnist", tmp_path)


def test_the_folder_is_argument_then_environment_then_user_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDQUILT_DATA", os.path.join("some", "where"))
    assert data.data_folder() == Path("some") / "where"
    assert data.data_folder("else") == Path("else")
    monkeypatch.delenv("FEDQUILT_DATA")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert data.data_folder() == Path("caches") / "fedquilt"


def test_the_list_says_what_is_there_and_how_large(tmp_path: Path) -> None:
    cache.write(tmp_path / "mnist.npz", toy())
    rows = {row.name: row for row in data.available(tmp_path)}
    assert list(rows)[:3] == ["digits", "mnist", "cifar10"]
    assert len(rows) == 14
    assert [name for name, row in rows.items() if row.present] == ["digits", "mnist"]
    assert rows["mnist"].size == (tmp_path / "mnist.npz").stat().st_size
    assert rows["harbox"].path == tmp_path / "harbox.npz"
    assert all(row.source.startswith("http") and row.licence for row in rows.values())
