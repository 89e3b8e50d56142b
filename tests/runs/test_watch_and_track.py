"""The page while a run goes on, for this machine only; and what loggers are told."""

from __future__ import annotations

import http.client
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from run_help import build

import fedquilt as fq
from fedquilt.cli import main
from fedquilt.cli.output import Refused
from fedquilt.cli.watch import HOST, Watch, watched
from fedquilt.runs.trackers import mlflow, scores, settings, tensorboard

QUICK: dict[str, Any] = {"engine": "sequential", "alone": False, "rounds": 2}


def get(watch: Watch, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(HOST, watch.port, timeout=20)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def other_address() -> str | None:
    """An address of this machine that is not the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return None
        found = str(probe.getsockname()[0])
    return None if found.startswith("127.") else found


def test_the_page_is_new_after_every_round(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    watch = Watch(tmp_path / "run")
    assert get(watch, "/")[0] == 503  # there is nothing yet
    rounds = []

    def look(federation: fq.Federation, report: Any) -> None:
        status, body = get(watch, "/data.json")
        assert status == 200
        data = json.loads(body)["scenarios"][0]
        rounds.append(data["views"][0]["methods"][0]["rounds"])

    fq.run(build(), "fedavg", out=tmp_path / "run", callbacks=[look], **QUICK)
    assert rounds == [[1], [1, 2]]
    status, page = get(watch, "/")
    assert (status, "<title>" in page) == (200, True)
    watch.seen = 0.0
    watch.close()


def test_it_answers_only_on_the_loopback_and_only_to_this_machine(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    try:
        assert watch.server.server_address[0] == "127.0.0.1"
        assert get(watch, "/", host="evil.example:80")[0] == 403
        assert get(watch, "/data.json", host="evil.example")[0] == 403
        assert get(watch, "/../run.toml")[0] == 404
        assert get(watch, "/run.toml", host=f"localhost:{watch.port}")[0] == 404
        elsewhere = other_address()
        if elsewhere is not None:
            with pytest.raises(OSError), socket.create_connection((elsewhere, watch.port), timeout=2):  # noqa: PT011
                pass
    finally:
        watch.seen = 0.0
        watch.close()


def test_a_taken_port_and_nothing_on_disk_are_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(Refused, match="cannot be listened on"):
            Watch(tmp_path, taken.getsockname()[1])
    with pytest.raises(Refused, match="--no-keep"), watched(0, None):
        pass


def test_the_command_serves_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    words = ("digits", "fedavg", "--rounds", "1", "--no-alone", "--engine", "sequential", "--set", "clients=4")
    assert main(("run", "--watch", *words, "--json")) == 0
    told = capfd.readouterr()
    assert "watch it at http://127.0.0.1:" in told.err
    assert json.loads(told.out)["finished"]


# --- loggers ---------------------------------------------------------------------------------------------------------


def test_tensorboard_has_every_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = fq.run(build(), "modfl", callbacks=[tensorboard(tmp_path)], **QUICK)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    points = found.Scalars("accuracy/received/test")
    assert [point.step for point in points] == [1, 2]
    assert points[-1].value == pytest.approx(result.summary["accuracy_mean"], abs=1e-6)
    assert "circles/configuration" in found.Tags()["scalars"]


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_has_every_round(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'ml.db'}"
    result = fq.run(build(), "fedprox", settings={"mu": 0.3}, callbacks=[mlflow("a run", uri=uri)], **QUICK)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("fedquilt")
    assert experiment is not None
    (kept,) = client.search_runs([experiment.experiment_id])
    assert (kept.info.run_name, kept.info.status) == ("a run", "FINISHED")
    assert kept.data.params["method.mu"] == "0.3"
    points = client.get_metric_history(kept.info.run_id, "accuracy/received/test")
    assert [point.step for point in points] == [1, 2]
    assert points[-1].value == pytest.approx(result.summary["accuracy_mean"])


def test_a_logger_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match=r"fedquilt\[track\]"):
        tensorboard(tmp_path)


def test_what_loggers_are_told() -> None:
    told: list[dict[str, float]] = []
    names: list[dict[str, str]] = []

    def log(federation: fq.Federation, report: Any) -> None:
        told.append(scores(report))
        names.append(settings(federation))

    result = fq.run(build(), "fedavg", callbacks=[log], **QUICK)
    assert told[-1]["accuracy/received/test"] == pytest.approx(result.summary["accuracy_mean"])
    assert told[-1]["worst_decile/received/test"] == pytest.approx(result.summary["accuracy_worst_decile"])
    assert sum(t["megabytes/up"] for t in told) == pytest.approx(result.summary["megabytes_up"])
    assert names[0]["training.rounds"] == "2"
