"""One rank in benchmarks/moe.py: the same tokens through Weft and through gloo, alternately.

The gloo side is a plain expert-parallel layer with `all_to_all_single`: counts, then one token copy
for each of its experts, then each expert's reply. Both results are compared with the error bound in
docs/moe.md.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed

import weft
from weft.base.array import DTYPES
from weft.bench.group import deliver, worker
from weft.bench.moe_worker import error_share, expert_output, make_all_to_all, run_round
from weft.bench.moe_workload import Batch, Router, Workload
from weft.bench.phases import PhaseClock

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

WARM_UP_ROUNDS = 3


def work(directory: Path, task: dict[str, Any]) -> None:
    """Run the workload."""
    workload = Workload(**task["workload"])
    torch.set_num_threads(1)
    with weft.init() as communicator:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=communicator.rank,
            world_size=communicator.world_size,
        )
        deliver(communicator, directory, measure(communicator, workload))
        torch.distributed.destroy_process_group()


def measure(communicator: weft.Communicator, workload: Workload) -> dict[str, Any]:
    """All rounds: nanoseconds by phase and the number of wrong results, by side."""
    router = Router(workload)
    clocks = {"weft": PhaseClock(), "gloo": PhaseClock()}
    wrong = dict.fromkeys(clocks, 0)
    all_to_all = make_all_to_all(communicator, workload)
    for number in range(WARM_UP_ROUNDS + workload.rounds):
        batch = router.batch(communicator.rank, number)
        if number == WARM_UP_ROUNDS:
            clocks = {side: PhaseClock() for side in clocks}
        for turn in range(len(clocks)):
            side = ("weft", "gloo")[(number + turn) % len(clocks)]
            communicator.barrier()
            if side == "weft":
                combined, received = run_round(
                    clocks[side], communicator, all_to_all, batch, workload
                )
                received.release()
            else:
                combined = run_gloo_round(clocks[side], communicator, batch, workload)
            wrong[side] += error_share(combined, batch, workload) > 1
    return {
        "routes": sorted({route for route in communicator.routes() if route is not None}),
        "durations": {side: clock.durations() for side, clock in clocks.items()},
        "wrong": wrong,
    }


def run_gloo_round(
    clock: PhaseClock, communicator: weft.Communicator, batch: Batch, workload: Workload
) -> NDArray[Any]:
    """Combined result from one round over gloo, with the same barriers as `run_round`."""
    ranks = communicator.world_size
    per_rank = workload.experts // ranks
    with clock("dispatch send"):
        experts = batch.ids.reshape(-1)
        order = torch.from_numpy(np.argsort(experts, kind="stable"))
        copies = as_torch(batch.tokens)[order // workload.top_k]
        counts = np.bincount(experts, minlength=workload.experts)
    with clock("dispatch recv"):
        its_counts = torch.empty(workload.experts, dtype=torch.int64)
        torch.distributed.all_to_all_single(its_counts, torch.from_numpy(counts))
        sent = counts.reshape(ranks, per_rank).sum(axis=1).tolist()
        arrived_counts = its_counts.numpy().reshape(ranks, per_rank)
        arrives = arrived_counts.sum(axis=1).tolist()
        arrived = as_numpy(exchange(copies, sent, arrives), workload)
    communicator.barrier()
    with clock("experts"):
        local = communicator.rank * per_rank + np.tile(np.arange(per_rank), ranks)
        expert_of_row = np.repeat(local, arrived_counts.reshape(-1))
        outputs = expert_output(arrived, expert_of_row[:, None], workload)
    communicator.barrier()
    with clock("combine send"):
        replies = exchange(as_torch(outputs), arrives, sent)
    with clock("combine recv"):
        rows = torch.empty_like(replies)
        rows[order] = replies
        shape = (workload.tokens, workload.top_k, workload.hidden)
        weights = torch.from_numpy(batch.weights)[:, :, None]
        combined = (rows.reshape(shape).float() * weights).sum(dim=1).to(rows.dtype)
    return as_numpy(combined, workload)


def exchange(rows: torch.Tensor, sent: list[int], arrives: list[int]) -> torch.Tensor:
    """Rows to all ranks, from all ranks."""
    target = torch.empty((sum(arrives), rows.shape[1]), dtype=rows.dtype)
    torch.distributed.all_to_all_single(target, rows, arrives, sent)
    return target


def as_torch(array: NDArray[Any]) -> torch.Tensor:
    """The same bytes as bfloat16: PyTorch rejects numpy's bfloat16."""
    return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)


def as_numpy(tensor: torch.Tensor, workload: Workload) -> NDArray[Any]:
    """The same bytes."""
    result: NDArray[Any] = tensor.view(torch.uint16).numpy().view(DTYPES[workload.dtype])
    return result


if __name__ == "__main__":
    sys.exit(worker(work))
