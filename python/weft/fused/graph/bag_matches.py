"""Compiled-graph places with embedding bags before an all-to-all, and the fused operator.

`torch.nn.EmbeddingBag` pools the global batch's bags for this rank's tables. Rows from all tables
are concatenated by columns, and an all-to-all with equal parts sends each rank the rows for its
samples. The operator gets all tables at once, so indices and offsets for several tables are
concatenated in the graph.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from weft.fused.embedding.operator import EMBEDDING
from weft.fused.embedding.tables import COLUMNS_OF, MOST_COLUMNS
from weft.fused.graph.nodes import (
    ATEN,
    VIEWS,
    Match,
    RefusedError,
    call,
    erase,
    erase_unused,
    even_ranks,
    is_call,
    reshaped,
    resplit,
    value_of,
    wait_of,
)
from weft.fused.tables import Shape

if TYPE_CHECKING:
    import torch
    from torch.fx import Node

__all__ = ["exchanged_bags"]

_NAME: Final = "embedding_all_to_all"
_BAGS: Final = frozenset((ATEN._embedding_bag.default, ATEN._embedding_bag_forward_only.default))
#: Modes by torch's numbers.
_MODES: Final = ("sum", "mean", "max")


@dataclass(frozen=True)
class _Bags:
    """A call to torch's embedding bag.

    Attributes:
        weight: the table, [rows, columns].
        indices: [count].
        offsets: [batch], or [batch + 1] if `has_end`.
        factors: factors for the indices, [count].
        mode: fused operator's mode.
    """

    weight: Node
    indices: Node
    offsets: Node
    factors: Node | None
    mode: str
    has_end: bool


def exchanged_bags(node: Node) -> Match | None:
    """The place at an all-to-all, if bags are before it."""
    if not _has_bag_before(node.args[0]):
        return None
    group = str(node.args[3])
    try:
        return _place(node, group)
    except RefusedError as refused:
        return Match(_NAME, group, Shape(0, 0, 0), reason=str(refused), node=node)


def _place(node: Node, group: str) -> Match:
    wait, ranks, source = wait_of(node), even_ranks(node), node.args[0]
    pooled = _pooled(source, is_whole=True)
    bags = [_bags_of(each) for each in pooled]
    values = [value_of(each.weight) for each in bags]
    dtype, device = values[0].dtype, values[0].device
    _check_tables(values)
    batch = value_of(pooled[0])[0].shape[0]
    if not isinstance(batch, int):
        raise RefusedError("dynamic batch; expected a static one")
    if batch % ranks:
        raise RefusedError(f"batch {batch} is not divisible by {ranks} ranks")
    columns = sum(each.shape[1] for each in values)

    def substitute(site: str) -> None:
        with node.graph.inserting_before(node):
            y = call(
                EMBEDDING,
                [each.weight for each in bags],
                *_concatenated(bags, batch),
                [each.mode for each in bags],
                [columns] * ranks,
                batch,
                dtype,
                group,
                site,
            )
            _restore(wait, y, ranks, batch // ranks, columns)
        erase(wait, node)
        _erase_pooled(source)

    return Match(
        _NAME,
        group,
        Shape(batch, columns, 1),
        ranks,
        dtype,
        device,
        substitute=substitute,
        node=node,
        detail=" ".join(
            f"{value.shape[0]}x{value.shape[1]} {each.mode}"
            for value, each in zip(values, bags, strict=True)
        ),
    )


def _has_bag_before(node: Any) -> bool:
    """True if bags are before a node, with functions between that change places or shapes."""
    moves = (ATEN.cat.default, ATEN.clone.default, ATEN.permute.default, ATEN.unsqueeze.default)
    pending, seen = [node], set()
    while pending:
        node = pending.pop()
        if node in seen or not hasattr(node, "all_input_nodes"):
            continue
        seen.add(node)
        if is_call(node, _BAGS):
            return True
        if is_call(node, (*VIEWS, *moves, operator.getitem)):
            pending += node.all_input_nodes
    return False


def _pooled(node: Any, is_whole: bool = False) -> list[Node]:
    """Bag calls whose rows, side by side, are a node's rows; without other users.

    Args:
        node: values [batch, ...].
        is_whole: the node is what is sent, in any shape.
    """
    if not _has_bag_before(node):
        raise RefusedError("rows other than those of bags are sent")
    if len(node.users) > 1:
        raise RefusedError("the pooled rows have other users")
    if is_call(node, (operator.getitem,)) and is_call(node.args[0], _BAGS):
        return [node.args[0]]
    if is_call(node, VIEWS) and (is_whole or _has_rows_of(node, node.args[0])):
        return _pooled(node.args[0], is_whole)
    dimensions = len(value_of(node).shape)
    if is_call(node, (ATEN.unsqueeze.default,)) and node.args[1] % dimensions > 0:
        return _pooled(node.args[0])
    if is_call(node, (ATEN.cat.default,)) and (*node.args, 0)[1] % dimensions == 1:
        return [each for part in node.args[0] for each in _pooled(part)]
    name = getattr(node.target, "__name__", str(node.target))
    raise RefusedError(f"{name} between bags and exchange; expected rows side by side")


def _has_rows_of(node: Node, other: Node) -> bool:
    return bool(value_of(node).shape[0] == value_of(other).shape[0])


def _bags_of(node: Node) -> _Bags:
    """A call's arguments, checked."""
    if any(user.args[1] != 0 and user.users for user in node.users):
        raise RefusedError("gradients of tables; use weft.fused.EmbeddingBags")
    every = node.target._schema.arguments
    given: dict[str, Any] = {
        each.name: each.default_value for each in every if each.has_default_value()
    }
    given |= dict(zip((each.name for each in every), node.args, strict=False)) | node.kwargs
    mode, factors = _MODES[given["mode"]], given["per_sample_weights"]
    if mode == "max":
        raise RefusedError("mode max; expected sum or mean")
    if given["padding_idx"] != -1:
        raise RefusedError("padding_idx is given")
    return _Bags(
        given["weight"],
        given["indices"],
        given["offsets"],
        factors,
        mode if factors is None else "weighted_sum",
        given["include_last_offset"],
    )


def _check_tables(tables: list[torch.Tensor]) -> None:
    """Raise unless the kernel takes tables with these shapes, strides, dtypes and devices."""
    if len(dtypes := {str(each.dtype).removeprefix("torch.") for each in tables}) > 1:
        raise RefusedError(f"tables of {', '.join(sorted(dtypes))}; expected one dtype")
    if len({each.device for each in tables}) > 1:
        raise RefusedError("tables on several devices")
    widths = [each.shape[1] for each in tables]
    if any(width % COLUMNS_OF or not 0 < width <= MOST_COLUMNS for width in widths):
        raise RefusedError(
            f"tables of {widths} columns; expected multiples of {COLUMNS_OF} up to {MOST_COLUMNS}"
        )
    if not all(each.is_contiguous() for each in tables):
        raise RefusedError("strides of a table")


def _concatenated(bags: list[_Bags], batch: int) -> tuple[Node, Node, Node | None]:
    """Indices, offsets [tables * batch + 1] and factors for all tables, in operator format."""
    first = bags[0]
    if len(bags) == 1 and first.has_end:
        return first.indices, first.offsets, first.factors
    starts: list[Node] = []
    total: Any = 0
    for each in bags:
        own = each.offsets
        if each.has_end:
            own = call(ATEN.slice.Tensor, own, 0, 0, batch)
        starts.append(call(ATEN.add.Tensor, own, total) if starts else own)
        total = _sum(total, _count(each.indices))
    end = _filled(first.offsets, 1, total, value_of(first.offsets).dtype)
    offsets = call(ATEN.cat.default, [*starts, end])
    if len(bags) == 1:
        return first.indices, offsets, first.factors
    indices = call(ATEN.cat.default, [each.indices for each in bags])
    given = next((each.factors for each in bags if each.factors is not None), None)
    if given is None:
        return indices, offsets, None
    dtype = value_of(given).dtype
    factors = [
        _filled(each.indices, _count(each.indices), 1, dtype)
        if each.factors is None
        else each.factors
        for each in bags
    ]
    return indices, offsets, call(ATEN.cat.default, factors)


def _filled(like: Node, size: Any, fill: Any, dtype: torch.dtype) -> Node:
    """A tensor [size] with one value, on the device of a node's value."""
    device = value_of(like).device
    return call(ATEN.full.default, [size], fill, like=like, dtype=dtype, device=device)


def _count(indices: Node) -> Any:
    """Index count: from the trace, or a node if it is dynamic."""
    size = value_of(indices).shape[0]
    return size if isinstance(size, int) else call(ATEN.sym_size.int, indices, 0)


def _sum(total: Any, count: Any) -> Any:
    if isinstance(total, int) and (total == 0 or isinstance(count, int)):
        return total + count if total else count
    return call(operator.add, total, count)


def _restore(wait: Node, y: Node, ranks: int, rows: int, columns: int) -> None:
    """Replace received rows, by rank, with rows from y [rows, ranks * columns].

    Users that bring a sample's rows together get y, without a copy.
    """
    whole, axis = resplit(wait, ranks)
    if axis == 1 and value_of(wait).shape[0] == ranks * rows:
        whole.replace_all_uses_with(reshaped(y, value_of(whole).shape))
        erase_unused(wait)
        return
    views = [user for user in wait.users if is_call(user, VIEWS)]
    for view in (wait, *views):
        if tuple(value_of(view).shape[:2]) == (ranks, rows):
            _restore_turned(view, y)
    erase(*views)
    if not wait.users:
        return
    split = call(ATEN.reshape.default, y, [rows, ranks, columns])
    by_rank = call(ATEN.permute.default, split, [1, 0, 2])
    shape = [-1, *value_of(wait).shape[1:]]
    wait.replace_all_uses_with(call(ATEN.reshape.default, by_rank, shape))


def _restore_turned(view: Node, y: Node) -> None:
    """Replace permutations [rows, ranks, ...] on a view [ranks, rows, ...], and the copies."""
    swap = [1, 0, *range(2, len(value_of(view).shape))]
    for turned in list(view.users):
        if not is_call(turned, (ATEN.permute.default,)) or list(turned.args[1]) != swap:
            continue
        its = reshaped(y, value_of(turned).shape)
        for copy in list(turned.users):
            if is_call(copy, (ATEN.clone.default,)):
                copy.replace_all_uses_with(its)
                erase(copy)
        turned.replace_all_uses_with(its)
        erase(turned)


def _erase_pooled(node: Node) -> None:
    """Erase a node without users, and everything before it up to the bags."""
    moves = (*VIEWS, *_BAGS, ATEN.cat.default, ATEN.unsqueeze.default, operator.getitem)
    if is_call(node, moves):
        erase(*node.users)
        if not node.users:
            before = node.all_input_nodes
            erase(node)
            for each in before:
                _erase_pooled(each)
