"""Where figures come from, and the files that keep them."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import weft

__all__ = ["append_record", "origin"]


def origin() -> dict[str, Any]:
    """The machine and the versions that figures were measured with."""
    build = weft.build_info()
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "weft": build.version,
        "commit": build.commit,
        "profile": build.profile,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": {
            "processor": processor(),
            "architecture": platform.machine(),
            "kernel": platform.release(),
            "cores": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],
        },
    }


def processor() -> str:
    """The name that the kernel knows the processor by."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Append a line of JSON to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
