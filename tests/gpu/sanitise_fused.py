r"""Fused kernel calls with few programs, for compute-sanitizer, which is slow.

    weft run -n 2 -- compute-sanitizer --tool memcheck python tests/gpu/sanitise_fused.py
    weft run -n 2 -- compute-sanitizer --tool racecheck \
        python tests/gpu/sanitise_fused.py --kernels gemv

Results are compared with references as well. Embedding bags: `tests.workers.fused.embedding_calls`.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    """Exit status: 0 if results are correct, 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", choices=["gemm", "gemv"], help="default: all")
    parser.add_argument("--device", choices=["cuda", "twin"], default="cuda")
    arguments = parser.parse_args()
    import weft
    import weft.fused

    # Minutes: a peer may be in its compiler, or under a slower sanitizer.
    weft.fused.set_timeout(600)
    with weft.init() as communicator:
        wrong = []
        for name in [arguments.kernels] if arguments.kernels else ["gemm", "gemv"]:
            checked = {"gemm": gemms, "gemv": gemvs}[name]
            wrong += checked(communicator, arguments.device)
            communicator.barrier()
        weft.check()
        communicator.barrier()
        print(f"rank {communicator.rank}:", "; ".join(wrong) or "correct", flush=True)
    return 1 if wrong else 0


def gemms(communicator: Any, device: str) -> list[str]:
    """Calls of each GEMM with a collective, in both main loops, two times; wrong ones."""
    import torch

    from tests.workers.fused import gemm_calls as calls

    place = calls.Place(communicator, device)
    large, few = (calls.LARGE, calls.FEW_ROWS) if device == "cuda" else (calls.SMALL, calls.STREAM)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    common = {"dtype": dtype, "transposed": False, "symmetric": False, "wide": False}
    common |= {"sizes": (256, 192, 512) if device == "cuda" else (32, 24, 64), "num_sms": 2}
    cases = [
        common | {"operator": operator, "tiling": tiling}
        for operator in calls.OPERATORS
        for tiling in (large, few)
    ]
    # One program, so that it has further tiles behind each step's one; 20 main loop steps.
    paced = common | {"tiling": large._replace(paced_stores=True), "num_sms": 1}
    paced["sizes"] = (256, 1280, 512) if device == "cuda" else (32, 320, 64)
    cases += [paced | {"operator": operator} for operator in calls.OPERATORS[:3]]
    found = [calls.run_case(place, case, seed) for seed, case in enumerate(cases) for _ in (1, 2)]
    return [text for right, text, _ in found if not right]


def gemvs(communicator: Any, device: str) -> list[str]:
    """Calls in each kind of `gemv_all_reduce` and `all_reduce_rms_norm`; failed checks."""
    from tests.workers.fused import gemv_calls as calls

    place = calls.Place(communicator, device)
    generator, wrong = random.Random(1), []
    count = len(calls.GPU_GEMVS) if place.on_gpu else 4
    for index in range(count):
        options = calls.random_gemv(place, generator, index)
        wrong += calls.check_gemv(place, index, options)[0]
    for index in range(len(calls.GPU_NORMS)):
        options = calls.random_norm(place, generator, index)
        if options["rows"] > 16:
            options["rows"] = 16
        wrong += calls.check_norm(place, index, options)[0]
    return wrong


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
