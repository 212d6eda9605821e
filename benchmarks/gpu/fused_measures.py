"""Measure of the benchmark of fused operators: graphs of calls of every side in turn.

A graph makes `calls` calls on inputs and weights in turn. Ranks meet on their streams before a
replay; a time is that of a replay, by events around it, over its calls. Sides alternate in blocks
of replays, each in a random order, and the results of each are compared with the reference before
and after its replays.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import collectives_runner
from fused_data import DATA
from fused_sides import defaults, sides_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from fused_cases import Case
    from fused_context import Context
    from fused_data import Data
    from fused_sides import Calls, Way

__all__ = ["compare"]

#: Most blocks of replays of a side, between which the other sides have theirs.
BLOCKS: Final = 10
#: Most replays of a side.
MOST_REPLAYS: Final = 200
#: Errors after which Weft's objects of this process are unusable.
POISONED: Final = ("WaitTimeoutError", "PeerLostError", "PeerLeftError")


class Runner(collectives_runner.Runner):
    """A side's graph of a case."""

    bound: Calls  # type: ignore[assignment]

    def __init__(self, context: Context, way: Way, case: Case, data: Data) -> None:
        # The bases are those of the benchmark of collectives.
        bases: tuple[Any, ...] = (way, case, data)
        super().__init__(context, *bases)
        self.way, self.references, self.arrange = way, data.references, data.arrange
        self.turn = 0
        self.facts = {"is_whole": way.is_whole, "is_ours": way.ours, "share": 0.0, "digest": None}

    def refill(self) -> None:
        """Make the inputs of the next replay."""
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
            for result in results if self.way.is_whole else ():
                result.fill_(float("nan"))
        self.bound.meet()
        self.graph()
        self.device.synchronise()
        self.side.check()
        # Those of earlier calls may be overwritten.
        self.judge(max(self.references))

    def judge(self, slot: int) -> None:
        """Compare results of a slot with the reference."""
        if not self.way.is_whole:
            return
        results = tuple(self.arrange(result) for result in self.bound.results[slot])
        share = self.references[slot].judge(results)
        # JSON has no infinity.
        self.facts["share"] = max(self.facts["share"], min(share, 1e30))
        words = results[0].contiguous().view(self.device.torch.int16)
        self.facts["digest"] = int(words.sum(dtype=self.device.torch.int64))


def compare(context: Context, case: Case) -> dict[str, Any]:
    """Times and results of every side on this rank, or the reason to leave out the case."""
    if (reason := case.unable(context.ranks, context.free())) is not None:
        return {"skipped": reason, "sides": {}}
    context.under_way(case.name, "")
    data, failure = context.attempt(lambda: DATA[case.computation](context, case))
    if failure is not None or data is None:
        return {"failed": failure and failure.text, "sides": {}}
    found: dict[str, Any] = {}
    ways = sides_of(context, data)
    waiting = admit(context, case, ways, data, found)
    # A GPU's clock depends on the power that the side before took, so that a side must not always
    # follow the same one. Orders are equal on all ranks.
    orders = random.Random(context.agree(random.getrandbits(32))[0])
    blocks = min([BLOCKS, *(total for _, total in waiting)])
    for block in range(blocks):
        for runner, total in orders.sample(waiting, len(waiting)):
            count = (block + 1) * total // blocks - block * total // blocks
            attempt(context, runner, partial(runner.block, count), found)
        waiting = [each for each in waiting if each[0].side.name not in found]
    for runner, _ in waiting:
        attempt(context, runner, runner.judge_replay, found)
        if runner.side.name not in found:
            done = {"status": "ok", "reason": None, "times": runner.times}
            found[runner.side.name] = done | runner.facts
    ordered = {way.name: found[way.name] for way in ways}
    made = {"sides": ordered, "buffers": case.buffers, "calls": case.calls}
    return made | ({"defaults": defaults(data)} if case.kind == "ablation" else {})


def admit(
    context: Context, case: Case, ways: list[Way], data: Data, found: dict[str, Any]
) -> list[tuple[Runner, int]]:
    """Prepare every side that can run; `found` receives status and reason of the others.

    Returns:
        Runners, and their numbers of replays, equal on all ranks.
    """
    runners = []
    excluded: dict[str, str] = context.task["excluded"]
    for way in ways:
        if (reason := way.unable(case)) is not None:  # type: ignore[arg-type]
            found[way.name] = {"status": "skipped", "reason": reason}
            continue
        for key in (f"{case.name}: {way.name}", way.library_name):
            if key in excluded:
                found[way.name] = {"status": "failed", "reason": excluded[key]}
        if way.name in found:
            continue
        runner = Runner(context, way, case, data)
        attempt(context, runner, way.ready, found)
        if way.name in found:
            # A later attempt would fail on some ranks alone.
            excluded[way.library_name or way.name] = found[way.name]["reason"]
            continue
        replay_us = attempt(context, runner, runner.prepare, found)
        if way.name in found:
            continue
        slowest = max(context.agree(replay_us))
        wanted = int(context.task["seconds"] * 1e6 / max(slowest, 1.0))
        # A CPU has no time for many.
        most = MOST_REPLAYS if context.device.kind == "cuda" else case.replays
        runners.append((runner, max(case.replays, min(wanted, most))))
    return runners


def attempt(
    context: Context, runner: Runner, work: Callable[[], Any], found: dict[str, Any]
) -> Any:
    """Run a side's work on all ranks; `found` receives its failure."""
    name = runner.side.name
    context.under_way(runner.case.name, name)
    result, failure = context.attempt(work)
    if failure is None:
        return result
    if any(error in failure.text for error in POISONED):
        # The ranks are started anew without this side.
        raise RuntimeError(f"{name}: {failure.text}")
    status = "skipped" if failure.refused else "failed"
    found[name] = {"status": status, "reason": failure.text}
    return None
