"""Measure for the fused operator benchmark: every side's call graphs in turn.

Sides alternate in replay blocks, each in a random order, and each side's results are compared with
the reference before and after its replays.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import harness.measure
from fused_data import DATA
from fused_sides import defaults, sides_of
from harness.measure import Graph, is_poisoned, portion, replays

if TYPE_CHECKING:
    from fused_cases import Case
    from fused_context import Context
    from fused_data import Data
    from fused_sides import Way
    from harness.context import Failure

__all__ = ["compare"]

#: Most replay blocks per side, between which the other sides have theirs.
BLOCKS: Final = 10


def compare(context: Context, case: Case) -> dict[str, Any]:
    """Times and results for every side on this rank, or the reason to leave out the case."""
    if (reason := case.unable(context.ranks, context.free())) is not None:
        return {"skipped": reason, "sides": {}}
    context.under_way(case.name, "")
    data, failure = context.attempt(lambda: DATA[case.computation](context, case))
    if failure is not None or data is None:
        return {"failed": failure and failure.text, "sides": {}}
    turns = Turns(context, case, sides_of(context, data))
    admitted = turns.admit(lambda way: Runner(context, way, case, data))
    waiting = [(runner, replays(context, case, replay_us)) for runner, replay_us in admitted]
    # A GPU's clock depends on the power that the side before took, so that a side must not always
    # follow the same one. Orders are equal on all ranks.
    orders = random.Random(context.agree(random.getrandbits(32))[0])
    blocks = min([BLOCKS, *(total for _, total in waiting)])
    for block in range(blocks):
        for runner, total in orders.sample(waiting, len(waiting)):
            turns.attempt(runner.side, partial(runner.block, portion(total, block, blocks)))
        waiting = [each for each in waiting if each[0].side.name not in turns.found]
    for runner, _ in waiting:
        turns.attempt(runner.side, runner.judge_replay)
        if runner.side.name not in turns.found:
            turns.done(runner.side, times=runner.times, **runner.facts)
    made = turns.result(buffers=case.buffers, calls=case.calls)
    return made | ({"defaults": defaults(data)} if case.kind == "ablation" else {})


class Turns(harness.measure.Turns):
    """A case's sides in turn; some share a library."""

    def library(self, side: Way) -> str:
        """A library that cannot be set up is left out in all cases."""
        return side.library_name

    def failed(self, side: Way, failure: Failure) -> None:
        """Leave a side out, or raise: the ranks are started anew without it."""
        if is_poisoned(failure.text):
            raise RuntimeError(f"{side.name}: {failure.text}")
        super().failed(side, failure)


class Runner(Graph):
    """A side's graph for a case."""

    def __init__(self, context: Context, way: Way, case: Case, data: Data) -> None:
        super().__init__(context, way, case)
        self.references, self.arrange = data.references, data.arrange
        self.turn = 0
        self.facts = {"is_whole": way.is_whole, "is_ours": way.ours, "share": 0.0, "digest": None}

    def refill(self) -> None:
        """Make the next replay's inputs."""
        self.bound.refill(self.turn)
        self.turn += 1

    def judge_calls(self) -> None:
        """Calls on the first and on the last slot, compared with the reference."""
        self.turn = 0
        self.refill()
        for slot in self.references:
            self.bound.call(slot)
            self.judge(slot)

    def judge_replay(self) -> None:
        """A replay over results that are NaN before, compared with the reference."""
        self.turn = 0
        self.refill()
        for results in self.bound.results.values():
            for result in results if self.side.is_whole else ():
                result.fill_(float("nan"))
        self.bound.meet()
        self.graph()
        self.device.synchronise()
        self.side.check()
        # Results from earlier calls may be overwritten.
        self.judge(max(self.references))

    def judge(self, slot: int) -> None:
        """Compare a slot's results with the reference."""
        if not self.side.is_whole:
            return
        results = tuple(self.arrange(result) for result in self.bound.results[slot])
        share = self.references[slot].judge(results)
        # JSON has no infinity.
        self.facts["share"] = max(self.facts["share"], min(share, 1e30))
        words = results[0].contiguous().view(self.device.torch.int16)
        self.facts["digest"] = int(words.sum(dtype=self.device.torch.int64))
