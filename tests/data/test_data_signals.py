"""Signal data sets, parsed from small files in their official formats; and what every parser refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import official_files as official
import pytest

from fedquilt.data import SOURCES, hapt, harbox, realworld, uci_har, wisdm
from fedquilt.data.errors import DataDamaged


def test_uci_har_reads_the_zip_within_the_zip_and_finds_chains(tmp_path: Path) -> None:
    parsed = uci_har.parse(*official.uci_har(tmp_path))
    assert parsed.x.shape == (5, 9, 128)
    assert parsed.x[0, 4, :3].tolist() == pytest.approx([4.0, 4.01, 4.02])
    assert parsed.y.tolist() == [4, 4, 5, 0, 0]
    assert parsed.subject is not None
    assert parsed.subject.tolist() == [1, 1, 3, 2, 2]
    assert parsed.is_test is not None
    assert parsed.is_test.tolist() == [False] * 3 + [True] * 2
    assert parsed.recording is not None
    assert parsed.recording.tolist() == [0, 0, 1, 2, 2]
    assert parsed.time is not None
    assert parsed.time.tolist() == [0, 64, 0, 0, 64]
    assert parsed.channels[:4] == ("body_acc_x", "body_acc_y", "body_acc_z", "body_gyro_x")


def test_hapt_counts_readings_from_1_and_ends_inclusively(tmp_path: Path) -> None:
    parsed = hapt.parse(*official.hapt(tmp_path))
    assert parsed.x.shape == (500, 6)
    assert parsed.x[7].tolist() == pytest.approx([7, 14, 21, 0.7, 1.4, 2.1])
    assert parsed.y[:10].tolist() == [-1] * 10
    assert parsed.y[10:150].tolist() == [4] * 140
    assert parsed.y[150:200].tolist() == [6] * 50
    assert parsed.y[200:300].tolist() == [-1] * 100
    assert parsed.y[300:].tolist() == [0] * 200
    assert parsed.recording is not None
    assert np.bincount(parsed.recording).tolist() == [0, 300, 200]


def test_hapt_refuses_a_label_beyond_the_recording(tmp_path: Path) -> None:
    signal = official.text(np.ones((10, 3)))
    members = {f"RawData/{s}_exp01_user01.txt": signal for s in ("acc", "gyro")}
    members["RawData/labels.txt"] = b"1 1 5 1 11\n"
    with pytest.raises(DataDamaged, match="label from 1 to 11 of 10"):
        hapt.parse(official.make_zip(tmp_path / "a.zip", members))


def test_wisdm_reads_records_that_run_together_and_splits_at_gaps(tmp_path: Path) -> None:
    parsed = wisdm.parse(*official.wisdm(tmp_path))
    assert [parsed.label_names[i] for i in parsed.y] == ["Jogging"] * 4 + ["Walking"] * 2 + ["Standing"]
    assert parsed.x[3].tolist() == pytest.approx([-0.61291564, 18.496431, 3.0237172])
    assert parsed.subject is not None
    assert parsed.subject.tolist() == [33] * 6 + [17]
    assert parsed.recording is not None
    assert parsed.recording.tolist() == [0, 0, 0, 0, 1, 2, 3]  # activity changes; ten seconds pass; subject changes


def test_wisdm_leaves_out_a_broken_record_but_refuses_many(tmp_path: Path) -> None:
    good = "".join(f"1,Walking,{50_000_000 * i + 1},1.0,2.0,3.0;\n" for i in range(1000))
    name = "WISDM_ar_v1.1/WISDM_ar_v1.1_raw.txt"
    one = official.make_tar(tmp_path / "one.tar.gz", {name: (good + "11,Walking,1867172313000,4.4,;\n").encode()})
    assert len(wisdm.parse(one)) == 1000
    two = official.make_tar(tmp_path / "two.tar.gz", {name: (good + "11,Walk\n12,Jog\n").encode()})
    with pytest.raises(DataDamaged, match="1000 readings and 2 broken"):
        wisdm.parse(two)


def test_realworld_aligns_sensors_splits_at_gaps_and_opens_nested_zips(tmp_path: Path) -> None:
    parsed = realworld.parse(*official.realworld(tmp_path))
    assert parsed.subject is not None
    assert parsed.recording is not None
    runs = [(int(parsed.subject[r[0]]), parsed.label_names[parsed.y[r[0]]], len(r))
            for r in (np.flatnonzero(parsed.recording == n) for n in np.unique(parsed.recording))]  # fmt: skip
    # the gyroscope starts 5 ms late, so its stretch of 980 ms overlaps the other's by 975: 49 steps of 20 ms
    assert runs == [(1, "walking", 49), (1, "walking", 49), (4, "climbingup", 50), (4, "climbingup", 50)]
    walking = parsed.x[parsed.subject == 1]
    assert walking[0].tolist() == pytest.approx([5, 1, 2, 10, 1, 2])  # at 5 ms: between two readings of the first
    assert walking[49, 3] / walking[49, 0] == pytest.approx(2)


def test_harbox_cuts_rows_into_windows_and_drops_the_clock(tmp_path: Path) -> None:
    parsed = harbox.parse(*official.harbox(tmp_path))
    assert parsed.x.shape == (4, 9, 100)
    assert [parsed.label_names[i] for i in parsed.y] == ["typing", "Walk", "Walk", "Call"]
    assert parsed.subject is not None
    assert parsed.subject.tolist() == [2, 2, 2, 10]
    assert parsed.x[2, :, 0].tolist() == list(range(1001, 1010))
    assert parsed.time is not None
    assert parsed.time.tolist() == [0, 0, 100, 0]


@pytest.mark.parametrize("name", official.MAKERS)
def test_a_truncated_archive_is_refused(name: str, tmp_path: Path) -> None:
    paths = official.MAKERS[name](tmp_path)
    last = paths[-1]
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    with pytest.raises(DataDamaged, match=f"{last.name.replace('+', '.')} is not usable"):
        SOURCES[name].parse(*paths)


@pytest.mark.parametrize("name", official.MAKERS)
def test_a_foreign_archive_is_refused(name: str, tmp_path: Path) -> None:
    paths = official.MAKERS[name](tmp_path)
    tar = paths[0].name.endswith(".tar.gz")
    make = official.make_tar if tar else official.make_zip
    make(paths[0], {"readme.txt": b"something else"})
    with pytest.raises(DataDamaged, match="delete it and fetch the official archive again"):
        SOURCES[name].parse(*paths)


@pytest.mark.parametrize("name", official.MAKERS)
def test_a_page_of_html_is_refused(name: str, tmp_path: Path) -> None:
    paths = official.MAKERS[name](tmp_path)
    paths[0].write_text("<html>please log in</html>")
    with pytest.raises(DataDamaged, match="is not usable"):
        SOURCES[name].parse(*paths)
