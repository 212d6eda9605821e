"""Compiled-graph places with a float8 GEMM beside a collective, and the operators for them.

A GEMM is `aten._scaled_mm` with row and column scales, or with tensor scales. Views may stand
between it and the collective, also as another one-byte dtype, since not all process groups have
float8 collectives.
"""

from __future__ import annotations

import operator
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from weft.fused.gemm.scales import FLOAT8, OUT_DTYPES
from weft.fused.graph.matches import matmuls_after as unscaled_after
from weft.fused.graph.matmul_nodes import (
    biased,
    check_sum,
    gathered_sizes,
    has_collective_between,
    joined,
    matched,
    scattered_sizes,
    sliced,
    transposed,
    unsplit,
)
from weft.fused.graph.nodes import (
    ATEN,
    COLLECTIVES,
    VIEWS,
    Match,
    RefusedError,
    call,
    depends_on,
    erase,
    erase_source,
    erase_unused,
    even_ranks,
    hint,
    is_call,
    only_wait,
    reshaped,
    resplit,
    value_of,
    wait_of,
)
from weft.fused.scaled_operators import SCALED_OPERATORS
from weft.fused.tables import Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, Node

__all__ = ["find_scaled"]

_MATMUL: Final = ATEN._scaled_mm.default
#: `_scaled_mm` arguments after operands and scales.
_OPTIONS: Final = ("bias", "scale_result", "out_dtype", "use_fast_accum")


class _Matmul(NamedTuple):
    """A float8 GEMM node, and the parts that operators take."""

    node: Node
    shape: Shape
    dtype: torch.dtype
    fast: bool
    bias: Any

    @classmethod
    def of(cls, node: Node) -> _Matmul:
        """The parts in a node, if there are operators for it."""
        given = dict(zip(_OPTIONS, node.args[4:], strict=False)) | node.kwargs
        if given.get("scale_result") is not None:
            raise RefusedError("the matmul has a result scale")
        x, weight, of_rows, of_columns = (value_of(each) for each in node.args[:4])
        dtype = given.get("out_dtype") or x.dtype
        if dtype not in OUT_DTYPES:
            name = str(dtype).removeprefix("torch.")
            raise RefusedError(f"result in {name}; expected bfloat16 or float16")
        rows, inner = x.shape
        columns = weight.shape[1]
        if not (isinstance(inner, int) and isinstance(columns, int)):
            raise RefusedError("dynamic weight size")
        if x.dtype not in FLOAT8 or weight.dtype not in FLOAT8:
            raise RefusedError("operands are not float8")
        if not weight.t().is_contiguous() or inner % 16 or columns % 16:
            raise RefusedError("strides of the weight, or sizes that are not multiples of 16")
        fit = _fits(of_rows, rows, 0) and _fits(of_columns, columns, 1)
        if not fit:
            raise RefusedError("scales of blocks; expected row and column scales")
        shape = Shape(hint(rows), columns, inner)
        return cls(node, shape, dtype, bool(given.get("use_fast_accum")), given.get("bias"))

    @property
    def has_row_scales(self) -> bool:
        """True unless one scale covers all of x."""
        scale = value_of(self.node.args[2])
        return len(scale.shape) == 2 and scale.numel() != 1

    def call(
        self, name: str, x: Any, group: Any, site: str, *options: bool, of_rows: Any = None
    ) -> Node:
        """Insert an operator call for this GEMM.

        Args:
            name: operator name.
            x: this rank's rows.
            group: the collective's group.
            site: place in the graph.
            options: operator options.
            of_rows: scale for x; by default the GEMM's scale.
        """
        _, weight, scale, of_columns = self.node.args[:4]
        of_rows = scale if of_rows is None else of_rows
        given = (x, transposed(weight), of_rows, of_columns, group, *options)
        return call(SCALED_OPERATORS[name], *given, self.dtype, self.fast, site)


def _fits(scale: torch.Tensor, size: Any, axis: int) -> bool:
    """True for a one-element float32 scale, or one for each row or column."""
    if scale.dtype != torch.float32:
        return False
    lengths = list(scale.shape)
    if all(isinstance(length, int) and length == 1 for length in lengths):
        return True
    return len(lengths) == 2 and bool(lengths[axis] == size) and bool(lengths[1 - axis] == 1)


def find_scaled(graph: Graph) -> list[Match]:
    """All places, in graph order."""
    return [match for node in list(graph.nodes) for match in matched(node, _FINDERS)]


def _reduced(node: Node) -> Match | None:
    matmul = _matmul_before(node.args[0])
    if matmul is None:
        return None
    check_sum(node)
    found, wait = matmul.node, wait_of(node)

    def substitute(site: str) -> None:
        with found.graph.inserting_before(found):
            y = matmul.call("scaled_matmul_all_reduce", found.args[0], node.args[2], site)
        found.replace_all_uses_with(y)
        wait.replace_all_uses_with(node.args[0])
        erase(wait, node, found)

    return _made("scaled_matmul_all_reduce", node, 2, matmul, substitute, before=found)


def _scattered(node: Node) -> Match | None:
    source, axis = unsplit(node.args[0], node.args[2])
    matmul = _matmul_before(source)
    if matmul is None:
        return None
    check_sum(node)
    sizes = scattered_sizes(source, axis, matmul.shape.columns)
    ranks = int(node.args[2])
    return _sent("scaled_matmul_reduce_scatter", node, matmul, ranks, sizes, axis)


def _exchanged(node: Node) -> Match | None:
    matmul = _matmul_before(node.args[0])
    if matmul is None:
        return _exchanged_before(node)
    if (wait := only_wait(node)) is not None and unscaled_after(wait):
        # The place is a GEMM behind the collective, which `weft.fused.graph.matches` finds.
        return None
    return _sent("scaled_matmul_all_to_all", node, matmul, even_ranks(node))


def _sent(
    name: str,
    node: Node,
    matmul: _Matmul,
    ranks: int,
    sizes: tuple[int, ...] = (),
    axis: int = 0,
) -> Match:
    wait = wait_of(node)

    def substitute(site: str) -> None:
        x, _, of_rows, _ = matmul.node.args[:4]
        with node.graph.inserting_before(node):
            if prod(sizes[:axis]) > 1:
                x = sliced(x, sizes, axis, ranks)
                if matmul.has_row_scales:
                    of_rows = sliced(of_rows, sizes, axis, ranks)
            y = matmul.call(name, x, node.args[3], site, of_rows=of_rows)
            y = reshaped(y, value_of(wait).shape)
        wait.replace_all_uses_with(y)
        source = node.args[0]
        erase(wait, node)
        erase_source(source, _MATMUL)

    return _made(name, node, 3, matmul, substitute, ranks)


def _exchanged_before(node: Node) -> Match | None:
    wait = only_wait(node)
    matmuls = [] if wait is None else _matmuls_after(wait)
    if wait is None or not matmuls:
        return None
    if len(matmuls) > 1 or not _is_only_for(wait, matmuls[0]):
        raise RefusedError("received rows have several users; expected one matmul")
    matmul, ranks = _Matmul.of(matmuls[0]), even_ranks(node)

    def substitute(site: str) -> None:
        with matmul.node.graph.inserting_before(matmul.node):
            x = _rows_of(node.args[0], matmul)
            y = matmul.call("all_to_all_scaled_matmul", x, node.args[3], site)
            y = biased(y, matmul.bias)
        _replace(matmul.node, y, wait, node)

    return _made("all_to_all_scaled_matmul", node, 3, matmul, substitute, ranks, matmul.node)


def _gathered(node: Node) -> Match | None:
    if (wait := only_wait(node)) is None:
        return None
    ranks = int(node.args[1])
    whole, axis = resplit(wait, ranks)
    matmuls = _matmuls_after(whole)
    if not matmuls:
        return None
    every = _Matmul.of(matmuls[0])
    matmul = every._replace(shape=every.shape._replace(rows=every.shape.rows // ranks))
    sizes = gathered_sizes(node.args[0], axis, matmul.shape.inner)
    is_only = _is_only_for(whole, matmul.node)
    if not is_only and any(depends_on(each, wait) for each in matmul.node.args[1:4]):
        raise RefusedError("the weight or a scale depends on the gathered rows")
    if not is_only and has_collective_between(wait, matmul.node):
        raise RefusedError("a collective before the matmul needs the gathered rows")

    def substitute(site: str) -> None:
        # Behind the weight and scales; the graph is sorted afterwards.
        with node.graph.inserting_before(matmul.node):
            x = _rows_of(node.args[0], matmul)
            of_rows = matmul.node.args[2]
            is_turned = prod(sizes[:axis]) > 1
            if is_turned and matmul.has_row_scales:
                # From the GEMM's order to rank order.
                lengths = (*sizes[:axis], sizes[axis] * ranks, *sizes[axis + 1 :])
                of_rows = sliced(of_rows, lengths, axis, ranks)
            given = (x, node.args[2], site, not is_only)
            both = matmul.call("all_gather_scaled_matmul", *given, of_rows=of_rows)
            y = call(operator.getitem, both, 0)
            if is_turned:
                y = joined(y, sizes, axis, ranks)
            y = biased(y, matmul.bias)
            if not is_only:
                gathered = call(operator.getitem, both, 1)
                gathered = _as(gathered, value_of(wait).dtype)
                gathered = reshaped(gathered, value_of(wait).shape)
        if is_only:
            _replace(matmul.node, y, wait, node)
            return
        matmul.node.replace_all_uses_with(y)
        wait.replace_all_uses_with(gathered)
        erase(matmul.node, wait, node)

    return _made("all_gather_scaled_matmul", node, 2, matmul, substitute, ranks, matmul.node)


def _made(
    name: str,
    node: Node,
    group: int,
    matmul: _Matmul,
    substitute: Callable[[str], None],
    ranks: int = 0,
    before: Node | None = None,
) -> Match:
    device = value_of(matmul.node).device
    return Match(
        *(name, str(node.args[group]), matmul.shape, ranks, matmul.dtype, device),
        substitute=substitute,
        node=node,
        before=before,
        matmul=matmul.node,
    )


def _replace(matmul: Node, y: Node, wait: Node, node: Node) -> None:
    """Put a result in a GEMM's place, and erase the GEMM with the collective before it."""
    matmul.replace_all_uses_with(y)
    matmul.graph.erase_node(matmul)
    erase_unused(wait)
    erase(node)


def _matmul_before(node: Any) -> _Matmul | None:
    """The GEMM whose value, in other shapes, a node has; without other users."""
    has_others = False
    while is_call(node, VIEWS):
        has_others |= len(node.users) > 1
        node = node.args[0]
    if not is_call(node, (_MATMUL,)):
        return None
    if has_others or len(node.users) > 1:
        raise RefusedError("the matmul has other users")
    matmul = _Matmul.of(node)
    if matmul.bias is not None:
        raise RefusedError("a bias is added before the collective")
    return matmul


def _matmuls_after(node: Node) -> list[Node]:
    """GEMMs whose first operand is a node, in other shapes; in graph order."""
    found: list[Node] = []
    for user in node.users:
        if _is_view(user):
            found += _matmuls_after(user)
        elif is_call(user, (_MATMUL,)) and user.args[0] is node and user.args[1] is not node:
            found.append(user)
    order = {each: place for place, each in enumerate(node.graph.nodes)}
    return sorted(dict.fromkeys(found), key=order.__getitem__)


def _is_only_for(node: Node, matmul: Node) -> bool:
    """True if a node is only used as a GEMM's first operand, in other shapes."""
    users = list(node.users)
    if len(users) != 1:
        return False
    return users[0] is matmul or (_is_view(users[0]) and _is_only_for(users[0], matmul))


def _is_view(node: Any) -> bool:
    """True for another shape, or another one-byte dtype."""
    if is_call(node, (ATEN.view.dtype,)):
        return bool(value_of(node).itemsize == value_of(node.args[0]).itemsize == 1)
    return is_call(node, VIEWS)


def _rows_of(node: Any, matmul: _Matmul) -> Any:
    """The tensor that a collective sends, as an operator's x."""
    whole = _as(node, value_of(matmul.node.args[0]).dtype)
    return reshaped(whole, (-1, matmul.shape.inner))


def _as(node: Any, dtype: torch.dtype) -> Any:
    """A node as another one-byte dtype."""
    return node if value_of(node).dtype == dtype else call(ATEN.view.dtype, node, dtype)


#: By collective, as in `weft.fused.graph.matches`.
_FINDERS: Final = {
    COLLECTIVES.all_reduce.default: (_reduced, "scaled_matmul_all_reduce", 2),
    COLLECTIVES.reduce_scatter_tensor.default: (_scattered, "scaled_matmul_reduce_scatter", 3),
    COLLECTIVES.all_to_all_single.default: (_exchanged, "scaled_matmul_all_to_all", 3),
    COLLECTIVES.all_gather_into_tensor.default: (_gathered, "all_gather_scaled_matmul", 2),
}
