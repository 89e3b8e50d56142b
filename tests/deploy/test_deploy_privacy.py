"""Privacy on devices: they clip and add local noise themselves, the server adds noise that only it can draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("dp_accounting")

from deploy_help import LocalPost, digits_with_public, federate, row_key, same_rows
from safetensors.torch import load_file

import fedquilt as fq
from fedquilt.core.federation import Federation
from fedquilt.core.protection import CLIP, received
from fedquilt.deploy.ops.create import create_from_scenario
from fedquilt.deploy.project import Address
from fedquilt.deploy.server.bounds import clipped
from fedquilt.deploy.server.coordinator import lead
from fedquilt.deploy.server.newcomers import welcomed
from fedquilt.deploy.server.remote_clients import remote
from fedquilt.deploy.server.run_folder import RemoteRunFolder
from fedquilt.deploy.transport.transport import Answer
from fedquilt.deploy.transport.wire import pack, unpack
from fedquilt.interface.messages import Instructions, UnitValues, Updates
from fedquilt.methods import FedAvg
from fedquilt.runs.result import Run
from fedquilt.scenario import Scenario

CENTRAL: dict[str, Any] = {"noise": 0.05, "clip": 0.5, "smallest": 2}
LOCAL: dict[str, Any] = {"noise": 0.05, "clip": 0.5, "level": "local"}


def scenario(**training: Any) -> Scenario:
    made = digits_with_public(clients=4)
    return Scenario(made.name, made.clients, made.training.but(training), None, None, made.label_names)


def rows(federation: Federation) -> list[dict[str, Any]]:
    result = Run(federation)
    federation.run([result.take])
    if federation.backend.late:
        result.evaluations += federation.evaluate(last=True)
    return result.rows


@pytest.mark.parametrize("dp", [CENTRAL, CENTRAL | {"adaptive": True}], ids=["fixed clip", "adaptive clip"])
def test_a_deployed_run_is_the_simulated_one_where_the_secret_is_the_same(tmp_path: Path, dp: dict[str, Any]) -> None:
    """The devices clip, the server adds noise and samples: half of the clients, each by itself."""
    made = scenario(share=0.6, sampling="poisson", rounds=4)
    simulated = Federation(
        made, FedAvg(), seed=0, device="cpu", engine="sequential", privacy=fq.Privacy(**dp), secret=11
    )
    deployed, _ = federate(tmp_path, made, "fedavg", 4, dp=dp, secret=11)
    here = rows(deployed)
    asked = {row_key(row) for row in here}  # on devices only those who take part are asked how they score
    same_rows(here, [row for row in rows(simulated) if row_key(row) in asked])
    assert {row["client"] for row in here if row["round"] == 4} == {client.name for client in made.clients}
    assert {row["training_loss"] for row in here} == {None}


def test_what_leaves_a_device_is_clipped(tmp_path: Path) -> None:
    deployed, post = federate(tmp_path, scenario(), "fedavg", 1, dp=CENTRAL | {"clip": 0.01})
    lengths = []

    def look(name: str, round_: int, letter: bytes, device: Any) -> Answer | None:
        content = device.handle(letter)
        (sent, told), (received, asked) = unpack(content), unpack(letter)
        if sent:
            before: dict[str, torch.Tensor] = {}
            for i, units in enumerate(asked["units"]):
                parts = torch.split(torch.from_numpy(received[f"value/{i}"].copy()), asked["sizes"][i])
                before |= dict(zip(units, parts, strict=True))
            change = [torch.from_numpy(sent[f"value/{unit}"].copy()) - value for unit, value in before.items()]
            lengths.append(float(torch.cat(change).norm()))
            assert told.get("training_loss") is None
        return Answer(name, content)

    post.accident = look
    deployed.run()
    assert len(lengths) == 4
    assert all(0 < length <= 0.01 * 1.001 for length in lengths)


def test_local_noise_is_drawn_by_the_device_alone(tmp_path: Path) -> None:
    """Two federations with one seed: the devices of the one have other secrets than those of the other."""
    made, sent = scenario(), dict[str, list[torch.Tensor]]()
    for place in ("here", "there"):
        deployed, post = federate(tmp_path / place, made, "fedavg", 1, dp=LOCAL)

        def look(name: str, round_: int, letter: bytes, device: Any) -> Answer | None:
            content = device.handle(letter)
            assert device.handle(letter) == content  # who asks the same again is told the same
            arrays, _ = unpack(content)
            if arrays:
                sent.setdefault(name, []).append(
                    torch.cat([torch.from_numpy(a.copy()) for _, a in sorted(arrays.items())])
                )
            return Answer(name, content)

        post.accident = look
        deployed.run()
        key = tmp_path / place / "clients" / made.clients[0].name / "noise.key"
        assert key.stat().st_mode & 0o077 == 0
    for here, there in sent.values():
        noise = (here - there) / 2**0.5  # what they learnt is the same
        assert float(noise.std()) == pytest.approx(LOCAL["noise"] * LOCAL["clip"], rel=0.1)


def test_noise_of_the_server_is_drawn_by_a_secret_of_its_own(tmp_path: Path) -> None:
    """Two servers with one seed, which all devices know: what they give out differs by noise of both."""
    ended = []
    for place in ("here", "there"):
        project = create_from_scenario(tmp_path / place, scenario(epochs=1), Address())
        spec: dict[str, Any] = {"run": "r", "method": "fedavg", "rounds": 1, "seed": 0, "dp": CENTRAL | {"noise": 1.0}}
        lead(project, spec | {"project": str(project.folder), "folder": str(project.runs / "r")}, LocalPost(project))
        key = project.server_folder / "noise.key"
        assert key.stat().st_mode & 0o077 == 0
        model = load_file(project.folder / "clients" / "client-0" / "models" / "r.safetensors")
        ended.append(torch.cat([value.flatten() for _, value in sorted(model.items())]))
    apart = (ended[0] - ended[1]) / 2**0.5
    assert float(apart.std()) == pytest.approx(1.0 * CENTRAL["clip"] / 4, rel=0.1)


Question = tuple[dict[str, Any], dict[str, Any]]


def otherwise(**said: Any) -> Callable[[dict[str, Any], dict[str, Any]], Question]:
    """A letter that says some things otherwise."""
    return lambda arrays, text: (arrays, text | said)


@pytest.mark.parametrize("level", ["local", "sample"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda arrays, text: ({key: value + 1 for key, value in arrays.items()}, text),
        lambda arrays, text: (arrays, text | {"send": text["send"][:1]}),  # of fewer units a clip is another one
        lambda arrays, text: (arrays, text | {"terms": text["terms"] | {"seed": 5}}),
        lambda arrays, text: (arrays, text | {"terms": text["terms"] | {"dp": text["terms"]["dp"] | {"noise": 0.0}}}),
        lambda arrays, text: (arrays, text | {"terms": {k: v for k, v in text["terms"].items() if k != "dp"}}),
        otherwise(everyone=1),
        otherwise(round=2),  # a round that was not promised
    ],
    ids=["values", "units", "seed", "noise", "none", "samples", "round"],
)
def test_a_second_question_in_a_round_is_not_answered(
    tmp_path: Path, level: str, ask: Callable[[dict[str, Any], dict[str, Any]], Question]
) -> None:
    """All of its noise is that of the first answer, so the difference of two would have none."""
    deployed, post = federate(tmp_path, scenario(), "fedavg", 1, dp=LOCAL | {"level": level})
    codes, same = [], []

    def curious(name: str, round_: int, letter: bytes, device: Any) -> Answer | None:
        content = device.handle(letter)
        arrays, text = unpack(letter)
        if not text["last"]:
            again = pack(arrays, text | {"token": "other", "refused": "no-answer", "evaluate": False})
            same.append(
                all((one == unpack(content)[0][key]).all() for key, one in unpack(device.handle(again))[0].items())
            )
            codes.append(unpack(device.handle(pack(*ask(arrays, text))))[1].get("code"))
        return Answer(name, content)

    post.accident = curious
    deployed.step(evaluate=False)
    assert codes == ["asked-again"] * 4
    assert same == [True] * 4  # asked the same again it says the same


@pytest.mark.parametrize("level", ["local", "sample"])
def test_from_another_state_a_question_is_another_one(tmp_path: Path, level: str) -> None:
    """A server that names an earlier state asks for what the client would learn from that, with the same noise."""
    deployed, post = federate(tmp_path, scenario(), "fedavg", 2, dp=LOCAL | {"level": level})
    deployed.step(evaluate=False)
    codes = []

    def go_back(name: str, round_: int, letter: bytes, device: Any) -> Answer | None:
        content = device.handle(letter)
        arrays, text = unpack(letter)
        assert text["accepted"]
        codes.append(unpack(device.handle(pack(arrays, text | {"accepted": ""})))[1].get("code"))
        return Answer(name, content)

    post.accident = go_back
    deployed.step(evaluate=False)
    assert codes == ["asked-again"] * 4


def far(name: str, round_: int, letter: bytes, device: Any) -> Answer | None:
    """The first client says something far from what it has."""
    arrays, text = unpack(device.handle(letter))
    if name == "client-0":
        arrays |= {key: value + 100 for key, value in arrays.items() if key.startswith("value/")}
    return Answer(name, pack(arrays, text))


@pytest.mark.parametrize("adaptive", [False, True])
def test_whoever_does_not_clip_is_clipped_by_the_server(tmp_path: Path, adaptive: bool) -> None:
    """So that it moves the sum by no more than an honest client does."""
    dp = {"noise": 0.0, "clip": 0.5, "smallest": 2, "adaptive": adaptive}
    deployed, post = federate(tmp_path, scenario(), "fedavg", 1, dp=dp)
    moved = []

    post.accident = far
    run_them = deployed.backend.exchange

    def watched(*asked: Any) -> Any:
        pairs = run_them(*asked)
        for down, up in pairs:
            changes = [block.value - received(block, down) for block in up.blocks]
            moved.extend(torch.cat(changes, 1).norm(dim=1).tolist())
        return pairs

    deployed.backend.exchange = watched  # type: ignore[method-assign, assignment]
    deployed.step(evaluate=False)
    assert len(moved) == 4
    assert max(moved) <= 0.5 * (1 + 1e-6)  # lengths are measured in single precision here
    assert moved[0] == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("told", [None, 0.02, 2.0])
@pytest.mark.parametrize("times", [0.99, 1.0001, 1.05, 1e4])
def test_the_server_cuts_what_is_longer_than_the_clip_of_the_round_and_nothing_else(
    told: float | None, times: float
) -> None:
    """An adaptive clip is another one in each round, whatever it began with."""
    privacy, clip = fq.Privacy(noise=1.0, clip=0.5, adaptive=told is not None), told or 0.5
    start, way = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    told_clip = {} if told is None else {CLIP: torch.tensor([[told]], dtype=torch.float64)}
    sent = UnitValues(("a", "b"), (600, 400), None, start[None])
    down = Instructions(1, (0,), (sent,), (None,), {}, told=told_clip)
    value = start + times * clip / way.norm() * way
    cut, _ = clipped(({"a": value[:600], "b": value[600:]}, {}), down, privacy)
    found = torch.cat([cut["a"], cut["b"]])
    if times < 1:
        assert torch.equal(found, value)
    else:
        assert 0.999 * clip < float((found.double() - start.double()).norm()) <= clip


@pytest.mark.parametrize("level", ["local", "sample"])
def test_under_noise_of_their_own_a_client_far_from_the_others_is_left_out(tmp_path: Path, level: str) -> None:
    """What has its noise tells nobody's secret by being left out."""
    deployed, post = federate(tmp_path, scenario(), "fedavg", 1, dp=LOCAL | {"level": level})

    post.accident = far
    deployed.step(evaluate=False)
    assert remote(deployed).left_out == {"client-0": {"far-from-others": 1}}


def test_what_is_refused_in_a_simulation_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its server half finds something"):
        federate(tmp_path, scenario(), "clustered", 1, dp=CENTRAL)


@pytest.mark.parametrize("dp", [CENTRAL, LOCAL], ids=["client", "local"])
def test_a_private_run_does_not_go_back(tmp_path: Path, dp: dict[str, Any]) -> None:
    """With the noise of a round that devices have, the sum of other clients would be told: the difference is bare."""
    project = create_from_scenario(tmp_path / "fed", scenario(), Address())
    spec: dict[str, Any] = {"run": "r", "method": "fedavg", "rounds": 2, "seed": 0, "dp": dp | {"noise": 1.0}}
    spec |= {"project": str(project.folder), "folder": str(project.runs / "r")}
    lead(project, spec, LocalPost(project))
    records = RemoteRunFolder(spec["folder"])
    records.go_back_to(2)  # where it is
    with pytest.raises(ValueError, match="the run r promises privacy, and devices have what came after round 1"):
        records.go_back_to(1)
    assert records.earlier() == [0, 1, 2]


@pytest.mark.parametrize("said", [None, 100.0, -100.0, 0.0])
def test_whatever_a_client_says_of_the_clip_it_is_one_voice(tmp_path: Path, said: float | None) -> None:
    """One that says nothing is left out, and not the others; one that says more than yes or no says yes or no."""
    adaptive = CENTRAL | {"adaptive": True, "clip": 1e-4, "noise": 1e-5}  # nobody honest is within this clip
    deployed, post = federate(tmp_path, scenario(), "fedavg", 1, dp=adaptive)

    def lie(name: str, round_: int, letter: bytes, device: Any) -> Answer | None:
        arrays, text = unpack(device.handle(letter))
        if name != "client-2" or not arrays:
            return None
        reported = {key: np.full_like(value, said or 0) for key, value in arrays.items() if key.startswith("report/")}
        assert len(reported) == 1
        kept = {key: value for key, value in arrays.items() if not key.startswith("report/")}
        return Answer(name, pack(kept | (reported if said is not None else {}), text))

    post.accident = lie
    deployed.run()
    assert remote(deployed).left_out == ({"client-2": {"wrong-shape": 1}} if said is None else {})
    guard = deployed.server.guard
    assert guard is not None
    heard, yes = (3, 0) if said is None else (4, int(said == 100.0))
    share = 0.5 + (yes - heard / 2) / 4
    grown = math.exp(-0.2 * (share - 0.5))
    assert guard.clip == pytest.approx(1e-4 * grown, rel=0.03)


def test_a_newcomer_is_counted_among_those_whom_the_clip_follows(tmp_path: Path) -> None:
    """As it is where the run goes on from its files with all of them; whoever was there before has what it had."""
    deployed, _ = federate(tmp_path, scenario(), "fedavg", 1, dp=CENTRAL | {"adaptive": True, "noise": 0.01})
    server = deployed.server
    member = replace(server.roster.members[0], name="newcomer")
    grown = welcomed(server, member, Updates(0, ()), remote(deployed))
    for guard, clients in ((server.guard, 4), (grown.guard, 5), (grown.merging.guard, 5)):
        assert guard is not None
        assert (guard.cohort, guard.count_noise) == (clients, clients / 20)
