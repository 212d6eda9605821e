"""Small rounds of every kind, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitise.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitise.py

Each phase ends on all ranks before the next begins, so kernels never wait for each other: their
speed and concurrency are irrelevant. Outputs are compared as well.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any


def main() -> int:
    """Exit status: 0 if outputs are correct, 1 if not, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "twin"], default="cuda")
    parser.add_argument("--fused", action="store_true", help="the fused launches too, on one rank")
    parser.add_argument(
        "--path", choices=["packets", "latency", "bandwidth"], help="only this path"
    )
    arguments = parser.parse_args()
    import torch

    from tests.gpu.case import Chance, Shape
    from tests.gpu.compare import differences
    from tests.gpu.reference import Reference
    from tests.gpu.side import Side

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("needs a GPU: torch.cuda is not available", file=sys.stderr)
        return 2
    base = Shape(ranks=3, experts=7, top_k=3, hidden=272, max_tokens=8)
    cast: dict[str, Any] = {"wire_dtype": "float8_e4m3fn", "scales": ("float32", 32)}
    given: dict[str, Any] = {"token_dtype": "float8_e5m2", "scales": ("float8_e8m0fnu", 64)}
    shapes = [replace(base, path=path) for path in ("packets", "latency", "bandwidth")]
    shapes += [replace(each, **cast, pad_to=8) for each in shapes[:3]]
    shapes += [replace(each, **given, layout="padded", ids_dtype="int32") for each in shapes[:3]]
    shapes += [
        replace(base, layout="indexed", path=path, max_tokens=70)
        for path in ("latency", "bandwidth")
    ]
    shapes += [
        replace(base, layout="dense", weighting="expert", path=path, max_tokens=70, **cast)
        for path in ("latency", "bandwidth")
    ]
    shapes += [
        replace(base, ranks=1, max_positions=12, path=path) for path in ("packets", "bandwidth")
    ]
    shapes = [each for each in shapes if arguments.path in (None, each.path)]
    wrong = 0
    for number, shape in enumerate(shapes):
        # Minutes: kernels are slow under the sanitizer.
        side = Side(shape, arguments.device, skew_timeout=600.0, num_sms=4)
        chance = Chance(number)
        modes = ["apart", "apart"]
        if arguments.fused and shape.ranks == 1:
            modes.append("fused")
        for mode in modes:
            batches = chance.batches(shape, side.positions)
            expected = Reference(shape, side.positions).run(batches)
            for rank, pair in enumerate(zip(side.run(batches, 0, mode), expected, strict=True)):  # type: ignore[arg-type]
                for difference in differences(*pair):
                    wrong += 1
                    print(f"{shape}, rank {rank}: {difference}")
        side.close()
        print(f"{number + 1} of {len(shapes)} shapes", flush=True)
    return int(wrong != 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
