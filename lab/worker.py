"""Rank processes: one for each host, in its network namespace.

`python -m lab.worker` reads a JSON line from standard input, forks a process for each rank and
waits for them. Each rank joins the group over the tcp provider and then serves commands, JSON lines
on a UNIX socket, so that commands take no network bandwidth. All times are on the machine's
monotonic clock.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import weft
from lab.namespaces import enter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

#: Asks the kernel for a signal when the parent ends.
PR_SET_PDEATHSIG: Final = 1
ELEMENT: Final = np.dtype(np.float32).itemsize
#: Period of the input values, which are whole numbers: sums are exact.
PERIOD: Final = 251
#: Change in the ranks' niceness: other programs on the machine delay them less.
NICE: Final = -10
#: Seconds for one wait in a schedule.
WAIT: Final = 120.0


class Schedule:
    """One schedule on this rank: memory, lanes and operations."""

    def __init__(
        self, communicator: weft.Communicator, program: dict[str, Any], elements: int
    ) -> None:
        self.communicator = communicator
        self.operations: list[dict[str, Any]] = program["operations"]
        self.elements = elements
        self.block = elements // program["blocks"] * ELEMENT
        sizes = {
            "input": elements * ELEMENT,
            "output": elements * ELEMENT,
            "scratch": max(program["scratch_blocks"], 1) * self.block,
        }
        self.regions = {name: communicator.alloc(size) for name, size in sizes.items()}
        self.memory = {name: region.bytes.view(np.float32) for name, region in self.regions.items()}
        self.counters = [
            communicator.counter(peers=peers) for peers in self._peers(program["lanes"])
        ]
        shared = communicator.share(list(self.regions.values()), self.counters, timeout=WAIT)
        self.remote = [dict(zip(sizes, regions, strict=False)) for regions in shared]
        self.requests: list[weft.Request] = []
        self.next = 0

    def _peers(self, lanes: int) -> list[list[int]]:
        """Peers by lane: those written to and those waited for."""
        found: list[set[int]] = [set() for _ in range(lanes)]
        for operation in self.operations:
            for kind, end in (("write", "to"), ("wait", "from")):
                if kind in operation:
                    found[operation[kind]["lane"]].add(operation[kind][end])
        return [sorted(peers) for peers in found]

    def fill(self) -> None:
        """Write this rank's input."""
        values = np.arange(self.elements, dtype=np.int64) + self.communicator.rank
        self.memory["input"][:] = values % PERIOD
        self.memory["output"][:] = np.nan

    def is_correct(self) -> bool:
        """True if the output is the sum over all inputs."""
        expected = np.zeros(self.elements, dtype=np.float32)
        for rank in range(self.communicator.world_size):
            expected += (np.arange(self.elements, dtype=np.int64) + rank) % PERIOD
        return bool(np.array_equal(self.memory["output"], expected))

    def advance(self, step: int | None = None) -> None:
        """Execute operations up to the first write in a later step than `step`; `None`: all."""
        while self.next < len(self.operations):
            ((kind, fields),) = self.operations[self.next].items()
            if step is not None and kind == "write" and fields["step"] > step:
                break
            getattr(self, kind)(fields)
            self.next += 1
        # Only calls make progress, so no bytes may be left when this returns.
        for request in self.requests:
            request.wait(timeout=WAIT)
        self.requests.clear()

    def write(self, fields: dict[str, Any]) -> None:
        """Post a counted write, once its lane in the last run was read."""
        peer, counter = fields["to"], self.counters[fields["lane"]]
        counter.wait_for_credit(peer, timeout=WAIT)
        source, target = fields["source"], fields["target"]
        page = weft.Page(
            self.regions[source["buffer"]],
            source["first"] * self.block,
            self.remote[peer][target["buffer"]],
            target["first"] * self.block,
            source["blocks"] * self.block,
        )
        self.requests.append(self.communicator.write(peer, counter, [page]))

    def wait(self, fields: dict[str, Any]) -> None:
        """Wait for a peer's writes on a lane."""
        length = fields["blocks"] * self.block
        self.counters[fields["lane"]].wait({fields["from"]: [length]}, timeout=WAIT)

    def reduce(self, fields: dict[str, Any]) -> None:
        """Add a span to another."""
        target = self._span(fields["target"])
        np.add(target, self._span(fields["source"]), out=target)

    def copy(self, fields: dict[str, Any]) -> None:
        """Copy a span to another."""
        self._span(fields["target"])[:] = self._span(fields["source"])

    def finish(self) -> None:
        """Give credit for all that was waited for, so that the schedule can run again."""
        for operation in self.operations:
            if wait := operation.get("wait"):
                self.counters[wait["lane"]].credit(wait["from"])
        self.next = 0

    def close(self) -> None:
        """Release memory and lanes, with all other ranks."""
        for counter in self.counters:
            counter.release(timeout=WAIT)
        for region in self.regions.values():
            region.release()

    def _span(self, span: dict[str, Any]) -> NDArray[np.float32]:
        """Elements in a span on this rank."""
        length = self.block // ELEMENT
        first = span["first"] * length
        return self.memory[span["buffer"]][first : first + span["blocks"] * length]


class Server:
    """A rank's commands."""

    def __init__(self, communicator: weft.Communicator) -> None:
        self.communicator = communicator
        self.schedule: Schedule | None = None

    def prepare(self, program: dict[str, Any], elements: int) -> dict[str, Any]:
        """Replace the schedule."""
        if self.schedule is not None:
            self.schedule.close()
        self.schedule = Schedule(self.communicator, program, elements)
        return {}

    def fill(self) -> dict[str, Any]:
        """Write the next run's input."""
        self._made().fill()
        return {}

    def run(self, at: float) -> dict[str, Any]:
        """Run the schedule from a monotonic clock time on; start, end, processor time."""
        schedule = self._made()
        time.sleep(max(at - time.monotonic(), 0.0))
        start, processor = time.monotonic(), time.process_time()
        schedule.advance()
        return {"start": start, "end": time.monotonic(), "cpu_s": time.process_time() - processor}

    def step(self, step: int) -> dict[str, Any]:
        """Run the operations in one step."""
        self._made().advance(step)
        return {}

    def finish(self, check: bool) -> dict[str, Any]:
        """Compare the output with the sum, and give credit."""
        schedule = self._made()
        correct = not check or schedule.is_correct()
        schedule.finish()
        return {"correct": correct}

    def _made(self) -> Schedule:
        assert self.schedule is not None, "`prepare` comes first"
        return self.schedule


def serve(path: str, host: int) -> None:
    """Join the group and serve commands until the socket closes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rw", encoding="utf-8")

        def reply(value: dict[str, Any]) -> None:
            stream.write(json.dumps(value) + "\n")
            stream.flush()

        try:
            # Sleeping waits: ranks share the cores with the links.
            with weft.init(spin=0.0, timeout=WAIT) as communicator:
                server = Server(communicator)
                reply({"host": host})
                for line in stream:
                    command = json.loads(line)
                    reply(getattr(server, command.pop("do"))(**command))
        except Exception:
            reply({"error": traceback.format_exc(limit=-4)})


def become(rank: dict[str, Any], path: str) -> None:
    """Turn a forked process into a rank."""
    die_with_parent()
    enter(rank["node"])
    os.environ.update(rank["environment"])
    serve(path, rank["host"])


def die_with_parent() -> None:
    """Have the kernel kill this process once the parent has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Fork the ranks that the JSON line on standard input lists, and wait for them."""
    (path,) = arguments
    die_with_parent()
    os.nice(NICE)
    children = []
    for rank in json.loads(sys.stdin.readline()):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                become(rank, path)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    return max(
        (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), default=0
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
