"""GEMMs beside collectives, compiled with the `weft.fused` pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import distributed, nn
from torch._inductor import config
from torch.nn.functional import linear

import weft.fused
from tests.workers.fused.compile_common import compiled, counted, recorded


def graphs(group: str) -> dict[str, Any]:
    """All functions in `GRAPHS` in one graph, compiled with the pass, beside those functions."""
    ranks = distributed.get_world_size()
    # Separate tensors for each, as equal GEMMs become one.
    inputs = [
        (torch.randn(6 * ranks, 16), torch.randn(24, 16), torch.randn(24, 16)) for _ in GRAPHS
    ]

    def every(inputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        return [
            function(*tensors, group)
            for function, tensors in zip(GRAPHS.values(), inputs, strict=True)
        ]

    weft.fused.enable(force=True, timeout=20)
    weft.fused.reset_report()
    left: list[str] = []

    def listed(graph: torch.fx.Graph) -> None:
        left.extend(str(node.target) for node in graph.nodes)

    config.post_grad_custom_post_pass = listed
    try:
        with recorded() as messages, torch.no_grad():
            found = compiled(every)(inputs)
    finally:
        config.post_grad_custom_post_pass = None
        weft.fused.disable()
    with torch.no_grad():
        expected = every(inputs)
    close = {
        name: own.shape == its.shape and torch.allclose(own, its, atol=1e-3)
        for name, own, its in zip(GRAPHS, found, expected, strict=True)
    }
    gemms = sum(left.count(f"aten.{name}.default") for name in ("mm", "addmm"))
    return {"close": close, "gemms": gemms, "lines": len(messages), **counted()}


def dynamic(group: str) -> list[Any]:
    """A graph with dynamic rows, run with 8, 40 and 12 rows."""
    w = torch.randn(24, 16)

    def function(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = functional.all_reduce(linear(x.relu(), w), "sum", group)
        scattered = functional.reduce_scatter_tensor(linear(x, 2 * w), "sum", 0, group)
        return y.sum() + scattered

    weft.fused.enable(force=True)
    weft.fused.reset_report()
    run, found = compiled(function), []
    with torch.no_grad():
        for rows in (8, 40, 12):
            x = torch.randn(rows, 16)
            torch._dynamo.mark_dynamic(x, 0)
            found.append(torch.allclose(run(x), function(x), atol=1e-3))
    weft.fused.disable()
    return [found, counted()]


def _linear_all_reduce(x: Any, w: Any, v: Any, group: str) -> Any:
    y = linear(torch.relu(x), w).view(2, -1, w.shape[0])
    return functional.all_reduce(y, "sum", group) + 1


def _many_rows(x: Any, w: Any, v: Any, group: str) -> Any:
    x = x.repeat(10, 1)
    return functional.all_reduce(linear(x, w), "sum", group) * 2


def _average(x: Any, w: Any, v: Any, group: str) -> Any:
    return functional.all_reduce(linear(x, w), "avg", group)


def _bias_before(x: Any, w: Any, v: Any, group: str) -> Any:
    return functional.all_reduce(linear(x, w, w[:, 0]), "sum", group)


def _used_twice(x: Any, w: Any, v: Any, group: str) -> Any:
    y = linear(x, w)
    return functional.all_reduce(y, "sum", group) + y


def linear_reduce_scatter(x: Any, w: Any, v: Any, group: str) -> Any:
    return functional.reduce_scatter_tensor(linear(x, w), "sum", 0, group).relu()


def _scatter_of_axis(x: Any, w: Any, v: Any, group: str) -> Any:
    y = linear(x.view(2, -1, x.shape[1]), w)
    return functional.reduce_scatter_tensor(y, "sum", 1, group).relu()


def _scatter_of_columns(x: Any, w: Any, v: Any, group: str) -> Any:
    y = linear(x.view(2, -1, x.shape[1]), w)
    return functional.reduce_scatter_tensor(y, "sum", 2, group).relu()


def _scatter_of_split_columns(x: Any, w: Any, v: Any, group: str) -> Any:
    y = linear(x.view(2, -1, x.shape[1]), w).view(2, -1, 4, 6)
    return functional.reduce_scatter_tensor(y, "sum", 1, group).relu()


def _gather_linear(x: Any, w: Any, v: Any, group: str) -> Any:
    return linear(functional.all_gather_tensor(x.relu(), 0, group), w)


def _gather_linears(x: Any, w: Any, v: Any, group: str) -> Any:
    whole = functional.all_gather_tensor(x.relu(), 0, group)
    return linear(whole, w, v[:24, 0]) + linear(whole, v) + whole.sum()


def _gather_with_reduction(x: Any, w: Any, v: Any, group: str) -> Any:
    """A collective between gather and GEMM, which needs the gathered rows."""
    whole = functional.all_gather_tensor(x.relu(), 0, group)
    total = functional.all_reduce(whole.sum(0), "sum", group)
    return linear(whole, w) * total.sum()


def _gathered_lengths(x: Any, group: str) -> Any:
    """Two sequences, with a part on each rank; as functional collectives gather them."""
    whole = functional.all_gather_tensor(x.view(2, -1, x.shape[1]), 0, group)
    return torch.cat(torch.chunk(whole, distributed.get_world_size()), 1)


def _gather_of_axis(x: Any, w: Any, v: Any, group: str) -> Any:
    whole = _gathered_lengths(x, group)
    return linear(whole, w) + linear(whole, v)


def _gather_of_axis_once(x: Any, w: Any, v: Any, group: str) -> Any:
    return linear(_gathered_lengths(x, group), w)


def _linear_all_to_all(x: Any, w: Any, v: Any, group: str) -> Any:
    return functional.all_to_all_single(linear(x, w), None, None, group).relu()


def _all_to_all_linear(x: Any, w: Any, v: Any, group: str) -> Any:
    return linear(functional.all_to_all_single(x.relu(), None, None, group), w, w[:, 1])


def _uneven(x: Any, w: Any, v: Any, group: str) -> Any:
    # Rank r receives r + 1 parts from each rank.
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    part = x.shape[0] // (ranks * (ranks + 1) // 2)
    sent = [part * (each + 1) for each in range(ranks)]
    return functional.all_to_all_single(
        linear(x[: sum(sent)], w), [sent[rank]] * ranks, sent, group
    )


def _bags(x: Any, w: Any, v: Any, group: str) -> Any:
    rows = torch.arange(x.shape[0], device=x.device)
    y = nn.functional.embedding_bag(rows % 16, w, rows, mode="sum")
    return functional.all_to_all_single(y, None, None, group)


def _collective_alone(x: Any, w: Any, v: Any, group: str) -> Any:
    return linear(x, w) + functional.all_reduce(x.sum(), "sum", group)


GRAPHS = {
    "linear_all_reduce": _linear_all_reduce,
    "many_rows": _many_rows,
    "average": _average,
    "bias_before": _bias_before,
    "used_twice": _used_twice,
    "linear_reduce_scatter": linear_reduce_scatter,
    "scatter_of_axis": _scatter_of_axis,
    "scatter_of_columns": _scatter_of_columns,
    "scatter_of_split_columns": _scatter_of_split_columns,
    "gather_linear": _gather_linear,
    "gather_linears": _gather_linears,
    "gather_with_reduction": _gather_with_reduction,
    "gather_of_axis": _gather_of_axis,
    "gather_of_axis_once": _gather_of_axis_once,
    "linear_all_to_all": _linear_all_to_all,
    "all_to_all_linear": _all_to_all_linear,
    "uneven": _uneven,
    "bags": _bags,
    "collective_alone": _collective_alone,
}
