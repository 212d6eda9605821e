"""One of the two ranks in `weft bench transfer`: round trips with writes, both checked."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import weft
from weft.base.progress import Progress
from weft.bench.group import deliver, worker

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
    sizes, rounds = task["sizes"], task["rounds"]
    with weft.init() as communicator:
        if communicator.world_size != 2:
            raise weft.errors.ConfigurationError(
                f"transfers are between 2 ranks; there are {communicator.world_size}"
            )
        shown = task["progress"] and communicator.rank == 0
        total = sum(rounds) + WARM_UP_ROUNDS * len(sizes)
        with Progress("transfers", total, enabled=shown) as progress:
            found = [
                Exchange(communicator, size, count).run(progress)
                for size, count in zip(sizes, rounds, strict=True)
            ]
        (route,) = {route for route in communicator.routes() if route is not None}
        details = communicator.provider_details()
        result = {"route": route, "provider_details": details, "sizes": found}
        deliver(communicator, directory, result)


class Exchange:
    """Round trips for one size: rank 0 writes, rank 1 writes as many bytes back."""

    def __init__(self, communicator: weft.Communicator, size: int, rounds: int) -> None:
        self.communicator, self.size = communicator, size
        self.rounds = rounds + WARM_UP_ROUNDS
        self.rank, self.peer = communicator.rank, 1 - communicator.rank
        length = size + STEP * self.rounds
        # Each rank's bytes follow from the rank number.
        self.sent_bytes, self.expected_bytes = (
            np.random.default_rng((size, rank)).integers(0, 256, length, dtype=np.uint8)
            for rank in (self.rank, self.peer)
        )
        self.source = communicator.alloc(SLOTS * size)
        self.destination = communicator.alloc(SLOTS * size)
        self.counter = communicator.counter()
        shared = communicator.share([self.destination], [self.counter])
        self.remote = shared[self.peer][0]
        self.parts = self.count_parts()

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
            "parts": self.parts,
            "trips_ns": trips[WARM_UP_ROUNDS:],
            "copies_ns": copies[WARM_UP_ROUNDS:],
            "wrong": wrong,
        }

    def fill(self, number: int) -> None:
        """Put fresh bytes into this round's source."""
        begin = ((number + 1) % SLOTS) * self.size
        fresh = self.sent_bytes[STEP * number :][: self.size]
        self.source.bytes[begin : begin + self.size] = fresh

    def write(self, lane_round: int) -> weft.Request:
        """Start the write for a round."""
        offset = (lane_round % SLOTS) * self.size
        page = weft.Page(self.source, offset, self.remote, offset, self.size)
        return self.communicator.write(self.peer, self.counter, [page], round=lane_round)

    def arrived_whole(self, number: int) -> bool:
        """True if every byte in the peer's write arrived unchanged."""
        begin = ((number + 1) % SLOTS) * self.size
        arrived = self.destination.bytes[begin : begin + self.size]
        expected = self.expected_bytes[STEP * number :][: self.size]
        return bool(np.array_equal(arrived, expected))

    def time_copies(self) -> list[int]:
        """Nanoseconds for numpy copies of as many bytes, from buffers used in turn."""
        source: NDArray[np.uint8] = self.sent_bytes
        targets = np.empty((SLOTS, self.size), dtype=np.uint8)
        times = []
        for number in range(self.rounds):
            begin = time.perf_counter_ns()
            np.copyto(targets[number % SLOTS], source[STEP * number :][: self.size])
            times.append(time.perf_counter_ns() - begin)
        return times


if __name__ == "__main__":
    sys.exit(worker(work))
