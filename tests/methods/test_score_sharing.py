"""Score sharing: three users and four labels by hand, what moves, changes, distillation, and what it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.client import Change, Client, Split
from fedquilt.core.federation import Federation
from fedquilt.core.server import Server
from fedquilt.engines.settings import Training
from fedquilt.interface.messages import Update
from fedquilt.methods.score_sharing import ScoreSharing
from fedquilt.scenario import Scenario
from fedquilt.sharing import median
from fedquilt.sharing.scores import masked
from fedquilt.sharing.weighted_sums import Merged

# Three users with the labels {0, 1}, {1, 2}, {2, 3}, and eight public samples A to H: six of the reference with the
# labels 1 1 2 2 0 3, two to test on with the labels 1 2. What the users' models say (their other label: one minus it):
LABELS = ((0, 1), (1, 2), (2, 3))
REFERENCE, TEST = [1, 1, 2, 2, 0, 3], [1, 2]
#                   A    B    C    D    E    F    G    H
USER_1 = torch.tensor([0.8, 0.4, 0.3, 0.6, 0.2, 0.7, 0.4, 0.9])  # of label 1: wrong about B and G
USER_2 = torch.tensor([0.6, 0.9, 0.4, 0.7, 0.1, 0.3, 0.8, 0.2])  # of label 1: wrong about D
USER_3 = torch.tensor([0.3, 0.2, 0.9, 0.6, 0.4, 0.1, 0.7, 0.8])  # of label 2
SAMPLES = (4, 4, 8)  # so alpha = 1/2, 1/2, 1
ALL = ("received", "adapted", "own")
EYE = torch.eye(8)  # public sample number s is the s-th unit vector: a linear model looks its scores up


class LookUp(nn.Module):
    """A model that says given scores about unit vectors, and a lot about labels that it should be silent about."""

    def __init__(self, scores: Tensor, labels: tuple[int, int]) -> None:
        super().__init__()
        weight = torch.full((4, 8), 9.0)
        weight[labels[0]], weight[labels[1]] = (1 - scores).log(), scores.log()
        self.table = nn.Linear(8, 4, bias=False)
        self.table.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)  # type: ignore[no-any-return]


def builder(scores: Tensor, labels: tuple[int, int]) -> Callable[[], nn.Module]:
    return lambda: LookUp(scores, labels)


def worked_example(changes: dict[int, dict[int, Change]] | None = None, rounds: int = 2) -> Scenario:
    """The users; they train on zeros, which teach a linear model nothing."""
    says = (USER_1, 1 - USER_2, 1 - USER_3)  # of the second label of each
    clients = [
        Client(
            f"user-{i + 1}",
            builder(says[i], labels),
            train=(torch.zeros(n, 8), [labels[0], labels[1]] * (n // 2)),
            test=[(EYE[6:7], [1]), (EYE[6:], TEST), (EYE[7:], [2])][i],
            labels=labels,
            changes=(changes or {}).get(i),
        )
        for i, (labels, n) in enumerate(zip(LABELS, SAMPLES, strict=True))
    ]
    training = Training(rounds=rounds, epochs=1, batch=4, lr=0.1)
    names = ("cat", "dog", "sheep", "elephant")
    return Scenario("by hand", clients, training, (EYE[:6], REFERENCE), (EYE[6:], TEST), names)


def federation(scenario: Scenario, **settings: Any) -> Federation:
    return Federation(scenario, ScoreSharing(**settings), engine="sequential", device="cpu")


def consensus(server: Server, label: int) -> Tensor:
    """The server's scores of a label."""
    for circle_values in server.all_values:
        if f"label-{label}" in circle_values.units:
            return circle_values.value[0]
    raise AssertionError(label)


def test_the_worked_example_normalised() -> None:
    fed = federation(worked_example())
    fed.step()
    # Local update from f_G = 0: f_1 = s_1 / 3, f_2 = s_2 / 3 (alpha 1/2), f_3 = s_3 / 2 (alpha 1).
    # Accuracies on the reference: user 1 is right about A, wrong about B: 1/2 on label 1. User 2: 1 on label 1 (A, B),
    # and 1/2 on label 2 (C right, D wrong). User 3: 1 on label 2. Labels 0 and 3 have one owner: beta 1.
    plan = fed.server.plan
    assert plan["label-1"].weight.tolist() == [0.5, 1.0, 0.0]  # type: ignore[union-attr]
    assert plan["label-2"].weight.tolist() == [0.0, 0.5, 1.0]  # type: ignore[union-attr]
    assert plan["label-0"].weight.tolist() == [1.0, 0.0, 0.0]  # type: ignore[union-attr]
    torch.testing.assert_close(plan["label-1"].pull, torch.tensor([2 / 3, 2 / 3, 0.0]))  # 1 / (1 + alpha)
    torch.testing.assert_close(plan["label-2"].pull, torch.tensor([0.0, 2 / 3, 1 / 2]))
    # Label 1: (1/2 * s_1/3 + 1 * s_2/3) / (3/2). A: (0.4 + 0.6) / 4.5. G: (0.2 + 0.8) / 4.5.
    torch.testing.assert_close(consensus(fed.server, 1), (0.5 * USER_1 + USER_2) / 4.5)
    assert consensus(fed.server, 1)[[0, 6]].tolist() == pytest.approx([1 / 4.5, 1 / 4.5])
    # Label 2: (1/2 * (1 - s_2)/3 + 1 * s_3/2) / (3/2). C: (0.1 + 0.45) / 1.5 = 0.36667.
    assert float(consensus(fed.server, 2)[2]) == pytest.approx(0.36667, abs=1e-5)
    torch.testing.assert_close(consensus(fed.server, 0), (1 - USER_1) / 3)
    # Second round. Label 1, sample A: f_1 = (1/4.5 + 0.5 * 0.8) / 1.5 = 0.41481 and f_2 = (1/4.5 + 0.5 * 0.6) / 1.5 =
    # 0.34815. Sample B: f_1 = (1.1/4.5 + 0.2) / 1.5 = 0.29630, label 0 has 0.6 * 5/9 = 0.33333: still wrong, beta 1/2.
    # f_G(A) = (0.5 * 0.41481 + 0.34815) / 1.5 = 0.37037.
    fed.step()
    assert fed.server.plan["label-1"].weight.tolist() == [0.5, 1.0, 0.0]  # type: ignore[union-attr]
    assert float(consensus(fed.server, 1)[0]) == pytest.approx(0.37037, abs=1e-5)
    assert float(consensus(fed.server, 0)[1]) == pytest.approx(0.33333, abs=1e-5)


def test_the_worked_example_to_the_letter() -> None:
    fed = federation(worked_example(), normalise=False)
    fed.step()
    # f = alpha s: halves for users 1 and 2, s for user 3. Label 1: 1/2 * s_1/2 + 1 * s_2/2. A: 0.2 + 0.3.
    torch.testing.assert_close(consensus(fed.server, 1), 0.25 * USER_1 + 0.5 * USER_2)
    # Label 2: 1/2 * (1 - s_2)/2 + 1 * s_3. C: 0.15 + 0.9.
    assert float(consensus(fed.server, 2)[2]) == pytest.approx(1.05)
    # Second round, A: f_1 = 0.5 + 0.4, f_2 = 0.5 + 0.3. User 1 now has B right, as label 1 grows louder than its other
    # label: f_1 = 0.55 + 0.2 = 0.75 of label 1 against 0.3 + 0.3 of label 0. So beta is 1 twice, f_G(A) = 0.9 + 0.8.
    fed.step()
    assert fed.server.plan["label-1"].weight.tolist() == [1.0, 1.0, 0.0]  # type: ignore[union-attr]
    assert float(consensus(fed.server, 1)[0]) == pytest.approx(1.7)


@pytest.mark.parametrize("normalise", [True, False])
def test_the_only_owner_of_a_label_is_heard_however_wrong_it_is(normalise: bool) -> None:
    plain = worked_example()
    wrong = USER_1.clone()
    wrong[4] = 0.9  # E is of label 0, which user 1 alone owns; it now takes it for label 1
    clients = [replace(plain.clients[0], model=builder(wrong, LABELS[0])), *plain.clients[1:]]
    fed = federation(Scenario("one", clients, plain.training, plain.common, plain.public_test), normalise=normalise)
    fed.step()
    assert fed.server.plan["label-0"].weight.tolist() == [1.0, 0.0, 0.0]  # type: ignore[union-attr]
    torch.testing.assert_close(consensus(fed.server, 0), (1 - wrong) / (3 if normalise else 2))


def test_read_outs_of_the_worked_example() -> None:
    result = fq.run(worked_example(rounds=1), "score-sharing", engine="sequential", alone=False, readouts=ALL)
    right = {(row["client"], row["readout"]): row["accuracy"] for row in result.rows}
    # User 1 alone takes G for label 0 (0.6 against 0.4). The consensus has (0.2 + 0.8) / 1.5 = 0.667 of label 1 there.
    assert right["user-1", "own"] == right["user-1", "adapted"] == 0
    assert right["user-1", "received"] == 1
    assert right["user-2", "received"] == right["user-2", "own"] == 1


def test_beta_of_the_paper_comes_from_all_public_samples() -> None:
    fed = federation(worked_example(), protocol="paper")
    fed.step()
    assert fed.server.plan["label-1"].weight.tolist() == pytest.approx([1 / 3, 1, 0])  # type: ignore[union-attr]
    described = fed.method.describe(fed.server.state, fed.server.plan, fed.server.roster)
    assert described["protocol"] == "paper"
    assert "beta comes from" in described["measured_on"]


def test_scoring_only_samples_of_own_labels_gives_their_labels_away() -> None:
    fed = federation(worked_example(), scored="own", normalise=False)
    fed.step()
    # Label 2 has three public samples, C, D and H in this order; a row has the scores of all four labels.
    scores = consensus(fed.server, 2).view(3, 4)
    # D: user 2 is wrong about it (0.7 of label 1), and has beta 1/2 as before; user 3 is right (0.6 of label 2).
    # 1/2 * 1/2 * (0, 0.7, 0.3, 0) + 1 * 1 * (0, 0, 0.6, 0.4): user 3 has nothing to say about label 1, so label 2 wins.
    torch.testing.assert_close(scores[1], torch.tensor([0.0, 0.175, 0.675, 0.4]))
    # A has label 1: user 3 does not score it. 1/2 * 1/2 * (0.2, 0.8, 0, 0) + 1 * 1/2 * (0, 0.6, 0.4, 0).
    torch.testing.assert_close(consensus(fed.server, 1).view(3, 4)[0], torch.tensor([0.05, 0.5, 0.2, 0.0]))
    moved = fed.step().traffic
    assert moved.up[1].tolist() == [0, 0, 0, 3 * 4, 3 * 4, 0]
    described = fed.method.describe(fed.server.state, fed.server.plan, fed.server.roster)
    assert "gives its label away" in described["measured_on"]


def test_a_given_alpha_sets_the_pull() -> None:
    fed = federation(worked_example(), alpha=0.25)
    fed.step()
    torch.testing.assert_close(fed.server.plan["label-2"].pull, torch.tensor([0.0, 0.8, 0.8]))


def test_labels_that_are_not_owned_are_never_predicted_nor_shared() -> None:
    outputs = torch.arange(8.0).view(2, 4)
    owned = torch.tensor([True, True, False, False])
    assert torch.equal(masked(outputs, owned).softmax(1)[:, 2:], torch.zeros(2, 2))
    torch.testing.assert_close(masked(outputs, owned).softmax(1)[:, :2], outputs[:, :2].softmax(1))
    with pytest.raises(ValueError, match="gives 3 outputs, but there are 4 labels"):
        masked(outputs[:, :3], owned)


def record(fed: Federation) -> list[Update]:
    """Every message that clients send from now on."""
    ups: list[Update] = []
    run = fed.simulation.run

    def listen(down: Any) -> Update:
        ups.append(run(down))
        return ups[-1]

    fed.simulation.run = listen  # type: ignore[method-assign]
    return ups


def test_nothing_but_scores_of_own_labels_is_sent() -> None:
    fed = federation(worked_example())
    ups = record(fed)
    moved = [fed.step().traffic, fed.step().traffic]
    sent: dict[int, dict[str, int]] = {}
    for up in ups:
        assert up.reports == {}
        for block in up.blocks:
            places = range(len(up.ids)) if block.places is None else block.places.tolist()
            for at in places:
                for unit, size in zip(block.units, block.sizes, strict=True):
                    counts = sent.setdefault(up.ids[at], {})
                    counts[unit] = counts.get(unit, 0) + size
    assert sent == {i: {f"label-{label}": 2 * 8 for label in labels} for i, labels in enumerate(LABELS)}
    assert moved[0].bytes_up.tolist() == [4 * 8 * 2] * 3  # public samples x labels
    told = 4 * 4  # how much was heard of each label
    assert moved[0].bytes_down.tolist() == [told] * 3  # there are no scores to receive yet
    assert moved[1].bytes_down.tolist() == [told + n for n in (4 * 8, 4 * 8 * 2, 4 * 8)]  # labels that others have too
    described = fed.method.describe(fed.server.state, fed.server.plan, fed.server.roster)
    assert described["bytes_of_scores_a_round"] == moved[1].total_up + moved[1].total_down - 3 * told
    assert described["bytes_of_models_a_round"] == 2 * 4 * 3 * 32  # up and down, three models of 4 x 8 weights
    assert not any(
        "model" in circle_values.units for circle_values in fed.server.all_values
    )  # the server holds no parameters


def test_one_client_alone_keeps_its_own_mind() -> None:
    whole = worked_example(rounds=3)
    scenario = Scenario("one", whole.clients[:1], whole.training, whole.common, whole.public_test, whole.label_names)
    result = fq.run(scenario, "score-sharing", engine="sequential", alone=False, readouts=ALL)
    assert {row["accuracy"] for row in result.rows} == {0.0}
    # After three rounds of the same scores: 1 - (2/3)^3 of them.
    row = result.federation.simulation.family_states[0].store.all()[:1]
    held = result.federation.simulation.family_states[0].family.layout.take(row, "label-1")[0]
    torch.testing.assert_close(held, (1 - (2 / 3) ** 3) * USER_1)


def test_a_large_alpha_is_the_mean_of_this_rounds_scores() -> None:
    fed = federation(worked_example(), alpha=1e6)
    fed.step()
    fed.step()
    torch.testing.assert_close(consensus(fed.server, 1), (0.5 * USER_1 + USER_2) / 1.5, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
def test_robust_merges_go_with_the_mean_and_with_the_sum(normalise: bool) -> None:
    def of_any_size(values: Tensor, circle: Tensor, weight: Tensor, circles: int) -> Merged:
        return median(values, circle, weight, circles)  # by its name it refuses circles of two: it bears no liar there

    fed = Federation(
        worked_example(), ScoreSharing(normalise=normalise), engine="sequential", device="cpu", rule=of_any_size
    )
    fed.step()
    # The median of two is their mean, without weights; to the letter it counts as often as beta sums to, 1/2 + 1.
    parts, scale = (USER_1 + USER_2) / 4, (1 / 1.5 if normalise else 1.5)
    torch.testing.assert_close(consensus(fed.server, 1), parts * scale)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"alpha": 0.0}, "never asks a client's model"),
        ({"protocol": "papers"}, "leak-free or paper"),
        ({"distil": -1}, "epochs of distillation"),
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScoreSharing(**settings)


def test_public_samples_must_be_there_and_show_every_label() -> None:
    whole = worked_example()
    with pytest.raises(ValueError, match="client 'user-1' holds no public samples"):
        federation(Scenario("none", whole.clients, label_names=whole.label_names))
    short = Split(EYE[:5], torch.tensor(REFERENCE[:5]))
    with pytest.raises(ValueError, match="client 'user-3' owns label 3, of which there are no public reference"):
        federation(Scenario("short", whole.clients, common=short, label_names=whole.label_names))


def test_a_client_that_takes_up_a_label_receives_its_consensus_at_once() -> None:
    change = Change(labels=(1, 2, 3), train=(torch.zeros(3, 8), [1, 2, 3]))
    fed = federation(worked_example({1: {2: change}}, rounds=3))
    fed.step()
    before = consensus(fed.server, 3).clone()  # user 3 was its only owner, and sent it
    ups = record(fed)
    moved = fed.step().traffic
    assert moved.down[1].tolist() == [0, 0, 0, 8, 8, 8]  # model, owned, labels 0 to 3
    torch.testing.assert_close(before, (1 - USER_3) / 2)
    told = next(up for up in ups if 1 in up.ids)
    assert fed.server.plan["label-3"].circle.tolist() == [-1, 0, 0]  # type: ignore[union-attr]
    # Its model still says 9 of label 3 and log(0.6) of label 1 about A, so s is about 1 and alpha is 3/8.
    part = told.part(["label-3"])
    assert part is not None
    s = (9 - torch.tensor([0.6, 0.4]).log().logsumexp(0)).sigmoid()
    mine = part[1][part[0].tolist().index(1), 0]
    torch.testing.assert_close(mine, (before[0] + 3 / 8 * s) / (1 + 3 / 8))


def test_a_new_model_keeps_the_scores_of_the_old_one() -> None:
    other = Change(model=lambda: nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 4)))
    fed = federation(worked_example({0: {2: other}}))
    fed.step()
    assert len(fed.simulation.family_states) == 1
    fed.step()
    assert len(fed.simulation.family_states) == 2  # unlike architectures side by side
    # Label 0 is user 1's alone: its consensus is the old model's third, and half of what the new one says.
    new = masked(fed.simulation.model(0)(EYE), torch.tensor([True, True, False, False])).softmax(1)[:, 0]
    torch.testing.assert_close(consensus(fed.server, 0), ((1 - USER_1) / 3 + 0.5 * new.detach()) / 1.5)


# --- models that learn -----------------------------------------------------------------------------------------------

MODELS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 4)),
    lambda: nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4)),
)


def overlapping(own: int = 3, rounds: int = 8, streams: bool = False) -> Scenario:
    """Eight clients of two architectures with `own` of four labels each, and too few noisy samples to learn them."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 20, generator=draw)

    def samples(n: int, labels: list[int]) -> tuple[Tensor, Tensor]:
        y = torch.tensor([labels[i % len(labels)] for i in range(n)])
        return centres[y] + 1.6 * torch.randn(n, 20, generator=draw), y

    reference, test = samples(200, [0, 1, 2, 3]), samples(400, [0, 1, 2, 3])
    clients = []
    for i in range(8):
        labels = sorted({(i + j) % 4 for j in range(own)})
        mine = torch.isin(test[1], torch.tensor(labels))
        changes = {r: Change(train=samples(12 + r, labels)) for r in range(2, rounds + 1)} if streams else None
        train, mine_of_test = samples(16, labels), (test[0][mine], test[1][mine])
        clients.append(Client(f"client-{i}", MODELS[i % 2], train, None, mine_of_test, None, labels, changes))
    return Scenario("overlapping labels", clients, Training(rounds=rounds, epochs=5, batch=8, lr=0.1), reference, test)


def scores_of(settings: dict[str, Any], scenario: Scenario | None = None) -> tuple[dict[str, float], fq.Run]:
    """The last round's accuracy by read-out."""
    result = fq.run(
        scenario or overlapping(), "score-sharing", settings=settings, engine="sequential", alone=False,
        readouts=ALL, evaluate_every=8,
    )  # fmt: skip
    return {e.readout: e.score for e in result.evaluations if e.split == "test"}, result


def test_it_wins_where_labels_overlap_and_the_letter_does_not() -> None:
    shared, result = scores_of({})
    alone = fq.run(overlapping(), "local", engine="sequential", evaluate_every=8).summary["accuracy_mean"]
    assert shared["received"] > shared["own"] + 0.05, shared
    assert shared["received"] > alone + 0.05, (shared, alone)
    # The paper's sums drown decisions in whichever label has grown loudest: about one of three labels is right.
    letter, _ = scores_of({"normalise": False})
    assert letter["received"] < 0.5 < letter["own"], letter
    assert result.plan.circle_sizes["label-0"].tolist() == [6]


def test_giving_labels_away_looks_like_a_gain() -> None:
    """The paper's federation in small: pairs of labels in a ring. Its margins come from this reading alone."""
    honest, given_away = (scores_of({"scored": scored}, overlapping(own=2))[0] for scored in ("all", "own"))
    assert given_away["received"] > honest["received"] + 0.02, (honest, given_away)
    assert given_away["received"] > 0.98


def test_distillation_makes_the_models_themselves_better() -> None:
    without, with_ = (scores_of({"distil": epochs}, overlapping(rounds=4))[0] for epochs in (0, 3))
    assert with_["own"] > without["own"] + 0.03, (without, with_)


@pytest.mark.parametrize("settings", [{"distil": 1}, {"normalise": False}])
def test_engines_agree_on_streams_of_data(settings: dict[str, Any]) -> None:
    rows = {}
    for engine in ("sequential", "vectorised", "parallel"):
        training = {"epochs": 1, "rounds": 2}
        result = fq.run(
            overlapping(rounds=2, streams=True), "score-sharing", training=training, settings=settings, engine=engine,
            alone=False, evaluate_every=2,
        )  # fmt: skip
        assert result.summary["engine"] == engine
        rows[engine] = torch.cat(
            [family_state.store.all() for family_state in result.federation.simulation.family_states], dim=1
        )
        result.federation.close()
    torch.testing.assert_close(rows["vectorised"], rows["sequential"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(rows["parallel"], rows["sequential"], rtol=1e-5, atol=1e-6)


def test_a_stream_sets_alpha_round_by_round() -> None:
    fed = federation(overlapping(rounds=3, streams=True))
    for round_, samples in ((1, 16), (2, 14), (3, 15)):
        fed.step()
        pull = fed.server.plan["label-0"].pull.max()
        assert float(pull) == pytest.approx(1 / (1 + samples / 600)), round_


def test_clients_may_sit_rounds_out() -> None:
    training = {"share": 0.4, "rounds": 6}
    result = fq.run(overlapping(), "score-sharing", training=training, engine="sequential", alone=False)
    assert result.summary["refused_updates"] == 0
    assert all(
        torch.isfinite(family_state.store.all()).all() for family_state in result.federation.simulation.family_states
    )


def test_samples_that_are_not_public_are_left_to_the_model() -> None:
    scenario = overlapping(rounds=1)
    clients = [Client(c.name, c.model, c.train, c.train, c.test, labels=c.labels) for c in scenario.clients]
    mixed = Scenario("mixed", clients, scenario.training, scenario.common, scenario.public_test)
    result = fq.run(mixed, "score-sharing", engine="sequential", alone=False, readouts=("received", "own"))
    by = {(row["client"], row["readout"], row["split"]): row["accuracy"] for row in result.rows}
    for client in clients:
        assert by[client.name, "received", "validation"] == by[client.name, "own", "validation"]
    assert any(by[c.name, "received", "test"] != by[c.name, "own", "test"] for c in clients)


def test_a_label_that_joins_late_is_heard_as_loudly_as_the_others() -> None:
    scenario = overlapping(own=2, rounds=8)
    late = []
    for client in scenario.clients:
        first = client.labels[:1]
        keep = client.train.y == first[0]
        train = client.train.x[keep], client.train.y[keep]
        more = {6: Change(labels=client.labels, train=client.train)}
        late.append(Client(client.name, client.model, train, None, client.test, None, first, more))
    joined = Scenario("late", late, scenario.training, scenario.common, scenario.public_test, ["a", "b", "c", "d"])
    result = fq.run(joined, "score-sharing", engine="sequential", alone=False, readouts=("received", "own"))
    last = {e.readout: e for e in result.evaluations if e.round == 8 and e.split == "test"}
    assert last["received"].score > last["own"].score - 0.02
    earlier = [e for e in result.evaluations if e.round == 5 and e.split == "test"]
    assert earlier[0].score == 1.0  # with one label there is nothing to mistake


def passing(gap: bool) -> Scenario:
    """Label 0 passes from the first client to the second, at once or after a round in which nobody owns it."""
    labels = {0: {2: Change(labels=(1,), train=(EYE[[0, 1]], [1, 1]))}, 1: {3 if gap else 2: Change(labels=(0, 1))}}
    return worked_example(labels)


@pytest.mark.parametrize("gap", [False, True])
def test_the_consensus_of_a_label_goes_to_its_next_owner(gap: bool) -> None:
    fed = federation(passing(gap))
    fed.step()
    agreed = consensus(fed.server, 0).clone()
    assert float(agreed.abs().sum()) > 0
    if gap:
        fed.step()
        assert not bool(_owners(fed, 0).any())
        torch.testing.assert_close(consensus(fed.server, 0), agreed)  # it waits
    ups = record(fed)
    fed.step()
    assert _owners(fed, 0).tolist() == [False, True, False]
    # The new owner goes on from what was agreed: f = (f_G + alpha s) / (1 + alpha), and is alone in the mean.
    own = masked(fed.simulation.model(1)(EYE), torch.tensor([True, True, False, False])).softmax(1)[:, 0]
    alpha = fed.server.roster.members[1].samples / 8
    torch.testing.assert_close(consensus(fed.server, 0), (agreed + alpha * own.detach()) / (1 + alpha))
    assert any("label-0" in block.units for up in ups for block in up.blocks)
    assert not bool(fed.server.plan.receives("label-0").any())  # from now on it has that value


def test_whoever_takes_a_label_up_again_receives_what_it_had_left() -> None:
    """User 1, the one owner of label 0, does without it in round 2, when nobody owns it."""
    gives_up = Change(labels=(1,), train=(EYE[[0, 1]], [1, 1]))
    fed = federation(worked_example({0: {2: gives_up, 3: Change(labels=(0, 1))}}, rounds=3))
    fed.step()
    left = consensus(fed.server, 0).clone()
    fed.step()
    fed.step()
    own = masked(fed.simulation.model(0)(EYE), torch.tensor([True, True, False, False])).softmax(1)[:, 0]
    alpha = fed.server.roster.members[0].samples / 8
    torch.testing.assert_close(consensus(fed.server, 0), (left + alpha * own.detach()) / (1 + alpha))


@pytest.mark.parametrize("normalise", [True, False])
def test_the_last_owner_goes_on_from_a_sum_that_was_not_its_own_scores(
    normalise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of label 2's owners user 2 alone takes part, half as loud as it speaks; then user 3 gives the label up."""
    gives_up = Change(labels=(3,), train=(torch.zeros(4, 8), [3] * 4))
    fed = federation(worked_example({2: {2: gives_up}}), normalise=normalise)
    monkeypatch.setattr(fed, "sample_clients", lambda *_: (1,))
    fed.step()
    agreed = consensus(fed.server, 2).clone()
    torch.testing.assert_close(agreed, (1 - USER_2) * (1 / 3 if normalise else 1 / 4))
    fed.step()
    updated = (agreed + (1 - USER_2) / 2) / (1.5 if normalise else 1)
    torch.testing.assert_close(consensus(fed.server, 2), updated)


def _owners(fed: Federation, label: int) -> Tensor:
    return fed.server.plan[f"label-{label}"].circle >= 0  # type: ignore[union-attr]
