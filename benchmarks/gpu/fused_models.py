"""Benchmark of models with the operators of weft.fused on the GPUs of one host.

Decoding with fused all-reduces beside unfused ones, compiled tensor-parallel layers with the pass
of weft.fused on and off, and a ranking model with fused embedding bags. Appends a record of each
case to results/gpu_fused_models.jsonl as it ends. Sides take turns in one run, with equal weights
and inputs, and their results are compared with a reference. A side that fails is recorded as failed
in its case, and the others run. `--device twin` runs tiny shapes on the CPU, with gloo beside Weft,
for tests.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from fused_models_cases import CASES, tiny
from launching import Program
from training import parse, run

RESULTS: Final = Path(__file__).parent.parent / "results" / "gpu_fused_models.jsonl"
#: A side that ends the ranks is left out of that case.
PROGRAM: Final = Program(
    "gpu-fused-models",
    Path(__file__).parent / "fused_models_rank.py",
    lambda case, side: f"{case}: {side}" if side else "",
)


def main() -> int:
    """All cases; 1 if a result was wrong or a case failed."""
    arguments = parse(__doc__, RESULTS, CASES, tiny)
    if arguments.device == "twin":
        os.environ["TRITON_INTERPRET"] = "1"
    return run(arguments, PROGRAM, RESULTS)


if __name__ == "__main__":
    sys.exit(main())
