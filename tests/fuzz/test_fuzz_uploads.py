"""What a client sends is refused with a reason, or has the shapes that were asked for and finite numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz_help import damaged, fuzzed
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from numpy.typing import NDArray
from safetensors.numpy import save

pytest.importorskip("flwr")

from fedquilt.core.terms import Terms
from fedquilt.deploy.project import Address, FederationSpec, Project, Rounds, Transfer
from fedquilt.deploy.server import declarations
from fedquilt.deploy.transport.agreed import write_member
from fedquilt.deploy.transport.codec import (
    agree,
    read_down,
    read_up,
    stack,
    write_down,
    write_up,
)
from fedquilt.deploy.transport.transport import Answer
from fedquilt.deploy.transport.wire import VERSION, Refused, pack, unpack
from fedquilt.engines.settings import Training
from fedquilt.interface.messages import ClientInfo, Instructions, UnitValues, Update
from fedquilt.methods import FedAvg
from fedquilt.sharing import Compression

SIZES = {"base": 6, "head": 3}
DOWN = Instructions(
    2, (1,), (UnitValues(("base", "head"), (6, 3), None, torch.arange(9.0)[None]),), (None,),
    {unit: torch.tensor([True]) for unit in SIZES}, 40, {"asks": torch.ones(1, 2)},
)  # fmt: skip
UP = Update(2, (1,), (UnitValues(("base", "head"), (6, 3), None, torch.ones(1, 9)),), {"loss": torch.tensor([0.5])})


def coded(how: Compression) -> Update:
    """The update with its codes."""
    change = UP.blocks[0].value - DOWN.blocks[0].value
    codes = {"base": how.encode(change[:, :5]), "head": how.encode(change[:, 6:])} if how.codes else {}
    return replace(UP, codes=codes)


MEMBER = ClientInfo("c1", 20, {"device": "a"}, (0, 1), {"base": ((2, 3),), "head": ((3,),)}, (), {"head": ("linear",)})
LEARNED = {"base": 5, "head": 3}  # the last number of the base is a statistic
HOWS = [Compression(), Compression("float16"), Compression("int8"), Compression("topk", kept=0.4)]
SENT = {how: pack(*write_up(coded(how), DOWN, LEARNED, how)) for how in HOWS}
LETTER = pack(*write_down(DOWN, LEARNED))
DECLARED = json.dumps(write_member(MEMBER)).encode()
KINDS = (np.float32, np.float16, np.float64, np.int64, np.uint8, np.bool_)
NAMES = st.one_of(
    st.sampled_from(["value/base", "value/head", "report/loss", "value/", "report/", "value/other", "scale/base"]),
    st.text(max_size=8),
)
_DEVICE = (ValueError, LookupError, TypeError, AttributeError, RuntimeError)  # `Device.handle` answers with a code
PROJECT = Project(Path("fed"), Address(), Rounds(), Transfer(), FederationSpec(), ("c1",))
TERMS = Terms(FedAvg(), Training(), 2)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=8,
)


def check(arrays: Mapping[str, NDArray[Any]], chooses: bool, how: Compression) -> None:
    """What a server does with an answer's arrays."""
    try:
        values, reports = read_up(arrays, DOWN, SIZES, LEARNED, how, 1000.0, chooses)
    except Refused:
        return
    assert chooses or set(values) == set(SIZES)
    for unit, value in values.items():
        assert value.shape == (SIZES[unit],)
        assert value.dtype == torch.float32
        assert bool(value.isfinite().all())
        assert float(value.norm()) < 1000 * 20
    for report in reports.values():
        assert not report.is_floating_point() or bool(report.isfinite().all())
    honest = read_up(unpack(SENT[how])[0], DOWN, SIZES, LEARNED, how, 1000.0, False)
    answers = {0: (values, reports), 1: honest, 2: honest}
    strange, _ = agree(answers, None, honest[1])
    assert not strange & {1, 2}  # one is never more than two
    ups = stack(
        2, {number: answer for number, answer in answers.items() if number not in strange}, dict.fromkeys(answers, 0)
    )
    assert {i for up in ups for i in up.ids} == set(answers) - strange


@fuzzed(300)
@given(data=st.data(), how=st.sampled_from(HOWS), chooses=st.booleans())
def test_a_damaged_upload_is_refused_or_as_asked_for(data: st.DataObject, how: Compression, chooses: bool) -> None:
    content = data.draw(damaged(SENT[how]))
    try:
        arrays, _ = unpack(content)
    except Refused:
        return
    assert sum(array.nbytes for array in arrays.values()) <= len(content)
    check(arrays, chooses, how)


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (np.array([0x7F800001], np.uint32).view(np.float32), "not-finite"),  # NaNs that warn when they are converted
        (np.array([0x7C01], np.uint16).view(np.float16), "not-finite"),
        (np.array([0x7FF0000000000001], np.uint64).view(np.float64), "not-finite"),
        (np.array([np.inf], np.float32), "not-finite"),
        (np.ones(1, np.complex64), "wrong-dtype"),
    ],
)
def test_a_report_that_is_no_number_is_refused_without_a_warning(report: NDArray[Any], code: str) -> None:
    sent, _ = unpack(SENT[Compression()])
    with pytest.raises(Refused) as refused:
        read_up({**sent, "report/loss": report}, DOWN, SIZES, LEARNED, Compression(), 1000.0, False)
    assert refused.value.code == code


@fuzzed(200)
@given(data=st.data())
def test_an_upload_of_any_arrays_is_refused_or_as_asked_for(data: st.DataObject) -> None:
    shape = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7)
    any_array = st.sampled_from(KINDS).flatmap(lambda kind: arrays_of.arrays(kind, shape))
    how = data.draw(st.sampled_from(HOWS))
    honest = sorted(unpack(SENT[how])[0].items())
    right = {name: arrays_of.arrays(array.dtype, array.shape) for name, array in honest}
    sent = {name: data.draw(values) for name, values in right.items() if data.draw(st.booleans())}
    sent |= data.draw(st.dictionaries(NAMES.filter(lambda name: name != "__metadata__"), any_array, max_size=3))
    arrays, _ = unpack(pack(sent, {"round": 2}))
    check(arrays, data.draw(st.booleans()), how)


@fuzzed(150)
@given(content=damaged(LETTER))
def test_a_damaged_letter_is_no_surprise_to_a_device(content: bytes) -> None:
    try:
        arrays, text = unpack(content)
        down = read_down(arrays, text)
    except (Refused, *_DEVICE):
        return
    assert isinstance(down, Instructions)


@fuzzed(300)
@given(told=st.one_of(JSON, damaged(DECLARED)))
def test_a_declaration_of_anything_is_refused_or_a_client(told: Any) -> None:
    if isinstance(told, bytes):
        try:
            told = json.loads(told)
        except (ValueError, RecursionError):
            return
    said = {"token": "t", "kind": "hello", "member": told, "changes": {}, "version": VERSION}
    content = save({}, metadata={"fedquilt": json.dumps(said)})  # not by `pack`, which sends no infinite numbers
    seen: list[ClientInfo] = []
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # building a model for each example takes long; what is built is checked
        patch.setattr(declarations, "_check_model", lambda project, terms, member, changes: seen.append(member))
        try:
            declarations.read_declaration(PROJECT, TERMS, Answer("c1", content), "t")
        except Refused:
            return
    (member,) = seen
    assert member.name == "c1"
    assert 0 < member.samples <= PROJECT.transfer.most_samples
    assert all(0 <= label < TERMS.classes for label in member.labels)
