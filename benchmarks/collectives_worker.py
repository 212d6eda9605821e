"""One rank in benchmarks/collectives.py: the same calls over Weft and peers, alternately.

Inputs are filled anew before each call and a result is read after it. The floor is the same call's
time on torch's `fake` backend, which moves no data.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

import weft
import weft.torch
from weft.bench.group import deliver, worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WARM_UP = 3
MOST_CALLS = 2000
FLOOR_CALLS = 2000
BLOCKS, BLOCK_CALLS = 41, 100


def work(directory: Path, task: dict[str, Any]) -> None:
    """Run all cases."""
    torch.set_num_threads(1)
    if "back_to_back" in task:
        pin(int(os.environ["WEFT_RANK"]), int(os.environ["WEFT_WORLD_SIZE"]))
    else:
        floor = fake_floor()
    with weft.init() as communicator:
        distributed.init_process_group(
            "weft",
            init_method=f"file://{directory}/store",
            rank=communicator.rank,
            world_size=communicator.world_size,
        )
        groups: dict[str, Any] = {
            "weft": distributed.group.WORLD,
            "gloo": distributed.new_group(backend="gloo"),
        }
        if "back_to_back" in task:
            distributed.barrier()
            deliver(communicator, directory, back_to_back())
            communicator.barrier()
            distributed.destroy_process_group()
            return
        if "deepspeed" in task["sides"]:
            groups["operator"] = weft_all_reduce()
            groups["deepspeed"] = deepspeed_all_reduce(communicator.rank, communicator.world_size)
        cases = [
            measure(communicator, groups, collective, size, task["seconds"])
            for collective in task["collectives"]
            for size in task["sizes"]
        ]
        deliver(communicator, directory, {"floor_us": floor, "cases": cases})
        communicator.barrier()
        distributed.destroy_process_group()


def weft_all_reduce() -> Callable[[torch.Tensor], object]:
    """Weft's in-place all-reduce by its operator, as DeepSpeed's: no Python code per call."""
    operator, group = torch.ops.weft.all_reduce_, distributed.group.WORLD.group_name
    return lambda tensor: operator(tensor, "sum", group)


def deepspeed_all_reduce(rank: int, ranks: int) -> Callable[[torch.Tensor], object]:
    """DeepSpeed's all-reduce over shared memory, in place: `deepspeed.comm.inference_all_reduce`.

    It is built at first use. The operator is called without the checks in `deepspeed.comm`.
    """
    from deepspeed.accelerator import get_accelerator

    library = get_accelerator().create_op_builder("ShareMemCommBuilder").load()
    if library.vector_kernel_level() < 1:
        raise RuntimeError("processor: expected AVX2")
    if ranks > 1:
        library.initialize(ranks, rank)
    operator: Callable[[torch.Tensor], object] = torch.ops.deepspeed.inference_all_reduce_
    return operator


def pin(rank: int, ranks: int) -> None:
    """Give this rank a separate core, if there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def back_to_back() -> dict[str, list[float]]:
    """Microseconds per 4-byte all-reduce, one after another without a barrier: by backend.

    Call blocks over weft and on torch's backend fake alternate, since a shared machine's speed
    changes within seconds.
    """
    from torch.testing._internal.distributed import fake_pg

    assert fake_pg.FakeStore is not None  # this import registers the backend
    groups = {"weft": distributed.group.WORLD, "fake": distributed.new_group(backend="fake")}
    tensor, times = torch.zeros(1), {side: list[float]() for side in groups}
    for block in range(BLOCKS):
        for side, group in groups.items():
            for _ in range(BLOCK_CALLS):
                start = time.perf_counter_ns()
                distributed.all_reduce(tensor, group=group)
                if block > 0:
                    times[side].append((time.perf_counter_ns() - start) / 1000)
    return times


def fake_floor() -> float:
    """Median microseconds for a 4-byte all-reduce on the backend `fake`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    tensor = torch.ones(1)
    times = []
    for _ in range(FLOOR_CALLS):
        start = time.perf_counter_ns()
        distributed.all_reduce(tensor)
        times.append(time.perf_counter_ns() - start)
    distributed.destroy_process_group()
    return sorted(times)[len(times) // 2] / 1000


def measure(
    communicator: weft.Communicator,
    groups: dict[str, Any],
    collective: str,
    size: int,
    seconds: float,
) -> dict[str, Any]:
    """Microseconds by call and the number of wrong results, by side."""
    case = Case(collective, size, communicator.rank, communicator.world_size)
    sides = list(groups)
    calls_of = {side: case.bound(group) for side, group in groups.items()}
    estimates = []
    for _ in range(WARM_UP):
        for side in sides:
            communicator.barrier()
            case.fill(0)
            start = time.perf_counter()
            calls_of[side]()
            estimates.append(time.perf_counter() - start)
    # All ranks make equally many calls.
    slowest = max(float(text) for text in communicator.all_gather(str(max(estimates)).encode()))
    calls = min(MOST_CALLS, max(5, int(seconds / max(slowest, 1e-6) / len(sides))))
    times: dict[str, list[float]] = {side: [] for side in sides}
    wrong = dict.fromkeys(sides, 0)
    for number in range(calls):
        # In random order, the same on all ranks: a call leaves code and data in the caches.
        for side in random.Random(number).sample(sides, len(sides)):
            call = calls_of[side]
            case.fill(number)
            communicator.barrier()
            start = time.perf_counter_ns()
            call()
            times[side].append((time.perf_counter_ns() - start) / 1000)
            wrong[side] += not case.is_right(number)
    return {"collective": collective, "bytes": size, "microseconds": times, "wrong": wrong}


class Case:
    """One collective on float32 vectors, `size` bytes in the larger one among input and output."""

    def __init__(self, collective: str, size: int, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        share = max(size // 4 // ranks, 1)
        whole = (
            share * ranks if collective not in {"all_reduce", "broadcast"} else max(size // 4, 1)
        )
        lengths = {
            "all_reduce": (whole, 0),
            "broadcast": (whole, 0),
            "reduce_scatter": (whole, share),
            "all_gather": (share, whole),
            "all_to_all": (whole, whole),
        }
        inputs, outputs = lengths[collective]
        self.input = torch.zeros(inputs)
        self.output = torch.zeros(outputs) if outputs else self.input
        calls: dict[str, Callable[[Any], object]] = {
            "all_reduce": lambda group: distributed.all_reduce(self.input, group=group),
            "broadcast": lambda group: distributed.broadcast(self.input, 0, group=group),
            "reduce_scatter": lambda group: distributed.reduce_scatter_tensor(
                self.output, self.input, group=group
            ),
            "all_gather": lambda group: distributed.all_gather_into_tensor(
                self.output, self.input, group=group
            ),
            "all_to_all": lambda group: distributed.all_to_all_single(
                self.output, self.input, group=group
            ),
        }
        self.call = calls[collective]
        total = sum(range(ranks))
        #: Expected sum over the ranks' numbers, and `number` terms, for the first and last element.
        self.expected = {
            "all_reduce": ((total, ranks), (total, ranks)),
            "broadcast": ((0, 1), (0, 1)),
            "reduce_scatter": ((total, ranks), (total, ranks)),
            "all_gather": ((0, 1), (ranks - 1, 1)),
            "all_to_all": ((0, 1), (ranks - 1, 1)),
        }[collective]

    def bound(self, group: Any) -> Callable[[], object]:
        """The call on a process group, or by an operator that takes the input."""
        if isinstance(group, distributed.ProcessGroup):
            return lambda: self.call(group)
        return lambda: group(self.input)

    def fill(self, number: int) -> None:
        """Write the input; this also overwrites the previous call's output."""
        self.output.fill_(-1)
        self.input.fill_(self.rank + number % 1000)

    def is_right(self, number: int) -> bool:
        """True if both ends come from this call and no filler is left."""
        ends = (self.output[0].item(), self.output[-1].item())
        right = tuple(ranks + terms * (number % 1000) for ranks, terms in self.expected)
        return ends == right and bool((self.output >= 0).all())


if __name__ == "__main__":
    sys.exit(worker(work))
