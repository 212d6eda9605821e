"""Fused operator traces, under Triton's interpreter."""

from pathlib import Path
from typing import Any

import pytest

from tests import ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

pytest.importorskip("triton")

COUNT = 2
#: Spans that each has on every rank.
OPERATORS = {
    "gemv_all_reduce": {"compute", "send", "wait", "finish"},
    "gemv_all_reduce with norm": {"compute", "send", "wait", "finish"},
    "gemm_reduce_scatter": {"compute", "send", "wait", "finish"},
    "gemm_all_reduce": {"compute", "send", "wait", "finish"},
    "all_gather_gemm": {"compute", "send", "wait"},
    "embedding_all_to_all": {"compute", "send", "wait"},
}


def test_traced_calls_have_equal_results_and_spans(tmp_path: Path) -> None:
    found = ranks.run(
        "fused.tracing_calls.traced",
        COUNT,
        environment={"TRITON_INTERPRET": "1"},
        timeout=150,
        folder=str(tmp_path),
    )
    check(found, COUNT)
    assert {path.stem for path in tmp_path.glob("*.json")} == set(OPERATORS)


def check(found: list[dict[str, Any]], count: int) -> None:
    for result in found:
        assert set(result) == set(OPERATORS)
        for name, each in result.items():
            assert each["equal"], name
            assert set(each["spans"]) == OPERATORS[name], name
            assert each["ranks"] == list(range(count)), name
            assert each["dropped"] == 0, name
            assert each["end"] > 0, name


def test_other_tensors_and_devices_are_rejected() -> None:
    import torch

    import weft.errors
    import weft.fused
    import weft.triton
    from weft.fused.tracing import current_trace

    with (
        pytest.raises(weft.errors.ShapeError, match="trace_empty"),
        weft.fused.tracing(torch.zeros(4, 4, 3)),
    ):
        pass
    cpu = torch.device("cpu")
    assert current_trace(cpu) is None
    one, other = (weft.triton.trace_empty(1, 1, device="cpu") for _ in range(2))
    with weft.fused.tracing(one):
        with weft.fused.tracing(other):
            assert current_trace(cpu) is other
        assert current_trace(cpu) is one
        with pytest.raises(weft.errors.ConfigurationError, match="trace on cpu"):
            current_trace(torch.device("cuda", 0))
    assert current_trace(cpu) is None
