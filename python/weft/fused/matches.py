"""Places in compiled graphs with a product beside a collective, and their fused operators.

Graphs are those of Inductor after the split into forward and backward: collectives are functional
(`_c10d_functional`), each with its `wait_tensor`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch

from weft.fused.gains import MAX_GEMV_ROWS, kernel_of
from weft.fused.operators import OPERATORS
from weft.fused.tables import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import Graph, Node

__all__ = ["Match", "find"]

_ATEN: Final = torch.ops.aten
_COLLECTIVES: Final = torch.ops._c10d_functional
_WAIT: Final = _COLLECTIVES.wait_tensor.default
_VIEWS: Final = frozenset((_ATEN.reshape.default, _ATEN.view.default, _ATEN._unsafe_view.default))
_BAGS: Final = frozenset((_ATEN._embedding_bag.default, _ATEN._embedding_bag_forward_only.default))


@dataclass
class Match:
    """A place in a graph.

    Attributes:
        operator: fused operator, as of `torch.ops.weft_fused`.
        group: name of the process group.
        shape: of the product on this rank before the collective; rows are those of the trace if
            they are dynamic.
        ranks: of the group, as the graph has it; 0 if it does not.
        dtype, device: of x.
        reason: of a refusal by the form of the graph.
        kernel: operator whose kernel runs the rows of the trace; by default `operator`.
        substitute: puts the operator into the graph, with the name of the place.
    """

    operator: str
    group: str
    shape: Shape
    ranks: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    reason: str | None = None
    substitute: Callable[[str], None] | None = None
    kernel: str = ""

    def text(self) -> str:
        """Description for logs and for the comparison of ranks."""
        sizes = "x".join(map(str, self.shape))
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.operator} {sizes} {name} group {self.group}"


class _RefusedError(Exception):
    """A place whose form has no fused operator; its text is the reason."""


def find(graph: Graph) -> list[Match]:
    """All places, in the order of the graph."""
    return [match for node in list(graph.nodes) for match in _match(node)]


def _match(node: Node) -> Iterator[Match]:
    finders = {
        _COLLECTIVES.all_reduce.default: (_reduced, "matmul_all_reduce", 2),
        _COLLECTIVES.reduce_scatter_tensor.default: (_scattered, "matmul_reduce_scatter", 3),
        _COLLECTIVES.all_to_all_single.default: (_exchanged, "matmul_all_to_all", 3),
        _COLLECTIVES.all_gather_into_tensor.default: (_gathered, "all_gather_matmul", 2),
    }
    if node.op != "call_function" or node.target not in finders:
        return
    finder, name, place = finders[node.target]
    group = node.args[place]
    try:
        found = finder(node)
        if found is not None:
            if not isinstance(group, str):
                raise _RefusedError("the group is not given by its name")
            yield found
    except _RefusedError as refused:
        yield Match(name, str(group), Shape(0, 0, 0), reason=str(refused))


def _reduced(node: Node) -> Match | None:
    product = _product_before(node.args[0])
    if product is None:
        return None
    if node.args[1] != "sum":
        raise _RefusedError(f"reduction {node.args[1]}; expected sum")
    wait = _wait_of(node)
    shape = _shape_of(product)
    # With dynamic rows, each call has the kernel for its number.
    is_short = isinstance(_value(product).shape[0], int) and shape.rows <= MAX_GEMV_ROWS
    is_straight = _value(product.args[1]).t().is_contiguous()
    name = "gemv_all_reduce" if is_short and is_straight else "matmul_all_reduce"

    def substitute(site: str) -> None:
        x, weight = product.args
        with product.graph.inserting_before(product):
            y = _call(OPERATORS[name], x, _transposed(weight), node.args[2], site)
        product.replace_all_uses_with(y)
        wait.replace_all_uses_with(node.args[0])
        _erase(wait, node, product)

    made = _made(name, node, 2, product, shape, substitute)
    made.kernel = kernel_of(name, shape, is_straight)
    return made


def _scattered(node: Node) -> Match | None:
    source, axis = _unsplit(node.args[0], node.args[2])
    product = _product_before(source)
    if product is None:
        return None
    if node.args[1] != "sum":
        raise _RefusedError(f"reduction {node.args[1]}; expected sum")
    wait, shape, ranks = _wait_of(node), _shape_of(product), int(node.args[2])
    sizes = _sizes(source) if axis else ()
    if axis and axis >= len(sizes) - 1:
        raise _RefusedError("columns are scattered; expected rows")

    def substitute(site: str) -> None:
        x, weight = product.args
        with node.graph.inserting_before(node):
            if axis and prod(sizes[:axis]) > 1:
                x = _sliced(x, sizes, axis, ranks)
            y = _call(
                OPERATORS["matmul_reduce_scatter"], x, _transposed(weight), node.args[3], site
            )
            y = _reshaped(y, _value(wait).shape)
        wait.replace_all_uses_with(y)
        _erase(wait, node)

    return _made("matmul_reduce_scatter", node, 3, product, shape, substitute, ranks)


def _exchanged(node: Node) -> Match | None:
    source = node.args[0]
    product = _product_before(source)
    if product is None:
        if _has_bag_before(source):
            raise _RefusedError("embedding bags; use weft.fused.embedding_all_to_all instead")
        return _exchanged_before(node)
    wait, ranks = _wait_of(node), _even(node)
    shape = _shape_of(product)

    def substitute(site: str) -> None:
        x, weight = product.args
        with node.graph.inserting_before(node):
            y = _call(OPERATORS["matmul_all_to_all"], x, _transposed(weight), node.args[3], site)
            y = _reshaped(y, _value(wait).shape)
        wait.replace_all_uses_with(y)
        _erase(wait, node)

    return _made("matmul_all_to_all", node, 3, product, shape, substitute, ranks)


def _exchanged_before(node: Node) -> Match | None:
    wait = _only_wait(node)
    products = [] if wait is None else _products_after(wait)
    if wait is None or not products:
        return None
    if len(products) > 1 or not _is_only_for(wait, products[0]):
        raise _RefusedError("received rows have several users; expected one product")
    product, ranks = products[0], _even(node)
    shape = _shape_of(product)

    def substitute(site: str) -> None:
        _, weight, bias = _operands(product)
        with product.graph.inserting_before(product):
            x = _reshaped(node.args[0], (-1, shape.inner))
            y = _call(OPERATORS["all_to_all_matmul"], x, _transposed(weight), node.args[3], site)
            y = _biased(y, bias)
        product.replace_all_uses_with(y)
        _erase(product, *_views_before(product, wait), wait, node)

    return _made("all_to_all_matmul", node, 3, product, shape, substitute, ranks)


def _gathered(node: Node) -> Match | None:
    if (wait := _only_wait(node)) is None:
        return None
    ranks = int(node.args[1])
    whole, axis = _resplit(wait, ranks)
    products = _products_after(whole)
    if not products:
        return None
    product = products[0]
    every = _shape_of(product)
    shape = every._replace(rows=every.rows // ranks)
    sizes = _sizes(node.args[0]) if axis else ()
    if axis and axis >= len(sizes) - 1:
        raise _RefusedError("columns are gathered; expected rows")
    is_only = _is_only_for(whole, product)
    if not is_only and _depends_on(_operands(product)[1], wait):
        raise _RefusedError("the weight depends on the gathered rows")

    def substitute(site: str) -> None:
        _, weight, bias = _operands(product)
        # Behind the weight; the graph is sorted afterwards.
        with node.graph.inserting_before(product):
            x = _reshaped(node.args[0], (-1, shape.inner))
            weight = _transposed(weight)
            both = _call(OPERATORS["all_gather_matmul"], x, weight, node.args[2], not is_only, site)
            y = _call(operator.getitem, both, 0)
            if axis and prod(sizes[:axis]) > 1:
                y = _joined(y, sizes, axis, ranks)
            if not is_only:
                gathered = _reshaped(_call(operator.getitem, both, 1), _value(wait).shape)
            y = _biased(y, bias)
        product.replace_all_uses_with(y)
        if not is_only:
            wait.replace_all_uses_with(gathered)
            _erase(product, wait, node)
        else:
            product.graph.erase_node(product)
            _erase_unused(wait)
            _erase(node)

    return _made("all_gather_matmul", node, 2, product, shape, substitute, ranks)


def _made(
    name: str,
    node: Node,
    group: int,
    product: Node,
    shape: Shape,
    substitute: Callable[[str], None],
    ranks: int = 0,
) -> Match:
    value = _value(product)
    return Match(
        name, str(node.args[group]), shape, ranks, value.dtype, value.device, None, substitute
    )


def _product_before(node: Any) -> Node | None:
    """The product of matrices whose value, in other shapes, is that of a node; of no other use."""
    while _is_call(node, _VIEWS):
        if len(node.users) > 1 and _is_product(_root(node)):
            raise _RefusedError("the product has other users")
        node = node.args[0]
    if not _is_product(node):
        return None
    if len(node.users) > 1:
        raise _RefusedError("the product has other users")
    if node.target is _ATEN.addmm.default:
        raise _RefusedError("a bias is added before the collective")
    return node


def _root(node: Any) -> Any:
    while _is_call(node, _VIEWS):
        node = node.args[0]
    return node


def _is_product(node: Any) -> bool:
    return _is_call(node, (_ATEN.mm.default, _ATEN.addmm.default))


def _products_after(node: Node) -> list[Node]:
    """Products whose first operand is a node, in other shapes; in the order of the graph."""
    found: list[Node] = []
    for user in node.users:
        if _is_call(user, _VIEWS):
            found += _products_after(user)
        elif _is_product(user) and not user.kwargs:
            first, *others = _operands(user)
            if first is node and node not in others:
                found.append(user)
    order = {each: place for place, each in enumerate(node.graph.nodes)}
    return sorted(dict.fromkeys(found), key=order.__getitem__)


def _is_only_for(node: Node, product: Node) -> bool:
    """True if a node is used only as the first operand of a product, in other shapes."""
    users = list(node.users)
    return len(users) == 1 and (users[0] is product or _is_only_for_view(users[0], product))


def _is_only_for_view(node: Node, product: Node) -> bool:
    return _is_call(node, _VIEWS) and _is_only_for(node, product)


def _operands(product: Node) -> tuple[Any, Any, Any]:
    """First and second operand, and the bias or `None`."""
    if product.target is _ATEN.mm.default:
        return product.args[0], product.args[1], None
    return product.args[1], product.args[2], product.args[0]


def _views_before(product: Node, last: Node) -> list[Node]:
    """Views from the first operand of a product back to a node, without it."""
    found, node = [], _operands(product)[0]
    while node is not last:
        found.append(node)
        node = node.args[0]
    return found


def _unsplit(node: Any, ranks: int) -> tuple[Any, int]:
    """Tensor and axis that a scatter of another axis than the first one splits and concatenates.

    Into a part for each rank.
    """
    if not _is_call(node, (_ATEN.cat.default,)) or (len(node.args) > 1 and node.args[1] != 0):
        return node, 0
    parts = node.args[0]
    split: Any = parts[0].args[0] if _is_call(parts[0], (operator.getitem,)) else None
    if not _is_call(split, (_ATEN.split.Tensor,)) or len(split.args) < 3:
        return node, 0
    source, length, axis = split.args
    sizes = _value(source).shape
    is_whole = isinstance(length, int) and sizes[axis] == length * len(parts)
    is_whole &= len(parts) == ranks
    if not is_whole or not _are_parts(parts, split):
        return node, 0
    return source, axis % len(sizes)


def _resplit(wait: Node, ranks: int) -> tuple[Node, int]:
    """Node and axis of a gather of another axis than the first one, which follows a wait."""
    users = list(wait.users)
    if len(users) != 1 or not _is_call(users[0], (_ATEN.split.Tensor,)):
        return wait, 0
    split = users[0]
    if len(split.args) > 2 and split.args[2] != 0:
        return wait, 0
    cats = {user for part in split.users for user in part.users}
    if len(cats) != 1 or not _is_call(cat := cats.pop(), (_ATEN.cat.default,)):
        return wait, 0
    if len(cat.args) < 2 or len(cat.args[0]) != ranks or not _are_parts(cat.args[0], split):
        return wait, 0
    return cat, cat.args[1] % len(_value(cat).shape)


def _are_parts(parts: Any, split: Node) -> bool:
    """True if nodes are all parts of a split, in order, each once."""
    return len(parts) == len(split.users) and all(
        _is_call(part, (operator.getitem,)) and part.args == (split, place)
        for place, part in enumerate(parts)
    )


def _even(node: Node) -> int:
    """Number of ranks of an all-to-all of equal parts."""
    sizes = [*node.args[1], *node.args[2]]
    if not sizes or any(size is not sizes[0] and size != sizes[0] for size in sizes):
        raise _RefusedError("parts are not known to be equal")
    return len(node.args[1])


def _has_bag_before(node: Any) -> bool:
    """True if an embedding bag is before a node, with views, concatenations and copies between."""
    between = (*_VIEWS, _ATEN.cat.default, _ATEN.clone.default, _ATEN.permute.default)
    pending, seen = [node], set()
    while pending:
        node = pending.pop()
        if node in seen or not hasattr(node, "all_input_nodes"):
            continue
        seen.add(node)
        if _is_call(node, _BAGS):
            return True
        if _is_call(node, (*between, operator.getitem)):
            pending += node.all_input_nodes
    return False


def _wait_of(node: Node) -> Node:
    wait = _only_wait(node)
    if wait is None:
        raise _RefusedError("the collective has other users than one wait")
    return wait


def _only_wait(node: Node) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is _WAIT else None


def _is_call(node: Any, targets: Any) -> bool:
    return getattr(node, "op", None) == "call_function" and node.target in targets


def _value(node: Any) -> Any:
    return node.meta["val"]


def _sizes(node: Any) -> tuple[int, ...]:
    sizes = tuple(_value(node).shape)
    if not all(isinstance(size, int) for size in sizes):
        raise _RefusedError("dynamic shape, of an axis that is not the first")
    return sizes


def _shape_of(product: Node) -> Shape:
    x, weight, _ = _operands(product)
    rows, inner = _value(x).shape
    sizes = [_hint(size) for size in (rows, _value(weight).shape[1], inner)]
    if not isinstance(inner, int):
        raise _RefusedError("dynamic inner size")
    return Shape(*sizes)


def _hint(size: Any) -> int:
    """A size, or that of the trace if it is dynamic."""
    if isinstance(size, int):
        return size
    if not size.node.has_hint():
        raise _RefusedError("dynamic shape, without a value in the trace")
    return int(size.node.hint)


def _call(target: Any, *args: Any) -> Node:
    """A call at the graph's place of insertion, with the value that fakes give it."""
    graph = next(arg.graph for arg in args if isinstance(arg, torch.fx.Node))
    made = graph.call_function(target, args)
    given = torch.fx.node.map_arg(args, _value)
    mode = next((its.fake_mode for its in _tensors(given) if hasattr(its, "fake_mode")), None)
    if mode is None:
        made.meta["val"] = target(*given)
    else:
        with mode:
            made.meta["val"] = target(*given)
    return made


def _tensors(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def _transposed(node: Any) -> Node:
    """The weight [columns, inner] of a product's second operand."""
    if _is_call(node, (_ATEN.permute.default,)) and list(node.args[1]) == [1, 0]:
        return node.args[0]
    return _call(_ATEN.permute.default, node, [1, 0])


def _reshaped(node: Any, sizes: Any) -> Any:
    """A node in a shape; its first size is inferred, as the other ones have to be static."""
    if all(isinstance(size, int) for size in sizes) and tuple(_value(node).shape) == tuple(sizes):
        return node
    if not all(isinstance(size, int) for size in sizes[1:]):
        raise AssertionError(f"static sizes are checked before: {sizes}")
    return _call(_ATEN.reshape.default, node, [-1, *sizes[1:]])


def _sliced(x: Any, sizes: tuple[int, ...], axis: int, ranks: int) -> Node:
    """Rows of x in the order of the ranks that an axis of the product is scattered to."""
    inner = _value(x).shape[1]
    before, after = prod(sizes[:axis]), prod(sizes[axis + 1 : -1])
    each = sizes[axis] // ranks * after
    split = _call(_ATEN.reshape.default, x, [before, ranks, each, inner])
    turned = _call(_ATEN.permute.default, split, [1, 0, 2, 3])
    return _call(_ATEN.reshape.default, turned, [-1, inner])


def _joined(y: Node, sizes: tuple[int, ...], axis: int, ranks: int) -> Node:
    """Rows of a product, by rank, in the order of a gather of an axis; sizes of a rank's part."""
    columns = _value(y).shape[1]
    before, after = prod(sizes[:axis]), prod(sizes[axis:-1])
    split = _call(_ATEN.reshape.default, y, [ranks, before, after, columns])
    turned = _call(_ATEN.permute.default, split, [1, 0, 2, 3])
    return _call(_ATEN.reshape.default, turned, [-1, columns])


def _biased(y: Any, bias: Any) -> Any:
    return y if bias is None else _call(_ATEN.add.Tensor, y, bias)


def _depends_on(node: Any, other: Node) -> bool:
    pending, seen = [node], set()
    while pending:
        node = pending.pop()
        if node is other:
            return True
        if node not in seen:
            seen.add(node)
            pending += node.all_input_nodes
    return False


def _erase(*nodes: Node) -> None:
    for node in nodes:
        if not node.users:
            node.graph.erase_node(node)


def _erase_unused(node: Node) -> None:
    """Erase a node whose users have no use, with them."""
    for user in list(node.users):
        _erase_unused(user)
    _erase(node)
