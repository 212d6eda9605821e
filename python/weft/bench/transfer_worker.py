"""One of the two ranks in `weft bench transfer`: round trips with writes, both checked."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

import weft
from weft.base.progress import Progress
from weft.bench.group import deliver, worker
from weft.bench.transfer_memory import HostMemory, memory_on

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

WARM_UP_ROUNDS: Final = 3
#: Buffers per sort, used in turn.
SLOTS: Final = 2
#: Each round's bytes begin this much further on in the random bytes: they differ everywhere.
STEP: Final = 61


def work(directory: Path, task: dict[str, Any]) -> None:
    """Exchange every size."""
    rounds, pages, device = task["rounds"], task["pages"], task["device"]
    shapes = [Shape(size, pages) for size in task["sizes"]]
    with weft.init() as communicator:
        if communicator.world_size != 2:
            raise weft.errors.ConfigurationError(
                f"transfers are between 2 ranks; there are {communicator.world_size}"
            )
        shown = task["progress"] and communicator.rank == 0
        total = sum(rounds) + WARM_UP_ROUNDS * len(shapes)
        memory = memory_on(device, communicator.rank)
        with Progress("transfers", total, enabled=shown) as progress:
            found = [
                Exchange(communicator, memory, shape, count).run(progress)
                for shape, count in zip(shapes, rounds, strict=True)
            ]
        (route,) = {route for route in communicator.routes() if route is not None}
        details = communicator.provider_details()
        result = {"route": route, "provider_details": details, "sizes": found}
        deliver(communicator, directory, result)


class Shape(NamedTuple):
    """One write: pages of `size` bytes, or one contiguous range if `pages` is 0."""

    size: int
    pages: int


class Places(NamedTuple):
    """Places of a rank's pages in its source and in the peer's destination.

    Attributes:
        source: place of each page among `pool` places.
        destination: likewise.
        pool: places in a slot.
    """

    source: NDArray[np.intp]
    destination: NDArray[np.intp]
    pool: int

    @classmethod
    def of(cls, shape: Shape, rank: int) -> Places:
        """A rank's places: two permutations, or one place for a contiguous range."""
        if not shape.pages:
            return cls(np.zeros(1, np.intp), np.zeros(1, np.intp), 1)
        random, pool = np.random.default_rng((*shape, rank)), 2 * shape.pages
        source, destination = (random.permutation(pool)[: shape.pages] for _ in range(2))
        return cls(source, destination, pool)


class Exchange:
    """Round trips for one size: rank 0 writes, rank 1 writes as many bytes back.

    A write has one contiguous range, or a page list. A list's pages lie at other places in the
    source than in the destination, among as many pages that stay as they are.
    """

    def __init__(
        self, communicator: weft.Communicator, memory: HostMemory, shape: Shape, rounds: int
    ) -> None:
        self.communicator, self.memory, self.shape = communicator, memory, shape
        self.size = shape.size * (shape.pages or 1)
        self.rounds = rounds + WARM_UP_ROUNDS
        self.rank, self.peer = communicator.rank, 1 - communicator.rank
        length = self.size + STEP * self.rounds
        # Each rank's bytes and places follow from the rank number.
        self.sent_bytes, self.expected_bytes = (
            np.random.default_rng((self.size, rank)).integers(0, 256, length, dtype=np.uint8)
            for rank in (self.rank, self.peer)
        )
        self.sent, self.expected = Places.of(shape, self.rank), Places.of(shape, self.peer)
        pool = SLOTS * self.sent.pool * shape.size
        self.source = communicator.alloc(pool, device=memory.device)
        self.destination = communicator.alloc(pool, device=memory.device)
        self.source_pages, self.destination_pages = (
            memory.array(region).reshape(SLOTS, self.sent.pool, shape.size)
            for region in (self.source, self.destination)
        )
        # What arrives in each slot, in the pages between as well.
        self.pages_expected = np.zeros((SLOTS, self.sent.pool, shape.size), np.uint8)
        self.counter = communicator.counter()
        shared = communicator.share([self.destination], [self.counter])
        self.lists = [self.page_list(shared[self.peer][0], slot) for slot in range(SLOTS)]
        self.parts = self.count_parts()

    def page_list(self, remote: weft.RemoteRegion, slot: int) -> list[weft.Page]:
        """Pages of a write into a slot."""
        length, first = self.shape.size, slot * self.sent.pool
        return [
            weft.Page(
                self.source, (first + here) * length, remote, (first + there) * length, length
            )
            for here, there in zip(
                self.sent.source.tolist(), self.sent.destination.tolist(), strict=True
            )
        ]

    def count_parts(self) -> int:
        """Lane raises per write of this size, from one uncounted write each way."""
        before = self.written_parts()
        request = self.write(0)
        parts = self.written_parts() - before
        # Both writes have one size and one route.
        self.counter.wait({self.peer: parts})
        request.wait()
        self.counter.credit(self.peer)
        return parts

    def written_parts(self) -> int:
        """Parts that were written to the peer."""
        (parts,) = (row.parts for row in self.communicator.statistics() if row.peer == self.peer)
        return parts

    def run(self, progress: Progress) -> dict[str, Any]:
        """All round trips: nanoseconds for each, for as many local copies, and what was wrong."""
        trips, wrong = [], 0
        for number in range(self.rounds):
            # The writes that counted the parts were round 0 on the lanes.
            lane_round = number + 1
            self.fill(number)
            self.counter.wait_for_credit(self.peer, lane_round)
            if self.rank == 0:
                begin = time.perf_counter_ns()
                request = self.write(lane_round)
                self.counter.wait({self.peer: self.parts})
                trips.append(time.perf_counter_ns() - begin)
            else:
                self.counter.wait({self.peer: self.parts})
                request = self.write(lane_round)
            request.wait()
            wrong += not self.arrived_whole(number)
            self.counter.credit(self.peer)
            progress.advance()
        self.communicator.barrier()
        copies = self.time_copies() if self.rank == 0 else []
        self.communicator.barrier()
        self.source.release()
        self.destination.release()
        return {
            "size": self.size,
            "pages": self.shape.pages,
            "parts": self.parts,
            "trips_ns": trips[WARM_UP_ROUNDS:],
            "copies_ns": copies[WARM_UP_ROUNDS:],
            "wrong": wrong,
        }

    def fill(self, number: int) -> None:
        """Put fresh bytes into this round's source."""
        fresh = self.sent_bytes[STEP * number :][: self.size].reshape(-1, self.shape.size)
        self.memory.put(self.source_pages[(number + 1) % SLOTS], self.sent.source, fresh)

    def write(self, lane_round: int) -> weft.Request:
        """Start the write for a round."""
        pages = self.lists[lane_round % SLOTS]
        return self.communicator.write(self.peer, self.counter, pages, round=lane_round)

    def arrived_whole(self, number: int) -> bool:
        """True if every byte in the peer's write arrived unchanged, and no other byte changed."""
        slot = (number + 1) % SLOTS
        arrived = self.expected_bytes[STEP * number :][: self.size].reshape(-1, self.shape.size)
        self.pages_expected[slot, self.expected.destination] = arrived
        return self.memory.is_equal(self.destination_pages[slot], self.pages_expected[slot])

    def time_copies(self) -> list[int]:
        """Nanoseconds for local copies of as many contiguous bytes, from buffers used in turn."""
        buffers = [
            self.memory.copier(self.sent_bytes[STEP * number :][: self.size])
            for number in range(SLOTS)
        ]
        times = []
        for number in range(self.rounds):
            begin = time.perf_counter_ns()
            buffers[number % SLOTS]()
            times.append(time.perf_counter_ns() - begin)
        return times


if __name__ == "__main__":
    sys.exit(worker(work))
