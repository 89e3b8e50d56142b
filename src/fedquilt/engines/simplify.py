"""A recorded program without what does nothing in it.

Under `vmap` a product of two stacks comes apart into the product and half a dozen views of what has its shape already,
and what depends on shapes alone is made anew in every step. For a small model that is a good part of a step on a CPU.
What is left computes the same numbers, bit by bit.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

_aten = torch.ops.aten
_RESHAPES = {_aten.view.default, _aten._unsafe_view.default, _aten.expand.default}
_OF_SHAPES = {_aten.ones_like.default, _aten.zeros_like.default}  # they do not look at the numbers they are given
_LARGEST_CONSTANT = 2**16  # numbers; larger ones take less memory when they are made anew


def simplified(program: fx.GraphModule) -> fx.GraphModule:
    """A program that `make_fx` has traced, its views of the same shape, its needless copies and its constants gone.

    One that writes on anything stays as it is.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> program = simplified(make_fx(lambda x: x.expand(2, 3).clone().view(2, 3) + torch.arange(3))(torch.ones(2, 3)))
    >>> [node.name for node in program.graph.nodes if node.op == "call_function"]
    ['add']
    """
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    if not all(_only_reads(node) for node in nodes):
        return program
    constants: dict[fx.Node, Any] = {}
    for node in nodes:
        source = node.args[0] if node.args else None
        alike = isinstance(source, fx.Node) and _form(source) == _form(node) is not None
        copies = node.target is _aten.clone.default
        if alike and (node.target in _RESHAPES or (copies and not _handed_out(node))):
            node.replace_all_uses_with(source)
            program.graph.erase_node(node)
        elif not _handed_out(node) and (value := _constant(node, constants)) is not None:
            constants[node] = value
    for number, (node, value) in enumerate(constants.items()):
        if any(user not in constants for user in node.users):
            name = f"constant_{number}"
            program.register_buffer(name, value, persistent=False)
            with program.graph.inserting_before(node):
                node.replace_all_uses_with(program.graph.get_attr(name))
    program.graph.eliminate_dead_code()
    program.recompile()
    return program


def _only_reads(node: fx.Node) -> bool:
    """Whether what a node does is known not to write on what it is given."""
    does = node.target
    return does is operator.getitem or (isinstance(does, torch._ops.OpOverload) and not does._schema.is_mutable)


def _form(node: fx.Node) -> tuple[Any, ...] | None:
    """The shape, layout and type of the tensor that a node gives, if it gives one."""
    meta = node.meta.get("tensor_meta")
    return None if meta is None else (meta.shape, meta.stride, meta.dtype)


def _handed_out(node: fx.Node) -> bool:
    """Whether the program returns what a node gives or a view of it, which whoever gets it may write on."""
    return any(user.op == "output" or (_shows(user) and _handed_out(user)) for user in node.users)


def _shows(node: fx.Node) -> bool:
    """Whether what a node gives may lie where what it is given does."""
    does = node.target
    return not isinstance(does, torch._ops.OpOverload) or any(given.alias_info for given in does._schema.returns)


def _constant(node: fx.Node, known: dict[fx.Node, Any]) -> Tensor | None:
    """What a node gives in every step, where it depends on nothing but shapes and other constants."""
    does = node.target
    if not isinstance(does, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in does.tags:
        return None
    values = dict(known)
    if does in _OF_SHAPES and isinstance(source := node.args[0], fx.Node):
        like = source.meta["val"]
        values[source] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    if any(source not in values for source in node.all_input_nodes):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    made = does(*args, **kwargs)
    return made if isinstance(made, Tensor) and made.numel() <= _LARGEST_CONSTANT else None
