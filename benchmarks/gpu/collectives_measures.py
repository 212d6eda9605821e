"""Measures of the benchmark of device collectives, by kind of case.

A collective is timed in CUDA graphs: one graph of each side makes `calls` calls on buffers in turn.
Before each replay the inputs are written anew, and the ranks meet on their streams; a time is that
of a replay, by events around it, over its calls. The sides alternate in blocks of replays.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from collectives_runner import admit
from collectives_sides import swept

if TYPE_CHECKING:
    from collections.abc import Callable

    from collectives_cases import Case
    from collectives_context import Context
    from collectives_runner import Runner
    from collectives_sides import Side

__all__ = ["MEASURES"]

OK: Final[dict[str, Any]] = {"status": "ok", "reason": None}
#: Blocks of replays of a side, between which the other sides have theirs.
BLOCKS: Final = 4
#: Most replays of a side.
MOST_REPLAYS: Final = 200
#: Calls without a graph: enqueued in a row, and with a wait after each.
CALLED: Final = 100
SINGLE: Final = 50
REPEATS: Final = 5
#: Rows and columns of the matrices beside a collective, and products and replays timed as a whole.
GEMM: Final = 8192
PRODUCTS: Final = 20
REPLAYS: Final = 5
#: Multiprocessors that products leave free, in the measurement with a carve-out.
CARVED: Final = 32


def collective(context: Context, case: Case) -> dict[str, Any]:
    """All sides of an operation."""
    key = case.operation if case.operation in context.sides else "other"
    return compare(context, case, context.sides[key])


def compare(context: Context, case: Case, sides: list[Side]) -> dict[str, Any]:
    """Sides in turn; times and checks by side."""
    found: dict[str, Any] = {}
    runners = []
    for runner, replay_us in admit(context, case, sides, found):
        wanted = int(context.task["seconds"] * 1e6 / max(replay_us, 1.0))
        # The twin's replays are few: a CPU runs them.
        most = MOST_REPLAYS if context.device.kind == "cuda" else case.replays
        runners.append((runner, max(case.replays, min(wanted, most))))
    for block in range(BLOCKS):
        for runner, total in runners:
            context.under_way(case.name, runner.side.name)
            runner.block((block + 1) * total // BLOCKS - block * total // BLOCKS)
            # Before the next side writes to buffers that both may share.
            if block == BLOCKS - 1:
                runner.judge_replay()
                found[runner.side.name] = OK | {"times": runner.times} | runner.facts
    return report(context, case, found, sides)


def report(
    context: Context, case: Case, found: dict[str, Any], sides: list[Side], **more: Any
) -> dict[str, Any]:
    """Result of a rank, with sides in their order."""
    ordered = {side.name: found[side.name] for side in sides}
    return {"sides": ordered, "buffers": case.buffers, "calls": case.calls} | more


def sweep(context: Context, case: Case) -> dict[str, Any]:
    """Weft at every number of multiprocessors, beside its own choice."""
    return compare(context, case, swept(context, case))


def weft_and_nccl(context: Context) -> list[Side]:
    """The sides of measurements beyond graphs."""
    names = ("weft", "weft symmetric", "nccl")
    return [side for side in context.sides["all_reduce"] if side.name in names]


def called(context: Context, case: Case) -> dict[str, Any]:
    """All-reduces without a graph: time of the host for a call, and of calls with their device."""
    found: dict[str, Any] = {}
    sides = weft_and_nccl(context)
    for runner, _ in admit(context, case, sides, found):
        context.under_way(case.name, runner.side.name)
        found[runner.side.name] = OK | runner.facts | called_times(context, runner)
    return report(context, case, found, sides)


def called_times(context: Context, runner: Runner) -> dict[str, Any]:
    """Microseconds of the host a call, of calls in a row, and of a call with a wait."""
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


def beside_products(context: Context, case: Case) -> dict[str, Any]:
    """All-reduces beside matrix products on another stream; each is timed inside of the other."""
    found: dict[str, Any] = {}
    products, sides = Products(context), weft_and_nccl(context)
    for runner, _ in admit(context, case, sides, found):
        context.under_way(case.name, runner.side.name)
        phases: dict[str, list[float]] = {}
        for prefix, carved in (("", 0), ("carveout ", CARVED)):
            for name, values in products.beside(runner, case.replays, carved).items():
                phases[prefix + name] = values
        times = phases.pop("with gemm")
        found[runner.side.name] = OK | runner.facts | {"times": times, "phases": phases}
    return report(context, case, found, sides, gemm=GEMM, carved=CARVED)


class Products:
    """Matrix products in bfloat16 on a stream of their own."""

    def __init__(self, context: Context) -> None:
        self.context, self.device = context, context.device
        torch = self.torch = context.device.torch
        self.left, self.right = (
            torch.randn((GEMM, GEMM), device=self.device.name).bfloat16() for _ in range(2)
        )
        self.out = torch.empty_like(self.left)
        self.stream = torch.cuda.Stream()

    def beside(self, runner: Runner, repeats: int, carved: int) -> dict[str, list[float]]:
        """Times of both, alone and together, in microseconds a call and a product."""
        cuda: Any = __import__("weft.cuda", fromlist=["sm_carveout"])
        times: dict[str, list[float]] = {}
        with cuda.sm_carveout(carved) if carved else nullcontext():
            self.multiply(PRODUCTS)
            self.reduce(runner, REPLAYS)
            self.meet()
            for _ in range(repeats):
                for name, value in self.once(runner).items():
                    times.setdefault(name, []).append(value)
        return times

    def once(self, runner: Runner) -> dict[str, float]:
        """Each alone, then each while the other lasts three times as long."""
        product = self.timed(PRODUCTS, self.multiply)
        alone = self.timed(REPLAYS, lambda count: self.reduce(runner, count))
        needed = 3 * PRODUCTS * product / alone, 3 * REPLAYS * alone / product
        longer = max(self.context.agree(int(max(needed)) + 1))
        self.reduce(runner, longer)
        beside = self.timed(PRODUCTS, self.multiply)
        self.multiply(longer)
        together = self.timed(REPLAYS, lambda count: self.reduce(runner, count))
        calls = runner.case.calls
        return {
            "alone": alone / calls,
            "with gemm": together / calls,
            "gemm alone": product,
            "gemm with calls": beside,
        }

    def multiply(self, count: int) -> tuple[Any, Any]:
        """Enqueue products."""
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
        """Microseconds of one of `count`."""
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
    "gemm": beside_products,
    "sweep": sweep,
}
