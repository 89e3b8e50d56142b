"""What goes between ranks: sums where sums do, columns for medians; the same bits however many ranks there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_help import in_ranks
from run_help import Net, build, contents
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.core.ranks import Ranks, ranks
from fedquilt.core.simulation import Simulation
from fedquilt.engines.parallel import can_fork
from fedquilt.interface.messages import Instructions, Update
from fedquilt.runs.checkpoint import load

pytestmark = [
    pytest.mark.skipif(not can_fork(), reason="ranks are forked here"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
WEIGHTS = sum(tensor.numel() for tensor in Net().state_dict().values())
ALL: dict[str, dict[str, Any]] = {
    **{merge: {"merge": merge} for merge in (*fq.sharing.MERGES, "nnm+krum", "bucketing+median")},
    "noise": {
        "privacy": fq.Privacy(epsilon=8, clip=0.5, adaptive=True),
        "training": {"sampling": "poisson", "share": 0.6},
    },
    "steps": {"method": "fedadam"},
    "late": {"training": {"arrivals": 3, "share": 0.6}},
    "split": {"method": "clustered", "settings": {"after": 1}},
    "neighbours": {"method": "gossip"},
    "narrow": {"method": "lg-fedavg", "merge": "median"},  # fewer columns than ranks
    "narrow krum": {"method": "lg-fedavg", "merge": "krum"},
}


def one(name: str, folder: Path, clients: int = 11, **more: Any) -> fq.Run:
    how: dict[str, Any] = {"method": "fedavg", "training": {"share": 1.0}, "rounds": 2, "checkpoint_every": 2}
    how |= ALL.get(name, {}) | more
    made = build(clients=clients)
    if name in ("noise", "narrow", "narrow krum"):  # noise and running statistics do not go together
        model = plain if name == "noise" else narrow
        others = tuple(fq.Client(c.name, model, c.train, c.validation, c.test) for c in made.clients)
        made = replace(made, clients=others)
    if name == "late":
        hardware = [{"speed": str(10 + i), "bandwidth": "1"} for i in range(clients)]
        some = zip(made.clients, hardware, strict=True)
        slow = tuple(fq.Client(c.name, Net, c.train, c.validation, c.test, traits=has) for c, has in some)
        made = replace(made, clients=slow)
    return fq.run(made, how.pop("method"), engine="sequential", out=folder, alone=False, **how)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), Scale())


# One worker does them: setting up what they share takes half a minute.
together = pytest.mark.xdist_group("merges of ranks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all these by one rank, by two and by four."""
    place = tmp_path_factory.mktemp("ranks")

    def work(size: int) -> Callable[[], None]:
        def go() -> None:
            for name in ALL:
                one(name, place / f"{name}-{size}")

        return go

    for size in (1, 2, 4):
        assert in_ranks(size, work(size)) == [0] * size
    return place


@together
@pytest.mark.parametrize("name", ALL)
def test_of_every_merge_the_bits_are_the_same_however_many_ranks(name: str, folder: Path) -> None:
    first = contents(folder / f"{name}-1")
    assert contents(folder / f"{name}-2") == first
    assert contents(folder / f"{name}-4") == first


@together
@pytest.mark.parametrize("name", ALL)
def test_ranks_merge_as_one_process_does(name: str, folder: Path, tmp_path: Path) -> None:
    one(name, tmp_path / "plain")
    for i in range(11):
        mine, plain = (
            fq.load_model(place, f"c{i}").state_dict() for place in (folder / f"{name}-4", tmp_path / "plain")
        )
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)
    assert (folder / f"{name}-4" / "traffic.jsonl").read_text() == (tmp_path / "plain" / "traffic.jsonl").read_text()


def moved(size: int, place: Path, **how: Any) -> list[int]:
    """Bytes that each rank gave to others in ten rounds, less those in two."""
    found = []
    for rounds in (12, 2):

        def work(rounds: int = rounds) -> None:
            one("", place / f"{rounds}", rounds=rounds, evaluate_every=100, checkpoint_every=100, **how)
            here = ranks()
            assert here is not None
            (place / f"{rounds}-{here.rank}").write_text(str(here.sent))

        assert in_ranks(size, work) == [0] * size
        found.append([int((place / f"{rounds}-{rank}").read_text()) for rank in range(size)])
    return [more - less for more, less in zip(*found, strict=True)]


def test_what_goes_between_ranks_does_not_grow_with_the_clients_where_a_sum_will_do(tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "many").mkdir()
    few, many = (max(moved(2, tmp_path / name, clients=n)) for name, n in (("few", 8), ("many", 40)))
    talk = 10 * (32 * 40 + 2000)  # who sent, who was left out, and the words around it
    sums = 10 * 8 * (WEIGHTS + 1)  # half of a sum and half of all sums, in double precision
    assert sums <= few <= many <= sums + talk
    assert many - few < 10 * 32 * WEIGHTS  # less than the copies of 16 clients more of one rank
    copies = 10 * 20 * 4 * WEIGHTS
    assert copies > sums


def test_a_median_moves_columns(tmp_path: Path) -> None:
    sent = max(moved(2, tmp_path, clients=40, merge="median"))
    half = 10 * (40 * WEIGHTS // 2 * 4 // 2)  # the other rank's columns of one's own 20 clients
    assert half <= sent <= half + 10 * (4 * WEIGHTS + 40 * 32 + 2500)


@pytest.mark.parametrize("merge", ["krum", "geometric-median", "nnm+centred-clipping"])
def test_merges_by_distances_move_columns_and_sums_over_columns(merge: str, tmp_path: Path) -> None:
    sent = max(moved(2, tmp_path, clients=40, merge=merge))
    half = 10 * (40 * WEIGHTS // 2 * 4 // 2)  # the other rank's columns of one's own 20 clients
    sums = 10 * 8 * 40 * 40 * 2  # two tables of distances, in double precision
    assert half <= sent <= half + sums + 10 * (4 * WEIGHTS + 40 * 32 + 2500)


@pytest.mark.parametrize("shards", [4, 5, 7])
def test_shards_are_added_in_one_order(shards: int, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    parts = {shard: torch.randn(13, generator=draw).double() * 10.0 ** (shard % 3) / 3 for shard in range(shards)}

    def by_halves(low: int, high: int) -> Tensor:
        middle = (low + high) // 2
        return parts[low] if high - low == 1 else by_halves(low, middle) + by_halves(middle, high)

    def work() -> None:
        here = ranks()
        assert here is not None
        here.over(shards)
        found = here.added({shard: parts[shard] for shard in here.mine})
        assert torch.equal(found, by_halves(0, shards))

    alone = Ranks(shards=shards)
    assert torch.equal(alone.added(parts), by_halves(0, shards))
    for size in (2, 3, 4):
        assert in_ranks(size, work) == [0] * size


@pytest.mark.parametrize("merge", ["mean", "median", "krum"])
def test_a_copy_that_is_not_finite_is_left_out_on_all_ranks(merge: str, tmp_path: Path) -> None:
    trained = Simulation.run

    def spoilt(self: Simulation, down: Instructions) -> Update:
        up = trained(self, down)
        if 5 in up.ids:  # its last column, which is that of another rank, and nothing else
            up.blocks[0].value[up.ids.index(5), -1] = torch.nan
        return up

    def work(size: int) -> Callable[[], None]:
        def go() -> None:
            Simulation.run = spoilt  # type: ignore[method-assign]  # in this process, which ends
            one("", tmp_path / str(size), merge=merge)

        return go

    for size in (1, 2, 4):
        assert in_ranks(size, work(size)) == [0] * size
    first = contents(tmp_path / "1")
    assert contents(tmp_path / "2") == first
    assert contents(tmp_path / "4") == first
    found = load(tmp_path / "4" / "checkpoint")
    assert found is not None
    assert found[0]["refused"].tolist() == [0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0]
