"""Training over the backend `weft` beside the same training over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]


def test_losses_of_ddp_and_fsdp2_are_those_over_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    lines = tmp_path / "training.jsonl"
    process = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "training.py"), "--ranks", "4"),
            *("--steps", "6", "--results", str(lines)),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    found = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    assert [(line["shape"], line["side"]) for line in found] == [
        (f"{model}, {method}", side)
        for model in ("resnet", "bert")
        for method in ("ddp", "fsdp2")
        for side in ("weft", "gloo")
    ]
    for line in found:
        # Rounding in another summation order, which steps amplify.
        assert line["loss_difference"] < 1e-4
        assert line["last_loss"] < line["first_loss"]
