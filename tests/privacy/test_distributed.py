"""Noise in shares under secure sums: what is drawn, what is added, what is proved of it, and what is refused."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dp_accounting")
pytest.importorskip("cryptography")

import numpy as np
import torch
from numpy.typing import NDArray
from privacy_help import audited, by_hand, changes, learnable, run, shared, still, unrelated
from scipy.special import logsumexp
from scipy.stats import chisquare
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.core import noisy_shares
from fedquilt.core.noisy_shares import SIGMA, NoisyShares, clipped_changes
from fedquilt.core.secure_round import close
from fedquilt.interface.messages import Instructions, UnitValues, Update
from fedquilt.privacy import Budget, Use, noise_for
from fedquilt.privacy.accountant import epsilon_of
from fedquilt.privacy.discrete_gaussian import discrete_gaussian
from fedquilt.secure import SecureSums
from fedquilt.secure.masks import words

SAMPLES = [(0.4, 0), (2.0, 0), (10.0, 1)]


def shares(**how: Any) -> fq.Privacy:
    return fq.Privacy(**{"noise": 1.0, "level": "distributed", "smallest": 2, **how})


# --- the noise --------------------------------------------------------------------------------------------------------


def gaussian_pmf(sigma: float, reach: int) -> NDArray[np.float64]:
    weight = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    return np.asarray(weight / weight.sum())


@pytest.mark.parametrize("sigma", [1, 3, 50])
def test_whole_numbers_come_as_often_as_a_discrete_gaussian_has_them(sigma: int) -> None:
    count, reach = 60_000, 4 * sigma
    drawn = discrete_gaussian(sigma, count, words(bytes([sigma]) * 32))
    expected = gaussian_pmf(sigma, 12 * sigma)[8 * sigma : 16 * sigma + 1]  # the middle; the rest is one bin
    seen = np.bincount(np.clip(drawn, -reach - 1, reach + 1) + reach + 1, minlength=2 * reach + 3)
    seen, rest = seen[1:-1], seen[0] + seen[-1]
    bins = np.append(expected, 1 - expected.sum()) * count
    enough = bins >= 5
    pooled = np.append(seen, rest)
    found = np.append(pooled[enough], pooled[~enough].sum())
    wanted = np.append(bins[enough], bins[~enough].sum())
    assert chisquare(found, wanted).pvalue > 1e-4
    assert chisquare(found, np.roll(wanted, 1)).pvalue < 1e-4  # the test can fail


def test_a_large_sigma_has_its_length_and_no_pattern_in_its_last_bits() -> None:
    drawn = discrete_gaussian(SIGMA, 100_000, words(b"s" * 32))
    assert drawn.std() == pytest.approx(SIGMA, rel=0.01)
    assert abs(drawn.mean()) < 5 * SIGMA / math.sqrt(100_000)
    assert chisquare(np.bincount(drawn & 63, minlength=64)).pvalue > 1e-4


def test_noise_is_other_noise_for_another_key_and_the_same_for_the_same() -> None:
    one, again, other = (discrete_gaussian(SIGMA, 50, words(key * 32)) for key in (b"a", b"a", b"b"))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("sigma", [0, 2**25])
def test_a_sigma_whose_products_would_not_fit_is_refused(sigma: int) -> None:
    with pytest.raises(ValueError, match="must be a whole number from 1 to"):
        discrete_gaussian(sigma, 1, words(b"a" * 32))


@pytest.mark.parametrize(("sigma", "count"), [(1.0, 2), (1.0, 5), (3.0, 4)])
@pytest.mark.parametrize("shift", [1, 2])
def test_a_sum_of_shares_is_as_private_as_the_accountant_is_told(sigma: float, count: int, shift: int) -> None:
    """Renyi divergences of the sum itself, by convolution, against rho alpha with rho = (shift / length)^2 / 2 and what
    sums add to it: 10 sum_k exp(-2 pi^2 sigma^2 k / (k + 1)) / 4. For `SIGMA` steps that is no number at all."""
    pmf = one = gaussian_pmf(sigma, 40 * int(sigma))
    for _ in range(count - 1):
        pmf = np.convolve(pmf, one)
    pmf = pmf[(there := np.flatnonzero(pmf > 1e-200))[0] : there[-1] + 1]
    here, moved = pmf[shift:], pmf[:-shift]
    extra = 10 * sum(math.exp(-2 * math.pi**2 * sigma**2 * k / (k + 1)) for k in range(1, count))
    rho = shift**2 / (count * sigma**2) / 2
    for alpha in (1.5, 2.0, 5.0, 16.0):
        divergence = float(logsumexp(alpha * np.log(here) + (1 - alpha) * np.log(moved))) / (alpha - 1)
        assert divergence <= alpha * (rho + extra / 4) + 1e-12
        assert divergence == pytest.approx(alpha * rho, rel=0.01)
    assert math.exp(-(math.pi**2) * SIGMA**2) == 0.0


# --- what is promised -------------------------------------------------------------------------------------------------


def test_known_values_by_renyi_divergences() -> None:
    """100 rounds at 10 times the clip are one at the clip: 4.7285, as for Gaussian noise; all take part in all."""
    assert round(epsilon_of(10.0, 1.0, 100, 1e-5, whole=True), 4) == 4.7285
    assert Budget(shares(noise=10.0), Use()).epsilon(100) == pytest.approx(4.7285, abs=1e-4)
    noise = noise_for(4.7285, 1e-5, Use(), 100, whole=True)
    assert noise == pytest.approx(10.0, rel=1e-3)
    assert epsilon_of(noise, 1.0, 100, 1e-5, whole=True) <= 4.7285


def test_the_noise_for_a_promise_is_found_and_told() -> None:
    result = run(learnable(8, share=0.5), privacy=fq.Privacy(epsilon=8, level="distributed"), secure=True)
    noise = result.federation.terms.privacy.found  # type: ignore[union-attr]
    assert result.summary["epsilon"] == pytest.approx(8, rel=1e-3)
    assert epsilon_of(noise, 1.0, 3, 1e-5, whole=True) <= 8  # that only half take part counts for nothing
    assert "from the server too" in result.summary["privacy"]


def test_an_audit_of_what_the_server_sees_where_only_enough_are_honest() -> None:
    """Of 6 clients 3 add noise. A canary among them sends the longest change, or none; the others send nothing."""
    trials, rounds = 600, 2

    def scores(privacy: fq.Privacy, canary: bool) -> Tensor:
        grid, source = NoisyShares(privacy, SecureSums(), 6), words(bytes([canary]) * 32)
        change = np.zeros(trials * rounds)
        parts = [grid.encode(change + canary * privacy.clip * (i == 0), source) for i in range(grid.enough)]
        return torch.from_numpy(grid.decode(np.sum(parts, axis=0, dtype=np.uint64)).reshape(trials, rounds).sum(1))

    promised = shares(noise=2.0)
    epsilon = Budget(promised, Use()).epsilon(rounds)
    assert 0 < audited(scores(promised, True), scores(promised, False), 1e-5) < epsilon
    bare = shares(noise=1e-3)
    assert audited(scores(bare, True), scores(bare, False), 1e-5) > epsilon


# --- rounds -----------------------------------------------------------------------------------------------------------


def test_a_round_by_hand_with_next_to_no_noise_is_the_mean_of_clipped_changes() -> None:
    result = run(by_hand(SAMPLES), privacy=shares(noise=1e-7), secure=True)
    change = changes(SAMPLES)
    clipped = change / change.norm(dim=1, keepdim=True).clamp(min=1.0)
    assert shared(result).tolist() == pytest.approx(clipped.mean(0).tolist(), abs=1e-6)


def test_the_clip_holds_for_all_circles_of_a_client_together_in_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Circles of 3 and of 6 have unlike grids; rounded to them, without noise, nobody is longer than the clip."""
    monkeypatch.setattr(noisy_shares, "discrete_gaussian", lambda sigma, size, words: np.zeros(size, np.int64))
    random = torch.Generator().manual_seed(0)
    value = torch.randn(20, 7, generator=random) * torch.logspace(-6, 3, 20)[:, None]
    start = torch.randn(20, 7, generator=random)
    names, sizes = ("a", "b"), (3, 4)
    down = Instructions(1, tuple(range(20)), (UnitValues(names, sizes, None, start),), (None,), {}, 1, {}, {}, {})
    up = Update(1, tuple(range(20)), (UnitValues(names, sizes, None, start + value),))
    for clip in (1e-3, 0.7):
        moved = clipped_changes(up, down, clip).blocks[0].value.numpy()
        length = np.zeros(20)
        for columns, members in ((slice(0, 3), 3), (slice(3, 7), 6)):
            grid = NoisyShares(shares(clip=clip), SecureSums(), members)
            for i, row in enumerate(moved[:, columns]):
                length[i] += (grid.decode(grid.encode(row, words(b"k" * 32))) ** 2).sum()
        assert (np.sqrt(length) <= clip).all()
        assert np.sqrt(length[-1]) == pytest.approx(clip, rel=1e-3)


def test_the_clip_holds_for_units_that_travel_apart() -> None:
    """Of two clients the second alone sends the second unit."""
    one, other = (UnitValues((name,), (1,), at, torch.tensor(v)) for name, at, v in (
        ("a", None, [[3.0], [3.0]]), ("b", torch.tensor([1]), [[4.0]]),
    ))  # fmt: skip
    start = UnitValues(("a", "b"), (1, 1), None, torch.zeros(2, 2))
    down = Instructions(1, (0, 1), (start,), (None,), {})
    moved = clipped_changes(Update(1, (0, 1), (one, other)), down, 1.0)
    assert moved.blocks[0].value.flatten().tolist() == pytest.approx([1.0, 0.6])
    assert moved.blocks[1].value.flatten().tolist() == pytest.approx([0.8])


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(1000, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        return y


@pytest.mark.parametrize("honest", [0.5, 1.0])
def test_the_noise_of_every_number_has_the_promised_length(honest: float) -> None:
    """Clients that do not move, 8 in each of two circles: noise of z C over sqrt(honest) in sums, as all are honest."""
    noise, clip, each = 3.0, 0.5, 8
    still = (torch.zeros(1, 1000), torch.tensor([0]))
    made = [
        fq.Client(f"c{i}", Wide, still, still, still, {"cohort": f"k{i % 2}", "device": "d"}, (0, 1))
        for i in range(2 * each)
    ]
    scenario = fq.Scenario("still", made, fq.Training(rounds=1, batch=1))
    privacy = shares(noise=noise, clip=clip, honest=honest)
    first = run(scenario, "modfl", privacy, settings={"by": {"*": "cohort"}}, secure=True)
    start = first.federation.simulation.first_values()[first.federation.server.all_values[0].keys[0]]
    values = shared(first).view(2, -1) - start
    assert values.numel() == 4000
    assert float(values.std()) == pytest.approx(noise * clip / math.sqrt(honest) / each, rel=0.04)
    assert first.summary["signal_to_noise"] == pytest.approx(
        each * math.sqrt(honest) / noise / math.sqrt(2000), rel=1e-3
    )


def test_noise_of_one_unit_circle_or_round_says_nothing_of_anothers() -> None:
    """In a simulation, where it follows from the seed; on devices it is drawn from the system's randomness."""
    found, method = [], fq.methods.ModFL(by={"a": "everyone", "b": "cohort"})
    how: dict[str, Any] = {"privacy": shares(noise=2.0), "secure": SecureSums(), "device": "cpu"}
    for seed in (0, 1):
        federation = fq.Federation(still(8), method, engine="sequential", seed=seed, **how)
        for _ in range(2):
            before = [values.value.clone() for values in federation.server.all_values]
            federation.step(evaluate=False)
            after = [values.value for values in federation.server.all_values]
            found += [row for now, then in zip(after, before, strict=True) for row in now - then]
    assert len(found) == 2 * 2 * 3  # seeds, rounds, circles
    unrelated(torch.stack(found))


def test_a_client_whose_numbers_are_not_finite_sends_noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    of = run(by_hand(SAMPLES * 2, rounds=1), privacy=shares(noise=1e-7), secure=True).federation
    (values,) = of.server.all_values
    down = of.server.instructions(range(6))
    before, copies = values.value.clone(), torch.zeros(6, 4) + values.value
    copies += torch.tensor([[0.3], [0.1], [math.nan], [0.2], [math.inf], [0.0]]) * torch.tensor([1.0, 0, 0, 0])
    up = Update(2, tuple(range(6)), (UnitValues(values.units, values.sizes, None, copies),))
    answers = close(of.server, [(down, up)], SecureSums())
    of.server.merge([answer for _, answer in answers])
    assert (values.value - before)[0].tolist() == pytest.approx([0.1, 0, 0, 0], abs=1e-6)
    assert int(of.server.refused.sum()) == 0  # that they are not is nobody's to know


def test_it_goes_on_to_the_same_bits_and_other_seeds_have_other_noise(tmp_path: Path) -> None:
    how: dict[str, Any] = {"privacy": shares(clip=0.1, honest=0.75), "secure": True}
    whole, other = run(learnable(6), **how), run(learnable(6), seed=1, **how)

    def stop(of: Any, report: Any) -> None:
        if report.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(learnable(6), out=tmp_path, checkpoint_every=1, callbacks=[stop], **how)
    assert "honest = 0.75" in (tmp_path / "run.toml").read_text()
    again = fq.resume(tmp_path, learnable(6))
    assert again.rows == whole.rows
    assert again.summary["epsilon"] == whole.summary["epsilon"]
    assert not torch.equal(shared(whole), shared(other))


@pytest.mark.parametrize("method", ["fedper", "ditto", "scaffold", "fedadam"])
def test_methods_come_to_what_they_come_to_with_noise_of_the_server(method: str) -> None:
    """With next to no noise, of either kind, they are the same."""
    mine = run(learnable(6), method, shares(noise=1e-7, clip=0.1), secure=True)
    other = run(learnable(6), method, fq.Privacy(noise=0.0, clip=0.1, smallest=2))
    torch.testing.assert_close(shared(mine), shared(other), rtol=1e-4, atol=1e-5)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_does_not_go_with_it_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="needs secure sums: add --secure-sums"):
        run(learnable(), privacy=shares())
    with pytest.raises(ValueError, match=r"take dp\.level=distributed"):
        run(learnable(), privacy=fq.Privacy(noise=1.0), secure=True)
    with pytest.raises(ValueError, match="which liars would not do"):
        run(learnable(), privacy=shares(), secure=True, attack="sign-flip")
    with pytest.raises(ValueError, match="has no shares"):
        shares(noise=0.0)
    with pytest.raises(ValueError, match="must be above 0 and at most 1"):
        shares(honest=1.5)
    with pytest.raises(ValueError, match=r"do not fit into 32 bits; take secure\.bits=64"):
        run(learnable(), privacy=shares(noise=1e-4), secure=SecureSums(bits=32, range=64.0))
    with pytest.raises(ValueError, match="looks at single copies"):
        run(learnable(), privacy=shares(), secure=True, merge="median")
    with pytest.raises(ValueError, match="has a circle of 4 clients"):
        run(learnable(), "modfl", shares(smallest=5), settings={"by": {"*": "cohort"}}, secure=True)


def test_32_bits_do_where_sums_fit() -> None:
    wide, narrow = (
        run(learnable(), privacy=shares(), secure=SecureSums(bits=bits, range=64.0)) for bits in (64, 32)
    )  # fmt: skip
    assert torch.equal(shared(wide), shared(narrow))


def test_enough_is_rounded_up() -> None:
    for honest, members in itertools.product((0.1, 0.5, 0.7, 1.0), range(3, 40)):
        found = NoisyShares(shares(honest=honest), SecureSums(), members).enough
        assert found >= honest * members - 1e-6
        assert found - 1 < honest * members
