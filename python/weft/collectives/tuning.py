"""The `weft tune` file: path, text for the native module, and new entries."""

from __future__ import annotations

import json
import logging
import os
import platform
from pathlib import Path
from typing import Any, Final

from weft.base import cache
from weft.base.environment import path
from weft.base.files import read_bytes, read_text

__all__ = ["FORMAT", "add_entry", "machine_name", "named_file", "source", "text_of", "tuning_file"]

VARIABLE: Final = "WEFT_TUNING"
#: File name in the cache.
NAME: Final = "tuning.json"
#: Value for the key `format`, as crates/collectives/src/tuning/file.rs declares it.
FORMAT: Final = "weft-tuning-1"

logger = logging.getLogger("weft.tuner")


def named_file() -> Path | None:
    """The file that `WEFT_TUNING` names; None if it is the one in Weft's cache."""
    return path(VARIABLE)


def tuning_file() -> Path:
    """The file named by `WEFT_TUNING`, else `tuning.json` in Weft's cache."""
    return named_file() or cache.place(NAME)


def source() -> tuple[str, str, str] | None:
    """File name, file text and machine name; None without a file.

    The native module checks the text.
    """
    file = named_file()
    if file is None:
        found = cache.read(NAME)
        return found and (str(found[0]), found[1], machine_name())
    try:
        return str(file), read_bytes(file).decode(errors="replace"), machine_name()
    except OSError as error:
        logger.warning("%s: %s; algorithms are selected by rules", VARIABLE, error)
        return None


def machine_name() -> str:
    """Processor name, and how many cores this process may use."""
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
    """File text with these entries."""
    return json.dumps({"format": FORMAT, "entries": entries}, indent=1) + "\n"


def add_entry(file: Path | None, entry: dict[str, Any]) -> Path:
    """Write an entry to a file and replace any entry for the same group, or a damaged file.

    Args:
        file: path; None for the one in the cache.
        entry: as docs/tuning.md describes it.

    Returns:
        The path that was written.

    Raises:
        OSError: if it cannot be written.
    """
    if file is None:
        found = cache.read(NAME)
        return cache.write(NAME, merged(found[1] if found else "", entry))
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError):
        text = ""
    file.parent.mkdir(parents=True, exist_ok=True)
    return cache.keep(file, merged(text, entry))


def merged(text: str, entry: dict[str, Any]) -> bytes:
    """File text with this entry added."""
    key = ("provider", "ranks", "machine")
    kept = [old for old in entries(text) if any(old.get(name) != entry[name] for name in key)]
    return text_of([*kept, entry]).encode()


def entries(text: str) -> list[dict[str, Any]]:
    """Entries in a file's text; none if it is damaged."""
    try:
        found = json.loads(text)
    # RecursionError: brackets nested deeper than any entry's.
    except (ValueError, RecursionError):
        return []
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return []
    listed = found.get("entries")
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
