"""Clients that change between rounds: their data, their labels, their models, and what becomes of plans and values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedquilt.client import Change, Client
from fedquilt.core import local_training
from fedquilt.core.federation import Federation
from fedquilt.engines.settings import Training
from fedquilt.methods import FedAvg, Local, ScoreSharing
from fedquilt.scenario import Scenario

Builder = Callable[[], nn.Module]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 3), nn.Linear(3, 3))


def data(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=draw), torch.arange(n) % 3


def scenario(*changes: dict[int, Change], public: bool = False, first: Builder = small) -> Scenario:
    clients = [
        Client(f"client-{i}", first, data(9 + 3 * i, i), test=data(6, 10 + i), labels=(0, 1, 2), changes=change)
        for i, change in enumerate(changes)
    ]
    common = data(12, 20) if public else None
    training = Training(rounds=3, epochs=1, batch=4, lr=0.1)
    return Scenario("changing", clients, training, common, label_names=["a", "b", "c"])


def row(fed: Federation, client: int) -> Tensor:
    family_state, at = fed.simulation.home[client]
    return fed.simulation.family_states[family_state].store.all()[at].clone()


def test_new_data_leave_the_model_and_change_the_weights() -> None:
    fed = Federation(scenario({2: Change(train=data(30, 7))}, {}), FedAvg(), engine="sequential")
    fed.step()
    before = row(fed, 0)
    members = fed.simulation.changes(2)
    assert torch.equal(row(fed, 0), before)
    assert {n: member.samples for n, member in members.items()} == {0: 30}
    fed.server.declare(members)
    assert fed.server.plan["0"].weight.tolist() == [30.0, 12.0]  # type: ignore[union-attr]


def test_an_engine_found_by_trial_is_kept_through_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Federation(scenario({2: Change(train=data(30, 7))}, {}), FedAvg(), engine="auto")
    fed.step()
    kinds = fed.simulation.engines
    monkeypatch.setattr(local_training, "select_engine", lambda *_: pytest.fail("engines were tried again"))
    fed.step()
    assert fed.simulation.engines == kinds
    fed.close()


def test_other_labels_keep_the_model_with_its_statistics_and_drop_samples() -> None:
    fed = Federation(scenario({2: Change(labels=(0, 2))}, {}, public=True), ScoreSharing(), engine="sequential")
    fed.step()
    layout = fed.simulation.family_states[0].family.layout
    before = row(fed, 0)
    fed.simulation.changes(2)
    after = row(fed, 0)
    for unit in ("model", "label-0", "label-1", "label-2"):
        assert torch.equal(layout.take(after[None], unit), layout.take(before[None], unit))
    assert float(layout.tensor(before[None], "model.1.running_mean").abs().sum()) > 0
    assert [client.labels for client in fed.simulation.family_states[0].clients] == [(0, 2), (0, 1, 2)]
    family_state, at = fed.simulation.home[0]
    assert fed.simulation.family_states[family_state].clients[at].train.y.unique().tolist() == [0, 2]
    table = fed.simulation.family_states[family_state].table("test", (), (), torch.device("cpu"))
    assert table.mask[at].tolist() == [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]  # tested on labels 0 and 2
    fed.server.declare(fed.simulation.members())
    assert fed.server.plan["label-1"].circle.tolist() == [-1, 0]  # type: ignore[union-attr]
    fed.step()


def test_a_new_model_starts_afresh_and_shares_what_has_its_shape() -> None:
    fed = Federation(scenario({2: Change(model=large)}, {}, {}), FedAvg(), engine="sequential")
    fed.step()
    fed.step()
    assert [family_state.family.ids for family_state in fed.simulation.family_states] == [(0,), (1, 2)]
    assert list(fed.server.plan.units) == ["0", "1", "2", "3"]
    assert fed.server.plan["0"].circle.tolist() == [0, 1, 1]  # type: ignore[union-attr]
    assert fed.server.plan["3"].circle.tolist() == [0, -1, -1]  # type: ignore[union-attr]
    fed.step()


def test_a_new_model_of_the_same_kind_starts_afresh_too() -> None:
    again = Change(model=lambda: small())
    fed = Federation(scenario({2: again}, {}), Local(), engine="sequential")
    first = row(fed, 0)
    fed.step()
    trained = row(fed, 1)
    assert not torch.equal(row(fed, 0), first)
    fed.simulation.changes(2)
    assert torch.equal(row(fed, 0), first)
    assert torch.equal(row(fed, 1), trained)


def test_clients_that_take_another_model_together_share_it() -> None:
    fed = Federation(scenario({2: Change(model=large)}, {2: Change(model=large)}), FedAvg(), engine="sequential")
    fed.step()
    fed.step()
    layout = fed.simulation.family_states[0].family.layout
    mean = (9 * row(fed, 0) + 12 * row(fed, 1)) / 21
    held = {
        unit: circle_values.column((unit, s))[0]
        for circle_values in fed.server.all_values
        for unit, s in circle_values.keys
    }
    assert held.keys() == {"0", "1", "2", "3"}
    torch.testing.assert_close(held["2"], layout.take(mean[None], "2")[0])


def test_a_client_without_samples_of_its_labels_is_refused() -> None:
    client = Client("phone", small, data(2), labels=(0, 1), changes={2: Change(labels=(2,))})
    with pytest.raises(ValueError, match=r"client 'phone' owns \(2,\) in round 2 but no training samples"):
        client.at(2)
    later = Client("phone", small, data(2), test=data(3), labels=(0, 1), changes={2: Change(labels=(0, 1, 2))})
    assert later.labels == (0, 1)  # it may be tested on a label that it owns later
