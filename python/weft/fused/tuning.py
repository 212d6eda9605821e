"""Autotuning of fused operators: times of tilings and of the unfused operators, agreed by ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d

from weft.fused.groups import group_of
from weft.fused.tables import UNFUSED, Shape, Table, device_name, own_table, tuning_file, write

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["UNFUSED", "Shape", "Table", "own_table", "tune", "tuning_file"]

#: Calls before the timed ones, and timed calls, of which the median counts.
_WARM: Final = 3
_TIMED: Final = 11


def tune(
    operator: str,
    call: Callable[[Mapping[str, Any] | None], object],
    unfused: Callable[[], object],
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    candidates: Sequence[Mapping[str, Any] | None],
    *,
    group: str,
    timer: Callable[[Callable[[], object]], float] | None = None,
) -> tuple[str, Mapping[str, Any] | None]:
    """Time an operator with each tiling and without fusion, and keep the fastest.

    All ranks of the group call it with the same arguments. A candidate's time is that of the
    slowest rank. Rank 0 writes the file; the group's later calls of the class use the choice.

    Args:
        operator: name, as of `torch.ops.weft_fused`.
        call: makes one call with a tiling, given by its fields; `None` for the default one.
        unfused: makes the same call by operators of torch.
        shape: of the call.
        dtype: of x.
        device: of x.
        candidates: tilings by their fields.
        group: name of the process group.
        timer: returns microseconds of a function; by default the median of 11 calls.

    Returns:
        Name of the choice ("unfused" or the tiling's fields) and the tiling.
    """
    place = group_of(group)
    measure = timer or _Timer(device)
    named: dict[str, Mapping[str, Any] | None] = {name_of(each): each for each in candidates}
    own: dict[str, float] = {UNFUSED: measure(unfused)}
    for name, tiling in named.items():
        own[name] = measure(lambda tiling=tiling: call(tiling))  # type: ignore[misc]
    times = _slowest(own, group, place.ranks)
    # The first of equal ones, with unfused before all others.
    best = min(times, key=lambda name: times[name])
    entry = {"choice": best, "tiling": named.get(best), "microseconds": times}
    key = Table.key(operator, shape, dtype, place.ranks, device_name(device))
    place.learn(Table(place.table.entries | {key: entry}))
    if place.rank == 0:
        write(key, entry)
    return best, named.get(best)


def name_of(tiling: Mapping[str, Any] | None) -> str:
    """Name of a tiling: its fields."""
    if not tiling:
        return "default"
    return ",".join(f"{name}={value}" for name, value in sorted(tiling.items()))


class _Timer:
    """Median of several calls in microseconds, by events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, function: Callable[[], object]) -> float:
        for _ in range(_WARM):
            function()
        return sorted(self._once(function) for _ in range(_TIMED))[_TIMED // 2]

    def _once(self, function: Callable[[], object]) -> float:
        if self._device.type != "cuda":
            begin = time.perf_counter()
            function()
            return (time.perf_counter() - begin) * 1e6
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        function()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3


def _slowest(own: dict[str, float], group: str, ranks: int) -> dict[str, float]:
    resolved: Any = c10d._resolve_process_group(group)
    every: list[Any] = [None] * ranks
    distributed.all_gather_object(every, own, group=resolved)
    return {name: max(its[name] for its in every) for name in every[0]}
