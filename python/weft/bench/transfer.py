"""`weft bench transfer`: counted writes between two ranks, through the Python API."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from weft.bench.group import run_group, task_directory

__all__ = ["measure"]

MOST_ROUNDS: Final = 500
FEWEST_ROUNDS: Final = 10
#: Bytes sent each way for each size, about.
BYTES_PER_SIZE: Final = 256 << 20


def measure(
    sizes: list[int], provider: str | None, rounds: int | None, progress: bool
) -> dict[str, Any]:
    """Measure every size.

    Raises:
        GroupError: if a rank failed.
    """
    counts = [
        rounds or min(MOST_ROUNDS, max(FEWEST_ROUNDS, BYTES_PER_SIZE // size)) for size in sizes
    ]
    task = {"sizes": sizes, "rounds": counts, "progress": progress}
    with task_directory(task) as directory:
        first, second = run_group("weft.bench.transfer_worker", 2, directory, provider)
    return {
        "interface": "Python",
        "route": first["route"],
        "provider_details": first["provider_details"],
        "sizes": [
            summarise(mine, theirs["wrong"])
            for mine, theirs in zip(first["sizes"], second["sizes"], strict=True)
        ],
    }


def summarise(found: dict[str, Any], wrong_at_peer: int) -> dict[str, Any]:
    """Figures for one size."""
    # A round trip is two transfers, one after the other.
    p50, p99 = np.percentile(np.array(found["trips_ns"]) / 2, (50, 99))
    copy = float(np.median(found["copies_ns"]))
    return {
        "bytes": found["size"],
        "parts": found["parts"],
        "rounds": len(found["trips_ns"]),
        "one_way_p50_us": float(p50) / 1000,
        "one_way_p99_us": float(p99) / 1000,
        "gb_per_s": float(found["size"] / p50),
        "memcpy_p50_us": copy / 1000,
        "memcpy_gb_per_s": float(found["size"] / copy),
        "wrong": found["wrong"] + wrong_at_peer,
    }
