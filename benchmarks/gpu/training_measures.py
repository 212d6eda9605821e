"""Measure for the training benchmark: all sides' steps in turn, with losses or outputs.

A step time is between two events behind steps in a row. A side's block begins with all ranks
together and an untimed step; then the next side has a block.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol

import harness.measure
from training_decode import Decoder, Decoding
from training_steps import Training, batches

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.context import Context, Failure
    from training_cases import Case
    from training_sides import Group

__all__ = ["compare"]

#: By case kind: what all sides share, and a side's steps with it.
PROGRAMS: Final[dict[str, tuple[Callable[..., Any], Callable[..., Program]]]] = {
    "ddp": (batches, Training),
    "fsdp2": (batches, Training),
    "decode": (Decoder, Decoding),
}


class Program(Protocol):
    """A side's steps."""

    def step(self) -> None:
        """Enqueue a step."""
        ...

    def facts(self) -> dict[str, Any]:
        """Results to compare, after the last step."""
        ...


class Runner:
    """A side's blocks."""

    def __init__(self, context: Context, side: Group, case: Case, data: Any) -> None:
        self.context, self.side, self.case, self.data = context, side, case, data
        self.program: Program | None = None
        self.times: list[float] = []

    def prepare(self) -> None:
        """Make the steps, and run those before the measurement."""
        self.program = PROGRAMS[self.case.kind][1](self.context, self.case, self.side, self.data)
        for _ in range(self.case.checked):
            self.program.step()
        self.context.device.synchronise()
        self.side.check()

    def block(self) -> None:
        """Timed steps in a row."""
        assert self.program is not None
        device = self.context.device
        self.program.step()
        stamps = [device.stamp()]
        for _ in range(self.case.steps):
            self.program.step()
            stamps.append(device.stamp())
        device.synchronise()
        self.side.check()
        self.times += [device.elapsed_us(*span) for span in pairwise(stamps)]

    def facts(self) -> dict[str, Any]:
        """Step results."""
        assert self.program is not None
        return self.program.facts()


def compare(context: Context, case: Case) -> dict[str, Any]:
    """Times and results for every side on this rank, or the reason to skip the case."""
    if (reason := case.unable(context.ranks)) is not None:
        return {"skipped": reason, "sides": {}}
    data, failure = context.attempt(lambda: PROGRAMS[case.kind][0](context, case))
    if failure is not None:
        raise RuntimeError(f"{case.name}: {failure.text}")
    turns = Turns(context, case, context.sides[case.kind])
    admitted = turns.admit(lambda side: Runner(context, side, case, data))
    runners = [runner for runner, _ in admitted]
    for block in range(case.blocks):
        # Another side is first in each block.
        first = block % max(len(runners), 1)
        for runner in runners[first:] + runners[:first]:
            turns.attempt(runner.side, runner.block)
            if runner.side.name in turns.found:
                # Frees memory for the sides that go on.
                runner.program = None
        runners = [runner for runner in runners if runner.side.name not in turns.found]
    for runner in runners:
        facts = turns.attempt(runner.side, runner.facts)
        if facts is not None:
            turns.done(runner.side, **facts, times=runner.times)
    return turns.result()


class Turns(harness.measure.Turns):
    """A case's sides in turn, each from the same time on all ranks."""

    def unable(self, side: Any) -> str | None:
        """All sides take part."""
        return None

    def begin(self, side: Any) -> None:
        """Record the side in progress, and wait for all ranks."""
        super().begin(side)
        self.context.communicator.barrier(timeout=60)

    def failed(self, side: Any, failure: Failure) -> None:
        """Leave a side out."""
        self.leave(side, "failed", failure.text)
