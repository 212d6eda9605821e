"""Cases in torch.distributed whose ranks are forked from one process that has imported torch."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from tests import stacks
from weft.torch import build

if TYPE_CHECKING:
    from collections.abc import Callable

#: A case's limit, on a busy machine.
LIMIT_SECONDS = 60.0
CONTEXT = multiprocessing.get_context("fork")


class Place(NamedTuple):
    """A rank in a case; all ranks share a directory."""

    rank: int
    ranks: int
    directory: str

    def store(self, name: str = "store") -> Any:
        """The store with this name that all ranks share."""
        return distributed.FileStore(os.path.join(self.directory, name), self.ranks)

    def join(self, timeout: float = 30.0, backend: str = "weft", **options: Any) -> None:
        """Make the default process group."""
        distributed.init_process_group(
            backend,
            store=self.store(),
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=timeout),
            **options,
        )


def message(call: Callable[[], Any]) -> str:
    """A call error's type and first line; "none" if it returns."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "none"


def rank(pipe: Connection, case: Callable[[Place], Any], place: Place) -> None:
    """Run a case on one rank and send its result."""
    torch.set_num_threads(1)
    # The process that forked it shows its stacks before.
    faulthandler.dump_traceback_later(2 * LIMIT_SECONDS, exit=True)
    stacks.arm(place.directory, place.rank)
    try:
        pipe.send(case(place))
    except BaseException as error:
        if stacks.is_late(error):
            sys.stderr.write(stacks.shared(place.directory))
        pipe.send("".join(traceback.format_exception(error)))
        raise


def received(pipe: Connection, directory: str) -> Any:
    if not wait([pipe], LIMIT_SECONDS):
        sys.stderr.write(stacks.shared(directory))
        return "no result in time"
    try:
        return pipe.recv()
    except EOFError:
        return "the rank ended without a result"


def run(module: str, cases: list[tuple[str, int]], at_once: int) -> dict[str, list[Any]]:
    """Results from functions in a module by rank; `cases`: their rank counts."""
    build.load()
    functions = importlib.import_module(f"tests.workers.{module}")
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for first in range(0, len(cases), at_once):
            started = []
            for name, ranks in cases[first : first + at_once]:
                place = Path(directory, name)
                place.mkdir()
                started.append((name, start(getattr(functions, name), ranks, str(place))))
            for name, processes in started:
                place = Path(directory, name)
                found[name] = [received(pipe, str(place)) for _, pipe in processes]
                for process, _ in processes:
                    process.join(LIMIT_SECONDS)
                    process.kill()
    return found


def start(case: Callable[[Place], Any], ranks: int, directory: str) -> list[Any]:
    processes = []
    for each in range(ranks):
        ours, theirs = CONTEXT.Pipe()
        arguments = (theirs, case, Place(each, ranks, directory))
        process = CONTEXT.Process(target=rank, args=arguments)
        process.start()
        theirs.close()
        processes.append((process, ours))
    return processes
