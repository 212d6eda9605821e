#!/usr/bin/env python3
"""Products of matrices fused with collectives: time beside the product and the collective alone.

    weft run -n 4 -- python benchmarks/gpu/fused_gemm.py [--case NAME] [--rows N,N]
        [--tile-rows N,N] [--tile-stages N,N] ...

prints a line of JSON for each case, number of rows and tiling: microseconds, median of rank 0, of
torch's product, of `weft.fused.gemm`, of the collective of `weft.cuda.Collectives`, of both one
after the other, and of the fused operator; and whether its result is near that of the two.
With TRITON_INTERPRET=1 it runs tiny shapes on the CPU, as a check of itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from typing import TYPE_CHECKING, Any, Final

import torch

import weft
import weft.fused
from weft.cuda import Collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Operator, and [columns, inner] of the whole layer; the divided one is marked by its place.
CASES: Final = {
    "deepseek-up": ("all_gather_gemm", 36864, 7168, "columns"),
    "deepseek-down": ("gemm_reduce_scatter", 7168, 18432, "inner"),
    "deepseek-expert-up": ("all_to_all_gemm", 4096, 7168, ""),
    "deepseek-expert-down": ("gemm_all_to_all", 7168, 2048, ""),
    "mixtral-up": ("all_gather_gemm", 28672, 4096, "columns"),
    "mixtral-down": ("gemm_all_reduce", 4096, 14336, "inner"),
    "llama70-up": ("all_gather_gemm", 57344, 8192, "columns"),
    "llama70-down": ("gemm_reduce_scatter", 8192, 28672, "inner"),
}
WARM_UP: Final = 5
REPEATS: Final = 20


def main() -> None:
    """Measure all cases on each rank; rank 0 prints."""
    options = parsed()
    on_gpu = os.environ.get("TRITON_INTERPRET") != "1"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("WEFT_LOCAL_RANK", "0")))
    with weft.init() as communicator:
        collectives = Collectives(communicator, device="cuda" if on_gpu else "twin")
        for name, rows in itertools.product(options.case or CASES, options.rows):
            for tiling in tilings(options):
                line = measure(communicator, collectives, name, rows, tiling, on_gpu)
                if communicator.rank == 0:
                    print(json.dumps(line), flush=True)


def parsed() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="Products fused with collectives")
    numbers = {"type": lambda text: [int(each) for each in text.split(",")]}
    parser.add_argument("--case", action="append", choices=CASES, help="case (default: all)")
    parser.add_argument("--rows", default=[1024, 4096, 16384], help="rows of all ranks", **numbers)
    for field in weft.fused.Tiling._fields:
        parser.add_argument(f"--tile-{field.replace('_', '-')}", dest=f"tile_{field}", **numbers)
    return parser.parse_args()


def tilings(options: argparse.Namespace) -> Iterator[weft.fused.Tiling | None]:
    """The default if no field is given; otherwise all combinations of the fields given."""
    given = {field: getattr(options, f"tile_{field}") for field in weft.fused.Tiling._fields}
    given = {field: values for field, values in given.items() if values}
    if not given:
        yield None
        return
    for values in itertools.product(*given.values()):
        yield weft.fused.Tiling()._replace(**dict(zip(given, values, strict=True)))


def measure(
    communicator: weft.Communicator,
    collectives: Collectives,
    name: str,
    rows: int,
    tiling: weft.fused.Tiling | None,
    on_gpu: bool,
) -> dict[str, Any]:
    """Times of a case, in microseconds."""
    operator, columns, inner, divided = CASES[name]
    ranks = communicator.world_size
    columns //= ranks if divided == "columns" else 1
    inner //= ranks if divided == "inner" else 1
    own = rows // ranks if operator == "all_gather_gemm" else rows
    if not on_gpu:
        own, columns, inner = 16 * ranks, 32, 32
    dtype = torch.bfloat16 if on_gpu else torch.float16
    place = "cuda" if on_gpu else "cpu"
    torch.manual_seed(communicator.rank)
    x = torch.randn(own, inner, device=place, dtype=dtype)
    weight = torch.randn(columns, inner, device=place, dtype=dtype) / inner**0.5
    gathered = x
    if operator == "all_gather_gemm":
        gathered = torch.empty(ranks * own, inner, device=place, dtype=dtype)
    exchange, apart = separate(collectives, ranks, operator, x, gathered, weight)
    fused_operator = getattr(weft.fused, operator)

    def fused() -> torch.Tensor:
        found: torch.Tensor = fused_operator(x, weight, tiling=tiling)
        return found

    def product() -> torch.Tensor:
        return torch.nn.functional.linear(gathered, weight)

    def own_product() -> torch.Tensor:
        return weft.fused.gemm(gathered, weight, tiling=tiling)

    line: dict[str, Any] = {"case": name, "operator": operator, "ranks": ranks, "rows": rows}
    line |= {"columns": columns, "inner": inner, "tiling": tiling and tiling._asdict()}
    try:
        line["near"] = bool(torch.allclose(fused().float(), apart().float(), rtol=0.02, atol=0.05))
        calls = {"torch": product, "gemm": own_product, "collective": exchange}
        calls |= {"apart": apart, "fused": fused}
        for key, call in calls.items():
            line[key] = timed(communicator, call, on_gpu)
        flops = 2 * gathered.shape[0] * columns * inner
        line["tflops"] = round(flops / line["gemm"] / 1e6, 1)
        line["of_torch"] = round(line["torch"] / line["gemm"], 3)
        line["speedup"] = round(line["apart"] / line["fused"], 3)
    except Exception as error:
        # A tiling may not fit; the others go on.
        line["error"] = str(error)
    return line


def separate(
    collectives: Collectives,
    ranks: int,
    operator: str,
    x: torch.Tensor,
    gathered: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[Callable[[], Any], Callable[[], torch.Tensor]]:
    """The collective alone, and product and collective one after the other."""
    linear = torch.nn.functional.linear
    partial = linear(gathered, weight)
    if operator == "all_gather_gemm":

        def gather() -> torch.Tensor:
            return collectives.all_gather(x, out=gathered)

        return gather, lambda: linear(gather(), weight)
    if operator == "all_to_all_gemm":
        return lambda: collectives.all_to_all(x), lambda: linear(collectives.all_to_all(x), weight)
    if operator == "gemm_all_to_all":
        return (
            lambda: collectives.all_to_all(partial),
            lambda: collectives.all_to_all(linear(x, weight)),
        )
    if operator == "gemm_reduce_scatter":
        out = torch.empty_like(partial[: len(partial) // ranks])
        return (
            lambda: collectives.reduce_scatter(partial, out=out),
            lambda: collectives.reduce_scatter(linear(x, weight), out=out),
        )
    return (
        lambda: collectives.all_reduce(partial, out=torch.empty_like(partial)),
        lambda: collectives.all_reduce(linear(x, weight)),
    )


def timed(communicator: weft.Communicator, call: Callable[[], Any], on_gpu: bool) -> float:
    """Median time of a call on this rank, in microseconds."""
    repeats = REPEATS if on_gpu else 1
    for _ in range(WARM_UP if on_gpu else 1):
        call()
    times = []
    if on_gpu:
        torch.cuda.synchronize()
    communicator.barrier()
    for _ in range(repeats):
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        else:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
    weft.check()
    return round(statistics.median(times), 1)


if __name__ == "__main__":
    main()
