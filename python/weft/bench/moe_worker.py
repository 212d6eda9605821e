"""One rank in `weft bench moe`: rounds with dispatch, experts and combine, each result checked."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import weft
from weft.base.array import DTYPES
from weft.base.progress import Progress
from weft.bench.group import deliver, worker
from weft.bench.moe_workload import Batch, Router, Workload
from weft.bench.phases import PhaseClock

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

WARM_UP_ROUNDS: Final = 5
TRACE_LIMIT: Final = 1_000_000
#: Unit roundoff and smallest positive number by type.
PRECISION: Final = {
    "float32": (2.0**-24, 2.0**-149),
    "float16": (2.0**-11, 2.0**-24),
    "bfloat16": (2.0**-8, 2.0**-133),
}


def work(directory: Path, task: dict[str, Any]) -> None:
    """Run the workload, after some rounds that do not count."""
    workload = Workload(**task["workload"])
    with weft.init(trace_limit=TRACE_LIMIT if task["trace"] else 0) as communicator:
        if communicator.world_size != workload.ranks:
            raise weft.errors.ConfigurationError(
                f"--ranks is {workload.ranks}, but the launcher started {communicator.world_size}"
            )
        deliver(communicator, directory, measure(communicator, workload, task))


def measure(
    communicator: weft.Communicator, workload: Workload, task: dict[str, Any]
) -> dict[str, Any]:
    """All rounds; what this rank saw."""
    router = Router(workload)
    clock = PhaseClock()
    load = np.zeros((max(len(router.layers), 1), workload.experts), dtype=np.int64)
    rows_sent: list[int] = []
    naive_rows, wrong, largest_share = 0, 0, 0.0
    all_to_all = make_all_to_all(communicator, workload)
    total = WARM_UP_ROUNDS + workload.rounds
    shown = task["progress"] and communicator.rank == 0
    with Progress("rounds", total, enabled=shown) as progress:
        for number in range(total):
            batch = router.batch(communicator.rank, number)
            if number == WARM_UP_ROUNDS:
                clock = PhaseClock()
                communicator.take_trace()
            # Rounds begin together: what ranks do between them does not count in the phases.
            communicator.barrier()
            combined, received = run_round(clock, communicator, all_to_all, batch, workload)
            with received:
                if number >= WARM_UP_ROUNDS:
                    copies, naive = received.copies_sent()
                    rows_sent.append(copies)
                    naive_rows += naive
                    load[router.layer(number)] += received.expert_load
            share = error_share(combined, batch, workload)
            wrong += share > 1
            largest_share = max(largest_share, share)
            progress.advance()
    trace = communicator.take_trace()
    trace.phases.extend(phase for phase in clock.phases if phase.name == "experts")
    return {
        "rows_sent": rows_sent,
        "naive_rows": naive_rows,
        "expert_load": load.tolist(),
        "wrong_rounds": wrong,
        "largest_share_of_bound": largest_share,
        "memory_bytes": all_to_all.memory_bytes,
        "routes": sorted({route for route in communicator.routes() if route is not None}),
        "provider_details": communicator.provider_details(),
        "durations": clock.durations(),
        "trace": trace.to_json() if task["trace"] else None,
    }


def make_all_to_all(communicator: weft.Communicator, workload: Workload) -> weft.moe.AllToAll:
    """All-to-all for the workload."""
    return weft.moe.AllToAll(
        communicator,
        experts=workload.experts,
        top_k=workload.top_k,
        hidden=workload.hidden,
        max_tokens=workload.tokens,
        dtype=workload.dtype,
    )


def run_round(
    clock: PhaseClock,
    communicator: weft.Communicator,
    all_to_all: weft.moe.AllToAll,
    batch: Batch,
    workload: Workload,
) -> tuple[NDArray[Any], weft.moe.Received]:
    """One round: the combined result, and the received round.

    Ranks meet before and after the experts: with fewer cores than ranks, one rank's experts would
    count as another's communication.
    """
    with clock("dispatch send"):
        dispatch = all_to_all.dispatch_send(*batch)
    with clock("dispatch recv"):
        received = dispatch.recv()
    communicator.barrier()
    with clock("experts"):
        outputs = np.empty((received.positions, workload.hidden), DTYPES[workload.dtype])
        for local, expert in enumerate(all_to_all.local_experts):
            begin, count = received.expert_offsets[local], received.expert_counts[local]
            outputs[begin : begin + count] = expert_output(
                received.of_expert(local), np.array(expert), workload
            )
    communicator.barrier()
    with clock("combine send"):
        combine = all_to_all.combine_send(received, outputs)
    with clock("combine recv"):
        combined = combine.recv()
    return combined, received


def expert_output(
    tokens: NDArray[Any], expert: NDArray[np.int64], workload: Workload
) -> NDArray[Any]:
    """Expert outputs: tokens times a factor for each expert, equal on both sides bit for bit."""
    factor = (0.5 + (expert + 1) / workload.experts).astype(np.float32)
    result: NDArray[Any] = (tokens.astype(np.float32) * factor).astype(DTYPES[workload.dtype])
    return result


def error_share(combined: NDArray[Any], batch: Batch, workload: Workload) -> float:
    """Largest error, as a share of the element's error bound in docs/moe.md.

    The reference is the dense sum in float64 over every token's experts.
    """
    exact = np.zeros(combined.shape)
    absolute = np.zeros(combined.shape)
    for slot in range(workload.top_k):
        ids = batch.ids[:, slot, None]
        term = expert_output(batch.tokens, ids, workload).astype(np.float64)
        term *= np.where(ids < 0, 0, batch.weights[:, slot, None].astype(np.float64))
        exact += term
        absolute += np.abs(term)
    count = (batch.ids >= 0).sum(axis=1)[:, None]
    unit32, smallest32 = PRECISION["float32"]
    unit, smallest = PRECISION[workload.dtype]
    bound = absolute * ((1 + unit32) ** count * (1 + unit) ** 2 - 1)
    bound += count * (smallest32 + smallest) + smallest
    return float((np.abs(combined.astype(np.float64) - exact) / bound).max(initial=0.0))


if __name__ == "__main__":
    sys.exit(worker(work))
