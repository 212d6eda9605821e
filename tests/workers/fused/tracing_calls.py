"""Fused operators with a trace, beside the same calls without one."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import weft
import weft.fused
import weft.triton
from tests.workers.triton.calls import Place

if TYPE_CHECKING:
    from collections.abc import Callable


def operators(place: Place) -> dict[str, Callable[[], torch.Tensor]]:
    """Calls by name; on GPUs of 10 us to 1 ms."""
    generator = torch.Generator().manual_seed(1 + place.rank)
    device = "cuda" if place.on_gpu else "cpu"
    scale = 32 if place.on_gpu else 1

    def random(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        return values.to(device, torch.float16 if place.on_gpu else torch.float32)

    x, weight = random(4, 64 * scale), random(128 * scale, 64 * scale)
    rows = random(64 * place.ranks * scale, 64 * scale)
    norm = torch.ones(128 * scale, dtype=x.dtype, device=device)
    bags, length, each = (4, 20, 1000) if place.on_gpu else (2, 3, 50)
    tables = [random(each, 64) for _ in range(bags)]
    batch = 16 * place.ranks * scale
    indices = torch.randint(0, each, (bags * batch * length,), generator=generator).to(device)
    offsets = torch.arange(0, bags * batch * length + 1, length, device=device)
    fused = weft.fused
    return {
        "gemv_all_reduce": lambda: fused.gemv_all_reduce(x, weight),
        "gemv_all_reduce with norm": lambda: fused.gemv_all_reduce(x, weight, norm_weight=norm)[0],
        "gemm_reduce_scatter": lambda: fused.gemm_reduce_scatter(rows, weight, fused=True),
        "gemm_all_reduce": lambda: fused.gemm_all_reduce(rows, weight, fused=True),
        "all_gather_gemm": lambda: fused.all_gather_gemm(rows, weight, fused=True),
        "embedding_all_to_all": lambda: fused.embedding_all_to_all(tables, indices, offsets),
    }


def traced(folder: str, device: str = "twin") -> dict[str, Any]:
    """By operator: equality of results, spans by name; rank 0 writes a file for each."""
    with weft.init() as communicator:
        place = Place(communicator, device)
        programs, capacity = (1056, 128) if place.on_gpu else (16, 64)
        found: dict[str, Any] = {}
        for name, call in operators(place).items():
            call()
            place.meet()
            expected = call().clone()
            trace = weft.triton.trace_empty(programs, capacity, device=device)
            with weft.fused.tracing(trace):
                # The first call compiles.
                call()
                place.meet()
                clocks = weft.triton.align_clocks(device=device)
                result = call()
            place.meet()
            timeline = weft.triton.timeline(trace, weft.fused.SPANS, clocks)
            if place.rank == 0:
                timeline.write_trace(Path(folder, f"{name}.json"))
                if find_spec("matplotlib") is not None:
                    timeline.write_picture(Path(folder, f"{name}.svg"), name)
            found[name] = {
                "equal": torch.equal(result, expected),
                "spans": Counter(span.name for span in timeline.spans if span.rank == place.rank),
                "ranks": sorted({span.rank for span in timeline.spans}),
                "dropped": timeline.dropped,
                "end": max(span.end_ns for span in timeline.spans),
                "overlap": timeline.overlap_ns(place.rank, ["compute"], ["send"]),
                "error": timeline.clock_error_ns,
            }
        return found
