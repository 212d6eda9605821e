"""`weft bench transfer`: counted writes between two ranks, through the Python API."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from weft.bench.group import run_group, task_directory

__all__ = ["DEVICES", "Workload", "measure", "provider_on"]

MOST_ROUNDS: Final = 500
FEWEST_ROUNDS: Final = 10
#: Bytes sent each way for each size, about.
BYTES_PER_SIZE: Final = 256 << 20
#: Memory kinds for sources and destinations.
DEVICES: Final = ("cpu", "cuda", "twin")
#: Providers whose links reach memory on a device; verbs and ofi do where their NICs reach a GPU.
REACHING: Final = {
    "cuda": ("copy", "verbs", "ofi"),
    "twin": ("copy-twin",),
}


class Workload(NamedTuple):
    """Transfers to measure.

    Attributes:
        sizes: bytes per page.
        pages: pages in each write, at scattered places; 0 for a write of one contiguous range.
        device: kind of memory for sources and destinations.
        rounds: round trips per size; by default chosen by size.
    """

    sizes: list[int]
    pages: int = 0
    device: str = "cpu"
    rounds: int | None = None


def provider_on(device: str, provider: str | None) -> str | None:
    """Provider for memory on a device: copy by default, and its twin for a twin."""
    if device == "cpu":
        return provider
    chosen = provider or "copy"
    if chosen.startswith("copy"):
        chosen = "copy" if device == "cuda" else "copy-twin"
    return chosen


def measure(workload: Workload, provider: str | None, progress: bool) -> dict[str, Any]:
    """Measure every size.

    Raises:
        GroupError: if a rank failed.
    """
    sizes, pages, device, rounds = workload
    totals = [size * (pages or 1) for size in sizes]
    counts = [
        rounds or min(MOST_ROUNDS, max(FEWEST_ROUNDS, BYTES_PER_SIZE // total)) for total in totals
    ]
    task = {
        "sizes": sizes,
        "rounds": counts,
        "progress": progress,
        "pages": pages,
        "device": device,
    }
    is_staged = device != "cpu" and provider not in REACHING[device]
    environment = {"WEFT_STAGED": "1" if device == "cuda" else "twin"} if is_staged else {}
    with task_directory(task) as directory:
        first, second = run_group("weft.bench.transfer_worker", 2, directory, provider, environment)
    memory = {} if device == "cpu" else {"device": device, "staged": is_staged}
    return {
        "interface": "Python",
        "route": first["route"],
        **memory,
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
    pages = found["pages"]
    listed = {"pages": pages, "page_bytes": found["size"] // pages} if pages else {}
    return {
        "bytes": found["size"],
        **listed,
        "parts": found["parts"],
        "rounds": len(found["trips_ns"]),
        "one_way_p50_us": float(p50) / 1000,
        "one_way_p99_us": float(p99) / 1000,
        "gb_per_s": float(found["size"] / p50),
        "memcpy_p50_us": copy / 1000,
        "memcpy_gb_per_s": float(found["size"] / copy),
        "wrong": found["wrong"] + wrong_at_peer,
    }
