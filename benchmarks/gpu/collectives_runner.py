"""A side's graph of a case: checks, replays, times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from collectives_check import Reference, source

if TYPE_CHECKING:
    from collectives_cases import Case
    from collectives_context import Context, Failure
    from collectives_sides import Bound, Side

__all__ = ["Runner", "admit"]

#: Idle time of the stream before a replay, in which the host enqueues all of it; microseconds.
AHEAD_US: Final = 100.0


class Data:
    """Inputs of a case and the results that they must have; empty for a barrier."""

    def __init__(self, context: Context, case: Case) -> None:
        self.sources: list[Any] = []
        #: By buffer: the first and the last one.
        self.references: dict[int, Reference] = {}
        if case.operation != "barrier":
            slots = range(case.buffers)
            self.sources = [source(context, case, context.rank, slot) for slot in slots]
            ends = (slots[0], slots[-1])
            self.references = {slot: Reference(context, case, slot) for slot in ends}


class Runner:
    """A side's graph of a case."""

    def __init__(self, context: Context, side: Side, case: Case, data: Data) -> None:
        self.side, self.case, self.device, self.data = side, case, context.device, data
        self.times: list[float] = []
        self.facts: dict[str, Any] = {}
        self.spans: list[tuple[Any, Any]] = []

    def prepare(self) -> float:
        """Bind, check and capture; microseconds of a replay."""
        case = self.case
        self.bound: Bound = self.side.bind(case)
        self.refill()
        self.judge_calls()

        def calls() -> None:
            for number in range(case.calls):
                self.bound.call(number % case.buffers)

        self.graph = self.device.capture(calls)
        # The first replay of a graph uploads it.
        for _ in range(2 if self.device.kind == "cuda" else 1):
            self.replay()
        self.device.synchronise()
        self.side.check()
        last = self.device.elapsed_us(*self.spans[-1])
        self.spans.clear()
        return last

    def refill(self) -> None:
        """Write the inputs anew."""
        if self.data.sources:
            self.device.torch._foreach_copy_(self.bound.inputs, self.data.sources)

    def judge_calls(self) -> None:
        """One call on the first and one on the last buffer, compared with the reference."""
        bound = self.bound
        if not self.data.references:
            bound.call(0)
            return
        verdicts = []
        for slot, reference in self.data.references.items():
            if not bound.in_place:
                bound.outputs[slot].fill_(float("nan"))
            bound.call(slot)
            verdicts.append(reference.judge(bound.outputs[slot]))
        self.facts = {
            "largest_share_of_bound": max(verdict.share for verdict in verdicts),
            "exact": all(verdict.exact for verdict in verdicts),
            "in_place": bound.in_place,
            "ours": self.side.ours,
        }

    def judge_replay(self) -> None:
        """Compare results of the last replay, if they have buffers of their own."""
        if self.bound.in_place:
            return
        for slot, reference in self.data.references.items():
            verdict = reference.judge(self.bound.outputs[slot])
            self.facts["exact"] &= verdict.exact
            share = max(self.facts["largest_share_of_bound"], verdict.share)
            self.facts["largest_share_of_bound"] = share

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
        """Timed replays, without a wait of the host between them."""
        for _ in range(count):
            self.replay()
        self.device.synchronise()
        self.side.check()
        calls = self.case.calls
        self.times += [self.device.elapsed_us(*span) / calls for span in self.spans]
        self.spans.clear()


def end_if_ours(side: Side, failure: Failure) -> None:
    """Raise after a failure of Weft, whose sides share an object that is unusable since."""
    if side.ours:
        raise RuntimeError(f"{side.name}: {failure.text}")


def admit(
    context: Context, case: Case, sides: list[Side], found: dict[str, Any]
) -> list[tuple[Runner, float]]:
    """Prepare every side that can run.

    Args:
        context: of the rank.
        case: of the sides.
        sides: in order.
        found: receives status and reason of the other sides.

    Returns:
        Runners, and the slowest rank's microseconds of a replay.
    """
    data = Data(context, case)
    runners = []
    excluded: dict[str, str] = context.task["excluded"]
    for side in sides:
        if (reason := side.unable(case)) is not None:
            found[side.name] = {"status": "skipped", "reason": reason}
            continue
        if side.name in excluded:
            found[side.name] = {"status": "failed", "reason": excluded[side.name]}
            continue
        context.under_way(case.name, side.name)
        _, failure = context.attempt(side.ready)
        if failure is not None:
            end_if_ours(side, failure)
            # A later attempt would fail on some ranks alone.
            excluded[side.name] = failure.text
            found[side.name] = {"status": "failed", "reason": failure.text}
            continue
        runner = Runner(context, side, case, data)
        first, failure = context.attempt(runner.prepare)
        if failure is not None:
            if not failure.refused:
                end_if_ours(side, failure)
            status = "skipped" if failure.refused else "failed"
            found[side.name] = {"status": status, "reason": failure.text}
            continue
        runners.append((runner, max(context.agree(first))))
    return runners
