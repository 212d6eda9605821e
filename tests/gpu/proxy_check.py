"""Proxy on two GPUs, or on twins: every byte checked, and latencies by the GPU's clock.

    python -m tests.gpu.proxy_check

Rank 0 prints one JSON line: `ok`, the checks, and latencies in nanoseconds. GPU memory
goes through slots in host memory, over `--over`; over ofi libfabric reaches it. `--twin` runs it
under Triton's interpreter, with host memory in place of GPUs; these latencies say nothing. Exit
status 1 if a check fails.

- drained: a kernel pushes DRAINED and waits for its word: GPU, ring, thread, word, GPU
- signal, put: half of a round trip between two kernels, without bytes and with some
- crowd: half of a round trip between two kernels until the last of `--crowd` programs, all of which
  wait for it, has seen it
- storm: puts by many warps of a kernel in CUDA C++, which stores each quarter of a command at once
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

if "--twin" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch

import weft
import weft.triton as wt
from tests.gpu.proxy_kernels import answer, crowd, drain, echo, wait_for

HEADERS = Path(__file__).parents[2] / "crates" / "gpu" / "kernels"
#: Bytes for each put of the storm.
CELL = 64
STORM = r"""
#include "weft/proxy.cuh"

// Each warp puts bytes from cells of its own, with lengths and words that depend on the cell.
extern "C" __global__ void storm(
    const unsigned long long *context, unsigned peer, unsigned words, unsigned puts,
    unsigned *failed
) {
    using namespace weft;
    Table *table = reinterpret_cast<Table *>(context[0]);
    Record *records = reinterpret_cast<Record *>(table->record);
    const u32 *abort = reinterpret_cast<const u32 *>(table->abort);
    const Watch watch{table, records, abort, table->rank, 0, 64};
    const u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    for (u32 number = 0; number < puts; ++number) {
        const u64 cell = static_cast<u64>(warp) * puts + number;
        release_commands();
        const u64 at = cell * 64, length = cell % 64 + 1;
        const bool pushed = push(watch, command_put(peer, cell % words, 0, 0, at, 1, at, length));
        if (!pushed && threadIdx.x % 32 == 0) atomicAdd(failed, 1u);
    }
}
"""


class Check:
    """Checks on one rank."""

    def __init__(self, arguments: argparse.Namespace, communicator: weft.Communicator) -> None:
        self.arguments, self.communicator = arguments, communicator
        self.device = "twin" if arguments.twin else "cuda"
        if not arguments.twin:
            torch.cuda.set_device(communicator.rank % torch.cuda.device_count())
            torch.cuda.set_stream(torch.cuda.Stream())
        self.place = "cpu" if arguments.twin else "cuda"
        self.home: dict[str, Any] = {"words_home": arguments.words_home}
        self.rounds = arguments.rounds or (20 if arguments.twin else 2000)

    def meet(self) -> None:
        if not self.arguments.twin:
            torch.cuda.synchronize()
        weft.check()
        self.communicator.barrier()

    def zeros(self, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=self.place)

    def latencies(self) -> dict[str, Any]:
        """By what is measured: percentiles of one way, in nanoseconds."""
        found: dict[str, Any] = {}
        options: dict[str, Any] = {"words": 2, "device": self.device, "timeout": 60.0, **self.home}
        sizes = [0, 8, 4096, 65536, 1 << 19]
        with wt.Proxy(self.communicator, [1 << 20, 1 << 20], **options) as proxy:
            stamps = self.zeros(self.rounds, torch.int64)
            for turn in range(2):
                drain[(1,)](proxy.context, stamps, turn * self.rounds, self.rounds)
                self.meet()
            found["drained"] = percentiles(stamps, 1)
            first = 0
            for length in sizes:
                rounds = self.rounds if length < 65536 else self.rounds // 10
                # Once to compile and to warm up.
                for _ in range(2):
                    answer[(1,)](proxy.context, stamps, first, rounds, length)
                    self.meet()
                    first += rounds
                name = f"put {length}" if length else "signal"
                found[name] = percentiles(stamps[:rounds], 2)
        return found

    def echoes(self) -> list[int]:
        """Wrong values by round, in puts of 4 KiB."""
        block = 1024
        options: dict[str, Any] = {"words": 4, "device": self.device, "timeout": 60.0, "slots": 8}
        options |= self.home
        with wt.Proxy(self.communicator, [block * 4] * 2, **options) as proxy:
            wrong = self.zeros(self.rounds)
            outbox, inbox = (window.view(torch.int32) for window in proxy.windows)
            echo[(1,)](proxy.context, outbox, inbox, wrong, self.rounds, block)
            self.meet()
            return [int((wrong < 0).sum()), int(wrong.clamp(min=0).sum())]

    def crowd(self) -> dict[str, Any]:
        """By length: percentiles until the last of many waiting programs has seen a round."""
        found: dict[str, Any] = {"programs": self.arguments.crowd}
        options: dict[str, Any] = {"words": 2, "device": self.device, "timeout": 60.0, **self.home}
        rounds = max(self.rounds // 10, 2)
        with wt.Proxy(self.communicator, [1 << 20, 1 << 20], **options) as proxy:
            first = 0
            for length in [0, 8, 65536]:
                # Once to compile and to warm up.
                for _ in range(2):
                    begins, ends = (self.zeros(rounds, torch.int64) for _ in range(2))
                    grid = (self.arguments.crowd,)
                    crowd[grid](proxy.context, begins, ends, first, rounds, length)
                    self.meet()
                    first += rounds
                if self.communicator.rank == 0:
                    name = f"put {length}" if length else "signal"
                    found[name] = percentiles(ends - begins, 2)
        return found

    def storm(self) -> dict[str, Any]:
        """Puts by many warps at once, in both directions."""
        warps, puts, words = 256, self.arguments.storm, 64
        cells = warps * puts
        storm = torch.cuda._compile_kernel(
            STORM, "storm", cuda_include_dirs=[str(HEADERS)], nvcc_options=["-std=c++17"]
        )
        options: dict[str, Any] = {"words": words, "device": "cuda", "timeout": 60.0, **self.home}
        with wt.Proxy(self.communicator, [cells * CELL] * 2, **options) as proxy:
            outbox, inbox = proxy.windows
            outbox.copy_(content(self.communicator.rank, cells))
            failed, outcome = self.zeros(1), self.zeros(words)
            # Loaded now: loading waits for the kernels that run.
            wait_for[(1,)](proxy.context, outcome, 0, 0)
            storm((1, 1, 1), (256, 1, 1), [proxy.context, 0, words, 0, failed])
            self.meet()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            arguments = [proxy.context, 1 - self.communicator.rank, words, puts, failed]
            storm((warps // 8, 1, 1), (256, 1, 1), arguments)
            for word in range(words):
                rounds = len(range(word, cells, words))
                wait_for[(1,)](proxy.context, outcome[word:], word, rounds)
            end.record()
            torch.cuda.synchronize()
            proxy.check()
            inside = torch.arange(cells * CELL, device="cuda") % CELL
            cell = torch.arange(cells * CELL, device="cuda") // CELL
            expected = torch.where(
                inside <= cell % CELL, content(1 - self.communicator.rank, cells), 0
            )
            return {
                "puts": cells,
                "failed": int(failed),
                "waits": int(outcome.sum()),
                "wrong": int((inbox != expected).sum()),
                "seconds": begin.elapsed_time(end) / 1000,
            }


def content(rank: int, cells: int) -> torch.Tensor:
    """Bytes that differ between neighbours, cells and ranks, never 0."""
    index = torch.arange(cells * CELL, device="cuda")
    return ((index * 2654435761 + rank * 97 + (index >> 8) * 31) % 255 + 1).to(torch.uint8)


def percentiles(stamps: torch.Tensor, ways: int) -> dict[str, float]:
    sorted = (stamps.sort().values / ways).tolist()
    at = {"p50": 0.5, "p99": 0.99}
    result = {name: sorted[int(len(sorted) * part)] for name, part in at.items()}
    return result | {"times": len(sorted), "least": sorted[0], "most": sorted[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--twin", action="store_true", help="host memory in place of GPUs")
    parser.add_argument("--over", choices=["shm", "tcp", "ofi", "copy"], default="shm")
    parser.add_argument("--storm", type=int, default=200, help="puts by each of 256 warps")
    parser.add_argument("--rounds", type=int, help="2000, and 20 with --twin")
    homes = ["auto", "gdrcopy", "pinned", "gpu"]
    parser.add_argument("--words-home", choices=homes, default="auto")
    parser.add_argument("--crowd", type=int, help="programs that wait; 264, and 8 with --twin")
    arguments = parser.parse_args()
    if arguments.crowd is None:
        arguments.crowd = 8 if arguments.twin else 264
    if "WEFT_RANK" not in os.environ:
        command = [sys.executable, "-m", "weft", "run", "-n", "2", "--no-prefix", "--"]
        module = [sys.executable, "-m", "tests.gpu.proxy_check"]
        return subprocess.call([*command, *module, *sys.argv[1:]])
    if not arguments.twin and arguments.over == "shm":
        os.environ["WEFT_STAGED"] = "1"
    with weft.init(providers=[arguments.over]) as communicator:
        check = Check(arguments, communicator)
        mine: dict[str, Any] = {"echo": check.echoes(), "latency_ns": check.latencies()}
        if arguments.crowd:
            mine["crowd"] = check.crowd()
        if not arguments.twin and arguments.storm:
            mine["storm"] = check.storm()
        found = [json.loads(each) for each in communicator.all_gather(json.dumps(mine).encode())]
        ok = all(each["echo"] == [0, 0] for each in found)
        storms = [each["storm"] for each in found if "storm" in each]
        ok &= all((each["failed"], each["waits"], each["wrong"]) == (0, 64, 0) for each in storms)
        result = {
            "check": "proxy",
            "over": arguments.over,
            "words_home": arguments.words_home,
            "crowd_ns": found[0].get("crowd"),
            "ok": ok,
            "rounds": check.rounds,
            "echo": [each["echo"] for each in found],
            "storm": storms,
            "latency_ns": [each["latency_ns"] for each in found],
        }
        communicator.barrier()
        if communicator.rank == 0:
            print(json.dumps(result), flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
