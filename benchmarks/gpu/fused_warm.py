"""Compiles the fused operator benchmark's kernels, without launching them.

Rank groups, one for each operator, make its cases' calls at the same time, so that all cores
compile. Kernels go to Triton's cache, where the ranks that measure find them; those that are
missing there are compiled later, so a failure has no other effect.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from fused_cases import SYMMETRIC, Case
from fused_context import Context
from fused_data import DATA, Data
from fused_sides import Computed, sides_of
from harness.runner import WITHOUT_MULTICAST
from triton.runtime.jit import JITFunction

import weft
from weft.bench.device.machine import open_device
from weft.bench.group import ENVIRONMENT, task_directory, worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["warm"]

#: Expected time per case, to compile no more than a budget has time for; in seconds.
CASE_SECONDS: Final = 4.0
#: Rows per table: kernels depend on whether 16 divides them.
ROWS: Final = 1600
#: Time in which ranks that are stopped end, in seconds.
GRACE_SECONDS: Final = 5.0


def warm(cases: list[Case], ranks: int, budget: float, seconds: float) -> list[str]:
    """Compile for the cases that a budget has time for; returns the operators that failed.

    Args:
        cases: in run order.
        ranks: rank count.
        budget: measurement budget, in seconds.
        seconds: limit for this call.
    """
    by_operator: dict[str, list[Case]] = {}
    for case in cases[: 1 + int(min(budget / CASE_SECONDS, len(cases)))]:
        by_operator.setdefault(case.operator, []).append(case)
    deadline = time.monotonic() + seconds
    failed = []
    with ExitStack() as stack:
        started = {
            operator: stack.enter_context(group(chosen, ranks))
            for operator, chosen in by_operator.items()
        }
        for operator, process in started.items():
            try:
                if process.wait(max(0.0, deadline - time.monotonic())):
                    failed.append(operator)
            except subprocess.TimeoutExpired:
                failed.append(operator)
    return failed


@contextmanager
def group(cases: list[Case], ranks: int) -> Iterator[subprocess.Popen[bytes]]:
    """Launcher for ranks that compile for some cases; they are stopped at the end."""
    with task_directory({"cases": [case.to_json() for case in cases]}) as directory:
        launcher = [sys.executable, "-m", "weft", "run", "-n", str(ranks), "--grace", "3"]
        process = subprocess.Popen(
            [*launcher, "--", sys.executable, __file__, os.fspath(directory)],
            env=ENVIRONMENT | WITHOUT_MULTICAST | os.environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def compile_only() -> None:
    """Make Triton kernel launches in this process compile the kernels, and end there."""
    launch = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        # The property compiles the host function that launches it.
        assert kernel.run is not None
        return kernel

    JITFunction.run = run


def work(directory: Path, task: dict[str, Any]) -> None:
    """Make every case's calls, as one rank."""
    compile_only()
    with weft.init() as communicator:
        local = int(os.environ.get("WEFT_LOCAL_RANK", communicator.rank))
        device = open_device("cuda", local)
        context = Context(communicator, device, directory, [], task, {})
        for case in map(Case.from_json, task["cases"]):
            if case.computation == "embedding":
                case = replace(case, shape=case.shape | {"rows": ROWS})
            if case.unable(context.ranks, context.free()) is None:
                call(context, case)
        device.synchronise()
        communicator.barrier()


def call(context: Context, case: Case) -> None:
    """Every call to Weft's and Triton's kernels in a case, once."""
    data = DATA[case.computation](context, case, dry=True)
    if case.kind == "stores":
        call_stores(context, case, data)
        return
    if case.is_varied:
        for way in sides_of(context, data):
            # A tiling that does not fit raises.
            with suppress(Exception):
                way.calls().run(0)
        return
    data.fused(0)
    for algorithm in case.algorithms:
        data.fused(0, algorithm=algorithm)
    if case.operator in SYMMETRIC:
        size = case.vector()
        data.fused(0, weft.symmetric_empty(size, context.dtype, device=context.device.place))
    for library in data.computations:
        Computed(context, data, library).calls().run(0)
    if case.kind == "gemv_norm":
        data.finish(0, data.fused(0)[0])
        data.fused(0, fused=None)


def call_stores(context: Context, case: Case, data: Data) -> None:
    """Calls for a store comparison."""
    data.fused(0)
    Computed(context, data, "weft").calls().run(0)
    out = None
    if case.operator in SYMMETRIC:
        out = weft.symmetric_empty(case.vector(), context.dtype, device=context.device.place)
    for fields in ({}, *case.tilings):
        # A tiling that does not fit raises.
        with suppress(Exception):
            data.fused(0, out, tiling=data.tiling()._replace(**fields))


if __name__ == "__main__":
    sys.exit(worker(work))
