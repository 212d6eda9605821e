"""Measures for the device collectives benchmark, by case kind.

A collective is timed in CUDA graphs, and the sides alternate in replay blocks.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import harness.measure
from collectives_data import Data
from collectives_sides import swept
from harness.measure import Graph, portion, replays

if TYPE_CHECKING:
    from collections.abc import Callable

    from collectives_cases import Case
    from harness.context import Context, Failure
    from harness.side import Side

__all__ = ["MEASURES"]

#: Replay blocks per side, between which the other sides have theirs.
BLOCKS: Final = 4
#: Calls without a graph: enqueued in a row, and with a wait after each.
CALLED: Final = 100
SINGLE: Final = 50
REPEATS: Final = 5
#: Matrix rows and columns beside a collective, and GEMMs and replays timed as a whole.
GEMM: Final = 8192
GEMMS: Final = 20
REPLAYS: Final = 5
#: SMs that GEMMs leave free, in the measurement with a carve-out.
CARVED: Final = 32


def collective(context: Context, case: Case) -> dict[str, Any]:
    """All sides for an operation."""
    key = case.operation if case.operation in context.sides else "other"
    return compare(context, case, context.sides[key])


def compare(context: Context, case: Case, sides: list[Side]) -> dict[str, Any]:
    """Sides in turn; times and checks by side."""
    turns, admitted = admit(context, case, sides)
    runners = [(runner, replays(context, case, replay_us)) for runner, replay_us in admitted]
    for block in range(BLOCKS):
        for runner, total in runners:
            turns.begin(runner.side)
            runner.block(portion(total, block, BLOCKS))
            # Before the next side writes to buffers that both may share.
            if block == BLOCKS - 1:
                runner.judge_replay()
                turns.done(runner.side, times=runner.times, **runner.facts)
    return turns.result()


def admit(context: Context, case: Case, sides: list[Side]) -> tuple[Turns, list[Any]]:
    """Turns, and runners for every side that can run, with microseconds per replay."""
    turns, data = Turns(context, case, sides), Data(context, case)
    return turns, turns.admit(lambda side: Runner(context, side, case, data))


class Turns(harness.measure.Turns):
    """A case's sides in turn; Weft's share an object that is unusable after a failure."""

    def library(self, side: Side) -> str:
        """A side that cannot be set up is left out in all cases."""
        return side.name

    def failed(self, side: Side, failure: Failure) -> None:
        """Leave a side out, or raise after a Weft failure."""
        # Only calls are refused.
        is_refused = failure.refused and side.is_ready
        if side.ours and not is_refused:
            raise RuntimeError(f"{side.name}: {failure.text}")
        super().failed(side, failure._replace(refused=is_refused))

    def result(self, **more: Any) -> dict[str, Any]:
        """This rank's results, with the sides in order."""
        return super().result(buffers=self.case.buffers, calls=self.case.calls, **more)


class Runner(Graph):
    """A side's graph for a case."""

    def __init__(self, context: Context, side: Side, case: Case, data: Data) -> None:
        super().__init__(context, side, case)
        self.data = data

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
        """Compare the last replay's results, if they have separate buffers."""
        if self.bound.in_place:
            return
        for slot, reference in self.data.references.items():
            verdict = reference.judge(self.bound.outputs[slot])
            self.facts["exact"] &= verdict.exact
            share = max(self.facts["largest_share_of_bound"], verdict.share)
            self.facts["largest_share_of_bound"] = share


def sweep(context: Context, case: Case) -> dict[str, Any]:
    """Weft at every SM count, beside Weft's choice."""
    return compare(context, case, swept(context, case))


def weft_and_nccl(context: Context) -> list[Side]:
    """Sides for measurements beyond graphs."""
    names = ("weft", "weft symmetric", "nccl")
    return [side for side in context.sides["all_reduce"] if side.name in names]


def called(context: Context, case: Case) -> dict[str, Any]:
    """All-reduces without a graph: host time per call, and time per call with the device."""
    turns, admitted = admit(context, case, weft_and_nccl(context))
    for runner, _ in admitted:
        turns.begin(runner.side)
        turns.done(runner.side, **runner.facts, **called_times(context, runner))
    return turns.result()


def called_times(context: Context, runner: Runner) -> dict[str, Any]:
    """Host microseconds per call, for calls in a row, and for a call with a wait."""
    device, buffers = context.device, runner.case.buffers
    count = CALLED if device.kind == "cuda" else 10
    host, row, single = [], [], []
    for _ in range(REPEATS):
        runner.refill()
        device.synchronise()
        context.communicator.barrier(timeout=60)
        begin = time.perf_counter()
        for number in range(count):
            runner.bound.call(number % buffers)
        enqueued = time.perf_counter()
        device.synchronise()
        host.append((enqueued - begin) * 1e6 / count)
        row.append((time.perf_counter() - begin) * 1e6 / count)
    for number in range(SINGLE if device.kind == "cuda" else 10):
        begin = time.perf_counter()
        runner.bound.call(number % buffers)
        device.synchronise()
        single.append((time.perf_counter() - begin) * 1e6)
    return {"host": host, "times": row, "single": single}


def beside_gemms(context: Context, case: Case) -> dict[str, Any]:
    """All-reduces beside GEMMs on another stream; each is timed inside the other."""
    gemms = Gemms(context)
    turns, admitted = admit(context, case, weft_and_nccl(context))
    for runner, _ in admitted:
        turns.begin(runner.side)
        phases: dict[str, list[float]] = {}
        for prefix, carved in (("", 0), ("carveout ", CARVED)):
            for name, values in gemms.beside(runner, case.replays, carved).items():
                phases[prefix + name] = values
        times = phases.pop("with gemm")
        turns.done(runner.side, **runner.facts, times=times, phases=phases)
    return turns.result(gemm=GEMM, carved=CARVED)


class Gemms:
    """bfloat16 GEMMs on a separate stream."""

    def __init__(self, context: Context) -> None:
        self.context, self.device = context, context.device
        torch = self.torch = context.device.torch
        self.left, self.right = (
            torch.randn((GEMM, GEMM), device=self.device.name).bfloat16() for _ in range(2)
        )
        self.out = torch.empty_like(self.left)
        self.stream = torch.cuda.Stream()

    def beside(self, runner: Runner, repeats: int, carved: int) -> dict[str, list[float]]:
        """Times for both, separate and together, in microseconds per call and per GEMM."""
        cuda: Any = __import__("weft.cuda", fromlist=["sm_carveout"])
        times: dict[str, list[float]] = {}
        with cuda.sm_carveout(carved) if carved else nullcontext():
            self.multiply(GEMMS)
            self.reduce(runner, REPLAYS)
            self.meet()
            for _ in range(repeats):
                for name, value in self.once(runner).items():
                    times.setdefault(name, []).append(value)
        return times

    def once(self, runner: Runner) -> dict[str, float]:
        """Each separately, then each while the other lasts three times as long."""
        gemm = self.timed(GEMMS, self.multiply)
        alone = self.timed(REPLAYS, lambda count: self.reduce(runner, count))
        needed = 3 * GEMMS * gemm / alone, 3 * REPLAYS * alone / gemm
        longer = max(self.context.agree(int(max(needed)) + 1))
        self.reduce(runner, longer)
        beside = self.timed(GEMMS, self.multiply)
        self.multiply(longer)
        together = self.timed(REPLAYS, lambda count: self.reduce(runner, count))
        calls = runner.case.calls
        return {
            "alone": alone / calls,
            "with gemm": together / calls,
            "gemm alone": gemm,
            "gemm with calls": beside,
        }

    def multiply(self, count: int) -> tuple[Any, Any]:
        """Enqueue GEMMs."""
        with self.torch.cuda.stream(self.stream):
            begin = self.device.stamp()
            for _ in range(count):
                self.torch.mm(self.left, self.right, out=self.out)
            return begin, self.device.stamp()

    def reduce(self, runner: Runner, count: int) -> tuple[Any, Any]:
        """Enqueue replays on the current stream, behind a rendezvous."""
        runner.refill()
        runner.bound.meet()
        begin = self.device.stamp()
        for _ in range(count):
            runner.graph()
        return begin, self.device.stamp()

    def timed(self, count: int, work: Callable[[int], tuple[Any, Any]]) -> float:
        """Microseconds for one among `count`."""
        span = work(count)
        self.meet()
        return self.device.elapsed_us(*span) / count

    def meet(self) -> None:
        """Wait for the device and for all ranks."""
        self.device.synchronise()
        self.context.communicator.barrier(timeout=60)


MEASURES: Final[dict[str, Callable[[Context, Case], dict[str, Any]]]] = {
    "collective": collective,
    "barrier": collective,
    "called": called,
    "gemm": beside_gemms,
    "sweep": sweep,
}
