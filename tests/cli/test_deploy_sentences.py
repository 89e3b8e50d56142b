"""What `fedquilt deploy run` says when a run is over."""

from __future__ import annotations

from fedquilt.cli.deploy_runs import what_came

SUMMARY = {"readout": "received", "split": "test", "clients_measured": 4}


def test_what_went_wrong_is_said_with_the_score() -> None:
    scores = {"accuracy_mean": 0.126, "accuracy_std": 0.004, "accuracy_worst_decile": 0.12}
    why = {"nothing_split": "Nothing was split.", "trouble": "Nothing was learnt."}
    said = what_came({**SUMMARY, **scores, **why}, ["a fell", "b fell"])
    assert said == [
        "received accuracy on test data: 12.6 ± 0.4 % over 4 clients, worst decile 12.0 %",
        "Look at: a fell; b fell.",
        "Nothing was split.",
        "Nothing was learnt.",
    ]


def test_another_metric_has_no_per_cent_and_nobody_measured_has_no_score() -> None:
    metric = {"name": "rmse", "higher_is_better": False, "percent": False}
    scores = {"rmse_mean": 53.21, "rmse_std": 2.0, "rmse_worst_decile": 57.0}
    assert what_came({**SUMMARY, "metric": metric, **scores}, []) == [
        "received rmse on test data: 53.21 ± 2.00 over 4 clients, worst decile 57"
    ]
    assert what_came({**SUMMARY, "clients_measured": 0}, []) == ["received accuracy on test data: none"]
