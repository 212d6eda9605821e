"""Training and decoding on one host's GPUs: Weft beside NCCL.

The steps use DistributedDataParallel and FSDP2, and tensor-parallel layers in CUDA graphs, also
with torch's one-shot all-reduce. Appends a record for each case to results/gpu_training.jsonl as it
ends. Sides take turns in one run, with equal weights and batches, and losses or outputs are
compared. A side that fails is recorded as failed in that case, and the others run. `--device twin`
runs tiny shapes on the CPU, with gloo beside Weft, for tests.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from harness.cases import named, options, parse
from harness.runner import Program, main, show_sides
from training_cases import CASES, tiny

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence


def parsed(
    description: str,
    program: Program,
    cases: Sequence[Any],
    shrink: Callable[[list[Any]], list[Any]],
) -> argparse.Namespace:
    """A step benchmark's options, with the cases as `chosen`.

    Args:
        description: program docstring.
        program: the benchmark.
        cases: all cases.
        shrink: replaces some cases by small ones.
    """
    example = ",".join(dict.fromkeys(case.name.split(" ")[0] for case in cases[:4]))
    about = f"cases by name or first words, as `{example}` (default: all)"
    parser = options(description, program.results, about)
    parser.add_argument("--tiny", action="store_true", help="small shapes, as on the twin")

    def choose(arguments: argparse.Namespace) -> Sequence[Any]:
        return cases if arguments.cases is None else named(arguments.cases, cases)

    return parse(parser, choose, shrink)


def cell(side: dict[str, Any]) -> str | None:
    """A side's median and p99 in milliseconds, or the status."""
    if side.get("status") != "ok":
        return side.get("status")
    time = side["time"]
    return f"{time['slowest_p50_us'] / 1000:.3f} / {time['slowest_p99_us'] / 1000:.3f}"


#: Steps on all sides, as `fused_models` has them too.
STEPS: Final = partial(
    Program,
    unit="ms a step, median / p99 at the slowest rank",
    tables=lambda records: show_sides(records, cell),
)
PROGRAM: Final = STEPS("gpu-training")


if __name__ == "__main__":
    sys.exit(main(PROGRAM, parsed(__doc__, PROGRAM, CASES, tiny)))
