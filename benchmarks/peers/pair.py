"""Process pair for peers with a Python interface; pair.h is the C equivalent.

Memory, slots, checks and ping-pong are the same as in pair.h. Requires only numpy.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

LONGEST = 64 << 20
MOST_MESSAGES = 500
WARM_UP_MESSAGES = 50
PATIENCE_SECONDS = 60


class Side(Protocol):
    """Interface for a peer's program, constructed with a `Pair` in both processes."""

    def prepare(self, offsets: list[int], length: int) -> None:
        """Prepare once the buffers that a program reuses."""

    def send(self, offset: int, length: int) -> None:
        """Send the source's bytes at `offset` to the same offset in the peer's inbox."""

    def receive(self) -> None:
        """Return once the peer's next message has arrived."""


class Pair:
    """One process in the pair."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank, self.connection = rank, connection
        #: Called while this process waits for the other, so that messages in flight make progress.
        self.progress: Callable[[], object] = lambda: None
        self.region = region_bytes()
        self.source = source_words(rank, self.region).view(np.uint8)
        self.inbox = np.zeros(self.region, dtype=np.uint8)
        self.peer_words = source_words(1 - rank, self.region).view(np.uint8)

    def exchange(self, mine: Any) -> Any:
        """Exchange a value with the other process."""
        self.connection.send(mine)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.connection.poll(0):
            self.progress()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the other process sent no value within {PATIENCE_SECONDS} s")
        return self.connection.recv()


def region_bytes() -> int:
    """Bytes in a source and in an inbox: about the last-level cache size."""
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [int(path.read_text().strip().removesuffix("K")) << 10 for path in caches]
    return max(2, -(-max(sizes, default=4 * LONGEST) // LONGEST)) * LONGEST


def source_words(rank: int, region: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Words in a rank's source."""
    words = np.arange(region // 8, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words |= np.uint64(1 << 63)
    if rank:
        words ^= np.uint64(0x5BD1E9957F4A7C15)
    return words


def run(name: str, make_side: Callable[[Pair, str], Side]) -> None:
    """Main function: `PROGRAM PATH SIZE...`; prints a JSON line for each size."""
    path, sizes = sys.argv[1], [int(size) for size in sys.argv[2:]]
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    context.Process(target=be_rank_1, args=(there, make_side, path, sizes)).start()
    for line in work(0, here, make_side, path, sizes):
        print(json.dumps({"pattern": "ping-pong", "side": name} | line), flush=True)
    # Some peers' libraries crash or hang at unload.
    os._exit(0)


def be_rank_1(
    connection: Connection, make_side: Callable[[Pair, str], Side], path: str, sizes: list[int]
) -> None:
    """Main function for the other process."""
    work(1, connection, make_side, path, sizes)
    os._exit(0)


def work(
    rank: int,
    connection: Connection,
    make_side: Callable[[Pair, str], Side],
    path: str,
    sizes: list[int],
) -> list[dict[str, Any]]:
    """Measurements from one process."""
    pair = Pair(rank, connection)
    side = make_side(pair, path)
    slots = Slots(pair.region)
    measure(pair, side, slots, LONGEST, pair.region // LONGEST)
    lines = []
    for length in sizes:
        count = min(max((16 << 20) // length, 2), MOST_MESSAGES)
        measure(pair, side, slots, length, min(count, WARM_UP_MESSAGES))
        times, wrong = measure(pair, side, slots, length, count)
        # Rank 1's first interval began before a message was sent.
        times = times[rank:]
        its_times, its_wrong = pair.exchange((times, wrong))
        lines.append(
            {"bytes": length, "one_way_ns": [times, its_times], "wrong": wrong + its_wrong}
        )
    pair.exchange(None)
    return lines


class Slots:
    """Message offsets, slot after slot, in the same order in both processes."""

    def __init__(self, region: int) -> None:
        self.region, self.next = region, 0

    def take(self, count: int, length: int) -> list[int]:
        """Offsets for the next messages."""
        stride = -(-length // 64) * 64
        first, slots = -(-self.next // stride), self.region // stride
        self.next = (first + count) % slots * stride
        return [(first + message) % slots * stride for message in range(count)]


def measure(
    pair: Pair, side: Side, slots: Slots, length: int, count: int
) -> tuple[list[float], int]:
    """One-way nanoseconds for `count` messages, and how many were wrong."""
    offsets = slots.take(count, length)
    side.prepare(offsets, length)
    pair.exchange(None)
    stamps = [time.perf_counter_ns()]
    for offset in offsets:
        if pair.rank == 0:
            side.send(offset, length)
            side.receive()
            stamps.append(time.perf_counter_ns())
        else:
            side.receive()
            stamps.append(time.perf_counter_ns())
            side.send(offset, length)
    pair.exchange(None)
    wrong = 0
    for offset in offsets:
        slot = slice(offset, offset + length)
        wrong += not np.array_equal(pair.inbox[slot], pair.peer_words[slot])
        pair.inbox[slot] = 0
    return [(after - before) / 2 for before, after in pairwise(stamps)], wrong
