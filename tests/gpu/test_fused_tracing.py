"""Fused operator traces on GPUs; keeps files for Perfetto and pictures in WEFT_TIMELINES."""

import os
from pathlib import Path

import pytest

from tests import ranks
from tests.fused import test_fused_tracing as interpreted

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(300)]

pytest.importorskip("triton")


@pytest.mark.parametrize("count", [2, 4])
def test_traced_calls_have_equal_results_and_spans(count: int, tmp_path: Path) -> None:
    import torch

    if count > max(2, torch.cuda.device_count()):
        pytest.skip(f"needs {count} GPUs")
    folder = Path(os.environ.get("WEFT_TIMELINES", tmp_path)) / f"{count}-ranks"
    folder.mkdir(parents=True, exist_ok=True)
    found = ranks.run(
        "fused.tracing_calls.traced",
        count,
        timeout=290,
        quiet=False,
        folder=str(folder.absolute()),
        device="cuda",
    )
    interpreted.check(found, count)
    for name, each in found[0].items():
        print(name, each)
