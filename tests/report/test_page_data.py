"""What the page is given: runs read with tolerance, plans packed and ordered, curves over seeds, everything escaped."""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import write_run

from fedquilt.report.page_content import page_data
from fedquilt.report.plan_frames import circle_colours, frames, order_by_similarity, packed
from fedquilt.report.read_runs import read_run


def unpacked(array: dict[str, Any]) -> Any:
    return np.frombuffer(base64.b64decode(array["data"]), dtype="<" + array["type"]).reshape(array["shape"])


def row(at: int, client: str, accuracy: float, readout: str = "received", loss: float | None = None) -> str:
    told = {"round": at, "client": client, "readout": readout, "split": "test", "accuracy": accuracy, "loss": loss}
    return json.dumps(told)


def test_a_run_is_read(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", "feddl", seed=3, clients=5, rounds=4, readouts=("received", "adapted")))
    assert (run.scenario, run.method, run.seed, run.reading) == ("har", "feddl", 3, ("received", "test"))
    assert run.clients == tuple(f"phone-{i}" for i in range(1, 6))
    assert set(run.series) == {("received", "test"), ("adapted", "test")}
    assert run.series["received", "test"].score.shape == (4, 5)
    assert [at for at, _ in run.plans] == [0, 1, 2, 3, 4]
    assert run.traffic is not None
    assert run.traffic.up[0].tolist() == pytest.approx([0.12, 0.144, 0.168, 0.192, 0.216])
    assert run.labels[0] == "walking"
    assert run.confusion["phone-1"].shape == (6, 6)


def test_a_line_cut_short_is_left_out_at_the_end_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(row(1, "a", 0.5) + "\n" + row(2, "a", 0.75)[:30])
    assert read_run(tmp_path).series["received", "test"].rounds == (1,)
    path.write_text('{"round": 1, "cli\n' + row(2, "a", 0.75) + "\n")
    with pytest.raises(ValueError, match=r"line 1 of .*metrics.jsonl' is not JSON"):
        read_run(tmp_path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary.json' is not JSON"):
        read_run(tmp_path)
    (tmp_path / "summary.json").unlink()
    (tmp_path / "run.toml").write_text("= 3")
    with pytest.raises(ValueError, match=r"run.toml' is not TOML"):
        read_run(tmp_path)


def test_tables_in_run_toml_are_looked_into(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'seed = 4\n[scenario]\nname = "digits"\nclients = ["b", "a"]\n[method]\nname = "feddl"\nlinkage = "average"\n'
    )
    (tmp_path / "metrics.jsonl").write_text(row(1, "a", 0.5) + "\n")
    run = read_run(tmp_path)
    assert (run.scenario, run.method, run.seed, run.clients) == ("digits", "feddl", 4, ("b", "a"))


def test_a_client_keeps_its_last_known_accuracy(tmp_path: Path) -> None:
    lines = [row(1, "a", 0.5), row(2, "b", 0.75), row(3, "a", 0.25)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    filled = read_run(tmp_path).series["received", "test"].filled()
    np.testing.assert_array_equal(filled, [[0.5, math.nan], [0.5, 0.75], [0.25, 0.75]])


def test_dense_plans_show_who_mixes_with_whom(tmp_path: Path) -> None:
    matrix = [[0.5, 0.5, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    line = {"round": 0, "units": {"all": {"matrix": matrix, "pull": [1, 1, 1, 1]}}}
    (tmp_path / "plans.jsonl").write_text(json.dumps(line))
    (tmp_path / "summary.json").write_text("{}")
    run = read_run(tmp_path)
    assert run.clients == ("client 0", "client 1", "client 2", "client 3")
    circle = run.plans[0][1]["all"]
    assert circle[0] == circle[1] >= 0
    assert circle[2:].tolist() == [-1, -1]


RECEIVED, ADAPTED = [[1, 0], [0, 1]], [[2, 0], [0, 2]]
CELLS = {"classes": 2, "cells": [[0, 0, 2], [1, 1, 2]]}


@pytest.mark.parametrize(
    "written",
    [
        {"a": ADAPTED},
        {"received": {"a": RECEIVED}, "adapted": {"a": ADAPTED}},
        {"a": {"received": RECEIVED, "adapted": ADAPTED}},
        {"labels": ["x", "y"], "clients": {"a": {"received": RECEIVED, "adapted": ADAPTED}}},
        {"clients": {"a": {"received": CELLS, "adapted": CELLS}}},
    ],
)
def test_confusion_is_read_in_each_form(tmp_path: Path, written: dict[str, Any]) -> None:
    (tmp_path / "summary.json").write_text('{"readout": "adapted", "split": "test"}')
    (tmp_path / "metrics.jsonl").write_text(row(1, "a", 0.5, readout="adapted"))
    (tmp_path / "confusion.json").write_text(json.dumps(written))
    run = read_run(tmp_path)
    assert {name: m.tolist() for name, m in run.confusion.items()} == {"a": ADAPTED}
    assert run.labels == (("x", "y") if "labels" in written else ())


def test_blocks_show_when_clients_are_ordered() -> None:
    rng = np.random.default_rng(0)
    columns = np.stack([np.zeros(60), np.arange(60) % 3, np.arange(60) % 6, rng.integers(0, 2, 60)], axis=1)
    ordered = columns[order_by_similarity(columns)]
    # Each of the three and of the six groups is one block: as many changes down a column as there are borders.
    assert (np.diff(ordered[:, 1]) != 0).sum() == 2
    assert (np.diff(ordered[:, 2]) != 0).sum() == 5


def test_circles_keep_their_colour_over_rounds_and_differ_within_a_unit() -> None:
    early, late = np.array([[0], [0], [1], [1]]), np.array([[0], [0], [2], [2]])
    colours = circle_colours([early, late])
    assert set(colours) == {(0, 0), (0, 1), (0, 2)}
    assert len(set(colours.values())) == 3


def test_a_colour_in_two_units_is_the_same_clients() -> None:
    rng = np.random.default_rng(1)
    sheet = np.stack([np.zeros(12), np.arange(12) % 2, np.arange(12) % 2, rng.integers(0, 4, 12)], axis=1).astype(int)
    colours = circle_colours([sheet])
    members: dict[int, set[bytes]] = {}
    for (unit, circle), colour in colours.items():
        members.setdefault(colour, set()).add((sheet[:, unit] == circle).tobytes())
    assert all(len(groups) == 1 for groups in members.values())
    assert colours[1, 0] == colours[2, 0]
    many = np.stack([rng.permutation(np.arange(60) // 2) for _ in range(3)], axis=1)  # 30 circles a unit
    for unit in range(3):
        mine = [colour for (u, _), colour in circle_colours([many]).items() if u == unit]
        assert len(set(mine)) == 30


def test_frames_hold_changes_only_and_read_back() -> None:
    plans = [
        (0, {"conv": np.array([0, 0, 0]), "head": np.array([-1, -1, -1])}),
        (2, {"conv": np.array([0, 0, 1]), "head": np.array([-1, -1, -1])}),
        (3, {"conv": np.array([0, 0, 2]), "head": np.array([-1, -1, -1])}),
    ]
    found = frames(plans, 3)
    assert found is not None
    assert [(f["round"], list(f["units"])) for f in found["frames"]] == [(0, ["0", "1"]), (2, ["0"])]
    assert unpacked(found["frames"][0]["units"]["0"]).tolist() == [1, 1, 1]
    assert unpacked(found["frames"][1]["units"]["0"]).tolist() == [1, 1, 0]  # alone in a circle is private
    assert found["circles"] == [[0, 0, 0]]
    assert found["layers"] is None
    assert not found["thinned"]
    assert frames([], 3) is None


def test_too_many_frames_are_thinned_and_the_last_one_stays() -> None:
    rng = np.random.default_rng(0)
    plans = [(t, {"u": rng.integers(0, 3, 50)}) for t in range(100)]
    found = frames(plans, 50, most=1000)
    assert found is not None
    assert found["thinned"]
    assert len(found["frames"]) == 20
    assert found["frames"][-1]["round"] == 99


def test_a_block_with_one_user_is_in_use() -> None:
    plan = {"encoder.0": np.array([0, -1]), "encoder.1": np.array([-1, 0]), "output.0": np.array([0, 0])}
    found = frames([(0, plan)], 2)
    assert found is not None
    assert found["layers"] == [[0, 1], [2]]
    assert unpacked(found["frames"][0]["units"]["0"]).tolist() == [1, 0]


def test_packing_is_little_endian() -> None:
    assert unpacked(packed(np.array([[1.5, 2.5]], dtype=">f4"))).tolist() == [[1.5, 2.5]]


def test_what_several_methods_say_of_themselves_is_said_once(tmp_path: Path) -> None:
    for name, trouble in {
        "fedavg": "Nothing was learnt.",
        "local": "It got worse.",
        "ditto": "Nothing was learnt.",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(row(1, client, 0.5) for client in "ab"))
        told = {"scenario": "s", "method": name, "seed": 0, "trouble": trouble}
        (tmp_path / name / "summary.json").write_text(json.dumps(told))
    notes = page_data([tmp_path / name for name in ("fedavg", "local", "ditto")])["scenarios"][0]["views"][0]["table"][
        "notes"
    ]
    assert [note for note in notes if "learnt" in note or "worse." in note] == [
        "fedavg, ditto: Nothing was learnt.",
        "local: It got worse.",
    ]


@pytest.mark.parametrize(("worst", "top"), [(3.0, None), (120_000.0, 2.0)])
def test_losses_that_left_all_bounds_do_not_hide_the_others(worst: float, top: float | None, tmp_path: Path) -> None:
    for name, losses in {"fedavg": [2.0, 1.0, 0.5], "local": [1.5, 0.75, 0.5], "ditto": [2.0, worst, 1.0]}.items():
        (tmp_path / name).mkdir()
        lines = [row(at, "a", 0.5, loss=loss) for at, loss in enumerate(losses, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
        (tmp_path / name / "summary.json").write_text(json.dumps({"scenario": "s", "method": name, "seed": 0}))
    assert (
        page_data([tmp_path / name for name in ("fedavg", "local", "ditto")])["scenarios"][0]["views"][0]["loss_top"]
        == top
    )


def test_curves_bands_gains_and_the_table(tmp_path: Path) -> None:
    def write(name: str, seed: int, scores: list[list[float]]) -> Path:
        folder = tmp_path / f"{name}-{seed}"
        folder.mkdir()
        lines = [row(at, c, s, loss=1 - s) for at, now in enumerate(scores, 1) for c, s in zip("ab", now, strict=True)]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        traffic = [{"round": at, "up": {"a": 1e6, "b": 2e6}, "down": {"a": 1e6, "b": 0}} for at in (1, 2)]
        (folder / "traffic.jsonl").write_text("\n".join(json.dumps(t) for t in traffic))
        (folder / "summary.json").write_text(json.dumps({"scenario": "s", "method": name, "seed": seed}))
        return folder

    runs = [
        write("local", 0, [[0.25, 0.25], [0.5, 0.5]]),
        write("local", 1, [[0.25, 0.25], [0.5, 0.5]]),
        write("fedavg", 0, [[0.25, 0.5], [0.75, 0.25]]),
        write("fedavg", 1, [[0.5, 0.5], [1.0, 0.5]]),
    ]
    data = page_data(runs)
    json.dumps(data, allow_nan=False)
    scenario = data["scenarios"][0]
    assert [(m["name"], m["seeds"]) for m in scenario["methods"]] == [("local", [0, 1]), ("fedavg", [0, 1])]
    assert len(scenario["views"]) == 1
    view = scenario["views"][0]
    fedavg = view["methods"][1]
    assert fedavg["rounds"] == [1, 2]
    assert fedavg["mean"] == [0.4375, 0.625]
    assert (fedavg["low"], fedavg["high"]) == ([0.375, 0.5], [0.5, 0.75])
    assert fedavg["megabytes"] == [4.0, 8.0]
    assert fedavg["loss"] == [0.5625, 0.375]
    assert unpacked(fedavg["final"]).tolist() == [0.875, 0.375]
    assert unpacked(fedavg["gain"]).tolist() == [0.375, -0.125]
    assert view["table"]["best"] == {"name": "fedavg", "score": 0.625, "gaining": 0.5}
    assert "against fedavg" in view["table"]["headings"]
    assert unpacked(scenario["traffic"][1]["up"]).tolist() == [2.0, 4.0]
    history = unpacked(scenario["details"][1]["history"]) / 65534
    np.testing.assert_allclose(history, [[0.375, 0.875], [0.5, 0.375]], atol=1e-5)


def test_confusions_are_summed_over_seeds_and_read_back(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(s), "fedavg", s, clients=3) for s in (0, 1)]
    total = sum(read_run(run).confusion["phone-2"] for run in runs)
    found = page_data(runs)["scenarios"][0]["details"][0]["confusion"]
    offsets, places, counts = (unpacked(found[key]) for key in ("offsets", "places", "counts"))
    matrix = np.zeros(36, dtype=int)
    matrix[places[offsets[1] : offsets[2]]] = counts[offsets[1] : offsets[2]]
    np.testing.assert_array_equal(matrix.reshape(6, 6), total)


def test_settings_tell_runs_of_one_method_apart(tmp_path: Path) -> None:
    runs = []
    for k, linkage in enumerate(("component", "average", "average")):
        folder = tmp_path / str(k)
        folder.mkdir()
        (folder / "run.toml").write_text(f'seed = {k}\n[method]\nname = "feddl"\nlinkage = "{linkage}"\ndecay = 0.5\n')
        (folder / "metrics.jsonl").write_text(row(1, "a", 0.5))
        runs.append(folder)
    methods = page_data(runs)["scenarios"][0]["methods"]
    assert [m["name"] for m in methods] == ["feddl (linkage=component)", "feddl (linkage=average)"]
    assert [m["seeds"] for m in methods] == [[0], [1, 2]]


def test_alone_may_be_a_readout(tmp_path: Path) -> None:
    lines = [row(1, "a", 0.75), row(1, "a", 0.5, readout="alone")]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    views = page_data([tmp_path])["scenarios"][0]["views"]
    assert len(views) == 1
    assert unpacked(views[0]["methods"][0]["gain"]).tolist() == [0.25]


def test_the_round_chosen_on_validation_is_the_result(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n".join([row(1, "a", 0.75), row(2, "a", 0.5)]))
    (tmp_path / "summary.json").write_text('{"round": 1}')
    assert unpacked(page_data([tmp_path])["scenarios"][0]["views"][0]["methods"][0]["final"]).tolist() == [0.75]


def test_a_report_needs_runs() -> None:
    with pytest.raises(ValueError, match="at least one run directory"):
        page_data([])


def test_the_page_is_one_file_that_asks_no_one(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from fedquilt.report.page import write_page

    run = write_run(tmp_path / "run", "feddl", names=[f"</script><script>alert({i})//" for i in range(12)])
    text = write_page([run], tmp_path).read_text(encoding="utf-8")
    assert (tmp_path / "report.html").is_file()
    head = text[: text.index("<style>")]
    assert "default-src 'none'" in head
    assert "connect-src 'none'" in head
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=[\"'](?!data:)", head + text[-20_000:])
    assert "<script>alert(" not in text
    assert "@@" not in head + text[-5_000:]


def test_without_plotly_the_cure_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fedquilt.report import page

    page._plotly.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ImportError, match=r"pip install 'fedquilt\[report\]'"):
        page.write_page([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_of_very_many_clients_some_are_shown_and_all_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", "feddl", clients=40, rounds=4)
    (all_,) = page_data([tmp_path / "run"])["scenarios"]
    monkeypatch.setattr("fedquilt.report.sample_clients.MOST", 9)
    (some,) = page_data([tmp_path / "run"])["scenarios"]
    assert (len(some["clients"]), some["everyone"], all_["everyone"]) == (9, 40, 40)
    assert some["views"][0]["table"] == all_["views"][0]["table"]  # means and intervals are over everyone
    (whole,), (part,) = all_["views"][0]["methods"], some["views"][0]["methods"]
    assert part["mean"] == whole["mean"]
    scores = dict(zip(all_["clients"], unpacked(whole["final"]).tolist(), strict=True))
    assert unpacked(part["final"]).tolist() == [scores[client] for client in some["clients"]]
    ranked = sorted(scores.values())
    assert sorted(unpacked(part["final"]).tolist())[::8] == [ranked[0], ranked[-1]]  # from the worst to the best
    assert unpacked(some["details"][0]["history"]).shape[0] == 9
    assert [len(quilt["clients"]) for quilt in some["quilts"]] == [9]
    assert unpacked(some["traffic"][0]["up"]).shape == (9,)
