"""Float8 GEMMs beside collectives, compiled with the `weft.fused` pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives as functional
from torch import distributed

import weft.fused
from tests.workers.fused.compile_common import compiled, counted

if TYPE_CHECKING:
    from collections.abc import Callable

#: x, weight, row and column scales.
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

FLOAT8 = torch.float8_e4m3fn


#: Dtype for 16-bit results.
_HALF = [torch.float16]


def half() -> torch.dtype:
    return _HALF[0]


def scaled_graphs(group: str) -> dict[str, Any]:
    """All `GRAPHS` functions in one graph, compiled with the pass, beside GEMMs in float32.

    torch has no GEMMs with row scales on the CPU.
    """
    rows = 6 * distributed.get_world_size()
    if torch.get_default_device().type == "cuda":
        # torch has row scales only for this there.
        _HALF[0] = torch.bfloat16
    inputs = [
        (
            torch.randn(rows, 32).to(FLOAT8),
            torch.randn(48, 32).to(FLOAT8),
            torch.rand(rows, 1) + 0.5,
            torch.rand(1, 48) + 0.5,
        )
        for _ in GRAPHS
    ]

    def every(multiply: Callable[..., torch.Tensor], inputs: list[Operands]) -> list[torch.Tensor]:
        return [
            function(multiply, *tensors, group)
            for function, tensors in zip(GRAPHS.values(), inputs, strict=True)
        ]

    weft.fused.enable(force=True, timeout=20)
    weft.fused.reset_report()
    try:
        with torch.no_grad():
            found = compiled(lambda inputs: every(torch._scaled_mm, inputs))(inputs)
    finally:
        weft.fused.disable()
    with torch.no_grad():
        expected = every(_multiply, inputs)
    close = {
        name: own.shape == its.shape and torch.allclose(own.float(), its.float(), 1e-2, 5e-2)
        for name, own, its in zip(GRAPHS, found, expected, strict=True)
    }
    return {"close": close, **counted()}


def _multiply(
    x: Any, w: Any, a: Any, b: Any, bias: Any = None, *, out_dtype: Any, use_fast_accum: bool
) -> Any:
    y = (x.float() @ w.float()) * a * b
    return (y if bias is None else y + bias).to(out_dtype)


def _matmul(multiply: Any, x: Any, w: Any, a: Any, b: Any, dtype: Any = None) -> Any:
    return multiply(x, w.t(), a, b, out_dtype=dtype or half(), use_fast_accum=True)


def _all_reduce(multiply: Any, x: Any, w: Any, a: Any, b: Any, group: str) -> Any:
    y = _matmul(multiply, x, w, a, b).view(2, -1, w.shape[0])
    return functional.all_reduce(y, "sum", group) + 1


def _reduce_scatter(multiply: Any, x: Any, w: Any, a: Any, b: Any, group: str) -> Any:
    y = multiply(x, w.t(), a[0], b[0, :1], out_dtype=half(), use_fast_accum=False)
    return functional.reduce_scatter_tensor(y, "sum", 0, group).relu()


def _all_to_all(multiply: Any, x: Any, w: Any, a: Any, b: Any, group: str) -> Any:
    return functional.all_to_all_single(_matmul(multiply, x, w, a, b), None, None, group) * 2


def _bytes_gathered(x: Any, group: str) -> Any:
    return functional.all_gather_tensor(x.view(torch.uint8), 0, group).view(FLOAT8)


def _gather(multiply: Any, x: Any, w: Any, a: Any, b: Any, group: str) -> Any:
    scales = functional.all_gather_tensor(a, 0, group)
    return _matmul(multiply, _bytes_gathered(x, group), w, scales, b)


def _gather_twice(multiply: Any, x: Any, w: Any, a: Any, b: Any, group: str) -> Any:
    whole = _bytes_gathered(x, group)
    one = torch.full((1,), 0.5)
    return _matmul(multiply, whole, w, one, one) + _matmul(multiply, whole, w, one, 2 * one)


def _exchange(multiply: Any, x: Any, w: Any, a: Any, b: Any, group: str) -> Any:
    rows = functional.all_to_all_single(x.view(torch.uint8), None, None, group).view(FLOAT8)
    scales = functional.all_to_all_single(a, None, None, group)
    return _matmul(multiply, rows, w, scales, b)


def _scatter_of_axis(multiply: Any, x: Any, w: Any, a: Any, b: Any, group: str) -> Any:
    y = _matmul(multiply, x, w, a, b).view(2, -1, w.shape[0])
    return functional.reduce_scatter_tensor(y, "sum", 1, group).relu()


def _gather_of_axis(multiply: Any, x: Any, w: Any, a: Any, b: Any, group: str) -> Any:
    ranks = distributed.get_world_size()

    def gathered(part: Any) -> Any:
        whole = functional.all_gather_tensor(part.reshape(2, -1, part.shape[1]), 0, group)
        return torch.cat(torch.chunk(whole, ranks), 1).view(-1, part.shape[1])

    rows = gathered(x.view(torch.uint8)).view(FLOAT8)
    bias = b[0].to(half())
    return multiply(rows, w.t(), gathered(a), b, bias, out_dtype=half(), use_fast_accum=True)


def _float32(multiply: Any, x: Any, w: Any, a: Any, b: Any, group: str) -> Any:
    y = _matmul(multiply, x, w, a[0], b[0, :1], torch.float32)
    return functional.all_reduce(y, "sum", group)


def _used_twice(multiply: Any, x: Any, w: Any, a: Any, b: Any, group: str) -> Any:
    y = _matmul(multiply, x, w, a[0], b[0, :1])
    return functional.all_reduce(y, "sum", group) + y


GRAPHS = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "gather_twice": _gather_twice,
    "exchange": _exchange,
    "scatter_of_axis": _scatter_of_axis,
    "gather_of_axis": _gather_of_axis,
    "float32": _float32,
    "used_twice": _used_twice,
}
