#!/usr/bin/env python3
"""All-reduce between GPUs on pretended hosts: time by chunk length, and for its parts.

    benchmarks/gpu/hierarchical.py [--device cuda] [--hosts 2] [--ranks 2] [--providers shm,tcp]

starts all ranks on this machine, which share its GPUs if there are fewer, and prints a JSON line
for each size: microseconds, median and 99th percentile at the slowest rank, for the whole call by
chunk length (the longest: one chunk, so no overlap), for only its calls between hosts, and for only
its calls within a host.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

#: Least chunk length, and least vector length.
LEAST: Final = 256 << 10
WARM_UP: Final = 3


def main() -> int:
    """Start the ranks; a rank measures."""
    options = parsed()
    if "WEFT_RANK" not in os.environ:
        start(options)
    return work(options)


def start(options: argparse.Namespace) -> NoReturn:
    """Become the program that starts the ranks: when it ends, they end."""
    environment = dict(os.environ)
    if options.providers:
        environment["WEFT_PROVIDERS"] = options.providers
    command = [sys.executable, "-m", "weft", "run", "-n", str(options.ranks)]
    command += [
        "--pretend-hosts",
        str(options.hosts),
        "--no-prefix",
        "--",
        sys.executable,
        __file__,
    ]
    os.execve(command[0], [*command, *sys.argv[1:]], environment)


def parsed() -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "twin"], default="cuda")
    parser.add_argument("--hosts", type=int, default=2, help="pretended hosts (default: 2)")
    parser.add_argument(
        "--ranks", type=int, default=2, help="total ranks on all hosts (default: 2)"
    )
    parser.add_argument("--providers", help="providers (default: WEFT_PROVIDERS, else shm,tcp)")
    parser.add_argument("--sizes", default="1,16,64,256", help="vector lengths in MiB, with commas")
    parser.add_argument("--pieces", default="1,4,8,16", help="chunk lengths in MiB, with commas")
    parser.add_argument("--calls", type=int, default=20, help="measured calls (default: 20)")
    parser.add_argument("--budget", type=float, default=90, help="seconds, about (default: 90)")
    parser.add_argument("--record", type=Path, help="JSON-lines file to append to")
    return parser.parse_args()


def work(options: argparse.Namespace) -> int:
    """Measure on this rank."""
    import torch

    import weft
    from weft.bench.record import append_record, origin

    on_gpu = options.device == "cuda"
    deadline = time.monotonic() + options.budget
    torch.set_num_threads(1)
    with weft.init() as communicator:
        if on_gpu:
            torch.cuda.set_device(communicator.rank % torch.cuda.device_count())
        about = {
            "benchmark": "gpu-hierarchical",
            "case": "all_reduce",
            "device": torch.cuda.get_device_name() if on_gpu else "twin",
            "gpus": torch.cuda.device_count() if on_gpu else 0,
            "hosts": options.hosts,
            "ranks": communicator.world_size,
            "routes": communicator.routes(),
            "torch": torch.__version__,
        }
        for size in options.sizes.split(","):
            bytes = max(round(float(size) * (1 << 20)), LEAST)
            record = (
                about
                | {"bytes": bytes, "dtype": "bfloat16"}
                | sized(communicator, bytes, options, deadline)
            )
            if communicator.rank == 0:
                print(json.dumps(record), flush=True)
                if options.record is not None:
                    append_record(options.record, record | {"origin": origin()})
    return 0


def sized(
    communicator: Any, bytes: int, options: argparse.Namespace, deadline: float
) -> dict[str, Any]:
    """Times for an all-reduce with `bytes` bytes and for its parts."""
    import torch

    from weft import cuda

    pieces = sorted({round(float(each) * (1 << 20)) for each in options.pieces.split(",")})
    # One chunk: the vector.
    lengths = [*(each for each in pieces if each < bytes), bytes]
    times: dict[str, Any] = {}
    for length in lengths:
        with cuda.HierarchicalCollectives(
            communicator, device=options.device, piece_bytes=length
        ) as collectives:
            device = collectives.device
            vector = torch.ones(bytes // 2, dtype=torch.bfloat16, device=device)
            collectives.prepare("max", torch.bfloat16)

            def call() -> None:
                collectives.all_reduce(vector, "max")  # noqa: B023

            name = "one piece" if length == bytes else f"{length >> 10} KiB"
            times[name] = timed(communicator, call, options.calls, deadline)
            correct = bool((vector == 1).all())
            if length == bytes:
                times |= parts(communicator, collectives, vector, options, deadline)
        if not correct:
            times[name] = {"wrong": True}
    return {"times_us": times}


def parts(
    communicator: Any,
    collectives: Any,
    vector: Any,
    options: argparse.Namespace,
    deadline: float,
) -> dict[str, Any]:
    """Times for one rank's calls between hosts, and within a host."""
    import torch

    from weft.collectives.host import HostCall

    local, network = collectives._local, collectives._network
    count = vector.numel() // local.world_size
    host = torch.ones(count, dtype=vector.dtype, pin_memory=vector.is_cuda)
    part = torch.ones(count, dtype=vector.dtype, device=vector.device)
    at = host.data_ptr()

    def between() -> None:
        network.run(HostCall("all_reduce", "bfloat16", count, at, at, "max"), 30.0, lambda: None)

    def within() -> None:
        local.reduce_scatter(vector, "max", out=part)
        local.all_gather(part, out=vector)

    def copies() -> None:
        host.copy_(part, non_blocking=True)
        part.copy_(host, non_blocking=True)

    measures = {"between hosts": between, "within hosts": within, "copies": copies}
    return {
        name: timed(communicator, call, options.calls, deadline) for name, call in measures.items()
    }


def timed(
    communicator: Any, call: Callable[[], None], calls: int, deadline: float
) -> dict[str, Any]:
    """Microseconds per call, each behind a barrier, until the GPU has ended: at the slowest rank.

    All ranks make as many calls: rank 0 decides, by the time that is left.
    """
    import numpy as np
    import torch

    def once() -> float:
        communicator.barrier()
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e6

    warm = [once() for _ in range(WARM_UP)]
    left = max(deadline - time.monotonic(), 0.0) / 20
    wanted = max(3, min(calls, int(left * 1e6 / max(warm[-1], 1.0))))
    wanted = int(communicator.all_gather(str(wanted).encode())[0])
    mine = [once() for _ in range(wanted)]
    every = [json.loads(each) for each in communicator.all_gather(json.dumps(mine).encode())]
    slowest = np.max(every, axis=0)
    return {
        "p50": round(float(np.percentile(slowest, 50)), 1),
        "p99": round(float(np.percentile(slowest, 99)), 1),
        "calls": wanted,
    }


if __name__ == "__main__":
    sys.exit(main())
