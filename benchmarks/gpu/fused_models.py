"""Models with weft.fused operators on one host's GPUs.

Decoding with fused all-reduces beside unfused ones, compiled tensor-parallel layers with the
weft.fused pass on and off, and a ranking model with fused embedding bags. Appends a record for each
case to results/gpu_fused_models.jsonl as it ends. Sides take turns in one run, with equal weights
and inputs, and the results are compared with a reference. A side that fails is recorded as failed
in that case, and the others run. `--device twin` runs tiny shapes on the CPU, with gloo beside
Weft, for tests.
"""

from __future__ import annotations

import sys
from typing import Final

from fused_models_cases import CASES, tiny
from harness.runner import main
from training import STEPS, parsed

PROGRAM: Final = STEPS("gpu-fused-models", interprets=True)


if __name__ == "__main__":
    sys.exit(main(PROGRAM, parsed(__doc__, PROGRAM, CASES, tiny)))
