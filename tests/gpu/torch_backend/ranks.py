"""Rank processes.

`Ranks` has all ranks run a function in a module beside this one, by name. Functions take the
context on a rank and return values that a test checks; stream and graph functions need a GPU.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch

#: Limit for a function on a busy machine, compilation included.
LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Context:
    """A rank: its number, the rank count, its device, and whether that is a GPU."""

    rank: int
    ranks: int
    device: torch.device
    on_gpu: bool

    def synchronise(self) -> None:
        """Wait for the GPU."""
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()


class Ranks:
    """Processes that wait for functions to run; a failure ends them.

    Args:
        kind: "cuda" for a GPU each, "twin" for the CPU.
        folder: for the store.
        bound: whether the default group is bound to the GPU.
    """

    def __init__(self, kind: str, folder: str, ranks: int = 2, *, bound: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, kind, rank, ranks, os.path.join(folder, "store"), bound)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, name: str, **arguments: Any) -> list[Any]:
        """Results from a function "module.function" on all ranks; errors as AssertionError."""
        self.begin(name, **arguments)
        try:
            replies = [self.receive(rank) for rank in range(len(self.pipes))]
        except Exception:
            self.end()
            raise
        failures = [f"rank {rank}: {each[1]}" for rank, each in enumerate(replies) if each[0]]
        if failures:
            self.end()
            raise AssertionError("\n".join(failures))
        return [each[1] for each in replies]

    def begin(self, name: str, **arguments: Any) -> None:
        """Have all ranks run a function."""
        for pipe in self.pipes:
            pipe.send((name, arguments))

    def receive(self, rank: int) -> Any:
        """A rank's reply."""
        if not self.pipes[rank].poll(LIMIT_SECONDS):
            raise AssertionError(f"rank {rank} did not reply within {LIMIT_SECONDS:g} s")
        try:
            return self.pipes[rank].recv()
        except EOFError:
            self.processes[rank].join(10)
            status = self.processes[rank].exitcode
            raise AssertionError(f"rank {rank} ended with status {status}") from None

    def end(self) -> None:
        """End all ranks, in peace if they reply."""
        for pipe in self.pipes:
            try:
                pipe.send(("", {}))
            except OSError:
                continue
        for process in self.processes:
            process.join(15)
            if process.is_alive():
                process.kill()
                process.join()
        self.processes.clear()

    @property
    def alive(self) -> bool:
        """True until the end."""
        return bool(self.processes)


def serve(pipe: Connection, kind: str, rank: int, ranks: int, store: str, bound: bool) -> None:
    """A rank: runs functions until the request to end."""
    # As programs have it: the tests for ranks on one GPU set another mode.
    os.environ.pop("CUDA_MODULE_LOADING", None)
    # Compilation without separate processes, which are slow to start.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch
    from torch import distributed

    import weft.torch

    on_gpu = kind == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        weft.torch.device.kind = "twin"
        torch.set_num_threads(1)
    distributed.init_process_group(
        "weft",
        store=distributed.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
        device_id=device if bound and on_gpu else None,
    )
    context = Context(rank, ranks, device, on_gpu)
    while True:
        name, arguments = pipe.recv()
        if not name:
            distributed.destroy_process_group()
            return
        try:
            module, _, function = name.partition(".")
            run = getattr(importlib.import_module(f"tests.gpu.torch_backend.{module}"), function)
            pipe.send((False, run(context, **arguments)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
