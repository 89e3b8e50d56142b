"""A scenario of a user's own samples in one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedquilt._util.suggest import did_you_mean
from fedquilt.client import Client, ModelBuilder
from fedquilt.data.dirichlet import dirichlet
from fedquilt.data.own import Samples, read_samples
from fedquilt.data.partition import Partition, by_subject, iid
from fedquilt.data.splits import random_split
from fedquilt.data.tables import Table
from fedquilt.data.windows import Standardiser
from fedquilt.engines.settings import Training
from fedquilt.models.plain import MLP
from fedquilt.scenario import Scenario
from fedquilt.tasks import Task, as_task

PARTITIONS: dict[str, Callable[..., Partition]] = {"dirichlet": dirichlet, "iid": iid}
AnyModel = Callable[..., nn.Module] | None


def scenario_from(
    source: Any,
    model: AnyModel = None,
    *,
    name: str = "own data",
    label: str | Sequence[str] = "label",
    client: Any = None,
    clients: int = 10,
    partition: str | Callable[..., Partition] | Partition = "dirichlet",
    shares: tuple[float, float, float] = (0.6, 0.1, 0.3),
    standardise: bool = False,
    leave_out: str | Sequence[str] = (),
    one_hot: str | Sequence[str] = (),
    gaps: Literal["mean"] | None = None,
    traits: Mapping[str, Mapping[str, str]] | None = None,
    training: Training | None = None,
    seed: int = 0,
    task: str | Task | None = None,
) -> Scenario:
    """A scenario of your own samples: read, given to clients, and split into training, validation and test.

    `source` is a pair (samples, labels), a data frame, a dict of columns, a csv or npz file (arrays `x`, `y` and maybe
    `client`), a folder of such files, one a client, a torch Dataset, or a Hugging Face data set of columns of numbers.
    `task` says what targets are (see `fedquilt.tasks`); without one, those that are not whole are numbers, others
    classes. Labels may be texts; images of bytes become numbers up to 1, channel first. `label` and `client` name
    columns of a table, `label=["left", "right"]` several targets at once; beside arrays, `client` is an array that says
    whose each sample is. Where nobody says whose samples are, `partition` deals them out among `clients`: "dirichlet",
    "iid", a function of (labels, clients, seed), or a partition made ready. Every client's samples are split at random,
    label by label, by `shares`; windows of one recording overlap, so split those yourself, by
    `fedquilt.data.time_split`, and make `Client`s.

    `model` builds a network: a function without arguments, or of a sample's shape and the number of classes; without
    one it is a small perceptron. With `standardise` every channel of a client's samples (a column of a table) is
    brought to mean 0 and deviation 1, by its own training samples. `traits` are by client.

    Of a table, `leave_out` names columns that a model is not to see (numbers of patients, say) and `one_hot` those of
    which each value becomes a column of 0 and 1. Numbers that are missing are refused, or with `gaps="mean"` filled
    with the mean of that column over the client's own training samples.

    >>> x, y = np.random.default_rng(0).normal(size=(90, 4)), np.array(["low", "mid", "high"] * 30)
    >>> made = scenario_from((x, y), clients=3)
    >>> len(made.clients), made.label_names, sum(c.samples for c in made.clients)
    (3, ('high', 'low', 'mid'), 54)
    """
    wanted = None if task is None else as_task(task)
    if gaps not in (None, "mean"):
        raise ValueError(f"gaps={gaps!r} is not known; write gaps='mean', or leave it out to have gaps refused")
    table = Table(label, _names(leave_out), _names(one_hot), gaps is not None)
    samples = read_samples(source, table, client, None if wanted is None else wanted.has_classes)
    by_class = samples.y.ndim == 1 and (wanted.has_classes if wanted is not None else samples.y.dtype.kind in "iu")
    kinds = samples.y if by_class else np.zeros(len(samples), dtype=np.int64)  # what is dealt out and split evenly
    parts = _parts(samples, kinds, partition, clients, seed)
    wide = max(int(samples.y.max()) + 1, len(samples.label_names)) if by_class else int(np.prod(samples.y.shape[1:]))
    build = _builder(model, samples.x.shape[1:], wide)
    unknown = sorted(set(traits or {}) - set(parts))
    if unknown:
        raise ValueError(f"traits: {did_you_mean(unknown[0], list(parts), 'client')}")
    made = []
    for number, (who, mine) in enumerate(parts.items()):
        splits = random_split(kinds[mine], shares, seed + number)
        x, told = samples.x[mine], dict[str, Sequence[Any]](name=samples.columns)
        if gaps is not None:
            x, told["filled_with"] = _filled(x, splits[0], who, samples.columns)
        if standardise:
            scale = Standardiser.fit(x[splits[0]])
            x, told["mean"], told["deviation"] = scale(x), scale.mean.tolist(), scale.deviation.tolist()
        train, validation, test = ((x[part], samples.y[mine][part]) for part in splits)
        columns = [dict(zip(told, column, strict=True)) for column in zip(*told.values(), strict=False)]
        made.append(Client(who, build, train, validation, test, (traits or {}).get(who), columns=columns))
    return Scenario(name, made, training, label_names=samples.label_names, task=task)


def _names(given: str | Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given


def _filled(x: NDArray[Any], train: NDArray[np.int64], client: str, columns: Sequence[str]) -> tuple[NDArray[Any], Any]:
    """Samples without gaps, and what stands in them: the mean of the training samples that have a number there."""
    missing = np.isnan(x)
    known = (~missing[train]).sum(axis=0)
    if (bad := missing.any(axis=0) & (known == 0)).any():
        at = int(bad.reshape(-1).argmax())
        which = f"column '{columns[at]}'" if columns else f"column {at + 1}"
        raise ValueError(
            f"client '{client}': none of its training samples has a number in {which}; leave that column out, or the "
            "client"
        )
    means = np.where(missing[train], 0, x[train]).sum(axis=0, dtype=np.float64) / np.maximum(known, 1)
    return np.where(missing, means, x).astype(x.dtype), means.tolist()


def _parts(
    samples: Samples,
    kinds: NDArray[np.int64],
    partition: str | Callable[..., Partition] | Partition,
    clients: int,
    seed: int,
) -> dict[str, NDArray[np.int64]]:
    """Each client's samples by its name."""
    if samples.client is not None:
        names, numbers = np.unique(samples.client, return_inverse=True)
        whose = by_subject(numbers, kinds)
        return {str(name): mine for name, mine in zip(names, whose, strict=True)}
    if isinstance(partition, str):
        if partition not in PARTITIONS:
            raise ValueError(did_you_mean(partition, PARTITIONS, "partition"))
        partition = PARTITIONS[partition]
    dealt = partition if isinstance(partition, Partition) else partition(kinds, clients, seed=seed)
    highest = max((int(mine.max()) for mine in dealt if len(mine)), default=-1)
    if highest >= len(samples):
        raise ValueError(f"the partition deals out sample {highest}, but there are {len(samples)}, counted from 0")
    digits = len(str(len(dealt)))
    return {f"client-{number:0{digits}d}": mine for number, mine in enumerate(dealt, 1)}


def _builder(model: AnyModel, shape: tuple[int, ...], classes: int) -> ModelBuilder:
    """A function without arguments that builds a network."""
    if model is None:
        return partial(MLP, shape, (32,), classes)
    if not callable(model) or isinstance(model, nn.Module):
        raise TypeError(f"model must be a function that builds an nn.Module, not {type(model).__name__}")
    needed = [
        p for p in inspect.signature(model).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    if len(needed) not in (0, 2):
        raise TypeError(f"model takes {len(needed)} arguments; give a function of none, or of (shape, classes)")
    return partial(model, *([shape, classes] if needed else []))
