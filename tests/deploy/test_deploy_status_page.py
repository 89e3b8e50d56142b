"""The status page and the numbers for Prometheus, from the files of a real run over the local post."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deploy_help import LocalPost, digits_with_public, lines

from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.ops.membership import add
from fedquilt.deploy.ops.run_facts import RunFacts
from fedquilt.deploy.ops.status_page import page, served
from fedquilt.deploy.server.coordinator import lead
from fedquilt.deploy.server.run_folder import RemoteRunFolder
from fedquilt.deploy.transport.transport import Answer


def test_what_is_served_is_what_the_run_wrote(tmp_path: Path) -> None:
    project = create_from_scenario(tmp_path / "fed", digits_with_public(clients=3))
    post = LocalPost(project)
    post.accident = lambda name, round_, *_: Answer(name, b"<b>") if (name, round_) == ("client-1", 2) else None
    folder = project.runs / "r"
    spec = {"run": "r", "project": str(project.folder), "folder": str(folder), "method": "fedavg", "rounds": 2}
    lead(project, spec, post)
    with served(project, 0) as port:
        text, shown = (
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5).read().decode()
            for path in ("/metrics", "/")
        )
    assert 'fedquilt_refused_total{run="r",client="client-1",code="unreadable"} 1' in text
    assert 'fedquilt_round{run="r"} 2' in text
    up = sum(sum(line["bytes_up"].values()) for line in lines(folder / "letters.jsonl"))
    assert f'fedquilt_bytes_up_total{{run="r"}} {up}' in text
    assert all(re.fullmatch(r"[a-z_]+\{[^}]*\} [0-9.e+-]+", line) for line in text.splitlines())
    assert "client-1: unreadable 1x" in shown
    assert "<td>finished<td>2 of 2" in shown
    assert "<h2>Circles of the last run</h2><pre>" in shown
    assert "1 circle of 3" in shown
    assert "To look at" not in shown
    assert 'fedquilt_clients_to_look_at{run="r"} 0' in text


def test_who_comes_while_it_is_served_is_on_it_and_a_run_without_a_leader_does_not_run(tmp_path: Path) -> None:
    project = create_from_scenario(tmp_path / "fed", digits_with_public(clients=2))
    folder = project.runs / "r"
    folder.mkdir()
    (folder / "status.json").write_text('{"state": "running", "round": 3, "rounds": 9}')
    with served(project, 0) as port:
        add(project, "late", "")
        text, shown = (
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5).read().decode()
            for path in ("/metrics", "/")
        )
        assert 'fedquilt_client_online{client="late"} 0' in text
        assert 'fedquilt_run_running{run="r"} 0' in text
        assert "<td>interrupted<td>3 of 9" in shown
        with RemoteRunFolder(folder).led():
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        assert 'fedquilt_run_running{run="r"} 1' in text


def test_whose_scores_fell_is_on_the_page(tmp_path: Path) -> None:
    alarms = ["a fell from accuracy 90.0 % in round 1 to 60.0 %"]
    assert "To look at in the last run</h2>a fell from" in page("f", {}, [RunFacts("r", "running")], [], "", alarms)
