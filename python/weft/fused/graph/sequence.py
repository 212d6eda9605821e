"""Graph rewrite: all-reduces between a GEMM and a norm become sequence-parallel.

In a tensor-parallel layer, all ranks add and norm all rows in the sum. After the rewrite, a
reduce-scatter gives each rank part of the rows, which it adds and norms, and an all-gather before
the next GEMM collects the normed rows: as many bytes as the all-reduce, a part of the work between,
and both collectives beside a GEMM, where they can be fused. Residuals stay divided from layer to
layer. Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
https://arxiv.org/abs/2205.05198, section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.fx import Node

from weft.fused.gains import MAX_GEMV_ROWS
from weft.fused.graph.nodes import (
    ATEN,
    COLLECTIVES,
    VIEWS,
    WAIT,
    Match,
    call,
    erase,
    group_of_call,
    is_call,
    only_wait,
    reshaped,
    root,
    value_of,
)
from weft.fused.operators import OWN_ROWS
from weft.fused.tables import Shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.fx import Graph

__all__ = ["NAME", "find"]

#: Rewrite name among operators.
NAME: Final = "sequence_parallel"
_ALL_REDUCE: Final = COLLECTIVES.all_reduce.default
_REDUCTIONS: Final = frozenset((ATEN.mean.dim, ATEN.sum.dim_IntList, ATEN.amax.default))


@dataclass
class _Region:
    """One group's all-reduces, and what follows row by row up to other operators.

    Attributes:
        group: name of the process group.
        ranks: group size.
        sums: waits for the all-reduces.
        nodes: nodes whose rows are divided, in graph order; includes `sums`.
    """

    group: str
    ranks: int
    sums: list[Node]
    nodes: list[Node]

    @property
    def shape(self) -> Shape:
        """Shape for the first GEMM before the all-reduce."""
        matmul = _matmul_of(self.sums[0])
        assert matmul is not None
        rows, inner = value_of(matmul.args[0]).shape
        return Shape(rows, value_of(matmul).shape[1], inner)

    @property
    def gathered(self) -> list[Node]:
        """Nodes whose rows others need in full; views on one node count once."""
        inside = set(self.nodes)
        outer = [node for node in self.nodes if any(user not in inside for user in node.users)]
        return list({root(node): node for node in outer}.values())

    def match(self) -> Match:
        """The region as a place, whose operator is `NAME`."""
        value = value_of(self.sums[0])
        reason = None
        if len(self.gathered) > len(self.sums):
            reason = (
                f"{len(self.gathered)} all-gathers for {len(self.sums)} all-reduces: others use "
                "rows of what is between"
            )
        return Match(
            *(NAME, self.group, self.shape, self.ranks, value.dtype, value.device, reason),
            node=self.sums[0].args[0],
            form=self.form(),
            substitute=lambda _: self.rewrite(),
        )

    def form(self) -> str:
        """Sums and all-gathers by the number of earlier collectives in the group."""
        before, count = dict[Node, int](), 0
        for node in self.sums[0].graph.nodes:
            before[node] = count
            count += group_of_call(node) == self.group
        sums = [f"{before[each.args[0]]}/{before[each]}" for each in self.sums]
        gathers = [
            f"{before[each]}/{value_of(each).shape[-1]} {value_of(each).dtype}"
            for each in self.gathered
        ]
        return f"sums {' '.join(sums)} gathers {' '.join(gathers)}"

    def rewrite(self) -> None:
        """Rewrite in place; the graph must be sorted afterwards."""
        made: dict[Node, Node] = {}
        for node in self.nodes:
            with node.graph.inserting_before(node):
                made[node] = self._divided(node, made)
        inside, whole = set(self.nodes), dict[Node, Node]()
        for node in self.nodes:
            users = [user for user in node.users if user not in inside]
            if not users:
                continue
            with node.graph.inserting_before(node):
                source = made[node]
                if source not in whole:
                    gather = COLLECTIVES.all_gather_into_tensor.default
                    whole[source] = call(WAIT, call(gather, source, self.ranks, self.group))
                rows = reshaped(whole[source], value_of(node).shape)
            for user in users:
                user.replace_input_with(node, rows)
        for node in reversed(self.nodes):
            reduce = node.args[0]
            node.graph.erase_node(node)
            if node in self.sums:
                source = reduce.args[0]
                erase(reduce)
                while is_call(source, VIEWS) and not source.users:
                    source, view = source.args[0], source
                    erase(view)

    def _divided(self, node: Node, made: Mapping[Node, Node]) -> Node:
        """This rank's rows in a node, [rows / ranks, columns]."""
        if node in self.sums:
            matmul = _matmul_of(node)
            scatter = COLLECTIVES.reduce_scatter_tensor.default
            return call(WAIT, call(scatter, matmul, "sum", self.ranks, self.group))
        if is_call(node, VIEWS):
            return made[node.args[0]]
        arguments = [self._argument(each, node, made) for each in node.args]
        if is_call(node, _REDUCTIONS):
            arguments[1] = [1]
        keywords = {key: self._argument(each, node, made) for key, each in node.kwargs.items()}
        return call(node.target, *arguments, **keywords)

    def _argument(self, argument: Any, node: Node, made: Mapping[Node, Node]) -> Any:
        if not isinstance(argument, Node):
            return argument
        if argument in made:
            return made[argument]
        shape = tuple(value_of(argument).shape)
        if _has_one_row(shape):
            return argument if len(shape) < 3 else reshaped(argument, (shape[-1],))
        rows = reshaped(argument, (prod(shape[:-1]), shape[-1]))
        return call(OWN_ROWS, rows, self.group)


def find(graph: Graph, ranks: Mapping[str, int]) -> list[Match]:
    """Regions with a norm, in graph order; substitution is a rewrite.

    Args:
        graph: an Inductor graph, as in `matches.find`; must be sorted after a rewrite.
        ranks: process group sizes, by name.
    """
    region_of: dict[Node, _Region] = {}
    for node in graph.nodes:
        if is_call(node, (WAIT,)) and (found := _begun(node, ranks)) is not None:
            region_of[node] = found
            continue
        sources = {
            id(region_of[each]): region_of[each]
            for each in node.all_input_nodes
            if each in region_of
        }
        if not sources:
            continue
        first, *others = sources.values()
        rows = _rows(first.sums[0])
        if not _is_by_row(node, rows, region_of) or any(
            (each.group, _rows(each.sums[0])) != (first.group, rows) for each in others
        ):
            continue
        for other in others:
            first.sums += other.sums
            first.nodes += other.nodes
            region_of.update(dict.fromkeys(other.nodes, first))
        first.nodes.append(node)
        region_of[node] = first
    order = {node: place for place, node in enumerate(graph.nodes)}
    regions = list({id(each): each for each in region_of.values()}.values())
    for each in regions:
        each.sums.sort(key=order.__getitem__)
        each.nodes.sort(key=order.__getitem__)
    normed = [each for each in regions if any(is_call(node, _REDUCTIONS) for node in each.nodes)]
    return [each.match() for each in sorted(normed, key=lambda each: order[each.sums[0]])]


def _begun(wait: Node, ranks: Mapping[str, int]) -> _Region | None:
    """A region with only a wait's all-reduce, if the rows can be divided."""
    reduce = wait.args[0]
    if not is_call(reduce, (_ALL_REDUCE,)) or reduce.args[1] != "sum" or only_wait(reduce) is None:
        return None
    group, rows = reduce.args[2], _rows(wait)
    count = ranks.get(group, 0)
    if count < 2 or rows <= MAX_GEMV_ROWS or rows % count or _matmul_of(wait) is None:
        return None
    return _Region(group, count, [wait], [wait])


def _matmul_of(wait: Node) -> Node | None:
    """The GEMM before a wait's all-reduce, with views between; without other users."""
    node: Any = wait.args[0].args[0]
    columns = value_of(node).shape[-1]
    while is_call(node, VIEWS) and len(node.users) == 1:
        node = node.args[0]
    is_matmul = is_call(node, (ATEN.mm.default,)) and len(node.users) == 1
    return node if is_matmul and value_of(node).shape[-1] == columns else None


def _rows(node: Any) -> int:
    """Number of rows: all sizes but the last multiplied; 0 if one is dynamic or the only one."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return 0
    if not all(isinstance(size, int) for size in value.shape):
        return 0
    return prod(value.shape[:-1])


def _has_one_row(shape: tuple[Any, ...]) -> bool:
    return all(size == 1 for size in shape[:-1])


def _is_by_row(node: Node, rows: int, divided: Mapping[Node, object]) -> bool:
    """True if each row in a node depends only on the same row in divided nodes."""
    if node.op != "call_function" or _rows(node) != rows:
        return False
    if is_call(node, VIEWS):
        return bool(value_of(node).shape[-1] == value_of(node.args[0]).shape[-1])
    if is_call(node, _REDUCTIONS):
        source, axes, *keep = node.args
        last = value_of(source).dim() - 1
        return source in divided and list(axes) in ([-1], [last]) and keep[:1] == [True]
    tags = getattr(node.target, "tags", ())
    if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags:
        return False
    if node.target._schema.is_mutable:
        return False
    tensors = node.all_input_nodes
    # A number that is a symbol in the graph is not a tensor.
    if not all(isinstance(each.meta.get("val"), torch.Tensor) for each in tensors):
        return False
    lead = tuple(value_of(node).shape[:-1])
    return all(
        each in divided or _has_one_row(tuple(value_of(each).shape)) or _leads(each, lead)
        for each in tensors
    ) and all(tuple(value_of(each).shape[:-1]) == lead for each in tensors if each in divided)


def _leads(node: Node, lead: tuple[int, ...]) -> bool:
    """True if a tensor has these sizes before its last."""
    return tuple(value_of(node).shape[:-1]) == lead
