"""`gemv_all_reduce` and `all_reduce_rms_norm` on GPUs, one process for each rank."""

from typing import Any

import pytest

from tests import ranks
from tests.fused import test_fused_gemv as interpreted

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(400)]

pytest.importorskip("triton")


@pytest.fixture(scope="module", params=[1, 2, 4, 8])
def results(request: pytest.FixtureRequest) -> list[Any]:
    import torch

    # Up to four ranks may share a GPU: each takes millisecond turns.
    if request.param > 4 * torch.cuda.device_count():
        pytest.skip(f"needs {-(-request.param // 4)} GPUs")
    return ranks.run(
        "fused.gemv_calls.calls",
        request.param,
        timeout=390,
        quiet=False,
        cases=48 if request.param == 2 else 4,
        repeats=500 if request.param <= torch.cuda.device_count() else 20,
        seed=request.param,
        device="cuda",
    )


def test_sums_residuals_and_norms_are_those_of_torch(results: list[Any]) -> None:
    interpreted.test_sums_residuals_and_norms_are_those_of_torch(results)
    interpreted.test_the_gemv_without_communication_gives_the_result_of_torch(results)


def test_all_ranks_have_the_same_bits(results: list[Any]) -> None:
    interpreted.test_all_ranks_have_the_same_bits(results)


def test_calls_of_alternating_shapes_repeat_their_bits(results: list[Any]) -> None:
    interpreted.test_calls_of_alternating_shapes_repeat_their_bits(results)


def test_the_program_of_the_page_computes_what_it_says(results: list[Any]) -> None:
    interpreted.test_the_program_of_the_page_computes_what_it_says(results)


def test_shapes_of_serving_give_what_torch_gives(results: list[Any]) -> None:
    for result in results:
        assert len(results) == 1 or result["serving"] == []


def test_replays_of_a_graph_between_eager_calls_repeat_their_bits(results: list[Any]) -> None:
    for result in results:
        assert len(results) == 1 or result["graph"] == []


def test_invalid_arguments_are_rejected_by_name(results: list[Any]) -> None:
    interpreted.test_invalid_arguments_are_rejected_by_name(results)


@pytest.mark.parametrize("operator", ["gemv_all_reduce", "packets", "flags"])
def test_a_rank_that_does_not_call_is_named(operator: str) -> None:
    found = ranks.run(
        "fused.gemv_calls.missing", 2, timeout=100, quiet=False, operator=operator, device="cuda"
    )
    interpreted.check_missing(*found)
