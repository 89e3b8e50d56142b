"""The status page and the numbers for Prometheus, from the files of a real run over the local post."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deploy_help import LocalPost, digits_with_public, lines

from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.ops.status_page import served
from fedquilt.deploy.server.coordinator import lead
from fedquilt.deploy.transport.transport import Answer


def test_what_is_served_is_what_the_run_wrote(tmp_path: Path) -> None:
    project = create_from_scenario(tmp_path / "fed", digits_with_public(clients=3))
    post = LocalPost(project)
    post.accident = lambda name, round_, *_: Answer(name, b"<b>") if (name, round_) == ("client-1", 2) else None
    folder = project.runs / "r"
    spec = {"run": "r", "project": str(project.folder), "folder": str(folder), "method": "fedavg", "rounds": 2}
    lead(project, spec, post)
    with served(project, 0) as port:
        text, page = (
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5).read().decode()
            for path in ("/metrics", "/")
        )
    assert 'fedquilt_refused_total{run="r",client="client-1",code="unreadable"} 1' in text
    assert 'fedquilt_round{run="r"} 2' in text
    up = sum(sum(line["bytes_up"].values()) for line in lines(folder / "letters.jsonl"))
    assert f'fedquilt_bytes_up_total{{run="r"}} {up}' in text
    assert all(re.fullmatch(r"[a-z_]+\{[^}]*\} [0-9.e+-]+", line) for line in text.splitlines())
    assert "client-1: unreadable 1x" in page
