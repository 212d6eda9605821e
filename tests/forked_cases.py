"""Results of cases of `workers`, run in one process that forks their ranks."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def results(module: str, cases: dict[str, int], *, at_once: int = 3) -> dict[str, list[Any]]:
    """Results of the functions of `workers.MODULE` by rank; `cases`: their numbers of ranks."""
    arguments = {"module": module, "cases": list(cases.items()), "at_once": at_once}
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.run(
            [sys.executable, "-m", "workers", "forked.run", json.dumps(arguments)],
            cwd=Path(__file__).parent,
            env=os.environ | {"TEST_RESULTS": directory, "RANK": "0"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        # Stacks of ranks that did not end; shown if a test of these cases fails.
        sys.stderr.write(process.stderr)
        assert process.returncode == 0, process.stderr
        found: dict[str, list[Any]] = json.loads(Path(directory, "0").read_text(encoding="utf-8"))
    return found
