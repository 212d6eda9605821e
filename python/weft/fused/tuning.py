"""Autotuner for fused operators: the ranks time tilings and the unfused operators together."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d
from triton.runtime.errors import OutOfResources

from weft.base.errors import ConfigurationError
from weft.fused import operators
from weft.fused.gains import kernel_of
from weft.fused.groups import group_of
from weft.fused.tables import (
    COMPOSED,
    DEFAULT,
    UNFUSED,
    Shape,
    Table,
    device_name,
    own_table,
    tuning_file,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weft.fused.groups import Group

__all__ = [
    "CANDIDATES",
    "COMPOSED",
    "UNFUSED",
    "Shape",
    "Table",
    "own_table",
    "tune",
    "tuning_file",
]

#: Calls before the timed ones; on a GPU, calls in a graph; times, whose median counts.
_WARM: Final = 3
_CALLS: Final = 10
_TIMES: Final = 11

#: Tilings that `tune` tries by default, by fields: for `gemv_all_reduce`, and for the others.
CANDIDATES: Final[dict[bool, tuple[Mapping[str, Any] | None, ...]]] = {
    True: (
        None,
        {"block_n": 16, "block_k": 512},
        {"block_n": 32, "block_k": 256},
        {"block_n": 64, "block_k": 128},
    ),
    False: (
        None,
        {"rows": 128, "columns": 256, "warps": 8, "stages": 3},
        {"rows": 128, "columns": 128, "warps": 4, "stages": 3, "programs": 2},
        {"rows": 64, "columns": 128, "warps": 4, "stages": 4, "programs": 2},
    ),
}


def tune(
    operator: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    group_name: str,
    candidates: Sequence[Mapping[str, Any] | None] | None = None,
    *,
    timer: Callable[[Callable[[], object]], float] | None = None,
) -> tuple[str, Mapping[str, Any] | None]:
    """Time an operator with each tiling, unfused and composed, and keep the fastest.

    Unfused means a GEMM and the group's collective; composed means a GEMM and a collective from
    `weft.cuda.Collectives`, as with `fused=False`. `gemv_all_reduce` is not composed.

    All ranks in the group call it with the same shapes, dtypes and candidates. A candidate's time
    is the slowest rank's time; a candidate that the kernel refuses is left out. Later calls in the
    group use the choice for the class, and rank 0 writes it to the file. Call `weft.fused.enable`
    again for later compilations to use it.

    Args:
        operator: name in `torch.ops.weft_fused`; `matmul_all_reduce` with few rows counts as
            `gemv_all_reduce`, whose kernel it runs.
        x: [rows, inner], as in a call.
        weight: [columns, inner].
        group_name: process group name.
        candidates: tilings by fields, `None` for the default one; by default `CANDIDATES`.
        timer: returns a function's time in microseconds; by default the median over several calls,
            on a GPU in a replayed graph.

    Returns:
        Choice ("unfused", "composed", "default" or the tiling's fields) and tiling.

    Raises:
        ConfigurationError: if the operator is unknown.
    """
    if operator not in operators.KERNELS:
        known = ", ".join(operators.KERNELS)
        raise ConfigurationError(f"operator {operator}: expected one of {known}")
    shape = Shape(x.shape[0], *weight.shape)
    operator = kernel_of(operator, shape, weight.is_contiguous())
    place = group_of(group_name)
    measure = timer or _Timer(x.device)
    if candidates is None:
        candidates = CANDIDATES[operator == "gemv_all_reduce"]
    named = {_name_of(each): each for each in candidates}
    own = {UNFUSED: measure(lambda: operators.unfused(operator, x, weight, group_name))}
    if operator != "gemv_all_reduce" and _takes(operator, place, x, weight, None, fused=False):
        own[COMPOSED] = measure(
            lambda: operators.run(operator, place, x, weight, None, fused=False)
        )
    for name, tiling in named.items():
        if _takes(operator, place, x, weight, tiling):
            own[name] = measure(
                lambda tiling=tiling: operators.run(operator, place, x, weight, tiling)  # type: ignore[misc]
            )
    times = _slowest(own, group_name, place.ranks)
    # The first among equals, with unfused before all others.
    best = min(times, key=lambda name: times[name])
    entry = {"choice": best, "tiling": named.get(best), "microseconds": times}
    key = Table.key(operator, shape, x.dtype, place.ranks, device_name(x.device))
    place.learn(Table(place.table.entries | {key: entry}))
    if place.rank == 0:
        write(key, entry)
    return best, named.get(best)


def _takes(
    operator: str,
    place: Group,
    x: torch.Tensor,
    weight: torch.Tensor,
    tiling: Mapping[str, Any] | None,
    **options: object,
) -> bool:
    """True if a tiling fits the call and the device."""
    try:
        return operators.run(operator, place, x, weight, tiling, **options)[1] is None
    except OutOfResources:
        return False


def _name_of(tiling: Mapping[str, Any] | None) -> str:
    """Tiling name: the fields."""
    if not tiling:
        return DEFAULT
    return ",".join(f"{name}={value}" for name, value in sorted(tiling.items()))


class _Timer:
    """Median call time in microseconds."""

    def __init__(self, device: torch.device) -> None:
        self._is_on_gpu = device.type == "cuda"

    def __call__(self, function: Callable[[], object]) -> float:
        for _ in range(_WARM):
            function()
        once = self._replay(function) if self._is_on_gpu else lambda: _elapsed(function)
        return sorted(once() for _ in range(_TIMES))[_TIMES // 2]

    def _replay(self, function: Callable[[], object]) -> Callable[[], float]:
        """Call time in a graph with several calls, without host time."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_CALLS):
                function()
        graph.replay()

        def once() -> float:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            return float(first.elapsed_time(last)) * 1e3 / _CALLS

        return once


def _elapsed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e6


def _slowest(own: dict[str, float], group_name: str, ranks: int) -> dict[str, float]:
    """The slowest rank's time for each candidate that all ranks have timed."""
    group: Any = c10d._resolve_process_group(group_name)
    every: list[Any] = [None] * ranks
    distributed.all_gather_object(every, own, group=group)
    common = [name for name in every[0] if all(name in its for its in every)]
    return {name: max(its[name] for its in every) for name in common}
