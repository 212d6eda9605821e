"""Fused operators refuse calls whose arguments differ between ranks, under Triton's interpreter."""

import pytest

from tests import ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(330)]

pytest.importorskip("triton")

#: By case: the arguments of ranks 0 and 1 in the error.
DIFFERENCES = {
    "batch": ("embedding_all_to_all[0](batch=3)", "embedding_all_to_all[0](batch=4)"),
    "rows": ("gemm_all_reduce(rows=32,", "gemm_all_reduce(rows=48,"),
    "operator": ("gemm_all_to_all(", "gemm_reduce_scatter("),
    "gathered": ("all_gather_gemm(rows=32,", "all_gather_gemm(rows=48,"),
    "stream_k": ("all_to_all_gemm(rows=16,", "all_to_all_gemm(rows=32,"),
    "tokens": ("gemv_all_reduce(tokens=4,", "gemv_all_reduce(tokens=3,"),
    "residual": ("residual=False", "residual=True"),
    "norm": ("eps=1e-06", "eps=1e-05"),
    "flags": ("all_reduce_rms_norm(rows=4,", "all_reduce_rms_norm(rows=5,"),
}


def test_a_rank_with_other_arguments_is_named() -> None:
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    call = "fused.agreement_calls.differ"
    check(ranks.run(call, 2, environment=environment, timeout=300))


def check(found: list[dict[str, tuple[str, int | None, str]]]) -> None:
    for rank, errors in enumerate(found):
        assert set(errors) == set(DIFFERENCES)
        for case, (kind, other, message) in errors.items():
            assert (kind, other) == ("ConfigurationMismatchError", 1 - rank), (case, message)
            assert DIFFERENCES[case][rank] in message.split(f" at rank {rank}, but ")[0], message
