"""A client's kept state: killed at any moment it loses nothing, and a repeated round starts where the first one did."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

from fedquilt.deploy.device.state import EARLIER_STATES, FRESH, LostState, NodeState


def outcome(state: NodeState, accepted: str) -> float | None:
    """The number this test keeps as a private unit, as the client finds it at the start of a round."""
    found = state.settle(accepted)
    return None if found is None else float(found[0]["head"][0])


def stage(state: NodeState, token: str, value: float) -> None:
    state.stage(token, {"head": np.array([value], np.float32)}, {})


def test_a_staged_outcome_counts_only_when_it_was_accepted(tmp_path: Path) -> None:
    state = NodeState(tmp_path, "run")
    assert outcome(state, FRESH) is None
    stage(state, "1", 1.0)
    assert outcome(state, "1") == 1.0
    stage(state, "2", 2.0)
    assert outcome(state, "1") == 1.0  # the server never accepted 2: the round is repeated from 1
    stage(state, "2b", 2.0)
    assert outcome(state, "2b") == 2.0


def test_a_token_that_is_a_path_leads_nowhere(tmp_path: Path) -> None:
    """A letter says it, and files of that name are moved."""
    state, other = NodeState(tmp_path, "run"), tmp_path / "other.safetensors"
    for token in ("1", "2", "3"):
        stage(state, token, 1.0)
        state.settle(token)
    assert state.earlier.is_dir()
    other.write_bytes(state.committed.read_bytes())
    with pytest.raises(LostState):
        state.settle("../../other")
    assert other.exists()


def test_a_lost_state_is_noticed_and_a_fresh_start_is_one(tmp_path: Path) -> None:
    state = NodeState(tmp_path, "run")
    with pytest.raises(LostState):
        state.settle("7")
    stage(state, "1", 1.0)
    assert outcome(state, "1") == 1.0
    assert outcome(state, FRESH) is None
    with pytest.raises(LostState):
        state.settle("1")


def test_a_damaged_file_is_a_lost_state(tmp_path: Path) -> None:
    state = NodeState(tmp_path, "run")
    stage(state, "1", 1.0)
    assert outcome(state, "1") == 1.0
    state.committed.write_bytes(b"\x00" * 40)
    with pytest.raises(LostState):
        state.settle("1")


def test_runs_do_not_mix(tmp_path: Path) -> None:
    stage(NodeState(tmp_path, "a"), "1", 1.0)
    with pytest.raises(LostState):
        NodeState(tmp_path, "b").settle("1")
    assert outcome(NodeState(tmp_path, "a"), "1") == 1.0


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.sampled_from(["round", "killed before staging", "reply lost", "server dies before saving", "absent"]),
        max_size=25,
    )
)
def test_no_sequence_of_accidents_loses_a_round(tmp_path_factory: pytest.TempPathFactory, events: list[str]) -> None:
    """The server adds 1 to its count for every accepted update; the client's private count must agree, always."""
    state = NodeState(tmp_path_factory.mktemp("node"), "run")
    saved_token, saved_count = FRESH, 0  # what the server's checkpoint says
    for number, event in enumerate(events):
        if event == "absent":
            continue
        count = outcome(state, saved_token) or 0.0  # the message arrives
        assert count == saved_count
        if event == "killed before staging":
            continue
        stage(state, str(number), count + 1)
        if event == "round":
            saved_token, saved_count = str(number), saved_count + 1
    assert (outcome(state, saved_token) or 0.0) == saved_count


def _die_inside(folder: Path, moment: str) -> None:
    """Stages an outcome and is killed in the middle of it, as by a power cut."""
    state = NodeState(folder, "run")
    state.settle("1")
    if moment == "writing":
        real = os.fsync

        def cut(descriptor: int) -> None:
            real(descriptor)
            os._exit(9)

        os.fsync = cut  # type: ignore[assignment]
    else:
        Path.replace = lambda *_: os._exit(9)  # type: ignore[method-assign]
    stage(state, "2", 2.0)


@pytest.mark.parametrize("moment", ["writing", "renaming"])
def test_a_kill_while_staging_leaves_the_committed_state(tmp_path: Path, moment: str) -> None:
    state = NodeState(tmp_path, "run")
    stage(state, "1", 1.0)
    assert outcome(state, "1") == 1.0
    process: Any = multiprocessing.get_context("spawn").Process(target=_die_inside, args=(tmp_path, moment))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert outcome(state, "1") == 1.0
    stage(state, "2", 2.0)
    assert outcome(state, "2") == 2.0


def test_an_old_process_cannot_work_beside_a_new_one(tmp_path: Path) -> None:
    state = NodeState(tmp_path, "run")
    with state.alone(), (state.folder / "lock").open("w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from("ab")), max_size=40))
def test_what_is_said_once_is_noted_in_a_file_that_does_not_grow(
    tmp_path_factory: pytest.TempPathFactory, asked: list[tuple[int, str]]
) -> None:
    """Whatever rounds come, and come again: nothing that a note of every round would refuse is said."""
    state, everything = NodeState(tmp_path_factory.mktemp("node"), "run"), dict[int, str]()
    for round_, word in asked:
        allowed = everything.setdefault(round_, word) == word
        now = {number: said for number, said in everything.items() if number > max(everything) - EARLIER_STATES - 1}
        said = state.said_once("opened").once(round_, word)  # as after a kill: from the file
        assert allowed or not said
        assert said or not allowed or round_ not in now
        assert state.said_once("opened").may_have(round_)
    assert len(list(state.folder.iterdir())) <= 1
    assert all(file.stat().st_size < 1000 for file in state.folder.iterdir())
