"""A model's head, which is its last unit, and features: what a head is given."""

from __future__ import annotations

from torch import Tensor, nn

from fedquilt.families.inputs import taking_inputs
from fedquilt.families.units import cut


def head_of(model: nn.Module, client: str) -> str:
    """The path of the layer or module that is the last unit of a client's model.

    >>> head_of(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), "a")
    '2'
    """
    units = cut(model)
    own = units[-1].parameters + units[-1].buffers
    tensors = (*dict(model.named_parameters()), *dict(model.named_buffers()))
    above = own[0].split(".")[:-1]
    paths = [".".join(above[:depth]) for depth in range(len(above), 0, -1)]  # from the inside out
    path = next((p for p in paths if {name for name in tensors if name.startswith(f"{p}.")} == set(own)), "")
    if not path or len(units) == 1:
        raise ValueError(
            f"client '{client}': the last unit of its model, '{units[-1].name}', is no layer or module by itself above "
            "others, so there are no features that a head is given; declare `units` of which the last one is"
        )
    return path


def through(model: nn.Module, head: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the head of a model is given for some samples, and the model's scores.

    >>> import torch
    >>> features, scores = through(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), "1", torch.zeros(5, 2))
    >>> features.shape, scores.shape
    (torch.Size([5, 3]), torch.Size([5, 1]))
    """
    with taking_inputs(model, [head]) as given:
        scores: Tensor = model(x)
    if len(given) != 1:
        raise ValueError(f"the head '{head}' of a model ran {len(given)} times for one batch; a head runs once")
    return given[0], scores


def width_of(model: nn.Module, head: str, client: str) -> int:
    """How many numbers of features a sample has: what the first layer of the head, a linear one, takes.

    >>> width_of(nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Flatten(), nn.Linear(3, 1))), "1", "a")
    3
    """
    layers = [layer for layer in model.get_submodule(head).modules() if list(layer.parameters(recurse=False))]
    if not isinstance(layers[0], nn.Linear):
        raise ValueError(
            f"client '{client}': the head of its model begins with a {type(layers[0]).__name__}, so it is not known "
            "how wide features are; declare `units` of which the last one begins with a linear layer"
        )
    return layers[0].in_features
