"""`weft.fused.EmbeddingAllToAll` under Triton's interpreter, one process for each rank."""

from typing import Any

import pytest

from tests import ranks

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(420)]

pytest.importorskip("triton")

TWIN = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
ALL = (
    *("forward float32", "forward float16", "buffers", "dense", "sparse", "pool", "wrong"),
    *("function", "model", "refused", "page"),
)
#: By rank count. With four, one lacks tables, and batches are uneven: the cases that depend on
#: it.
CASES = {1: ["forward float32", "dense", "model"], 2: ALL, 4: ["forward float32", "dense"]}


@pytest.fixture(scope="module", params=CASES)
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    cases = CASES[request.param]
    call = "fused.embedding_calls.calls"
    found = ranks.run(call, request.param, environment=TWIN, timeout=400, cases=cases)
    assert all(set(result) == set(cases) for result in found)
    return found


def check(results: list[dict[str, Any]], *cases: str) -> None:
    """All case results are true, where these were run; a rank without tables may have none."""
    for result in results:
        for name, found in result.items():
            if name.partition(" ")[0] in cases:
                assert all(found if isinstance(found, list) else [found]), (name, found)
    for name in results[0]:
        if name.partition(" ")[0] in cases:
            assert any(result[name] for result in results), name


def test_outputs_are_those_of_embedding_bag(results: list[dict[str, Any]]) -> None:
    check(results, "forward", "pool", "function")


def test_outputs_are_valid_until_their_buffer_is_used_again(results: list[dict[str, Any]]) -> None:
    check(results, "buffers")


def test_gradients_are_those_of_the_whole_model(results: list[dict[str, Any]]) -> None:
    check(results, "dense", "sparse")


def test_the_program_of_the_page_has_the_gradients_of_means(results: list[dict[str, Any]]) -> None:
    check(results, "page")


def test_an_index_outside_of_its_table_is_an_error_of_check(results: list[dict[str, Any]]) -> None:
    for result in results:
        if "wrong" not in result:
            continue
        right, error, message, uncovered = result["wrong"]
        assert (right, error) == (True, "OutOfRangeError")
        assert message.startswith(MESSAGE)
        # Offsets that begin behind 0, end before or behind the last index, or descend.
        assert uncovered == ["OutOfRangeError"] * 4


MESSAGE = "an index of table 0 is outside of its 5 rows"


def test_training_equals_that_of_one_process(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result.get("model", 0.0) < 1e-4


def test_wrong_arguments_are_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        if "refused" in result:
            assert result["refused"] == [
                *("ShapeError", "ShapeError", "ShapeError", "ConfigurationError", "ShapeError"),
                *("ShapeError", "ShapeError", "ShapeError", "ShapeError", "ConfigurationError"),
                *("ShapeError", "ShapeError", "ConfigurationError", "ConfigurationError"),
                *("ConfigurationError", "ClosedError"),
            ]


def test_a_rank_that_does_not_call_is_named() -> None:
    check_silent(ranks.run("fused.embedding_calls.silent", 2, environment=TWIN, timeout=400))


def check_silent(found: list[dict[str, Any]]) -> None:
    *waiting, silent = found
    assert silent == {"right": True}
    for rank, result in enumerate(waiting):
        assert result["right"]
        assert result["lost"]
        assert result["again"] in ("WaitTimeoutError", "GroupPoisonedError")
        assert result["error"][0] == "WaitTimeoutError"
        assert result["error"][2].startswith(
            f"rank {rank} waited for rank {len(waiting)} in a wait of a Triton kernel"
        )
