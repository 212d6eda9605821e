"""Results from `workers` cases, run in one process that forks their ranks."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests import ROOT


def results(module: str, cases: dict[str, int], *, at_once: int = 3) -> dict[str, list[Any]]:
    """Results from functions in `tests.workers.FOLDER.MODULE` by rank; `cases`: rank counts."""
    arguments = {"module": module, "cases": list(cases.items()), "at_once": at_once}
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.run(
            [sys.executable, "-m", "tests.workers", "backend.forked.run", json.dumps(arguments)],
            cwd=ROOT,
            env=os.environ | {"TEST_RESULTS": directory, "RANK": "0"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        # Stacks from ranks that did not end; shown if a test for these cases fails.
        sys.stderr.write(process.stderr)
        assert process.returncode == 0, process.stderr
        found: dict[str, list[Any]] = json.loads(Path(directory, "0").read_text(encoding="utf-8"))
    return found
