"""GEMMs on another stream at the same time: slowdown of both."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from weft.bench.device.rounds import Bank, Found, Rounds

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft.bench.device.cases import Case
    from weft.bench.device.context import Context
    from weft.bench.device.rig import Rig

__all__ = ["beside_gemms"]

#: Matrix rows and columns, and number of measurements.
SIZE: Final = 8192
REPEATS: Final = 5
#: GEMMs, and replays, that are timed as a whole.
GEMMS: Final = 20
REPLAYS: Final = 10


def beside_gemms(context: Context, case: Case) -> dict[str, Any]:
    """Rounds beside cuBLAS GEMMs on all SMs, and on the SMs that rounds leave."""
    rig = context.rig(case)
    if context.device.kind == "twin":
        rig.close()
        return {"skipped": "the twin has no streams"}
    found = Pair(context, rig, case).measure()
    rig.close()
    return found


class Pair:
    """Graphs: rounds on the current stream, GEMMs on another."""

    def __init__(self, context: Context, rig: Rig, case: Case) -> None:
        self.context, self.device, self.torch = context, context.device, context.device.torch
        self.sms = rig.facts()["num_sms"]
        bank = Bank(rig, case.slots)
        self.align, self.graph, self.found = Rounds(bank, count=1), Rounds(bank), Found(rig, bank)
        shape = (SIZE, SIZE)
        self.left, self.right = (
            self.torch.randn(shape, device=self.device.name).bfloat16() for _ in range(2)
        )
        self.out = self.torch.empty_like(self.left)
        self.stream = self.torch.cuda.Stream()

    def measure(self) -> dict[str, Any]:
        """GEMMs on all SMs, and on the SMs that a Weft launch does not take."""
        from weft.cuda import sm_carveout

        for prefix, limit in (("", nullcontext()), ("carveout ", sm_carveout(self.sms))):
            with limit:
                self._gemms(GEMMS)
                self._replays(REPLAYS)
                self._meet()
                times: dict[str, list[float]] = {}
                for _ in range(REPEATS):
                    for name, value in self._once().items():
                        times.setdefault(name, []).append(value)
            self.found.add(prefix, times, int(self.graph.wrong()))
        return self.found.result() | {"gemm": SIZE}

    def _once(self) -> dict[str, float]:
        gemms, replays = self._gemms, self._replays
        alone_gemm = self._timed(GEMMS, gemms)
        alone = self._timed(REPLAYS, replays)
        # Each is measured while the other lasts longer: three times what it would take without it.
        needed = 3 * GEMMS * alone_gemm / alone, 3 * REPLAYS * alone / alone_gemm
        text = str(int(max(needed)) + 1).encode()
        gathered = self.context.communicator.all_gather(text, timeout=60)
        longer = max(int(each) for each in gathered)
        replays(longer)
        gemm_beside = self._timed(GEMMS, gemms)
        gemms(longer)
        beside = self._timed(REPLAYS, replays)
        rounds = len(self.graph.slots)
        return {
            "alone": alone / rounds,
            "with gemm": beside / rounds,
            "gemm alone": alone_gemm,
            "gemm with rounds": gemm_beside,
        }

    def _gemms(self, count: int) -> tuple[Any, Any]:
        with self.torch.cuda.stream(self.stream):
            begin = self.device.stamp()
            for _ in range(count):
                self.torch.mm(self.left, self.right, out=self.out)
            return begin, self.device.stamp()

    def _replays(self, count: int) -> tuple[Any, Any]:
        self.align.replay()
        begin = self.device.stamp()
        for _ in range(count):
            self.graph.replay()
        return begin, self.device.stamp()

    def _timed(self, count: int, work: Callable[[int], tuple[Any, Any]]) -> float:
        span = work(count)
        self._meet()
        return self.device.elapsed_us(*span) / count

    def _meet(self) -> None:
        self.device.synchronise()
        self.context.communicator.barrier(timeout=60)
