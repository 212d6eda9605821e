"""Fused and plain collectives in torch.compile graphs with options that move collectives."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives as functional
from torch import distributed
from torch._inductor.exc import InductorError
from torch.nn.functional import linear

import weft.fused
from tests.workers.fused.compile_common import counted

if TYPE_CHECKING:
    from collections.abc import Callable

#: Inductor options by name.
OPTIONS: dict[str, dict[str, Any]] = {
    "reordered": {"reorder_for_compute_comm_overlap": True},
    "bucketed": {
        "bucket_reduce_scatters_fx": "all",
        "bucket_all_reduces_fx": "all",
    },
}
#: GPU-only options: time estimates need one, and gather buckets over gloo have wrong
#: values in torch 2.11 without Weft too.
GPU_OPTIONS: dict[str, dict[str, Any]] = {
    "scheduled": {
        "aten_distributed_optimizations.enable_overlap_scheduling": True,
        "aten_distributed_optimizations.collective_bucketing": True,
        "aten_distributed_optimizations.insert_overlap_deps": True,
    },
    "gathers bucketed": {"bucket_all_gathers_fx": "all"},
    "reduce-overhead": {"triton.cudagraphs": True},
}
_COLLECTIVES = ("weft_fused::", "_c10d_functional::all", "_c10d_functional::reduce")


def options(group: str) -> dict[str, dict[str, Any]]:
    """By option name: three calls' right results, counts, and the collectives in order."""
    is_on_gpu = torch.get_default_device().type == "cuda"
    every = OPTIONS | (GPU_OPTIONS if is_on_gpu else {})
    return {name: _compiled(chosen, group, is_on_gpu) for name, chosen in every.items()}


def mixed(x: Any, w: Any, v: Any, group: str) -> list[torch.Tensor]:
    """Two fused GEMMs among independent plain collectives in three kinds."""
    gathers = [functional.all_gather_tensor(x * factor, 0, group) for factor in (2, 3)]
    scatters = [functional.reduce_scatter_tensor(x + term, "sum", 0, group) for term in (2, 3)]
    reduced = [functional.all_reduce(each.sum(0), "sum", group) for each in (x, v)]
    whole = linear(functional.all_gather_tensor(x.relu(), 0, group), w)
    part = functional.reduce_scatter_tensor(linear(x, v), "sum", 0, group)
    return [whole.relu(), part.relu(), *(each * 2 for each in (*gathers, *scatters, *reduced))]


def _compiled(chosen: dict[str, Any], group: str, is_on_gpu: bool) -> dict[str, Any]:
    ranks = distributed.get_world_size()
    w, v = torch.randn(24, 16), torch.randn(24, 16)
    if not is_on_gpu:
        # C++ for pointwise operators is slow to compile.
        chosen = {"fallback_by_default": True, **chosen}
    if is_on_gpu and (error := _error_of_torch(chosen, w, v, group)) is not None:
        return {"torch": error}
    weft.fused.enable(force=True, timeout=20)
    weft.fused.reset_report()
    torch._dynamo.reset()
    run = torch.compile(mixed, fullgraph=True, options=chosen)
    close: list[bool] = []
    order: list[str] = []
    try:
        with torch.no_grad():
            # With CUDA graphs, the first calls run without one, and later ones replay it.
            for _ in range(3):
                x = torch.randn(4 * ranks, 16)
                found, order = _profiled(partial(run, x, w, v, group))
                expected = mixed(x, w, v, group)
                pairs = zip(found, expected, strict=True)
                close.append(all(torch.allclose(*pair, atol=1e-3) for pair in pairs))
    finally:
        weft.fused.disable()
    return {"close": close, "order": order, **counted()}


def _error_of_torch(chosen: dict[str, Any], w: Any, v: Any, group: str) -> str | None:
    """Error from compiling without the pass, such as from a torch pass; `None` without one."""
    torch._dynamo.reset()
    x = torch.randn(4 * distributed.get_world_size(), 16)
    try:
        with torch.no_grad():
            torch.compile(mixed, fullgraph=True, options=chosen)(x, w, v, group)
    except InductorError as error:
        return str(error)[:300] or "InductorError"
    return None


def _profiled(call: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], list[str]]:
    """A call's copied results, and its collectives in call order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = [each.clone() for each in call()]
    events = [each for each in profile.events() if each.name.startswith(_COLLECTIVES)]
    return found, [each.name for each in sorted(events, key=lambda each: each.time_range.start)]
