"""Sides in turn in one run: which take part, which fail, and graphs that are checked and timed.

A graph makes `calls` calls on buffers in turn. Before each replay the inputs are made anew, and the
ranks meet on the device; a time is the replay time, by events around it, per call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from harness.context import Context, Failure

__all__ = ["Graph", "Turns", "is_poisoned", "portion", "replays"]

#: Most replays per side.
MOST_REPLAYS: Final = 200
#: Idle stream time before a replay, in which the host enqueues it; microseconds.
AHEAD_US: Final = 100.0
#: Errors after which Weft's objects in this process are unusable.
POISONED: Final = ("WaitTimeoutError", "PeerLostError", "PeerLeftError")


def is_poisoned(reason: str) -> bool:
    """True if Weft's objects in this process are unusable since."""
    return any(error in reason for error in POISONED)


class Turns:
    """A case's sides, which take turns; one that fails leaves the others."""

    def __init__(self, context: Context, case: Any, sides: Sequence[Any]) -> None:
        self.context, self.case, self.sides = context, case, sides
        #: By side name: status and reason, and results if the status is "ok".
        self.found: dict[str, dict[str, Any]] = {}

    def unable(self, side: Any) -> str | None:
        """Reason for which a side does not take part; None if it does."""
        reason: str | None = side.unable(self.case)
        return reason

    def library(self, side: Any) -> str:
        """Key in the task's `excluded` that leaves the side out in all cases; "" if none does."""
        return ""

    def begin(self, side: Any) -> None:
        """Record the side in progress."""
        self.context.under_way(self.case.name, side.name)

    def failed(self, side: Any, failure: Failure) -> None:
        """Leave a side out after a failure, or raise if the ranks must be started anew."""
        self.leave(side, "skipped" if failure.refused else "failed", failure.text)

    def leave(self, side: Any, status: str, reason: str) -> None:
        """Leave a side out."""
        self.found[side.name] = {"status": status, "reason": reason}

    def done(self, side: Any, **results: Any) -> None:
        """Keep a side's results."""
        self.found[side.name] = {"status": "ok", "reason": None} | results

    def attempt(self, side: Any, work: Callable[[], Any]) -> Any:
        """Run a side's work on all ranks; None if it failed, so that the side is left out."""
        self.begin(side)
        result, failure = self.context.attempt(work)
        if failure is not None:
            self.failed(side, failure)
        return result

    def admit(self, make: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
        """Prepare every side that can run.

        Args:
            make: a side's runner, whose `prepare` is called.

        Returns:
            Runners, each with what `prepare` returned.
        """
        admitted = []
        excluded: dict[str, str] = self.context.task["excluded"]
        for side in self.sides:
            if (reason := self.unable(side)) is not None:
                self.leave(side, "skipped", reason)
                continue
            library = self.library(side)
            for key in (f"{self.case.name}: {side.name}", library):
                if key in excluded:
                    self.leave(side, "failed", excluded[key])
            if side.name in self.found:
                continue
            self.attempt(side, side.ready)
            if side.name in self.found:
                # A later attempt would fail only on some ranks.
                excluded |= {library: self.found[side.name]["reason"]} if library else {}
                continue
            runner = make(side)
            prepared = self.attempt(side, runner.prepare)
            if side.name not in self.found:
                admitted.append((runner, prepared))
        return admitted

    def result(self, **more: Any) -> dict[str, Any]:
        """This rank's results, with the sides in order."""
        return {"sides": {side.name: self.found[side.name] for side in self.sides}} | more


def replays(context: Context, case: Any, replay_us: float) -> int:
    """A side's replay count: as many as the measuring time holds at the slowest rank."""
    wanted = int(context.task["seconds"] * 1e6 / max(*context.agree(replay_us), 1.0))
    # The twin's replays are few: a CPU runs them.
    most = MOST_REPLAYS if context.device.kind == "cuda" else case.replays
    return max(case.replays, min(wanted, most))


def portion(total: int, block: int, blocks: int) -> int:
    """Replays in a block, if `total` is spread over `blocks`."""
    return (block + 1) * total // blocks - block * total // blocks


class Graph:
    """A side's graph for a case."""

    def __init__(self, context: Context, side: Any, case: Any) -> None:
        self.side, self.case, self.device = side, case, context.device
        #: The side's calls: `call` takes a buffer, and `meet` is a rendezvous between all ranks.
        self.bound: Any = None
        self.times: list[float] = []
        self.facts: dict[str, Any] = {}
        self.spans: list[tuple[Any, Any]] = []

    def refill(self) -> None:
        """Make the next replay's inputs."""
        raise NotImplementedError

    def judge_calls(self) -> None:
        """Make calls without a graph, and compare the results with the reference."""
        raise NotImplementedError

    def judge_replay(self) -> None:
        """Compare a replay's results with the reference."""
        raise NotImplementedError

    def prepare(self) -> float:
        """Bind, check and capture; returns microseconds per replay."""
        case = self.case
        self.bound = self.side.bind(case)
        self.refill()
        self.judge_calls()

        def calls() -> None:
            for number in range(case.calls):
                self.bound.call(number % case.buffers)

        self.graph = self.device.capture(calls)
        # A graph's first replay uploads it.
        for _ in range(2 if self.device.kind == "cuda" else 1):
            self.replay()
        self.device.synchronise()
        self.side.check()
        last = self.device.elapsed_us(*self.spans[-1])
        self.spans.clear()
        return last

    def replay(self) -> None:
        """Enqueue a timed replay."""
        device = self.device
        self.refill()
        if device.kind == "cuda":
            device.sleep(AHEAD_US)
        self.bound.meet()
        begin = device.stamp()
        self.graph()
        self.spans.append((begin, device.stamp()))

    def block(self, count: int) -> None:
        """Timed replays; the host does not wait between them."""
        for _ in range(count):
            self.replay()
        self.device.synchronise()
        self.side.check()
        calls = self.case.calls
        self.times += [self.device.elapsed_us(*span) / calls for span in self.spans]
        self.spans.clear()
