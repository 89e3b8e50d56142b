"""Before work starts: models made of parts that do not suit are refused, and so are those that fail a first sample.

And what is said when a model fails later: whose it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedquilt._util.turns import one_at_a_time
from fedquilt.client import Client, Split
from fedquilt.families.copies import copy_of
from fedquilt.families.family import Family
from fedquilt.families.habits import seeded
from fedquilt.tasks import Classification, Task

_CLASSES = Classification()


def check_parts(name: str, model: nn.Module) -> None:
    """Refuses a client's model with parts that cannot be copied, swapped for others or written as a row of numbers.

    >>> check_parts("a", nn.Sequential(nn.DataParallel(nn.Linear(1, 2))))
    Traceback (most recent call last):
    ValueError: client 'a': layer '0' of its model is a DataParallel; give the module inside it
    """
    for path, layer in model.named_modules():
        where = f"client '{name}': layer '{path}' of its model" if path else f"client '{name}': its model"
        if isinstance(layer, nn.DataParallel | nn.parallel.DistributedDataParallel):
            kind = type(layer).__name__
            raise ValueError(f"{where} is a {kind}; give the module inside it")
        if isinstance(layer, torch.jit.ScriptModule):
            raise ValueError(f"{where} is compiled to TorchScript; give the nn.Module that it was made from")
        for key, value in vars(layer).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                raise ValueError(
                    f"{where} holds '{key}', which was computed from other tensors when it was built and would not "
                    "follow them; compute it in forward, or use torch.nn.utils.parametrizations.weight_norm"
                )
        for key, buffer in layer.named_buffers(recurse=False):
            if buffer.layout != torch.strided:
                raise ValueError(f"{where} has a sparse buffer '{key}'; make it dense")
        for key, parameter in layer.named_parameters(recurse=False):
            if parameter.layout != torch.strided:
                raise ValueError(f"{where} has a sparse parameter '{key}'; make it dense")
            if parameter._post_accumulate_grad_hooks:
                raise ValueError(
                    f"{where} has a hook on '{key}' that waits until its gradient is accumulated, which is not done; "
                    "use register_hook"
                )


def misfit(name: str, samples: Tensor, error: Exception) -> str:
    """What is said where a client's model does not take the samples that everybody holds."""
    return (
        f"the model of client '{name}' cannot be run on the server's samples of shape {tuple(samples.shape[1:])} "
        f"({error}); give the scenario common samples that fit all models, in several forms where sensors differ: "
        'common={"device": {"camera": (x, y), "radar": (x, y)}}'
    )


@one_at_a_time
def check_model(
    family: Family, clients: Sequence[Client], classes: int, device: torch.device, task: Task = _CLASSES
) -> None:
    """Refuses a model that cannot take its clients' samples, or whose outputs do not go with their targets.

    >>> from torch import nn
    >>> from fedquilt.families.kinds import Kinds, families
    >>> from fedquilt.families.units import cut
    >>> net = nn.Linear(1, 2)
    >>> client = Client("a", lambda: net, train=([[0.0], [1.0]], [0, 2]))
    >>> check_model(families({0: Kinds().of(net, cut, client.train)})[0], [client], 3, torch.device("cpu"))
    Traceback (most recent call last):
    ValueError: client 'a' has samples of label 2, but its model has 2 outputs, for labels up to 1; give it 3 or more
    """
    name, sample = clients[0].name, clients[0].train.x[:1].to(device)
    twice = torch.cat([sample, sample])  # a norm without statistics of its own takes no single sample
    try:
        with torch.no_grad(), seeded(0):
            module = family.evaluator(device)
            outputs = (copy_of(module) if family.habits.apart else module)(twice.clone())
    except Exception as error:
        kind = f"{sample.dtype} of shape {tuple(sample.shape[1:])}"
        raise ValueError(f"client '{name}': its model cannot take its samples, {kind}: {error}") from error
    if not isinstance(outputs, torch.Tensor):
        told = "class scores" if task.has_classes else "numbers"
        raise ValueError(f"client '{name}': its model gives a {type(outputs).__name__}, not a tensor of {told}")
    task.check_outputs(outputs, clients[0].train.y, classes, f"client '{name}'")
    if not outputs.is_floating_point():
        kind = str(outputs.dtype).removeprefix("torch.")
        told = "class scores are floating-point ones" if task.has_classes else "outputs are floating-point numbers"
        raise ValueError(f"client '{name}': its model gives numbers of type {kind}; {told}")
    _check_losses(task, outputs, clients[0].train.y[:1].to(device), f"client '{name}'")
    _check_training(family, name, torch.cat([sample, sample]), device)
    if not task.has_classes:
        return
    wide = outputs.shape[1]
    for client in clients:
        highest = max(int(split.y.max()) for split in (client.train, client.validation, client.test) if len(split))
        if highest >= wide:
            raise ValueError(
                f"client '{client.name}' has samples of label {highest}, but its model has {wide} outputs, for labels "
                f"up to {wide - 1}; give it {highest + 1} or more"
            )
    if wide > classes:
        raise ValueError(
            f"client '{name}': its model has {wide} outputs, but the highest label of all clients is {classes - 1}; "
            f"give it {classes}, or name all {wide} labels in the scenario's label_names"
        )


def _check_losses(task: Task, outputs: Tensor, y: Tensor, whose: str) -> None:
    """Refuses a loss or metric of a user's own that does not give one number a sample."""
    if task.usual:
        return
    own = {} if isinstance(task.loss, str) else {"loss": task.loss}
    for name, function in (own | {metric.name: metric.function for metric in task.metrics}).items():
        try:
            found = function(outputs.detach(), torch.cat([y, y]))  # type: ignore[misc]
            shape = tuple(found.shape)
        except Exception as error:
            raise ValueError(f"{whose}: '{name}' of the task fails on its model's outputs: {error}") from error
        if shape != (2,):
            raise ValueError(f"{whose}: '{name}' of the task gives {shape} for 2 samples; give one number a sample")


@one_at_a_time
def check_public(family: Family, name: str, public: Sequence[Split], device: torch.device) -> None:
    """Refuses a model that cannot take the samples that everybody holds."""
    for split in public:
        few = split.x[:2].to(device)
        try:
            with torch.no_grad(), seeded(0):
                module = family.evaluator(device)
                (copy_of(module) if family.habits.apart else module)(few.clone())
        except Exception as error:
            raise ValueError(misfit(name, few, error)) from error


def _check_training(family: Family, name: str, twice: torch.Tensor, device: torch.device) -> None:
    """Refuses a model that fails when it is trained, or from whose outputs nothing can be learnt."""
    try:
        model = copy_of(family.template).to(device).train()
        with seeded(0):
            outputs = model(twice)
    except Exception as error:
        raise ValueError(f"client '{name}': its model fails in training: {_in_a_line(error)}") from error
    if outputs.shape[0] != len(twice):
        rows = f"{outputs.shape[0]} rows of scores for {len(twice)} samples"
        raise ValueError(f"client '{name}': its model gives {rows}; give one each")
    if any(parameter.requires_grad for parameter in model.parameters()) and not outputs.requires_grad:
        raise ValueError(
            f"client '{name}': its model's outputs do not depend on its parameters (are they detached, or computed "
            "without gradients?), so nothing can be learnt from them; freeze the parameters if that is what you want"
        )


@contextmanager
def naming(clients: Sequence[Client], places: Sequence[int], round_: int) -> Iterator[None]:
    """What a model raises in here is told as a sentence that names its clients, those of a family at these places.

    Sentences are let through, as are troubles of the machine.

    >>> from torch import nn
    >>> client = Client("a", lambda: nn.Linear(1, 2), train=([[0.0], [1.0]], [0, 1]))
    >>> with naming([client], [0], 3):
    ...     raise IndexError("index out of range")
    Traceback (most recent call last):
    ValueError: client 'a': its model fails in training, in round 3: IndexError: index out of range
    """
    try:
        yield
    except (ValueError, OSError, MemoryError, Warning, torch.OutOfMemoryError):
        raise
    except Exception as error:
        names = ", ".join(f"'{clients[at].name}'" for at in places[:8]) + ", ..." * (len(places) > 8)
        whose = f"client {names}" if len(places) == 1 else f"one of the clients {names}"
        told = f"{whose}: its model fails in training, in round {round_}: {_in_a_line(error)}"
        raise ValueError(told) from error


def _in_a_line(error: Exception) -> str:
    """What went wrong; of a worker's traceback the last line, which says it."""
    text = str(error).strip()
    return text.splitlines()[-1] if "Traceback (most recent call last)" in text else f"{type(error).__name__}: {text}"
