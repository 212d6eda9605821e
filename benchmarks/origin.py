"""Where figures come from: the machine, the commit, and the versions of what was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


@cache
def machine() -> dict[str, Any]:
    """This machine."""
    processor = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    kibibytes = [int(path.read_text().strip().removesuffix("K")) for path in caches]
    return {
        "processor": processor,
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "last_level_cache_mib": max(kibibytes, default=0) >> 10,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
    }


def origin(**versions: str | None) -> dict[str, Any]:
    """What goes with every line of results. `versions`: of what was measured beside Weft."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        # Names what was measured even if the commit is given another name.
        "sources": first_line("git", "rev-parse", "--short=12", "HEAD:crates"),
        "machine": machine(),
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version()} | versions,
    }


def commit() -> str:
    """The commit that is checked out, with `+` if files differ from it."""

    # Results are themselves files that change.
    but_results = ("--", ".", ":!benchmarks/results")
    changed = first_line("git", "status", "--porcelain", "--untracked-files=no", *but_results)
    name = first_line("git", "rev-parse", "--short=12", "HEAD")
    return (name or "unknown") + ("+" if changed else "")


def first_line(*command: str) -> str:
    """The first line that a program prints; empty if it fails or there is no such program."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return (done.stdout.splitlines() or [""])[0].strip()
