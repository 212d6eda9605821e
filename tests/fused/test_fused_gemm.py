"""`weft.fused` GEMMs with collectives, under Triton's interpreter."""

from typing import Any

import pytest

from tests import ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

pytest.importorskip("triton")

OPERATORS = (
    "gemm_all_to_all",
    "gemm_reduce_scatter",
    "gemm_all_reduce",
    "all_gather_gemm",
    "all_to_all_gemm",
)


def run(worker: str, count: int, module: str = "fused.gemm_calls", **arguments: Any) -> list[Any]:
    environment = {"TRITON_INTERPRET": "1"}
    call = f"{module}.{worker}"
    return ranks.run(call, count, environment=environment, timeout=150, **arguments)


@pytest.fixture(
    scope="module", params=[(1, 5), (2, 20), pytest.param((4, 5), marks=pytest.mark.long)]
)
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    count, cases = request.param
    return run("calls", count, cases=cases, repeats=4 if count == 2 else 2)


def test_random_calls_give_the_results_of_torch(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["wrong"] == []


def test_an_all_reduce_has_the_same_bits_on_all_ranks(results: list[dict[str, Any]]) -> None:
    assert results[0]["digests"]
    for result in results:
        assert result["digests"] == results[0]["digests"]


def test_large_and_tiny_calls_in_turn_reuse_the_inbox(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["alternating"] == [True] * len(OPERATORS)


def test_the_gathered_rows_are_those_of_all_ranks(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["gathered"]


def test_a_gemm_and_a_collective_give_the_same_results(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["unfused"] == []


def test_the_gemm_without_communication_gives_the_result_of_torch(
    results: list[dict[str, Any]],
) -> None:
    assert results[0]["alone"] == []


def test_arguments_that_do_not_fit_are_refused_before_the_launch(
    results: list[dict[str, Any]],
) -> None:
    if len(results) == 1:
        return
    for found in (result["refused"] for result in results):
        assert [name for name, _ in found] == [
            *("ShapeError", "ShapeError", "ConfigurationError", "ConfigurationError"),
            *("ShapeError", "ShapeError", "ShapeError", "ShapeError"),
            *("ConfigurationError", "ConfigurationError", "ConfigurationError"),
            *("ConfigurationError", "ConfigurationError"),
        ]
        assert found[11][1] == (
            "weft.fused.gemm_all_reduce: fused=False with tiling, num_sms: these are options of "
            "the kernel; pass only one"
        )
        assert found[5][1] == (
            "weft.fused.gemm_all_to_all: x has 5 rows: a multiple of the number of ranks, "
            f"{len(results)}, is needed"
        )


def test_gemms_of_float8_have_scales(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["scaled"] == []
    before = "weft.fused.gemm: "
    assert results[0]["refused scales"] == [
        before + "torch.float8_e4m3fn without scale_x and scale_weight: pass both",
        before + "x is torch.float8_e4m3fn, weight is torch.float16: expected both in float8",
        before + "scales with torch.float16: expected operands of float8",
        before + "out_dtype torch.float32: expected bfloat16 or float16",
        before + "Triton's interpreter does not compute bfloat16: float16 or float32 is needed on "
        "the CPU",
        before + "scale_x [3, 1]: expected [6, 1], or one element",
        before + "scale_weight torch.float64 on cpu: expected float32 on cpu",
        before + "tiling of (16, 32, 16) for float8: expected inner from 32 on",
        before + "weight [32, 8] of float8: expected multiples of 16",
    ]


def test_a_rank_that_does_not_call_is_named() -> None:
    check_missing(*run("missing", 2, operator="gemm_all_reduce"))


@pytest.mark.parametrize("operator", ["gemm_all_to_all", "gemm_all_reduce"])
def test_paced_stores_leave_a_rank_alone_that_does_not_call(operator: str) -> None:
    found = run("missing", 2, operator=operator, is_paced=True)
    check_missing(*found)
    assert found[1]["unchanged"]


def check_missing(waiting: dict[str, Any], other: dict[str, Any]) -> None:
    assert waiting["right"]
    assert other["right"]
    assert waiting["nan"]
    name, rank, message = waiting["error"]
    assert (name, rank) == ("WaitTimeoutError", 1)
    assert message.startswith("rank 0 waited for rank 1 in a wait of a Triton kernel")
    assert other["error"][0] == "GroupPoisonedError"


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.long), 3])
def test_bulk_and_paced_stores_give_the_same_results(count: int) -> None:
    """With rank counts other than 2, calls store as without bulk stores."""
    cases = 4 if count == 2 else 1
    found = run("compare", count, module="fused.gemm_stores", cases=cases)
    check_stores(found, cases, has_bulk=count == 2)


def check_stores(results: list[dict[str, Any]], cases: int, *, has_bulk: bool) -> None:
    """`cases`: each operator's."""
    for result in results:
        assert result["wrong"] == []
        assert result["differ"] == []
        # Every third case of an operator is called again; half the all-to-alls have bulk
        # stores. Two all-reduce cases are further ones.
        calls = [1 + (each % 3 == 0) for each in range(cases)]
        bulk = sum(calls[::2])
        assert result["bulk"] == bulk * has_bulk
        further = 2 + sum((3 * cases + each) // 3 % 3 == 0 for each in (0, 1))
        assert result["paced"] == 3 * sum(calls) - bulk + further
