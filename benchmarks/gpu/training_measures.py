"""Measure of the benchmark of training: steps of all sides in turn, with their losses or outputs.

A time of a step is that between two events behind steps in a row. A block of a side begins with all
ranks together and a step without a time; then the next side has a block.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol

from training_decode import Decoder, Decoding
from training_steps import Training, batches

if TYPE_CHECKING:
    from collections.abc import Callable

    from training_cases import Case
    from training_context import Context
    from training_sides import Group

__all__ = ["compare"]

#: By kind of case: what all sides share, and the steps of a side with it.
PROGRAMS: Final[dict[str, tuple[Callable[..., Any], Callable[..., Program]]]] = {
    "ddp": (batches, Training),
    "fsdp2": (batches, Training),
    "decode": (Decoder, Decoding),
}


class Program(Protocol):
    """Steps of a side."""

    def step(self) -> None:
        """Enqueue a step."""
        ...

    def facts(self) -> dict[str, Any]:
        """Results to compare, after the last step."""
        ...


class Runner:
    """Blocks of a side."""

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
        """Results of the steps."""
        assert self.program is not None
        return self.program.facts()


def compare(context: Context, case: Case) -> dict[str, Any]:
    """Times and results of every side on this rank, or the reason to skip the case."""
    if (reason := case.unable(context.ranks)) is not None:
        return {"skipped": reason, "sides": {}}
    sides: list[Any] = context.sides[case.kind]
    found: dict[str, Any] = {}
    data, failure = context.attempt(lambda: PROGRAMS[case.kind][0](context, case))
    if failure is not None:
        raise RuntimeError(f"{case.name}: {failure.text}")
    runners = admit(context, case, sides, data, found)
    for block in range(case.blocks):
        # Another side is first in each block.
        first = block % max(len(runners), 1)
        for runner in runners[first:] + runners[:first]:
            attempt(context, runner, runner.block, found)
        runners = [runner for runner in runners if runner.side.name not in found]
    for runner in runners:
        facts = attempt(context, runner, runner.facts, found)
        if facts is not None:
            found[runner.side.name] = {"status": "ok", "reason": None} | facts
            found[runner.side.name]["times"] = runner.times
    return {"sides": {side.name: found[side.name] for side in sides}}


def admit(
    context: Context, case: Case, sides: list[Group], data: Any, found: dict[str, Any]
) -> list[Runner]:
    """Prepare every side that can run; `found` receives the failures of the others."""
    runners = []
    excluded: dict[str, str] = context.task["excluded"]
    for side in sides:
        if (reason := excluded.get(f"{case.name}: {side.name}")) is not None:
            found[side.name] = {"status": "failed", "reason": reason}
            continue
        runner = Runner(context, side, case, data)
        attempt(context, runner, side.ready, found)
        if side.name not in found:
            attempt(context, runner, runner.prepare, found)
        if side.name not in found:
            runners.append(runner)
    return runners


def attempt(
    context: Context, runner: Runner, work: Callable[[], Any], found: dict[str, Any]
) -> Any:
    """Run a side's work from the same time on all ranks; `found` receives its failure."""
    context.under_way(runner.case.name, runner.side.name)
    context.communicator.barrier(timeout=60)
    result, failure = context.attempt(work)
    if failure is None:
        return result
    # Its memory is for the sides that go on.
    runner.program = None
    found[runner.side.name] = {"status": "failed", "reason": failure.text}
    return None
