"""What clients, scenarios and settings refuse, in sentences; and clients that change on the way."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_help import Planned, Zero, federation, mlp, parameter, points, rows_of
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.methods import FedAvg, FedPer, Local
from fedquilt.sharing import everyone

X, Y = [[0.0], [1.0]], [0, 1]


def client(name: str = "a", model: Any = Zero, train: Any = (X, Y), **more: Any) -> fq.Client:
    return fq.Client(name, model, train, **more)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: client(name=""), "a client needs a name"),
        (lambda: client(model=nn.Linear), None),  # a class is a function that builds
        (lambda: client(model=3), "client 'a': model must be a function that builds an nn.Module, not int"),
        (lambda: client(model=nn.Linear(1, 2)), "must be a function that builds an nn.Module, not Linear"),
        (
            lambda: client(train=torch.tensor(X)),
            "data of client 'a': give a pair (samples, labels), not a Tensor",
        ),
        (lambda: client(train=(X, ["no", "yes"])), "train data of client 'a': labels must be numbers"),
        (lambda: client(train=(np.array([["a"], ["b"]]), Y)), "train data of client 'a': samples must be numbers"),
        (lambda: client(train=(np.array(X)[::-1], Y)), None),  # an array that runs backwards
        (lambda: client(train=(X, [0])), "train data of client 'a': samples of shape (2, 1) do not go with labels of"),
        (
            lambda: fq.Scenario("s", [client(train=(X, [[0], [1]]))]),
            "they may be numbers, labels that are there or not",
        ),
        (lambda: client(train=(X, 1.5)), "give (n, ...) samples and (n,) labels"),
        (lambda: client(train=(X, [0.5, 1.5]), labels=[0]), "labels are classes, and its targets are none"),
        (lambda: client(train=([], [])), "client 'a' has no training samples"),
        (lambda: fq.Scenario("s", [client(train=(X, [0, -1]))]), "label -1 is negative; leave unlabelled samples out"),
        (
            lambda: fq.Scenario("s", [client(train=(X, [0, 0.5]))], task="classification"),
            "labels are whole numbers from 0 up, but one is 0.5",
        ),
        (lambda: client(train=(X, [0.5, np.nan])), "targets hold NaN or infinite values"),
        (lambda: client(train=([[0.0], [np.nan]], Y)), "samples hold NaN or infinite values"),
        (lambda: client(train=fq.Split(torch.tensor([[np.inf]]), torch.tensor([0]))), "NaN or infinite"),
        (lambda: client(test=([[0.0, 1.0]], [0])), "test samples are float32 of shape (2,), training samples"),
        (lambda: client(labels=[0]), "client 'a' has samples of label 1, which is not among its labels 0"),
        (lambda: client(changes={0: fq.Change()}), "a change at round 0; rounds count from 1"),
        (lambda: client(changes={2: fq.Change(train=([], []))}), "has no training samples from round 2 on"),
        (lambda: client(test=([[1]], [0])), "test samples are int64 of shape (1,), training samples float32"),
        (lambda: client(changes={2: fq.Change(train=([[1.0, 2.0]], [0]))}), "from round 2 on training samples are"),
        (lambda: fq.Scenario("s", []), "scenario 's' has no clients"),
        (lambda: fq.Scenario("s", [client(), client()]), "the client name 'a' is used twice"),
        (lambda: fq.Scenario("s", [client()], label_names=["no"]), "1 label names, but labels up to 1 occur"),
    ],
)
def test_sentences(make: Any, sentence: str | None) -> None:
    if sentence is None:
        make()
        return
    with pytest.raises((ValueError, TypeError), match=re.escape(sentence)):
        make()


def test_a_trait_that_is_none_is_not_declared() -> None:
    assert client(traits={"cohort": None, "device": 2}).traits == {"device": "2"}


class Odd(nn.Module):
    """A model from which nothing can be learnt."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.head = how, nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "raises" and self.training:
            raise IndexError("boom")
        out: Tensor = self.head(x)
        return {"integers": out.long(), "detached": out.detach(), "short": out[:-1]}.get(self.how, out)


def broken() -> nn.Module:
    raise KeyError("no such layer")


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scores(x), x


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"scenario": "digits"}, "a run is of a Scenario, not of a str"),
        ({"method": FedAvg}, "a name such as 'fedavg' or a method made ready, as in FedAvg()"),
        ({"method": 3}, "a name such as 'fedavg' or a method made ready, not a int"),
        ({"method": FedPer(), "settings": {"personal": 2}}, "with a method of your own, say FedPer(personal=2)"),
        ({"engine": "vectorized"}, "there is no engine 'vectorized'; did you mean 'vectorised'?"),
        ({"device": "gpu"}, "there is no device 'gpu'"),
        ({"merge": "medain"}, "there is no merge 'medain'; did you mean 'median'?"),
        ({"readouts": "recieved"}, "there is no read-out 'recieved'; did you mean 'received'?"),
        ({"evaluate_every": 0}, "evaluate_every=0 never looks; give at least 1"),
        ({"rounds": 2.5}, "rounds=2.5 must be a whole number"),
        ({"method": "modfl", "settings": {"by": "cohort"}}, "must say for each module with whom it is shared"),
        ({"method": "modfl", "settings": {"hysteresis": 2}}, "hysteresis=2 must be from 0"),
        (
            {"method": "modfl", "settings": {"linkage": "single"}},
            "linkage is component or average, not 'single'",
        ),
        ({"method": "fedprox", "settings": {"mu": float("nan")}}, "give a finite mu above 0"),
        ({"model": Pairs}, "client 'a': its model gives a tuple, not a tensor of class scores"),
        ({"model": lambda: nn.LazyLinear(2)}, "client 'a': its model has lazy layers without a shape yet"),
        ({"model": lambda: nn.Linear(3, 2)}, "client 'a': its model cannot take its samples"),
        ({"model": broken}, "client 'a': its model could not be built: KeyError: 'no such layer'"),
        ({"model": partial(Odd, "integers")}, "client 'a': its model gives numbers of type int64; class scores are"),
        ({"model": partial(Odd, "detached")}, "client 'a': its model's outputs do not depend on its parameters"),
        ({"model": partial(Odd, "short")}, "client 'a': its model gives 1 rows of scores for 2 samples; give one each"),
        ({"model": partial(Odd, "raises")}, "client 'a': its model fails in training: IndexError: boom"),
        ({"model": nn.Identity}, "client 'a': its model has no parameters, so there is nothing to train"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused_before_work(
    arguments: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    given = {"method": "fedavg", "engine": "sequential", "alone": False, **arguments}
    scenario = fq.Scenario("two", [client(model=given.pop("model", Zero)), client("b")])
    with pytest.raises((ValueError, TypeError), match=re.escape(sentence)):
        fq.run(given.pop("scenario", scenario), out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()  # nothing is left that would be in the way of the next try


def test_names_do_where_objects_do() -> None:
    scenario = fq.Scenario("three", [client(name, test=(X, Y)) for name in ("a", "b", "c")])
    run = fq.run(scenario, "fedavg", rounds=1, merge="median", readouts="received", engine="sequential", alone=False)
    assert {row["readout"] for row in run.rows} == {"received"}
    with pytest.raises(ValueError, match="alone is a run of 'fedavg'; give one of 'local', or True"):
        fq.run(scenario, "fedavg", rounds=1, alone=run)
    with pytest.raises(TypeError, match=r"takes a method made ready, such as methods.FedAvg\(\), not 'fedavg'"):
        fq.Federation(scenario, "fedavg")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lr": 0}, "trains nothing"),
        ({"lr": float("nan")}, "lr=nan must be a finite number"),
        ({"lr": float("inf")}, "lr=inf must be a finite number"),
        ({"weight_decay": float("nan")}, "weight_decay=nan must be a finite number"),
        ({"eps": -1.0}, "eps=-1.0 must be above 0"),
        ({"rounds": 2.5}, "rounds=2.5 must be a whole number"),
        ({"batch": 4.0}, "batch=4.0 must be a whole number"),
        ({"rounds": 0}, "must be at least 1"),
        ({"optimiser": "rmsprop"}, "take sgd, adam or adamw"),
        ({"momentum": 1.0}, "must be in [0, 1)"),
        ({"nesterov": True}, "nesterov needs a momentum"),
        ({"optimiser": "adam", "momentum": 0.9}, "belong to sgd"),
        ({"weight_decay": -1}, "must not be negative"),
        ({"betas": (0.9, 1.0)}, "two numbers in [0, 1)"),
        ({"share": 0}, "above 0 and at most 1"),
        ({"decay_at": (1.5,)}, "between 0 and 1"),
        ({"epoch": 3}, "there is no training setting 'epoch'; did you mean 'epochs'?"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fq.Training().but(settings)


def test_arrays_of_any_kind() -> None:
    double = client(train=(np.array(X, dtype=np.float64), np.array(Y, dtype=np.uint8)))
    assert double.train.x.dtype == torch.float32
    assert double.train.y.dtype == torch.int64
    assert double.labels == (0, 1)
    whole = client(train=(np.array([[3], [4]], dtype=np.int32), [0.0, 1.0]))
    assert not whole.train.x.is_floating_point()
    split = fq.Split(torch.zeros(2, 1), torch.tensor([0, 1]))
    assert client(train=split).train is split
    assert client(train=fq.Split(torch.zeros(2, 1).double(), torch.tensor([0, 1]))).train.x.dtype == torch.float32
    federated = federation(fq.Scenario("s", [double, client("b")]))
    federated.step()


def test_classes_are_those_of_all_clients_and_changes() -> None:
    later = client(changes={2: fq.Change(train=([[1.0]], [4])), 3: fq.Change(labels=(0, 6))})
    assert fq.Scenario("s", [client("b"), later]).classes == 7
    assert fq.Scenario("s", [client()], label_names=list("abc")).classes == 3


# --- models that do not suit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "parallel", "auto"])
@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: nn.Linear(4, 2), "client 'client-0' has samples of label 2, but its model has 2 outputs"),
        (lambda: nn.Linear(5, 3), "client 'client-0': its model cannot take its samples, torch.float32 of shape (4,)"),
        (lambda: nn.Linear(4, 9), "its model has 9 outputs, but the highest label of all clients is 2"),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (3, 1))), "gives (3, 1) for a sample"),
    ],
)
def test_models_that_do_not_suit_are_refused_before_work(engine: str, model: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        federation(points(model), engine=engine).step()


def test_a_builder_that_builds_no_module() -> None:
    with pytest.raises(TypeError, match=r"client 'a': its model function gave a int, not an nn\.Module"):
        federation(fq.Scenario("s", [client(model=lambda: 3)]))


@pytest.mark.parametrize("setting", [{"clients_at_once": 0}])
def test_federations_that_cannot_be(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="trains nobody"):
        federation(points(), **setting)


def test_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="PyTorch sees no GPU here"):
        fq.Federation(points(), FedAvg(), device="cuda")


def test_names_that_are_not_known() -> None:
    with pytest.raises(ValueError, match="did you mean 'fedavg'"):
        fq.run(points(), "fedavgg")
    with pytest.raises(ValueError, match="there is no setting of fedprox 'nu'; there are mu"):
        fq.run(points(), "fedprox", settings={"nu": 1})
    with pytest.raises(KeyError, match="there is no client 'bob'; there are client-0, client-1, client-2"):
        federation(points()).model("bob")


# --- clients that change ---------------------------------------------------------------------------------------------


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))


def changing(change: fq.Change, start: int = 2, model: Any = mlp) -> fq.Scenario:
    scenario = points(model)
    first = scenario.clients[0]
    changed = fq.Client(
        first.name, first.model, first.train, first.validation, first.test, first.traits, changes={start: change}
    )
    clients = [changed, *scenario.clients[1:]]
    return fq.Scenario("changing", clients, training=scenario.training.but({"rounds": 3}), label_names=list("abc"))


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "parallel"])
def test_new_data_leave_the_numbers_alone(engine: str) -> None:
    draw = torch.Generator().manual_seed(3)
    fresh = (torch.randn(8, 4, generator=draw), torch.randint(0, 3, (8,), generator=draw))
    federated = federation(changing(fq.Change(train=fresh)), FedAvg(), engine)
    federated.step()
    before = rows_of(federated)
    assert federated.server.roster.samples.tolist() == [5.0, 9.0, 7.0]
    federated.simulation.changes(2)
    assert all(torch.equal(row, before[name]) for name, row in rows_of(federated).items())
    federated.simulation.round = 1  # as the loop will do it
    federated.step()
    assert federated.server.roster.samples.tolist() == [8.0, 9.0, 7.0]
    federated.step()
    weights = federated.server.plan["0"].weight  # type: ignore[union-attr]
    assert weights.tolist() == [8.0, 9.0, 7.0]
    federated.close()


@pytest.mark.parametrize("method", [FedAvg(), FedPer(), Local()])
def test_another_model_from_some_round_on(method: FedAvg) -> None:
    federated = federation(changing(fq.Change(model=wider)), method)
    federated.step()
    others = {name: row for name, row in rows_of(federated).items() if name != "client-0"}
    federated.simulation.changes(2)
    assert all(torch.equal(rows_of(federated)[name], row) for name, row in others.items())
    federated.simulation.round = 1
    federated.step()
    federated.step()
    assert federated.model("client-0").get_parameter("0.weight").shape == (9, 4)
    assert federated.model("client-1").get_parameter("0.weight").shape == (6, 4)
    scored = {row["client"] for evaluation in federated.evaluate() for row in evaluation.rows()}
    assert scored == {"client-0", "client-1", "client-2"}


def test_a_model_with_other_units() -> None:
    def deeper() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    federated = federation(changing(fq.Change(model=deeper)), FedAvg())
    for _ in range(3):
        federated.step()
    assert set(federated.server.plan.units) == {"0", "2", "4"}
    # the first layer is of one shape still, so it is shared by all
    weights = [federated.model(f"client-{i}").get_parameter("0.weight") for i in range(3)]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2])


# --- a client's own start --------------------------------------------------------------------------------------------


def test_clients_start_alike_whatever_builds_them() -> None:
    scenario = points([mlp, lambda: mlp(), lambda: mlp()])
    federated = federation(scenario)
    assert len(federated.simulation.family_states) == 1
    rows = federated.simulation.family_states[0].store.all()
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[1], rows[2])
    other = federation(scenario, seed=1).simulation.family_states[0].store.all()
    assert not torch.equal(rows[0], other[0])


def test_building_moves_no_ambient_generator() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    federation(points()).step()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_builder_that_always_gives_the_same_module() -> None:
    net = mlp().train()
    kept = [p.detach().clone() for p in net.parameters()]
    federated = federation(points(lambda: net))
    federated.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), kept, strict=True))
    assert net.training
    given = federated.model("client-0")
    assert given is not net


def test_clients_without_validation_or_test_data() -> None:
    scenario = fq.Scenario("s", [client(), client("b", test=(X, Y))], training=fq.Training(rounds=1))
    run = fq.run(scenario, "fedavg", engine="sequential", device="cpu")
    assert {(row["client"], row["split"]) for row in run.rows} == {("b", "test")}
    assert run.summary["accuracy_mean"] is not None
    bare = fq.run(fq.Scenario("s", [client(), client("b")]), "fedavg", rounds=1, engine="sequential", device="cpu")
    assert bare.rows == []
    assert bare.summary["accuracy_mean"] is None
    assert bare.summary["accuracy_worst_decile"] is None


class Halves(nn.Module):
    """A unit of buffers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x))
        return out


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "parallel"])
def test_a_unit_without_parameters_is_shared_too(engine: str) -> None:
    federated = federation(points(Halves), Planned(plans=(everyone(["norm", "head"], [5, 9, 7]),)), engine)
    federated.step()
    means = torch.tensor([parameter(federated, i, "norm.running_mean") for i in range(3)])
    expected = (torch.tensor([5.0, 9.0, 7.0])[:, None] * means).sum(0) / 21
    torch.testing.assert_close(federated.model("client-1").get_buffer("norm.running_mean"), expected)
    federated.close()
