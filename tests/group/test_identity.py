"""Objects from another communicator, peer or all-to-all are rejected before any write."""

import pytest

from tests import ranks


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_regions_and_counters_of_the_group_before_reform_are_refused(transport: str) -> None:
    *survivors, _ = ranks.run("group.identity.before_reform", 3, transport)
    for rank, raised in enumerate(survivors):
        whose = f"another communicator (rank {rank} of 3, generation 0)"
        for name, (error, message) in raised.items():
            assert error == "WrongGroupError", name
            assert f"{whose}: one of this communicator (rank {rank} of 2, generation 1)" in message
        assert raised["source"][1].startswith("the source of a page ")
        assert raised["destination"][1].startswith("the destination of a page ")
        assert raised["counter"][1].startswith("the counter ")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_page_of_another_peer_is_refused(transport: str) -> None:
    first, *others = ranks.run("group.identity.another_peer", 3, transport)
    for name in ("write", "scatter"):
        error, message = first[name]
        assert error == "RegionError"
        assert "memory of rank 2, in a write to rank 1" in message
    assert [each["bytes"] for each in others] == [[7] * 8 + [0] * 8] * 2


@pytest.mark.parametrize(
    ("given", "passed", "others"),
    [
        (
            [[2, 1], [1, 1], [2, 1]],
            "share: ranks 0, 2 passed 2 regions and 1 counters; rank 1 passed 1 regions and 1 ",
            [1, 0, 1],
        ),
        (
            [[0, 1], [0, 1], [0, 2]],
            "share: ranks 0, 1 passed 0 regions and 1 counters; rank 2 passed 0 regions and 2 ",
            [2, 2, 0],
        ),
    ],
)
def test_ranks_that_share_different_numbers_are_named_on_every_rank(
    given: list[list[int]], passed: str, others: list[int]
) -> None:
    for rank, result in enumerate(ranks.run("group.identity.uneven", 3, given=given)):
        error, message = result["error"]
        assert error == "ConfigurationMismatchError"
        assert message.startswith(passed)
        assert result["rank"] == others[rank]
        # Lengths may differ, and a `share` after a rejected one succeeds.
        assert result["lengths"] == [[] if peer == rank else [8 * (peer + 1)] for peer in range(3)]


def test_no_rank_waits_for_one_whose_region_is_refused() -> None:
    results = ranks.run("group.identity.uneven", 3, given=[[1, 1]] * 3, read_only=1)
    errors = [result["error"][0] for result in results]
    assert errors == ["ConfigurationMismatchError", "RegionError", "ConfigurationMismatchError"]
    assert "rank 1 passed arguments that it refused (RegionError)" in results[0]["error"][1]
    assert [result["rank"] for result in results] == [1, None, 1]


def test_a_round_of_another_all_to_all_or_one_combined_before_is_refused() -> None:
    for raised in ranks.run("group.identity.another_round", 2):
        assert {error for error, _ in raised.values()} == {"StageError"}
        for name in ("another's", "another's, sent"):
            assert raised[name][1].startswith("round 0 was received by another all-to-all")
        assert raised["twice"][1].startswith("round 0 was combined before")
        assert "has been released" in raised["released"][1]
