"""Transformers package layers, distributed over ranks: only rounding differs."""

import importlib.util
import re
import subprocess
import sys

import pytest

from tests import ROOT

EXAMPLE = ROOT / "examples" / "use_as_layer.py"
#: Timeout for processes that import PyTorch and transformers, on a busy machine.
SECONDS = 150


@pytest.mark.torch
@pytest.mark.timeout(SECONDS + 10)
@pytest.mark.parametrize("ranks", [1, 2])
def test_spread_experts_give_what_one_process_gives(ranks: int) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers, which is not installed: pip install 'weft[layer]'")
    weft = [sys.executable, "-m", "weft", "run", "-n", str(ranks), "--"]
    result = subprocess.run(
        [*weft, sys.executable, str(EXAMPLE), "--device", "twin"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    shown = re.findall(
        r"(\S+) on (\d) ranks?: differs by (\S+); the bound is (\S+)$", result.stdout, re.M
    )
    assert [(name, int(count)) for name, count, *_ in shown] == [
        ("Qwen3-MoE", ranks),
        ("DeepSeek-V3", ranks),
    ]
    for *_, difference, bound in shown:
        assert float(difference) <= float(bound)
        # That bound is for the worst case; a token at a wrong expert differs by far more than this.
        assert float(difference) < 1e-3
