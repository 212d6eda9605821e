"""Collective kernels compiled ahead of time. Needs no GPU."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


@pytest.fixture
def compile_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    if importlib.util.find_spec("nvidia") is None:
        pytest.skip("needs NVRTC, which PyTorch for CUDA brings")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    from weft import cuda

    return cuda.compile_collectives


def test_programs_are_compiled_once_for_each_shape(
    compile_collectives: Any, tmp_path: Path
) -> None:
    import torch

    # Averages use the sum kernels; two further programs are without arithmetic.
    given = {"ops": ["sum", "avg"], "dtypes": [torch.bfloat16], "num_sms": 4}
    assert compile_collectives(2, **given) == (3, 0)
    cubins = {path.name for path in tmp_path.glob("*.cubin")}
    assert len(cubins) == 3
    assert compile_collectives(2, **given) == (0, 3)
    assert compile_collectives(2, ops=[], num_sms=5) == (2, 0)
    assert {path.name for path in tmp_path.glob("*.cubin")} > cubins


def test_what_does_not_fit_is_refused(compile_collectives: Any, tmp_path: Path) -> None:
    import torch

    from weft.errors import ConfigurationError, WeftError

    for ranks in (0, 65):
        with pytest.raises(ConfigurationError, match=f"ranks {ranks}: expected 1 to 64"):
            compile_collectives(ranks)
    with pytest.raises(ConfigurationError, match="and of bfloat16"):
        compile_collectives(2, ops=["and"])
    with pytest.raises(WeftError, match="gpu-architecture"):
        compile_collectives(2, arch="sm_1", ops=[])
    assert not list(tmp_path.glob("*.cubin"))
    assert torch.cuda.is_initialized() is False
