"""Small collectives of every kind and algorithm, and messages, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitise_collectives.py

Two ranks on two GPUs in this process. Results are compared with a reference as well.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path


def main() -> int:
    """Exit status: 0 if results are correct, 2 without GPUs. A wrong result raises."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "twin"], default="cuda")
    parser.add_argument("--seeds", type=int, default=8, help="groups of 40 calls")
    parser.add_argument("--elements", type=int, default=20_000, help="of the longest input")
    arguments = parser.parse_args()
    import torch

    from tests.gpu.collective_calls import DIRECT, EXCHANGES, Group, calls_of
    from tests.gpu.collective_messages import drawn, verify

    if arguments.device == "cuda" and torch.cuda.device_count() < 2:
        print(f"needs two GPUs: {torch.cuda.device_count()} visible", file=sys.stderr)
        return 2
    # Minutes: kernels are slow under the sanitizer.
    group = Group(arguments.device, 2, skew_timeout=600.0, num_sms=4)
    counts: dict[str, int] = {}
    exchanges = 0
    for seed in range(arguments.seeds):
        calls = [
            call
            for call in calls_of(1000 + seed, 2, 40, allocate=True)
            if call.rows * call.width <= 2 * arguments.elements
        ]
        for call in calls:
            # One program for each family and element width.
            if call.name in ("all_reduce", "reduce_scatter", "reduce"):
                call.dtype, call.op = ("bfloat16", "sum") if seed % 2 else ("int32", "max")
            if call.name in DIRECT and call.name in EXCHANGES and call.splits is None:
                # Half by copy engines.
                exchanges += 1
                if exchanges % 2:
                    call.symmetric, call.mixed, call.options = True, False, {"copy_engine": True}
                    if call.name == "scatter" or call.mode == "new":
                        call.mode = "out"
            copies = "copy engine" if call.options.get("copy_engine") else "default"
            name = str(call.options.get("algorithm", copies))
            counts[name] = counts.get(name, 0) + 1
        group.verify(calls, seed)
        chance = random.Random(seed)
        rounds = [drawn(group.members, chance, arguments.elements) for _ in range(10)]
        counts["messages"] = counts.get("messages", 0) + verify(group, rounds)
        print(f"{seed + 1} of {arguments.seeds} groups", flush=True)
    group.close()
    print("correct:", ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
