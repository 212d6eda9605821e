#!/usr/bin/env python3
"""Query dispatch to a model on a GPU: query rates when the node or the model copies inputs.

    benchmarks/gpu/queries.py [--device cuda:0] [--sizes 1024,150528] [--provider shm]
        [--rounds 5] [--budget SECONDS]

runs a front end and accelerator nodes in this process, and prints a JSON line for each size:
queries per second, the median over rounds in which the sides take turns. The model adds up each
query's bytes on the GPU.

- node: `Accelerator(device=...)`, whose inputs are on the GPU
- model: inputs in host memory, which the model copies by `.to(device)`; its answers by `.cpu()`
- no work: the node's inputs on the GPU, and answers without work of the model
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any, Final

#: Queries that a front end sends again and again.
QUERIES: Final = 2048
#: Side names.
SIDES: Final = ("node", "model", "no work")
#: Most bytes in these queries.
MOST_BYTES: Final = 256 << 20


def main() -> int:
    """Measure all sizes."""
    options = parsed()
    # The input arrays are read-only; the models write none.
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    for size in map(int, options.sizes.split(",")):
        record = about(options) | measured(size, options)
        print(json.dumps(record), flush=True)
        if options.record is not None:
            from weft.bench.record import append_record, origin

            append_record(options.record, record | {"origin": origin()})
        if not record["correct"]:
            return 1
    return 0


def parsed() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", help="device (default %(default)s)")
    parser.add_argument("--sizes", default="1024,150528", help="bytes per query, with commas")
    parser.add_argument("--provider", choices=("shm", "ofi", "tcp"), default="shm", help="provider")
    parser.add_argument("--slots", type=int, default=1024, help="queries in flight (default 1024)")
    parser.add_argument("--max-batch", type=int, default=64, help="queries per batch (default 64)")
    parser.add_argument("--window", type=float, default=0.0, help="seconds for which a batch waits")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per side (default 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per round (default 1)")
    parser.add_argument(
        "--budget", type=float, help="seconds for all rounds, which are shortened to fit"
    )
    parser.add_argument("--record", type=Path, help="JSON-lines file to append to")
    options = parser.parse_args()
    if options.budget is not None:
        if options.budget <= 0:
            parser.error(f"--budget {options.budget}: expected more than 0 seconds")
        rounds = len(options.sizes.split(",")) * options.rounds * len(SIDES)
        # Half the budget is for starts and checks.
        options.seconds = min(options.seconds, options.budget / (2 * rounds))
    return options


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Device and options, for records."""
    import torch

    device = torch.device(options.device)
    return {
        "benchmark": "gpu-queries",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "provider": options.provider,
        "slots": options.slots,
        "max_batch": options.max_batch,
        "window_us": round(options.window * 1e6),
        "seconds": options.seconds,
        "torch": torch.__version__,
    }


def measured(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """The sides' rates for queries with `size` bytes."""
    import numpy as np

    from weft.qdl import Accelerator, Tensor, ask

    count = max(64, min(QUERIES, MOST_BYTES // size))
    random = np.random.default_rng(1)
    samples = random.integers(0, 256, (count, size), np.uint8)
    queries = [[sample] for sample in samples]
    expected = samples.sum(axis=1, dtype=np.int64).tolist()
    inputs, outputs = [Tensor("sample", "uint8", (size,))], [Tensor("sum", "int64", (1,))]
    rates: dict[str, list[float]] = {}
    correct = True
    with contextlib.ExitStack() as stack:
        nodes = {}
        for name, (model, device) in sides(options.device).items():
            node = Accelerator(
                model,
                inputs=inputs,
                outputs=outputs,
                provider=options.provider,
                slots=options.slots,
                max_batch=options.max_batch,
                window=options.window,
                device=device,
            )
            nodes[name] = stack.enter_context(node)
        for turn in range(options.rounds + 1):
            for name, node in nodes.items():
                found = ask(
                    [node.address],
                    queries,
                    provider=options.provider,
                    slots=options.slots,
                    repeat=options.seconds if turn else 0.0,
                )
                if turn:
                    rates.setdefault(name, []).append(found.rate)
                elif name != "no work":
                    sums = [int.from_bytes(each[0], "little") for each in found.answers if each]
                    correct &= sums == expected
                correct &= found.failed == 0
    return {
        "case": f"{size} B",
        "bytes": size,
        "correct": correct,
        "queries_per_second": {
            name: round(statistics.median(each), 1) for name, each in rates.items()
        },
        "rounds": {name: [round(rate, 1) for rate in each] for name, each in rates.items()},
    }


def sides(device: str) -> dict[str, tuple[Any, str | None]]:
    """Each side's model and node device."""
    import torch

    def sums(batch: Any) -> Any:
        return batch.sum(dim=1, dtype=torch.int64, keepdim=True)

    def copied(batch: Any) -> Any:
        return sums(torch.from_numpy(batch).to(device)).cpu().numpy()

    answers = torch.zeros((1 << 16, 1), dtype=torch.int64, device=device)
    ways = ((sums, device), (copied, None), (lambda batch: answers[: len(batch)], device))
    return dict(zip(SIDES, ways, strict=True))


if __name__ == "__main__":
    sys.exit(main())
