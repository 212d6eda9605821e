"""Compiled-graph nodes: places for fused operators, and functions that read and make nodes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import Graph, Node

    from weft.fused.tables import Shape

__all__ = [
    "ATEN",
    "COLLECTIVES",
    "VIEWS",
    "WAIT",
    "Match",
    "RefusedError",
    "are_parts",
    "call",
    "collectives",
    "depends_on",
    "erase",
    "erase_source",
    "erase_unused",
    "even_ranks",
    "group_of_call",
    "hint",
    "is_call",
    "only_wait",
    "reshaped",
    "resplit",
    "root",
    "static_shape",
    "value_of",
    "wait_of",
]

ATEN: Final = torch.ops.aten
COLLECTIVES: Final = torch.ops._c10d_functional
WAIT: Final = COLLECTIVES.wait_tensor.default
VIEWS: Final = frozenset((ATEN.reshape.default, ATEN.view.default, ATEN._unsafe_view.default))


@dataclass
class Match:
    """A place in a graph where a fused operator may go.

    Attributes:
        operator: fused operator, a name in `torch.ops.weft_fused`.
        group: name of the process group.
        shape: this rank's GEMM shape before the collective, with traced rows if they are dynamic.
            For embedding bags: batch, columns in this rank's tables, 1.
        ranks: group size, as the graph has it; 0 if it does not.
        dtype, device: x's dtype and device.
        reason: why it is refused: by the graph's form, or by the pass.
        kernel: operator whose kernel runs the traced rows; by default `operator`.
        node: the collective.
        before: node before which the operator is put; by default the collective.
        matmul: the GEMM here, which is in only one substituted place.
        detail: only for this rank; distinguishes graphs.
        form: properties besides the shape that are equal on all ranks.
        site: place name, GRAPH/POSITION, for the agreement at the first call.
        substitute: puts the operator into the graph, with the site.
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
    node: Node | None = None
    before: Node | None = None
    matmul: Node | None = None
    detail: str = ""
    form: str = ""
    site: str = ""

    def text(self) -> str:
        """Description for logs."""
        return f"{self.kind()} group {self.group}"

    def kind(self) -> str:
        """Operator, sizes and dtype, which are equal on all ranks."""
        sizes = "x".join(map(str, self.shape))
        name = str(self.dtype).removeprefix("torch.")
        return " ".join(each for each in (self.operator, sizes, name, self.form) if each)


class RefusedError(Exception):
    """A place whose form has no fused operator; the text is the reason."""


def is_call(node: Any, targets: Any) -> bool:
    """True for a call to one of some functions."""
    return getattr(node, "op", None) == "call_function" and node.target in targets


def value_of(node: Any) -> Any:
    """A node's value in the trace: a fake tensor, or several."""
    return node.meta["val"]


def static_shape(node: Any) -> tuple[int, ...]:
    """Static shape of a node's value.

    Raises:
        RefusedError: if a size is dynamic.
    """
    sizes = tuple(value_of(node).shape)
    if not all(isinstance(size, int) for size in sizes):
        raise RefusedError("dynamic shape, of an axis that is not the first")
    return sizes


def hint(size: Any) -> int:
    """A size, or the traced size if it is dynamic.

    Raises:
        RefusedError: if the trace has no value.
    """
    if isinstance(size, int):
        return size
    if not size.node.has_hint():
        raise RefusedError("dynamic shape, without a value in the trace")
    return int(size.node.hint)


def root(node: Any) -> Any:
    """The node that a node views in another shape."""
    while is_call(node, VIEWS):
        node = node.args[0]
    return node


def collectives(graph: Graph) -> dict[str, list[Node]]:
    """Collectives by process group, in graph order."""
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        name = group_of_call(node)
        if name is not None:
            found.setdefault(name, []).append(node)
    return found


def group_of_call(node: Node) -> str | None:
    """A collective's argument `group_name`; `None` for other nodes, and if it is not a string."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return None
    for place, argument in enumerate(schema.arguments):
        if argument.name == "group_name":
            given: Any = (*node.args[place : place + 1], node.kwargs.get("group_name"))[0]
            return given if isinstance(given, str) else None
    return None


def only_wait(node: Node) -> Node | None:
    """The wait for a collective; `None` if it has other users."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is WAIT else None


def wait_of(node: Node) -> Node:
    """The wait for a collective.

    Raises:
        RefusedError: if it has other users.
    """
    wait = only_wait(node)
    if wait is None:
        raise RefusedError("the collective has other users than one wait")
    return wait


def even_ranks(node: Node) -> int:
    """Number of ranks in an all-to-all with equal parts.

    Raises:
        RefusedError: for other collectives.
    """
    sizes = [*node.args[1], *node.args[2]]
    if not sizes or any(size is not sizes[0] and size != sizes[0] for size in sizes):
        raise RefusedError("parts are not known to be equal")
    return len(node.args[1])


def depends_on(node: Any, other: Node) -> bool:
    """True if a node is another one, or depends on it."""
    pending, seen = [node], set()
    while pending:
        node = pending.pop()
        if node is other:
            return True
        if node not in seen:
            seen.add(node)
            pending += node.all_input_nodes
    return False


def call(target: Any, *args: Any, like: Node | None = None, **options: Any) -> Node:
    """A call at the graph's insertion point, with the value that fake tensors give it.

    `like` is a node in the graph, for calls without nodes.
    """
    leaves = (*_leaves(args), *_leaves(options.values()), like)
    nodes = [each for each in leaves if isinstance(each, torch.fx.Node)]
    made = nodes[0].graph.call_function(target, args, options)
    given, named = torch.fx.node.map_arg((args, options), value_of)
    values = (*_leaves(given), *map(value_of, nodes))
    mode = next((its.fake_mode for its in values if hasattr(its, "fake_mode")), None)
    if mode is None:
        made.meta["val"] = target(*given, **named)
    else:
        with mode:
            made.meta["val"] = target(*given, **named)
    return made


def _leaves(values: Any) -> Iterator[Any]:
    """Elements in nested lists."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _leaves(value)
        else:
            yield value


def reshaped(node: Any, sizes: Any) -> Any:
    """A node in a shape; the first size is inferred, as the other ones have to be static."""
    if all(isinstance(size, int) for size in sizes) and tuple(value_of(node).shape) == tuple(sizes):
        return node
    if not all(isinstance(size, int) for size in sizes[1:]):
        raise AssertionError(f"static sizes are checked before: {sizes}")
    return call(ATEN.reshape.default, node, [-1, *sizes[1:]])


def resplit(wait: Node, ranks: int) -> tuple[Node, int]:
    """Node and axis for a gather along another axis than the first, which follows a wait."""
    users = list(wait.users)
    if len(users) != 1 or not is_call(users[0], (ATEN.split.Tensor,)):
        return wait, 0
    split = users[0]
    if len(split.args) > 2 and split.args[2] != 0:
        return wait, 0
    cats = {user for part in split.users for user in part.users}
    if len(cats) != 1 or not is_call(cat := cats.pop(), (ATEN.cat.default,)):
        return wait, 0
    if len(cat.args) < 2 or len(cat.args[0]) != ranks or not are_parts(cat.args[0], split):
        return wait, 0
    return cat, cat.args[1] % len(value_of(cat).shape)


def are_parts(parts: Any, split: Node) -> bool:
    """True if nodes are all parts from a split, in order, each once."""
    return len(parts) == len(split.users) and all(
        is_call(part, (operator.getitem,)) and part.args == (split, place)
        for place, part in enumerate(parts)
    )


def erase(*nodes: Node) -> None:
    """Erase nodes that have no users, one after the other."""
    for node in nodes:
        if not node.users:
            node.graph.erase_node(node)


def erase_source(node: Node, *matmuls: Any) -> None:
    """Erase an unused GEMM, with the nodes between it and a collective.

    Inductor computes it otherwise, if the parts are concatenated.
    """
    between = (*VIEWS, ATEN.cat.default, ATEN.split.Tensor, operator.getitem)
    if node.users or not is_call(node, (*between, *matmuls)):
        return
    before = [] if node.target in matmuls else node.all_input_nodes
    node.graph.erase_node(node)
    for each in before:
        erase_source(each, *matmuls)


def erase_unused(node: Node) -> None:
    """Erase a node whose users are unused, with them."""
    for user in list(node.users):
        erase_unused(user)
    erase(node)
