"""Measurement recorder: provenance, and the JSON-lines files that keep the records.

The scripts in benchmarks/ load this file without the package, so it imports only the standard
library; only `origin` needs the built package.
"""

from __future__ import annotations

import json
import os
import platform
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["append_record", "append_records", "machine", "origin", "timestamp"]


def origin() -> dict[str, Any]:
    """Provenance for the installed package's figures: build, versions, machine, load."""
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
    """This machine's processor, usable cores, memory, largest cache and kernel."""
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
    """Processor model name from /proc/cpuinfo, or its architecture."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Append one record to a JSON-lines file."""
    append_records(path, [record])


def append_records(path: Path, records: list[dict[str, Any]]) -> None:
    """Append records to a JSON-lines file."""
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        length = file.seek(0, os.SEEK_END) if is_file else 0
        if length and not ends_a_line(path):
            lines = b"\n" + lines
        try:
            written = 0
            while written < len(lines):
                written += file.write(lines[written:]) or 0
        except BaseException:
            # A partial line would spoil the file.
            if is_file:
                file.truncate(length)
            raise


def ends_a_line(path: Path) -> bool:
    """True for a file whose last byte is a newline."""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
