"""Merges that look at more than copies, through whole rounds: a value to start from, a draw, a client to trust."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from core_help import points

import fedquilt as fq
from fedquilt.methods import FedAvg, FedPer
from fedquilt.sharing import FLTrust, NormBound, Rule, pick

COMMON = (torch.randn(12, 4, generator=torch.Generator().manual_seed(3)), torch.arange(12) % 3)


def federation(
    rule: Rule, sizes: tuple[int, ...] = (5, 9, 7, 6), common: bool = True, share: float = 1
) -> fq.Federation:
    scenario = points(sizes=sizes, common=COMMON if common else None, training={"share": share})
    return fq.Federation(scenario, FedAvg(), rule=rule, device="cpu", engine="sequential")


def sent(federation: fq.Federation) -> tuple[np.ndarray, np.ndarray]:
    """What the clients of a federation received and what they send, without merging it."""
    federation.backend.turn(federation.server, 1)
    ((down, up),) = federation.backend.exchange(federation.server, range(len(federation.scenario.clients)), ())
    return down.blocks[0].value[0].double().numpy(), up.blocks[0].value.double().numpy()


def test_fltrust_in_a_round_is_the_papers_formula() -> None:
    held, copies = sent(federation(FLTrust()))
    assert len(copies) == 5
    root, total, trust = copies[-1] - held, np.zeros_like(held), 0.0
    for copy in copies[:-1]:
        move = copy - held
        score = max(0.0, float(move @ root) / float(np.linalg.norm(move) * np.linalg.norm(root)))
        total += score * np.linalg.norm(root) / np.linalg.norm(move) * move
        trust += score
    federated = federation(FLTrust())
    federated.step()
    np.testing.assert_allclose(federated.server.all_values[0].value[0].numpy(), held + total / trust, atol=1e-6)


def test_norms_are_bounded_around_what_was_received() -> None:
    held, copies = sent(federation(NormBound(0.05)))
    moves = copies - held
    lengths = np.linalg.norm(moves, axis=1)
    assert (lengths > 0.05).all()
    federated = federation(NormBound(0.05))
    federated.step()
    expected = held + (moves * (0.05 / lengths)[:, None]).mean(0)
    np.testing.assert_allclose(federated.server.all_values[0].value[0].numpy(), expected, atol=1e-6)


def test_the_servers_client_is_always_there_and_never_measured() -> None:
    federated = federation(FLTrust(), share=0.25)
    for _ in range(2):
        report = federated.step()
        assert 4 in report.participants
        assert len(report.participants) in (1, 2)
        assert {row["client"] for e in report.evaluations for row in e.rows()} == {f"client-{i}" for i in range(4)}


def test_the_servers_client_has_as_much_as_others_of_all_labels() -> None:
    mine = federation(FLTrust()).scenario.clients[-1]
    assert (mine.name, mine.samples) == ("server", 6)  # of 5, 6, 7 and 9
    assert mine.train.y.tolist() == [0, 0, 1, 1, 2, 2]
    for x, y in zip(mine.train.x, mine.train.y, strict=True):
        assert any(torch.equal(x, other) and y == label for other, label in zip(*COMMON, strict=True))


def test_clients_can_be_trusted_by_name() -> None:
    assert len(federation(FLTrust(("client-2",))).scenario.clients) == 4
    with pytest.raises(
        ValueError, match=r"^the merge trusts somebody who is not here: there is no client to trust 'ann'"
    ):
        federation(FLTrust(("ann",)))
    with pytest.raises(
        ValueError, match=r"^fltrust compares with an update of the server's own, and it holds no samples"
    ):
        federation(FLTrust(), common=False)


@pytest.mark.parametrize("merge", ["bucketing+centred-clipping", "nnm+krum", "fltrust"])
def test_an_interrupted_run_goes_on_to_the_same_bits(merge: str, tmp_path: Path) -> None:
    scenario = points(sizes=(5, 9, 7, 6, 8, 5), common=COMMON, training={"rounds": 4, "share": 0.9})
    how = {"merge": merge, "engine": "sequential", "alone": False, "checkpoint_every": 1, "device": "cpu"}

    def stop(federation: fq.Federation, report: object) -> None:
        if federation.round == 2:
            raise KeyboardInterrupt

    whole = fq.run(scenario, "fedper", **how)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        fq.run(scenario, "fedper", out=tmp_path / "run", callbacks=[stop], **how)  # type: ignore[arg-type]
    again = fq.resume(tmp_path / "run", scenario)
    assert again.federation.server.rule == pick(merge)
    for one, other in zip(whole.federation.server.all_values, again.federation.server.all_values, strict=True):
        assert torch.equal(one.value, other.value)
    assert whole.rows == again.rows


def test_robust_merges_go_with_private_units() -> None:
    federated = fq.Federation(points(sizes=(5,) * 6), FedPer(), rule=pick("nnm+median"), device="cpu")
    before = federated.server.all_values[0].value.clone()
    federated.run()
    assert not torch.equal(before, federated.server.all_values[0].value)
    federated.close()
