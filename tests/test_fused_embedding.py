"""`weft.fused.EmbeddingAllToAll` under Triton's interpreter, one process for each rank."""

from typing import Any

import pytest

import ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

pytest.importorskip("triton")


def run(worker: str, count: int, **arguments: Any) -> list[Any]:
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    call = f"fused_embedding_calls.{worker}"
    return ranks.run(call, count, environment=environment, timeout=170, **arguments)


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    # All cases of two ranks; of four, those in which a rank lacks tables and batches are uneven.
    cases = ["forward", "gradients"] if request.param == 4 else None
    return run("calls", request.param, cases=cases)


def check(results: list[dict[str, Any]], case: str) -> None:
    for result in results:
        if case in result:
            assert set(_flat(result[case])) == {True}, result[case]


def _flat(found: Any) -> list[Any]:
    return [part for each in found for part in _flat(each)] if isinstance(found, list) else [found]


@pytest.mark.parametrize("case", ["forward", "pool", "buffers", "function"])
def test_outputs_are_those_of_embedding_bag(results: list[dict[str, Any]], case: str) -> None:
    check(results, case)


def test_gradients_are_those_of_the_whole_model(results: list[dict[str, Any]]) -> None:
    for result in results:
        for found in result["gradients"]:
            assert set(found) <= {True}, found


def test_an_index_outside_of_its_table_is_an_error_of_check(results: list[dict[str, Any]]) -> None:
    for result in results:
        if "wrong" in result:
            right, error, message = result["wrong"]
            assert (right, error) == (True, "OutOfRangeError")
            assert message.startswith("an index of table 0 is outside of its 5 rows")


def test_training_equals_that_of_one_process(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result.get("model", 0.0) < 1e-4


def test_wrong_arguments_are_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        if "refused" in result:
            assert result["refused"] == [
                *("ShapeError", "ShapeError", "ShapeError", "ConfigurationError", "ShapeError"),
                *("ShapeError", "ShapeError", "ShapeError", "ShapeError", "ConfigurationError"),
                *("ShapeError", "ShapeError", "ConfigurationError"),
            ]


def test_a_rank_that_does_not_call_is_named() -> None:
    check_silent(run("silent", 2))


def test_the_program_of_the_page_has_the_gradients_of_means() -> None:
    for shape, *sums in run("page", 2):
        assert shape == [4, 4, 16]
        # One for each of 8 samples and 16 columns.
        assert sums == pytest.approx([128.0, 128.0], rel=1e-5)


def check_silent(found: list[dict[str, Any]]) -> None:
    *waiting, silent = found
    assert silent == {"right": True}
    for rank, result in enumerate(waiting):
        assert result["right"]
        assert result["lost"]
        assert result["again"] in ("WaitTimeoutError", "GroupPoisonedError")
        if result["error"][0] == "WaitTimeoutError":
            assert result["error"][2].startswith(
                f"rank {rank} waited for rank {len(waiting)} in a wait of a Triton kernel"
            )
