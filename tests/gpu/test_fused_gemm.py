"""`weft.fused` GEMMs with collectives on GPUs, one process for each rank."""

from typing import Any

import pytest

from tests import ranks
from tests.fused import test_fused_gemm as interpreted

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(400)]

pytest.importorskip("triton")


@pytest.fixture(scope="module", params=[(1, 3), (2, 16), (4, 3), (8, 2)])
def results(request: pytest.FixtureRequest) -> list[Any]:
    import torch

    count, cases = request.param
    # Up to four ranks may share a GPU: each takes millisecond turns.
    if count > 4 * torch.cuda.device_count():
        pytest.skip(f"needs {-(-count // 4)} GPUs")
    return ranks.run(
        "fused.gemm_calls.calls",
        count,
        timeout=380,
        quiet=False,
        cases=cases,
        repeats=10,
        device="cuda",
    )


def test_all_calls_are_right(results: list[Any]) -> None:
    interpreted.test_random_calls_give_the_results_of_torch(results)
    interpreted.test_an_all_reduce_has_the_same_bits_on_all_ranks(results)
    interpreted.test_large_and_tiny_calls_in_turn_reuse_the_inbox(results)
    interpreted.test_a_gemm_and_a_collective_give_the_same_results(results)
    interpreted.test_the_gemm_without_communication_gives_the_result_of_torch(results)
    interpreted.test_the_gathered_rows_are_those_of_all_ranks(results)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_gemms_of_float8_are_right(count: int) -> None:
    import torch

    if count > torch.cuda.device_count():
        pytest.skip(f"needs {count} GPUs")
    found = ranks.run("fused.gemm_calls.scaled", count, timeout=300, quiet=False, device="cuda")
    for result in found:
        assert result["scaled"] == []


def test_replays_of_graphs_use_new_values(results: list[Any]) -> None:
    for result in results:
        assert result["graph"] == [True] * len(interpreted.OPERATORS)


def test_calls_on_two_streams_come_in_one_order(results: list[Any]) -> None:
    for result in results:
        assert result["streams"] == [True] * len(interpreted.OPERATORS)


@pytest.mark.parametrize("count", [2, 4])
def test_bulk_and_paced_stores_give_the_same_results(count: int) -> None:
    import torch

    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    found = ranks.run(
        "fused.gemm_stores.compare", count, timeout=200, quiet=False, cases=8, device="cuda"
    )
    interpreted.check_stores(found, 8, has_bulk=count == 2)


def test_a_large_exchange_by_default_has_the_bits_of_plain_stores(results: list[Any]) -> None:
    for result in results:
        assert result["exchange"]


@pytest.mark.parametrize("operator", ["gemm_all_reduce", "all_gather_gemm"])
def test_a_rank_that_does_not_call_is_named(operator: str) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    found = ranks.run(
        "fused.gemm_calls.missing", 2, timeout=120, quiet=False, operator=operator, device="cuda"
    )
    interpreted.check_missing(*found)


def test_paced_stores_leave_a_rank_alone_that_does_not_call() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    options: Any = {"operator": "gemm_all_to_all", "device": "cuda", "is_paced": True}
    found = ranks.run("fused.gemm_calls.missing", 2, timeout=120, quiet=False, **options)
    interpreted.check_missing(*found)
    assert found[1]["unchanged"]
