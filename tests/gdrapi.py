"""Stand-in for libgdrapi over host memory."""

import platform
import subprocess
from pathlib import Path

import pytest

from tests import ROOT


def stand_in(folder: Path, failing: str = "") -> tuple[dict[str, str], Path]:
    """Variables that name a compiled stand-in, and the log of calls; `failing`: a function."""
    if platform.machine() != "x86_64":
        pytest.skip("words are mapped only on x86-64")
    library, log = folder / "libgdrapi.so.2", folder / "calls"
    source = ROOT / "crates/cuda/tests/common/gdrapi.c"
    macros = [f'-DLOG="{log}"', f'-DFAIL="{failing}"']
    subprocess.run(["cc", "-shared", "-fPIC", *macros, "-o", library, source], check=True)
    return {"WEFT_LIBGDRAPI": str(library), "WEFT_LOG": "weft_gpu=info"}, log
