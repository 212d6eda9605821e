"""Torch process group formation that ends by a timeout or an abort."""

from typing import Any

import pytest

from tests.forked_cases import results

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

CASES = {
    "absent_in_init": 3,
    "aborted_init": 3,
    "aborted_new_group": 3,
    "aborted_split": 3,
    "absent_in_split": 3,
    "aborted_connection": 3,
    "aborted_collectives": 3,
    "closed_store": 2,
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    pytest.importorskip("torch")
    return results("backend.formation", CASES, at_once=8)


def assert_released(*ranks: Any) -> None:
    """Neither descriptors nor threads stay; fewer, if the groups before ended too."""
    for rank in ranks:
        assert max(rank["left"]) <= 0, rank


def test_a_timeout_names_the_missing_rank_and_the_group_forms_again(found: Any) -> None:
    *waiting, late = found["absent_in_init"]
    for rank in waiting:
        assert "2 did not come to the store within 4.5 s" in rank["error"]
        assert_released(rank)
    # The late rank ends by the others' record, not by its own timeout.
    assert "gave up: " in late["error"]
    assert "2 did not come" in late["error"]
    assert [rank["again"] for rank in found["absent_in_init"]] == [[3.0, 3.0]] * 3


@pytest.mark.parametrize("case", ["aborted_init", "aborted_new_group", "aborted_split"])
def test_an_abort_ends_the_formation_at_all_ranks(found: Any, case: str) -> None:
    first, second, late = found[case]
    assert first["error"].startswith("RendezvousError: aborted by this process")
    assert "rank 0 gave up: aborted" in second["error"]
    if late is not None:
        assert "rank 0" in late["error"]
    assert_released(first, second)


@pytest.mark.parametrize("case", ["aborted_connection", "aborted_collectives"])
def test_an_abort_ends_connections_of_ranks_that_met(found: Any, case: str) -> None:
    first, second, _ = found[case]
    assert first["error"].startswith("RendezvousError: aborted by this process")
    assert second["error"] != "none"
    for rank in (first, second):
        # By the abort: the timeout is 30 seconds.
        assert rank["seconds"] < 20
        assert_released(rank)


def test_a_split_ends_by_its_timeout(found: Any) -> None:
    for rank in found["absent_in_split"][:2]:
        assert "2 did not come to the store within 4.5 s" in rank["error"]
        assert_released(rank)


def test_a_store_whose_process_has_ended_is_named(found: Any) -> None:
    assert "the store of the process group failed" in found["closed_store"][1]
