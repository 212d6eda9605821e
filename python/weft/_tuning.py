"""The file of `weft tune`: its place, its text for the native module, and new entries."""

from __future__ import annotations

import json
import logging
import os
import platform
from pathlib import Path
from typing import Any, Final

from weft._cache import cache_directory

__all__ = ["FORMAT", "add_entry", "machine_name", "source", "text_of", "tuning_file"]

VARIABLE: Final = "WEFT_TUNING"
#: Value of the key `format`, as crates/collectives/src/tuning/file.rs declares it.
FORMAT: Final = "weft-tuning-1"

logger = logging.getLogger("weft.tuner")


def tuning_file() -> Path:
    """The file named by `WEFT_TUNING`, else `tuning.json` in Weft's cache directory."""
    named = os.environ.get(VARIABLE, "").strip()
    return Path(named) if named else cache_directory() / "tuning.json"


def source() -> tuple[str, str, str] | None:
    """Name and text of the file, and the name of this machine; None without a file.

    The native module checks the text.
    """
    file = tuning_file()
    try:
        return str(file), file.read_text(encoding="utf-8", errors="replace"), machine_name()
    except OSError as error:
        if os.environ.get(VARIABLE, "").strip():
            logger.warning("%s: %s; algorithms are selected by rules", VARIABLE, error)
        return None


def machine_name() -> str:
    """Processor, and number of its cores that this process may use."""
    name = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def text_of(entries: list[dict[str, Any]]) -> str:
    """Text of a file with these entries."""
    return json.dumps({"format": FORMAT, "entries": entries}, indent=1) + "\n"


def add_entry(file: Path, entry: dict[str, Any]) -> None:
    """Write an entry to a file, in place of one for the same group; a damaged file is replaced."""
    key = ("provider", "ranks", "machine")
    kept = [old for old in read(file) if any(old.get(name) != entry[name] for name in key)]
    file.parent.mkdir(parents=True, exist_ok=True)
    # A reader finds the old file or the new one.
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    fresh.write_text(text_of([*kept, entry]), encoding="utf-8")
    fresh.replace(file)


def read(file: Path) -> list[dict[str, Any]]:
    """Entries of a file; none if it is missing or damaged."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return []
    listed = found.get("entries")
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
