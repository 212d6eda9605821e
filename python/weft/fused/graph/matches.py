"""Compiled-graph places beside a collective, and the fused operators for them.

This module finds GEMMs; `bag_matches` finds embedding bags.

It searches Inductor's graphs after the split into forward and backward: collectives are functional
(`_c10d_functional`), each with a `wait_tensor`.
"""

from __future__ import annotations

import operator
from math import prod
from typing import TYPE_CHECKING, Any, Final

from weft.fused.gains import MAX_GEMV_ROWS, kernel_of
from weft.fused.graph.bag_matches import exchanged_bags
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
    root,
    value_of,
    wait_of,
)
from weft.fused.operators import OPERATORS
from weft.fused.tables import Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, Node

__all__ = ["SEARCHED", "Match", "find", "matmuls_after"]


def find(graph: Graph) -> list[Match]:
    """All places, in graph order."""
    return [match for node in list(graph.nodes) for match in matched(node, _FINDERS)]


def _reduced(node: Node) -> Match | None:
    matmul = _matmul_before(node.args[0])
    if matmul is None:
        return None
    check_sum(node)
    wait = wait_of(node)
    shape = _shape_of(matmul)
    # With dynamic rows, each call picks the kernel for the row count.
    is_short = isinstance(value_of(matmul).shape[0], int) and shape.rows <= MAX_GEMV_ROWS
    is_straight = value_of(matmul.args[1]).t().is_contiguous()
    name = "gemv_all_reduce" if is_short and is_straight else "matmul_all_reduce"

    def substitute(site: str) -> None:
        x, weight = matmul.args
        with matmul.graph.inserting_before(matmul):
            y = call(OPERATORS[name], x, transposed(weight), node.args[2], site)
        matmul.replace_all_uses_with(y)
        wait.replace_all_uses_with(node.args[0])
        erase(wait, node, matmul)

    made = _made(name, node, 2, matmul, shape, substitute)
    made.kernel, made.before = kernel_of(name, shape, is_straight), matmul
    return made


def _scattered(node: Node) -> Match | None:
    source, axis = unsplit(node.args[0], node.args[2])
    matmul = _matmul_before(source)
    if matmul is None:
        return None
    check_sum(node)
    wait, shape, ranks = wait_of(node), _shape_of(matmul), int(node.args[2])
    sizes = scattered_sizes(source, axis, shape.columns)

    def substitute(site: str) -> None:
        x, weight = matmul.args
        with node.graph.inserting_before(node):
            if axis and prod(sizes[:axis]) > 1:
                x = sliced(x, sizes, axis, ranks)
            y = call(OPERATORS["matmul_reduce_scatter"], x, transposed(weight), node.args[3], site)
            y = reshaped(y, value_of(wait).shape)
        wait.replace_all_uses_with(y)
        before = node.args[0]
        erase(wait, node)
        erase_source(before, ATEN.mm.default)

    return _made("matmul_reduce_scatter", node, 3, matmul, shape, substitute, ranks)


def _exchanged(node: Node) -> Match | None:
    source = node.args[0]
    matmul = _matmul_before(source)
    if matmul is None:
        return exchanged_bags(node) or _exchanged_before(node)
    wait, ranks = wait_of(node), even_ranks(node)
    shape = _shape_of(matmul)

    def substitute(site: str) -> None:
        x, weight = matmul.args
        with node.graph.inserting_before(node):
            y = call(OPERATORS["matmul_all_to_all"], x, transposed(weight), node.args[3], site)
            y = reshaped(y, value_of(wait).shape)
        wait.replace_all_uses_with(y)
        erase(wait, node)

    return _made("matmul_all_to_all", node, 3, matmul, shape, substitute, ranks)


def _exchanged_before(node: Node) -> Match | None:
    wait = only_wait(node)
    matmuls = [] if wait is None else matmuls_after(wait)
    if wait is None or not matmuls:
        return None
    if len(matmuls) > 1 or not _is_only_for(wait, matmuls[0]):
        raise RefusedError("received rows have several users; expected one matmul")
    matmul, ranks = matmuls[0], even_ranks(node)
    shape = _shape_of(matmul)

    def substitute(site: str) -> None:
        _, weight, bias = _operands(matmul)
        with matmul.graph.inserting_before(matmul):
            x = reshaped(node.args[0], (-1, shape.inner))
            y = call(OPERATORS["all_to_all_matmul"], x, transposed(weight), node.args[3], site)
            y = biased(y, bias)
        matmul.replace_all_uses_with(y)
        erase(matmul, *_views_before(matmul, wait), wait, node)

    made = _made("all_to_all_matmul", node, 3, matmul, shape, substitute, ranks)
    made.before = matmul
    return made


def _gathered(node: Node) -> Match | None:
    if (wait := only_wait(node)) is None:
        return None
    ranks = int(node.args[1])
    whole, axis = resplit(wait, ranks)
    matmuls = matmuls_after(whole)
    if not matmuls:
        return None
    matmul = matmuls[0]
    every = _shape_of(matmul)
    shape = every._replace(rows=every.rows // ranks)
    sizes = gathered_sizes(node.args[0], axis, shape.inner)
    is_only = _is_only_for(whole, matmul)
    if not is_only and depends_on(_operands(matmul)[1], wait):
        raise RefusedError("the weight depends on the gathered rows")
    if not is_only and has_collective_between(wait, matmul):
        raise RefusedError("a collective before the matmul needs the gathered rows")

    def substitute(site: str) -> None:
        _, weight, bias = _operands(matmul)
        # Behind the weight; the graph is sorted afterwards.
        with node.graph.inserting_before(matmul):
            x = reshaped(node.args[0], (-1, shape.inner))
            weight = transposed(weight)
            both = call(OPERATORS["all_gather_matmul"], x, weight, node.args[2], not is_only, site)
            y = call(operator.getitem, both, 0)
            if axis and prod(sizes[:axis]) > 1:
                y = joined(y, sizes, axis, ranks)
            if not is_only:
                gathered = reshaped(call(operator.getitem, both, 1), value_of(wait).shape)
            y = biased(y, bias)
        matmul.replace_all_uses_with(y)
        if not is_only:
            wait.replace_all_uses_with(gathered)
            erase(matmul, wait, node)
        else:
            matmul.graph.erase_node(matmul)
            erase_unused(wait)
            erase(node)

    made = _made("all_gather_matmul", node, 2, matmul, shape, substitute, ranks)
    made.before = matmul
    return made


def _made(
    name: str,
    node: Node,
    group: int,
    matmul: Node,
    shape: Shape,
    substitute: Callable[[str], None],
    ranks: int = 0,
) -> Match:
    value = value_of(matmul)
    return Match(
        name,
        str(node.args[group]),
        shape,
        ranks,
        value.dtype,
        value.device,
        substitute=substitute,
        node=node,
        matmul=matmul,
    )


def _matmul_before(node: Any) -> Node | None:
    """The GEMM whose value, in other shapes, a node has; without other users."""
    while is_call(node, VIEWS):
        if len(node.users) > 1 and _is_matmul(root(node)):
            raise RefusedError("the matmul has other users")
        node = node.args[0]
    if not _is_matmul(node):
        return None
    if len(node.users) > 1:
        raise RefusedError("the matmul has other users")
    if node.target is ATEN.addmm.default:
        raise RefusedError("a bias is added before the collective")
    return node


def _is_matmul(node: Any) -> bool:
    return is_call(node, (ATEN.mm.default, ATEN.addmm.default))


def matmuls_after(node: Node) -> list[Node]:
    """GEMMs whose first operand is a node, in other shapes; in graph order."""
    found: list[Node] = []
    for user in node.users:
        if is_call(user, VIEWS):
            found += matmuls_after(user)
        elif _is_matmul(user) and not user.kwargs:
            first, *others = _operands(user)
            if first is node and node not in others:
                found.append(user)
    order = {each: place for place, each in enumerate(node.graph.nodes)}
    return sorted(dict.fromkeys(found), key=order.__getitem__)


def _is_only_for(node: Node, matmul: Node) -> bool:
    """True if a node is only used as a GEMM's first operand, in other shapes."""
    users = list(node.users)
    return len(users) == 1 and (users[0] is matmul or _is_only_for_view(users[0], matmul))


def _is_only_for_view(node: Node, matmul: Node) -> bool:
    return is_call(node, VIEWS) and _is_only_for(node, matmul)


def _operands(matmul: Node) -> tuple[Any, Any, Any]:
    """First and second operand, and the bias or `None`."""
    if matmul.target is ATEN.mm.default:
        return matmul.args[0], matmul.args[1], None
    return matmul.args[1], matmul.args[2], matmul.args[0]


def _views_before(matmul: Node, last: Node) -> list[Node]:
    """Views from a GEMM's first operand back to a node, without it."""
    found, node = [], _operands(matmul)[0]
    while node is not last:
        found.append(node)
        node = node.args[0]
    return found


def _shape_of(matmul: Node) -> Shape:
    x, weight, _ = _operands(matmul)
    rows, inner = value_of(x).shape
    sizes = [hint(size) for size in (rows, value_of(weight).shape[1], inner)]
    if not isinstance(inner, int):
        raise RefusedError("dynamic inner size")
    return Shape(*sizes)


#: By collective: function that finds a place, operator name for refused places, and index of the
#: group argument.
_FINDERS: Final = {
    COLLECTIVES.all_reduce.default: (_reduced, "matmul_all_reduce", 2),
    COLLECTIVES.reduce_scatter_tensor.default: (_scattered, "matmul_reduce_scatter", 3),
    COLLECTIVES.all_to_all_single.default: (_exchanged, "matmul_all_to_all", 3),
    COLLECTIVES.all_gather_into_tensor.default: (_gathered, "all_gather_matmul", 2),
}
#: Collectives that the search looks at.
SEARCHED: Final = frozenset(_FINDERS)
