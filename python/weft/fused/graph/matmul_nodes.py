"""Compiled-graph nodes around a GEMM beside a collective, for both searches.

`weft.fused.graph.matches` finds 16-bit and 32-bit GEMMs, `weft.fused.graph.matches_scaled` float8
GEMMs.
"""

from __future__ import annotations

import operator
from math import prod
from typing import TYPE_CHECKING, Any

from weft.fused.graph.nodes import (
    ATEN,
    Match,
    RefusedError,
    are_parts,
    call,
    depends_on,
    group_of_call,
    is_call,
    static_shape,
    value_of,
)
from weft.fused.tables import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.fx import Node

    #: By collective: function that finds a place, operator name for refused places, and index of
    #: the group argument.
    Finders = Mapping[Any, tuple[Callable[[Node], Match | None], str, int]]

__all__ = [
    "biased",
    "check_sum",
    "gathered_sizes",
    "has_collective_between",
    "joined",
    "matched",
    "scattered_sizes",
    "sliced",
    "transposed",
    "unsplit",
]


def matched(node: Node, finders: Finders) -> Iterator[Match]:
    """A collective's place, if it has one."""
    if node.op != "call_function" or node.target not in finders:
        return
    finder, name, place = finders[node.target]
    group = node.args[place]
    try:
        found = finder(node)
        if found is not None:
            if not isinstance(group, str):
                raise RefusedError("the group is not given by its name")
            yield found
    except RefusedError as refused:
        yield Match(name, str(group), Shape(0, 0, 0), reason=str(refused), node=node)


def check_sum(node: Node) -> None:
    """Refuse a collective with another reduction than sum."""
    if node.args[1] != "sum":
        raise RefusedError(f"reduction {node.args[1]}; expected sum")


def scattered_sizes(source: Node, axis: int, columns: int) -> tuple[int, ...]:
    """Sizes scattered along an axis; none for the first axis.

    Raises:
        RefusedError: if it is not rows from a GEMM with `columns`.
    """
    sizes = static_shape(source) if axis else ()
    if axis and axis >= len(sizes) - 1:
        raise RefusedError("columns are scattered; expected rows")
    if axis and sizes[-1] != columns:
        raise RefusedError("columns are split between the matmul and the collective")
    return sizes


def gathered_sizes(part: Any, axis: int, inner: int) -> tuple[int, ...]:
    """This rank's sizes in a gather along an axis; none for the first axis.

    Raises:
        RefusedError: if it is not rows for a GEMM with `inner`.
    """
    sizes = static_shape(part) if axis else ()
    if axis and axis >= len(sizes) - 1:
        raise RefusedError("columns are gathered; expected rows")
    if axis and sizes[-1] != inner:
        raise RefusedError("columns are joined between the collective and the matmul")
    return sizes


def unsplit(node: Any, ranks: int) -> tuple[Any, int]:
    """Tensor and axis before a scatter along another axis than the first one.

    Such a scatter splits the tensor into a part for each rank, and concatenates the parts.
    """
    if not is_call(node, (ATEN.cat.default,)) or (len(node.args) > 1 and node.args[1] != 0):
        return node, 0
    parts = node.args[0]
    split: Any = parts[0].args[0] if is_call(parts[0], (operator.getitem,)) else None
    if not is_call(split, (ATEN.split.Tensor,)) or len(split.args) < 3:
        return node, 0
    source, length, axis = split.args
    sizes = value_of(source).shape
    is_whole = isinstance(length, int) and sizes[axis] == length * len(parts)
    is_whole &= len(parts) == ranks
    if not is_whole or not are_parts(parts, split):
        return node, 0
    return source, axis % len(sizes)


def transposed(node: Any) -> Node:
    """The weight [columns, inner] from a GEMM's second operand."""
    if is_call(node, (ATEN.permute.default,)) and list(node.args[1]) == [1, 0]:
        return node.args[0]
    return call(ATEN.permute.default, node, [1, 0])


def sliced(x: Any, sizes: tuple[int, ...], axis: int, ranks: int) -> Node:
    """Rows in x, in the order of the ranks to which an axis is scattered."""
    inner = value_of(x).shape[1]
    before, after = prod(sizes[:axis]), prod(sizes[axis + 1 : -1])
    each = sizes[axis] // ranks * after
    split = call(ATEN.reshape.default, x, [before, ranks, each, inner])
    turned = call(ATEN.permute.default, split, [1, 0, 2, 3])
    return call(ATEN.reshape.default, turned, [-1, inner])


def joined(y: Node, sizes: tuple[int, ...], axis: int, ranks: int) -> Node:
    """GEMM rows, by rank, in a gather's order along an axis; sizes are for one rank's part."""
    columns = value_of(y).shape[1]
    before, after = prod(sizes[:axis]), prod(sizes[axis:-1])
    split = call(ATEN.reshape.default, y, [ranks, before, after, columns])
    turned = call(ATEN.permute.default, split, [1, 0, 2, 3])
    return call(ATEN.reshape.default, turned, [-1, columns])


def biased(y: Any, bias: Any) -> Any:
    """A GEMM with a bias, or `None`, added."""
    return y if bias is None else call(ATEN.add.Tensor, y, bias)


def has_collective_between(wait: Node, matmul: Node) -> bool:
    """True if a collective that needs a wait precedes a GEMM; it would be put behind it."""
    node = wait.next
    while node is not matmul:
        if group_of_call(node) is not None and depends_on(node, wait):
            return True
        node = node.next
    return False
