"""Torch process groups with unusual threads, processes and tensors.

`WEFT_TEST_GIL_SECONDS`: time for which a rank goes on holding the GIL (default 10).
"""

from typing import Any

import pytest

from tests.forked_cases import results

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

CASES = {
    "rings": 3,
    "gil_held_beside_works": 3,
    "gil_held_beside_a_wait": 2,
    "child_of_a_group": 2,
    "reduction_threads": 2,
    "data_loaders": 2,
    "coalescing": 2,
    "views": 2,
    "lazy_values": 2,
    "long_timeouts": 2,
    "senders": 2,
    "destroyed": 2,
    "callbacks": 2,
    "factors": 2,
    "unequal_gathers": 2,
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    pytest.importorskip("torch")
    return results("backend.misuse", CASES, at_once=6)


def test_a_rank_that_holds_the_gil_is_not_lost_and_delays_no_other(found: Any) -> None:
    # The holder has the others' permission, which they give at their ends.
    assert found["gil_held_beside_works"] == [None, True, None]


def test_a_rank_that_waits_makes_progress_while_its_gil_is_held(found: Any) -> None:
    assert found["gil_held_beside_a_wait"] == [[], [True]]


def test_a_forked_child_cannot_use_the_group_and_ends(found: Any) -> None:
    for rank in found["child_of_a_group"]:
        assert rank["status"] == 0
        assert len(rank["errors"]) == 3
        for error in rank["errors"]:
            assert "this process was forked after the process group was made" in error
        assert rank["value"] == [7.0] * 5


def test_threads_of_reductions_are_those_of_each_group_and_end_with_it(found: Any) -> None:
    expected = {"before": 0, "default": [True, 1], "split": [True, 2], "status": 0, "after": 0}
    assert found["reduction_threads"] == [expected] * 2


def test_numbers_of_threads_of_reductions_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from weft.errors import ConfigurationError
    from weft.torch import Options

    assert Options().reduction_threads == 1
    monkeypatch.setenv("WEFT_REDUCTION_THREADS", "64")
    assert Options().reduction_threads == 64
    for value in ("65", "-1", "two"):
        monkeypatch.setenv("WEFT_REDUCTION_THREADS", value)
        with pytest.raises(ConfigurationError, match=f"WEFT_REDUCTION_THREADS is '{value}'"):
            Options()
    with pytest.raises(ConfigurationError, match="reduction_threads 65: expected 0 to 64"):
        Options(reduction_threads=65)


def test_workers_of_a_data_loader_are_forked_beside_a_group(found: Any) -> None:
    assert found["data_loaders"] == [2 * sum(range(32))] * 2


def test_only_asynchronous_operations_of_the_same_thread_are_coalesced(found: Any) -> None:
    for rank, each in enumerate(found["coalescing"]):
        assert each["here"] == 0.5
        assert each["there"] == [0.5]
        assert each["coalesced"] == [float(1 - rank)]
        assert each["parts"] == [True, True]
        assert "expected startCoalescing before it" in each["unmatched"]
        assert each["again"] == [1.0]


def test_views_and_scalars_have_their_values(found: Any) -> None:
    for rank, each in enumerate(found["views"]):
        assert each["negated"]
        assert each["gathered"] == [-1.0, -2.0, -2.0, -3.0]
        assert each["scalar"] == [3.0, [1.0, 2.0]]
        assert each["share"] == 2.0 * rank
        for size in (5, 100_000):
            assert each[f"gathered in place {size}"] == [[1.0], [2.0]]
            assert each[f"reduced in place {size}"] == [3.0]
        assert "more than one element of the written-to tensor" in each["expanded"]
        assert each["parameter"] == [2.0, 2.0]
        assert each["complex"] == [[2.0, 0.0]] * 3


def test_tensors_that_are_conjugated_or_negated_lazily_have_their_values(found: Any) -> None:
    for rank, each in enumerate(found["lazy_values"]):
        assert set(each) == {"2", "50000"}
        for whole, moved, received, share, summed, sent, real, negative in each.values():
            assert whole == [[1.0, -1.0], [2.0, -1.0]]
            # Share `rank` in both ranks' conjugates of the whole.
            assert moved == [[rank + 1.0, 1.0]]
            assert received == [[2.0 - rank, -1.0]]
            assert share == [[2.0 * (rank + 1), 2.0]]
            assert summed == [[3.0, -2.0]]
            assert sent == [[1.0, -1.0]]
            assert real == [-2.0, -1.0]
            assert negative == [-3.0]


def test_a_timeout_of_a_millennium_is_no_timeout_in_the_past(found: Any) -> None:
    assert found["long_timeouts"] == [[4.0, 4.0]] * 2


def test_threads_that_wait_for_one_receive_have_its_sender(found: Any) -> None:
    assert found["senders"] == [0, 0]


def test_pending_works_end_when_the_group_is_destroyed(found: Any) -> None:
    for errors in found["destroyed"]:
        assert len(errors) == 3
        for error in errors:
            assert "the process group was destroyed" in error or "left" in error


def test_callbacks_raise_wait_and_destroy(found: Any) -> None:
    for each in found["callbacks"]:
        assert "division by zero" in each["raised"]
        assert each["chained"] == [4.0, 4.0]
        assert each["destroyed"]


def test_rings_of_blocking_sends_end_in_buffers_or_by_name(found: Any) -> None:
    for each in found["rings"]:
        assert each["found"]
        # 160 MiB without a receive are a deadlock, which ends at the timeout.
        assert "rank" in each["beyond"]
        assert "send" in each["beyond"]


def test_a_gather_of_unequal_sizes_names_the_rank_and_both_sizes(found: Any) -> None:
    for error, sent, expected in zip(
        found["unequal_gathers"][0], ("160", "16"), ("16", "160"), strict=True
    ):
        assert f"weft: gather: rank 1 sent {sent} bytes: expected {expected}; pass as many" in error
        assert "tag" not in error
    assert found["unequal_gathers"][1] == ["none", "none"]


def test_addends_are_multiplied_by_a_factor(found: Any) -> None:
    for each in found["factors"]:
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            assert each[f"torch.{dtype}"] == [[1.5], [1.5, 1.5]]
        assert each["complex64"] == [[3.0, -1.0], [3.0, -1.0]]
        assert "ReduceOp.PRODUCT on complex64" in each["product"]
        assert each["int8"].endswith("expected a floating-point dtype")
        assert each["int64"].endswith("expected a floating-point dtype")
