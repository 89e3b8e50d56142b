"""Numbers of NumPy and PyTorch are Python's own once they are in: the same seeds, the same files."""

from __future__ import annotations

import json
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt._util.plain_values import python, with_python_settings
from fedquilt._util.randomness import key_of
from fedquilt.client import Change
from fedquilt.methods import FedProx
from fedquilt.runs.settings import builder_to_text
from fedquilt.sharing import TrimmedMean

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 2
np: Any = numpy  # signatures ask for Python's numbers; users do not
QUICK: dict[str, Any] = {"engine": "sequential", "rounds": 3, "device": "cpu"}


class Line(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x)
        return y


def scenario(names: Any = ("a", "b"), **more: Any) -> fq.Scenario:
    made = [fq.Client(n, Line, (X[:12], Y[:12]), test=(X[12:], Y[12:]), **more) for n in names]
    return fq.Scenario("two", made, fq.Training(batch=4, lr=0.1))


def weights(run: fq.Run, client: str = "a") -> list[float]:
    found: list[float] = nn.utils.parameters_to_vector(run.model(client).parameters()).tolist()
    return found


@pytest.mark.parametrize("seed", [np.int64(5), np.uint8(5), np.array(5), torch.tensor(5)])
def test_a_seed_is_the_same_seed_whoever_counts_it(seed: Any, tmp_path: Path) -> None:
    plain = fq.run(scenario(), "fedavg", seed=5, alone=False, **QUICK)
    run = fq.run(scenario(), "fedavg", seed=seed, alone=False, out=tmp_path / "run", **QUICK)
    assert weights(run) == weights(plain)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["seed"] == 5


@pytest.mark.parametrize("seed", [True, np.True_, 1.0, "1", None])
def test_what_is_no_whole_number_is_no_seed(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seed=.* must be a whole number"):
        fq.run(scenario(), "fedavg", seed=seed, **QUICK)
    with pytest.raises(ValueError, match=r"seed=.* must be a whole number"):
        fq.scenarios.build("digits", seed=seed)


def test_settings_of_all_kinds_may_come_from_arrays(tmp_path: Path) -> None:
    run = fq.run(
        scenario("abcde", labels=np.unique(Y.numpy())), FedProx(mu=np.float64(0.1)), rounds=np.int64(2),
        training={"lr": np.float64(0.1), "nesterov": np.False_, "decay_at": np.array([0.5]), "decay": np.float32(0.5)},
        merge=TrimmedMean(np.float64(0.2)), evaluate_every=np.int64(2), checkpoint_every=np.int32(1),
        clients_at_once=np.int64(1), alone=np.True_, out=tmp_path / "run", engine="sequential",
    )  # fmt: skip
    known = tomllib.loads((tmp_path / "run" / "run.toml").read_text())
    assert (known["method"]["settings"], known["merge"]["share"], known["training"]["lr"]) == ({"mu": 0.1}, 0.2, 0.1)
    assert (known["training"]["decay_at"], known["alone"], known["training"]["nesterov"]) == ([0.5], True, False)
    assert run.alone is not None
    assert fq.load_model(tmp_path / "run", "a").state_dict().keys() == run.model("a").state_dict().keys()


def test_a_run_resumed_goes_on_with_the_same_batches(tmp_path: Path) -> None:
    def stop(federation: fq.Federation, report: fq.RoundReport) -> None:
        if report.round == 1:
            raise RuntimeError("gone")

    how: dict[str, Any] = {**QUICK, "alone": False, "checkpoint_every": 1}
    with pytest.raises(RuntimeError, match="gone"):
        fq.run(scenario(), "fedavg", seed=np.int64(3), out=tmp_path / "run", callbacks=[stop], **how)
    through = fq.run(scenario(), "fedavg", seed=3, **how)
    assert weights(fq.resume(tmp_path / "run", scenario())) == weights(through)


def test_names_labels_traits_and_changes_are_plain() -> None:
    name = np.array(["phone"])[0]
    later = {np.int64(3): Change(labels=np.array([1, 0]))}
    client = fq.Client(
        name, Line, (X, Y), labels=np.unique(Y.numpy()), traits={"site": np.int64(4)}, changes=later
    )  # fmt: skip
    assert [type(value) for value in (client.name, *client.labels, client.traits["site"])] == [str, int, int, str]
    assert client.traits == {"site": "4"}
    assert [(type(at), change.labels) for at, change in client.changes.items()] == [(int, (1, 0))]
    assert fq.Client("f", Line, (X, Y), labels=np.array([0.0, 1.0])).labels == (0, 1)
    with pytest.raises(ValueError, match=r"client 'f': labels are whole numbers from 0 up, but one is 0.5"):
        fq.Client("f", Line, (X, Y), labels=np.array([0, 0.5]))


def test_a_client_named_by_a_number_is_found_by_its_digits(tmp_path: Path) -> None:
    run = fq.run(scenario([7, np.int64(8)]), "fedavg", alone=False, out=tmp_path / "run", **QUICK)
    assert {row["client"] for row in run.rows} == {"7", "8"}
    from fedquilt.report.read_runs import read_run

    assert read_run(tmp_path / "run").series
    for wrong in (None, True, 1.5, ("a",)):
        with pytest.raises(TypeError, match="a client's name is a text"):
            scenario([wrong])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rounds": True}, "rounds=True must be a whole number"),
        ({"lr": True}, "lr=True must be a number"),
        ({"lr": "0.1"}, "lr='0.1' must be a number"),
        ({"share": None}, "share=None must be a number"),
    ],
)
def test_what_is_no_number_is_no_setting_of_training(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        fq.Training(**settings)


def test_keys_builders_and_scenarios_do_not_see_the_difference() -> None:
    assert key_of(np.int64(0), np.str_("a"), (np.int32(2),)) == key_of(0, "a", (2,))
    assert builder_to_text(partial(Line, np.int64(3)))["args"] == [3]
    built = fq.scenarios.build("digits", seed=np.int64(1), clients=np.int64(8), noise=np.float64(0.2))
    assert repr(built.origin) == "{'name': 'digits', 'seed': 1, 'settings': {'clients': 8, 'noise': 0.2}}"
    kept = {"a": [1, ("b", 2.0)]}
    assert python(kept) is kept
    method = FedProx(mu=0.2)
    assert with_python_settings(method) is method
