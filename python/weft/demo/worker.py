"""One rank in the demonstration: routes a share of the images, runs its experts on what arrives."""

from __future__ import annotations

import sys
from base64 import b64encode
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import weft
from weft.base.progress import Progress
from weft.bench.group import deliver, worker
from weft.bench.phases import PhaseClock
from weft.demo.model import EXPERTS, HIDDEN, TOP_K, Model

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

MODEL: Final = "model.npz"
#: Rounds at the end whose records are all traced.
TRACED_ROUNDS: Final = 50
TRACE_LIMIT: Final = 1_000_000


def save_model(directory: Path, model: Model, images: NDArray[np.float32]) -> None:
    """Leave the model and the held-out images for the workers."""
    np.savez(directory / MODEL, *model, images=images)


def work(directory: Path, task: dict[str, Any]) -> None:
    """Classify the images `passes` times, in rounds with `batch` images per rank."""
    with np.load(directory / MODEL) as file:
        model = Model(*(file[f"arr_{index}"] for index in range(len(Model._fields))))
        images = file["images"]
    with weft.init(trace_limit=TRACE_LIMIT) as communicator:
        result = classify(communicator, model, images, task)
        deliver(communicator, directory, result)


def classify(
    communicator: weft.Communicator,
    model: Model,
    images: NDArray[np.float32],
    task: dict[str, Any],
) -> dict[str, Any]:
    """All passes; what this rank saw."""
    batch: int = task["batch"]
    starts = range(0, len(images), batch * communicator.world_size)
    rounds = task["passes"] * len(starts)
    clock = PhaseClock()
    logits, load = [], np.zeros(EXPERTS, dtype=np.int64)
    rows_sent = naive_rows = 0
    all_to_all = weft.moe.AllToAll(
        communicator, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=batch
    )
    communicator.barrier()
    shown = task["progress"] and communicator.rank == 0
    with Progress("rounds", rounds, enabled=shown) as progress:
        for number in range(rounds):
            if number == rounds - TRACED_ROUNDS:
                communicator.take_trace()
            begin = starts[number % len(starts)] + communicator.rank * batch
            mine = images[begin : begin + batch]
            ids, weights = model.route(mine)
            with clock("dispatch send"):
                dispatch = all_to_all.dispatch_send(mine, ids, weights)
            with clock("dispatch recv"):
                received = dispatch.recv()
            with received:
                with clock("experts"):
                    outputs = run_experts(model, all_to_all, received)
                with clock("combine send"):
                    combine = all_to_all.combine_send(received, outputs)
                with clock("combine recv"):
                    mixed = combine.recv()
                copies, naive = received.copies_sent()
                load += received.expert_load
            rows_sent, naive_rows = rows_sent + copies, naive_rows + naive
            logits.append(model.logits(mixed))
            progress.advance()
    trace = communicator.take_trace()
    # The other phases are in the trace already.
    experts = [phase for phase in clock.phases if phase.name == "experts"]
    trace.phases.extend(experts[-TRACED_ROUNDS:])
    return {
        "rounds": rounds,
        # All passes, one after the other; in each, this rank's images in order.
        "logits": b64encode(np.concatenate(logits).astype("<f4").tobytes()).decode(),
        "rows_sent": rows_sent,
        "naive_rows": naive_rows,
        "wire_bytes": sum(peer.bytes for peer in communicator.statistics()),
        "expert_load": load.tolist(),
        "routes": sorted({route for route in communicator.routes() if route is not None}),
        "provider_details": communicator.provider_details(),
        "durations": clock.durations(),
        "trace": trace.to_json(),
    }


def run_experts(
    model: Model, all_to_all: weft.moe.AllToAll, received: weft.moe.Received
) -> NDArray[np.float32]:
    """Outputs from this rank's experts, a row for each position."""
    outputs = np.empty((received.positions, HIDDEN), dtype=np.float32)
    for local, expert in enumerate(all_to_all.local_experts):
        begin, count = received.expert_offsets[local], received.expert_counts[local]
        outputs[begin : begin + count] = model.expert(expert, received.of_expert(local))
    return outputs


if __name__ == "__main__":
    sys.exit(worker(work))
