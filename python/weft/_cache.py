"""Directory of files that Weft makes and reads again."""

import os
from pathlib import Path

__all__ = ["cache_directory"]


def cache_directory() -> Path:
    """Directory as docs/environment.md describes it."""
    if named := os.environ.get("WEFT_CACHE_DIR"):
        return Path(named)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(shared) if Path(shared).is_absolute() else Path.home() / ".cache") / "weft"
