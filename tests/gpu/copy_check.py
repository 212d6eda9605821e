"""Counted writes between GPUs by copy engines: every byte checked, and bandwidth.

    weft run -n 2 -- python tests/gpu/copy_check.py     (without `weft run`, it starts itself so)

Two ranks, on two GPUs if available, else on one. Rank 0 prints one JSON line: `ok`, the checks,
and the median bandwidth by memory kind and size. `--twin` runs the same with host memory in
place of GPUs; these bandwidths are not comparable. `--over tcp` takes that provider, with GPU
memory through slots in host memory; `--over ofi` needs a libfabric provider with FI_HMEM, for
example `WEFT_OFI_PROVIDER=shm` with a libfabric that was built with CUDA. Exit status 1 if a byte
was wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import weft

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

SLOT = 1 << 20
KIB, MIB = 1 << 10, 1 << 20
SIZES = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
#: Providers that take GPU memory through slots in host memory.
STAGED = ["shm", "tcp"]
PATHS = ["device to device", "host to device", "device to host"]


class Host:
    """Twin whose device addresses are CPU addresses."""

    name = "twin"
    count = 2

    def __init__(self, number: int) -> None:
        self.device = f"twin:{number}"

    def _array(self, region: weft.Region) -> Bytes:
        memory = (ctypes.c_uint8 * len(region)).from_address(region.address)
        return np.ctypeslib.as_array(memory)

    def inbox(self, communicator: weft.Communicator, length: int) -> weft.Region:
        return communicator.alloc(length, device=self.device)

    def store(self, region: weft.Region, values: Bytes) -> None:
        """Write bytes to a region's start, synchronously."""
        self._array(region)[: len(values)] = values

    def equal(self, region: weft.Region, values: Bytes) -> bool:
        """True if a region begins with these bytes."""
        return bool(np.array_equal(self._array(region)[: len(values)], values))


class Cuda:
    """A GPU, through torch."""

    def __init__(self, number: int) -> None:
        import torch

        self.torch = torch
        self.device = f"cuda:{number}"
        torch.cuda.set_device(number)
        self.name = torch.cuda.get_device_name(number)

    def inbox(self, communicator: weft.Communicator, length: int) -> weft.Region:
        """Zeros, over ofi in torch's memory."""
        if communicator.routes()[1 - communicator.rank] != "ofi":
            return communicator.alloc(length, device=self.device)
        tensor = self.torch.zeros(length, dtype=self.torch.uint8, device=self.device)
        self.torch.cuda.synchronize()
        return communicator.register(tensor)

    def tensor(self, region: weft.Region) -> Any:
        """A region's bytes."""
        return self.torch.as_tensor(region.cuda, device=self.device)

    def store(self, region: weft.Region, values: Bytes) -> None:
        self.tensor(region)[: len(values)].copy_(self.torch.from_numpy(values))
        self.torch.cuda.synchronize()

    def equal(self, region: weft.Region, values: Bytes) -> bool:
        # The bytes' first reader is a kernel launched at once.
        expected = self.torch.from_numpy(values).to(self.device)
        return bool(self.torch.equal(self.tensor(region)[: len(values)], expected))


def device_count() -> int:
    import torch

    return int(torch.cuda.device_count())


class Side:
    """One rank: destinations and sources in both memory kinds."""

    def __init__(self, communicator: weft.Communicator, side: Host | Cuda, length: int) -> None:
        self.communicator, self.side = communicator, side
        self.peer = 1 - communicator.rank
        self.sources = {
            "host": communicator.alloc(length),
            "device": communicator.alloc(length, device=side.device),
        }
        self.inboxes = {
            "host": communicator.alloc(length),
            "device": side.inbox(communicator, length),
        }
        self.counter = communicator.counter()
        granted = communicator.share(list(self.inboxes.values()), [self.counter])[self.peer]
        self.targets = dict(zip(self.inboxes, granted, strict=True))
        self.round = 0

    def store(self, kind: str, values: Bytes) -> None:
        if kind == "host":
            self.sources[kind].bytes[: len(values)] = values
        else:
            self.side.store(self.sources[kind], values)

    def equal(self, kind: str, values: Bytes) -> bool:
        if kind == "host":
            return bool(np.array_equal(self.inboxes[kind].bytes[: len(values)], values))
        return self.side.equal(self.inboxes[kind], values)

    def write(self, pages: list[weft.Page]) -> weft.Request:
        """Write in the next round."""
        self.counter.wait_for_credit(self.peer, self.round)
        request = self.communicator.write(self.peer, self.counter, pages, round=self.round)
        self.round += 1
        return request


def plan(random: np.random.Generator) -> list[tuple[str, str, int, int, int]]:
    """A round's pages: memory kinds, offsets at the source and the destination, and lengths."""
    pages = []
    at = {"host": 0, "device": 0}
    for _ in range(random.integers(1, 24)):
        source, target = random.choice(["host", "device"], 2)
        length = int(random.choice([0, 1, 15, 4096, 8193, 18_432, 30_001, 40_000]))
        at[target] += int(random.integers(0, 300))
        begin = int(random.integers(0, SLOT - length))
        # Half of them as far from a multiple of 16 as the destination.
        begin += (at[target] - begin) % 16 if random.integers(2) and begin > 16 else 0
        pages.append((str(source), str(target), min(begin, SLOT - length), at[target], length))
        at[target] += length
    return pages


def random_rounds(side: Side, rounds: int) -> int:
    """Rounds with random pages in both directions at once; the number of correct rounds."""
    rank, right = side.communicator.rank, 0
    memory = {"host": np.zeros(SLOT, np.uint8), "device": np.zeros(SLOT, np.uint8)}
    for round in range(rounds):
        content = {
            sender: {
                kind: np.random.default_rng([round, sender, number]).integers(
                    0, 256, SLOT, dtype=np.uint8
                )
                for number, kind in enumerate(("host", "device"))
            }
            for sender in (0, 1)
        }
        plans = {sender: plan(np.random.default_rng([round, sender])) for sender in (0, 1)}
        for kind, values in content[rank].items():
            side.store(kind, values)
        request = side.write(
            [
                weft.Page(side.sources[source], begin, side.targets[target], at, length)
                for source, target, begin, at, length in plans[rank]
            ]
        )
        for source, target, begin, at, length in plans[side.peer]:
            memory[target][at : at + length] = content[side.peer][source][begin : begin + length]
        lengths = [length for *_, length in plans[side.peer]]
        side.counter.wait({side.peer: side.communicator.parts(side.peer, lengths)})
        right += all(side.equal(kind, values) for kind, values in memory.items())
        request.wait()
        side.counter.credit(side.peer)
    return right


def while_capturing(side: Side) -> bool:
    """A write during a capture neither breaks it nor becomes part of it."""
    values = np.random.default_rng(7).integers(0, 256, 100_000, dtype=np.uint8)
    side.store("device", values)
    page = weft.Page(side.sources["device"], 0, side.targets["device"], 0, len(values))
    right = True
    if isinstance(side.side, Cuda):
        torch = side.side.torch
        ones, graph = torch.ones(1000, device=side.side.device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ones += 1
            request = side.write([page])
            request.wait()
        graph.replay()
        right = bool((ones == 2).all())
    else:
        request = side.write([page])
        request.wait()
    side.counter.wait({side.peer: side.communicator.parts(side.peer, [len(values)])})
    right = right and side.equal("device", values)
    side.counter.credit(side.peer)
    return right


def median_seconds(times: int, once: Callable[[], float]) -> float:
    return statistics.median(once() for _ in range(times))


def bandwidth(side: Side, sizes: list[int]) -> list[dict[str, Any]]:
    """Rank 0 writes: seconds until the lane has risen, and until the reply has arrived."""
    results = []
    for path in PATHS:
        source, target = path.split(" to ")
        for size in sizes:
            times = 30 if size <= 16 * MIB else 10
            page = weft.Page(side.sources[source], 0, side.targets[target], 0, size)
            answers: list[float] = []

            def once(page: weft.Page = page, answers: list[float] = answers) -> float:
                begin = time.perf_counter()
                side.write([page]).wait()
                written = time.perf_counter()
                side.counter.wait_for_credit(side.peer, side.round)
                answers.append(time.perf_counter() - begin)
                return written - begin

            def answer(size: int = size) -> float:
                side.counter.wait({side.peer: side.communicator.parts(side.peer, [size])})
                side.counter.credit(side.peer)
                return 0.0

            side.communicator.barrier()
            if side.communicator.rank != 0:
                median_seconds(times + 3, answer)
                continue
            for _ in range(3):
                once()
            answers.clear()
            seconds = median_seconds(times, once)
            results.append(
                {
                    "path": path,
                    "bytes": size,
                    "gigabytes_per_second_p50": size / seconds / 1e9,
                    "seconds_p50": seconds,
                    "answered_seconds_p50": statistics.median(answers),
                    "times": times,
                }
            )
    return results


def rank(arguments: argparse.Namespace) -> bool:
    """Main function on one rank."""
    provider = arguments.over or ("copy-twin" if arguments.twin else "copy")
    if arguments.over in STAGED:
        os.environ["WEFT_STAGED"] = "twin" if arguments.twin else "1"
    with weft.init(providers=[provider]) as communicator:
        number = communicator.rank
        devices = Host.count if arguments.twin else device_count()
        number = number if devices > 1 else 0
        machine: Host | Cuda = Host(number) if arguments.twin else Cuda(number)
        length = max(SLOT, *arguments.sizes)
        side = Side(communicator, machine, length)
        right = random_rounds(side, arguments.rounds)
        captured = while_capturing(side)
        mine = {"right": right, "captured": captured, "device": machine.name}
        message = [json.loads(each) for each in communicator.all_gather(json.dumps(mine).encode())]
        ok = all(each["right"] == arguments.rounds and each["captured"] for each in message)
        result = {
            "check": "copy",
            "ok": ok,
            "rounds": arguments.rounds,
            "right": [each["right"] for each in message],
            "captured": [each["captured"] for each in message],
            "devices": [each["device"] for each in message],
            "same_device": devices < 2,
            "routes": communicator.routes(),
            "bandwidth": bandwidth(side, arguments.sizes),
        }
        communicator.barrier()
        if communicator.rank == 0:
            print(json.dumps(result), flush=True)
        return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--twin", action="store_true", help="host memory in place of GPUs")
    parser.add_argument("--over", choices=[*STAGED, "ofi"], help="another provider than copy")
    parser.add_argument("--rounds", type=int, default=100, help="of random pages")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes to time")
    arguments = parser.parse_args()
    if "WEFT_RANK" not in os.environ:
        command = [sys.executable, "-m", "weft", "run", "-n", "2", "--no-prefix", "--"]
        return subprocess.call([*command, sys.executable, *sys.argv])
    return 0 if rank(arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
