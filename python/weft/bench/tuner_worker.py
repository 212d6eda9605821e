"""One rank in `weft tune`."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import weft
from weft import _native
from weft.base.progress import Progress
from weft.bench.group import deliver, worker
from weft.collectives.tuning import text_of

if TYPE_CHECKING:
    from pathlib import Path

COLLECTIVES: Final = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all")
#: Seconds after which a call counts as failed.
TIMEOUT: Final = 60.0
#: Shortest batch, and its fewest calls: a rank that begins late finds the first call's data there,
#: so that few calls would seem faster than they are.
LEAST_SECONDS: Final = 0.0015
LEAST_CALLS: Final = 2
#: Most calls per batch, and most batches.
MOST_CALLS: Final = 2000
MOST_BATCHES: Final = 50
#: Short batches: many fit between two disturbances.
BATCH_SECONDS: Final = 0.003
#: From this size on, an algorithm that takes more than `SLOW` times the fastest is not measured
#: for larger ones.
PRUNED_FROM: Final = 1 << 20
SLOW: Final = 2.0
#: Shares of the measuring time, by smallest size in bytes.
LONG: Final = ((16 << 20, 8.0), (1 << 20, 3.0), (0, 1.0))

#: Algorithms within this multiple of the fastest are timed again, later, since a disturbance may
#: have decided; number of times.
CLOSE: Final = 1.5
MEASURED_AGAIN: Final = 3
#: Regret from which a judged case is timed again, and most times.
DOUBTFUL: Final = 1.05
JUDGED_AGAIN: Final = 6
#: Shares of the whole time: all sizes; close ones again; all judged; doubtful ones again.
PHASES: Final = (0.25, 0.4, 0.15, 0.2)

#: Algorithm and chunk count, for example `("ring", 4)`.
Choice = tuple[str, int]
#: Vector bytes, and seconds by algorithm.
Slot = tuple[int, dict[Choice, float]]


def work(directory: Path, task: dict[str, Any]) -> None:
    """Measure, and leave rank 0's result in the directory."""
    with weft.init() as communicator:
        if communicator.world_size < 2:
            raise weft.errors.ConfigurationError("1 rank: expected at least 2; pass --ranks")
        shown = task["progress"] and communicator.rank == 0
        with Progress("measurements", 0, enabled=shown) as progress:
            result = Measurement(communicator, task, progress).run()
        deliver(communicator, directory, result)


class Measurement:
    """Two passes over all collectives, sizes and algorithms, each followed by one over close ones.

    Passes lie apart in time, so that a disturbance that lasts some seconds does not affect both.
    """

    def __init__(
        self, communicator: weft.Communicator, task: dict[str, Any], progress: Progress
    ) -> None:
        self.communicator, self.task, self.progress = communicator, task, progress
        self.end = time.monotonic()
        self.every = [size for name in COLLECTIVES for size in self.sizes(name)]
        #: Total weight of the slots to come in this phase.
        self.weights_left = 0.0
        progress.total = 2 * len(self.every)

    def run(self) -> dict[str, Any]:
        """Entry for the file, and the times that judge its selection."""
        self.communicator.barrier()
        rates = _native.CollectiveTimer.memory_rates()
        copy_s, add_s = (max(column) for column in zip(*self.gather(rates), strict=True))
        timer = self.timer(None)
        self.phase(PHASES[0], self.every)
        first = {
            name: self.sweep(timer, name, _native.CollectiveTimer.candidates(name))
            for name in COLLECTIVES
        }
        for _ in range(MEASURED_AGAIN):
            undecided = [
                (name, slot, chosen)
                for name in COLLECTIVES
                for slot in first[name]
                if len(chosen := close(slot[1])) > 1
            ]
            self.again(timer, undecided, PHASES[1] / MEASURED_AGAIN)
        timer.close(TIMEOUT)
        routes = {route for route in self.communicator.routes() if route is not None}
        entry = {
            "provider": "+".join(sorted(routes)),
            "ranks": self.communicator.world_size,
            "machine": self.task["machine"],
            "at": self.task["at"],
            "constants": constants(first["all-gather"], self.communicator.world_size)
            | {"add_byte_s": add_s, "copy_byte_s": copy_s},
            "times": [curve for name in COLLECTIVES for curve in curves(name, first[name])],
        }
        timer = self.timer(("measurements of this run", text_of([entry]), entry["machine"]))
        self.phase(PHASES[2], self.every)
        second = {
            name: self.sweep(
                timer, name, list(first[name][0][1]), [set(times) for _, times in first[name]]
            )
            for name in COLLECTIVES
        }
        selected = {
            (name, size): timer.selected(name, size)
            for name in COLLECTIVES
            for size, _ in second[name]
        }
        for _ in range(JUDGED_AGAIN):
            doubtful = [
                (name, slot, [*close(slot[1]), own])
                for name in COLLECTIVES
                for slot in second[name]
                if slot[1][own := selected[name, slot[0]]] > DOUBTFUL * min(slot[1].values())
            ]
            self.again(timer, doubtful, PHASES[3] / JUDGED_AGAIN)
        timer.close(TIMEOUT)
        judged = [
            {
                "collective": name,
                "bytes": size,
                "selected": list(selected[name, size]),
                "times": [[*choice, seconds] for choice, seconds in times.items()],
            }
            for name in COLLECTIVES
            for size, times in second[name]
        ]
        return {"entry": entry, "judged": judged}

    def phase(self, share: float, sizes: list[int]) -> None:
        """Begin a phase over these sizes, for this share of the whole time."""
        self.end = time.monotonic() + share * self.task["seconds"]
        self.weights_left = sum(map(weight, sizes))

    def again(
        self,
        timer: _native.CollectiveTimer,
        slots: list[tuple[str, Slot, list[Choice]]],
        share: float,
    ) -> None:
        """Time some algorithms of some slots again, short vectors first; the shorter times count.

        Ends when its time is over, by rank 0's clock.
        """
        self.phase(share, [size for _, (size, _), _ in slots])
        for collective, (size, times), choices in sorted(slots, key=lambda one: one[1][0]):
            if self.gather(time.monotonic() >= self.end)[0]:
                break
            chosen = list(dict.fromkeys(choices))
            for choice, seconds in self.slot(timer, collective, chosen, size)[1].items():
                times[choice] = min(times[choice], seconds)

    def sizes(self, collective: str) -> list[int]:
        """Sizes to measure: at least an element for each rank, if ranks have shares."""
        has_shares = collective not in ("all-reduce", "broadcast")
        least = 4 * self.communicator.world_size if has_shares else 4
        return sorted({max(least, size) for size in self.task["sizes"]})

    def timer(self, tuning: tuple[str, str, str] | None) -> _native.CollectiveTimer:
        """Collectives over the communicator."""
        return _native.CollectiveTimer(self.communicator._native, TIMEOUT, tuning)

    def sweep(
        self,
        timer: _native.CollectiveTimer,
        collective: str,
        choices: list[Choice],
        alive: list[set[Choice]] | None = None,
    ) -> list[Slot]:
        """All sizes; the algorithms are those `alive` at a size, or those that were not slow."""
        found: list[Slot] = []
        for index, size in enumerate(self.sizes(collective)):
            if alive is not None:
                choices = [choice for choice in choices if choice in alive[index]]
            actual, times = self.slot(timer, collective, choices, size)
            found.append((actual, times))
            if alive is None:
                limit = SLOW * min(times.values()) if size >= PRUNED_FROM else float("inf")
                choices = [choice for choice in times if times[choice] <= limit]
            self.progress.advance()
        return found

    def slot(
        self, timer: _native.CollectiveTimer, collective: str, choices: list[Choice], size: int
    ) -> Slot:
        """One size: each algorithm's fastest batch, at the slowest rank."""
        actual = size
        probes: dict[Choice, float] = {}
        for choice in choices:
            try:
                # The first call makes the plan.
                timer.time(collective, *choice, size, 1, TIMEOUT)
                calls = 2 if size >= PRUNED_FROM else 16
                actual, probes[choice] = timer.time(collective, *choice, size, calls, TIMEOUT)
            except weft.errors.SizeError:
                # More lanes or staging memory than there are, on all ranks alike.
                continue
        share = weight(size) / self.weights_left
        self.weights_left = max(1.0, self.weights_left - weight(size))
        allowed = max(0.0, self.end - time.monotonic()) * share / max(1, len(probes))
        known = self.gather([allowed, *probes.values()])
        allowed, slowest = known[0][0], [max(column) for column in zip(*known, strict=True)][1:]
        batches = min(MOST_BATCHES, max(self.task["batches"], int(allowed / BATCH_SECONDS)))
        counts = [
            min(MOST_CALLS, max(LEAST_CALLS, int(max(allowed / batches, LEAST_SECONDS) / each)))
            for each in slowest
        ]
        # Batches of all algorithms in turn: a disturbance meets all of them.
        times = [
            [
                self.batch(timer, collective, choice, size, count)
                for choice, count in zip(probes, counts, strict=True)
            ]
            for _ in range(batches)
        ]
        every = self.gather(times)
        best = [
            min(max(rank[batch][index] for rank in every) for batch in range(batches))
            for index in range(len(probes))
        ]
        return actual, dict(zip(probes, best, strict=True))

    def batch(
        self,
        timer: _native.CollectiveTimer,
        collective: str,
        choice: Choice,
        size: int,
        count: int,
    ) -> float:
        """Mean seconds per call; all ranks begin together."""
        self.communicator.barrier()
        return timer.time(collective, *choice, size, count, TIMEOUT)[1]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return [
            json.loads(each) for each in self.communicator.all_gather(json.dumps(value).encode())
        ]


def close(times: dict[Choice, float]) -> list[Choice]:
    """Algorithms whose time is near the fastest."""
    return [choice for choice in times if times[choice] <= CLOSE * min(times.values())]


def weight(size: int) -> float:
    """Share of the measuring time."""
    return next(share for least, share in LONG if size >= least)


def curves(collective: str, slots: list[Slot]) -> list[dict[str, Any]]:
    """File entries for one collective."""
    choices = dict.fromkeys(choice for _, times in slots for choice in times)
    return [
        {
            "collective": collective,
            "algorithm": algorithm,
            "chunks": chunks,
            "points": [
                (size, times[algorithm, chunks])
                for size, times in slots
                if (algorithm, chunks) in times
            ],
        }
        for algorithm, chunks in choices
    ]


def constants(slots: list[Slot], ranks: int) -> dict[str, float]:
    """Link constants from all-gathers by `direct` and `ring`.

    Direct is one step with a post for each peer, ring as many steps with one post each.
    """
    others = ranks - 1
    times = [
        (size, {algorithm: seconds for (algorithm, _), seconds in found.items()})
        for size, found in slots
    ]
    direct, ring = times[0][1]["direct"], times[0][1]["ring"]
    step = direct if others == 1 else min(direct, max(0.0, (ring - direct) / (others - 1)))
    (low, first), (high, last) = times[0], [each for each in times if "direct" in each[1]][-1]
    travelled = (high - low) * others / ranks
    slope = (last["direct"] - first["direct"]) / travelled if travelled else 0.0
    return {
        "step_s": step,
        "post_s": max(0.0, (direct - step) / others),
        "byte_s": max(1e-13, slope),
    }


if __name__ == "__main__":
    sys.exit(worker(work))
