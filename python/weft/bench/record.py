"""Recorder of measurements: their provenance, and the files of JSON lines that keep them.

The scripts of benchmarks/ load this file without the package, so it imports only the standard
library; `origin` alone needs the built package.
"""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["append_record", "append_records", "machine", "origin", "timestamp"]


def origin() -> dict[str, Any]:
    """Provenance of figures of the installed package: build, versions, machine, load."""
    import numpy as np

    import weft

    build = weft.build_info()
    return {
        "at": timestamp(),
        "weft": build.version,
        "commit": build.commit,
        "profile": build.profile,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": machine() | {"load": os.getloadavg()[0]},
    }


def timestamp() -> str:
    """Current time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine() -> dict[str, Any]:
    """Processor, usable cores, memory, largest cache and kernel of this machine."""
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    kibibytes = [int(path.read_text().strip().removesuffix("K")) for path in caches]
    return {
        "processor": processor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "last_level_cache_mib": max(kibibytes, default=0) >> 10,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
    }


def processor() -> str:
    """Model name of the processor in /proc/cpuinfo, or its architecture."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Append one record to a file of JSON lines."""
    append_records(path, [record])


def append_records(path: Path, records: list[dict[str, Any]]) -> None:
    """Append records to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
