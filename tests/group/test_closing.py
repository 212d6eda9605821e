"""Closing frees all resources; calls on closed objects raise `ClosedError`."""

import pytest

from tests import ranks

TRANSPORTS = list(ranks.TRANSPORTS)


@pytest.mark.parametrize(
    ("transport", "progress"), [*((each, "caller") for each in TRANSPORTS), ("mixed", "thread")]
)
def test_no_memory_mapping_or_descriptor_is_left(transport: str, progress: str) -> None:
    for result in ranks.run("group.closing.all_goes", 4, transport, progress=progress, cycles=3):
        assert all(count > 0 for count in result["busy"])
        assert result["after each"] == [True] * 3
        assert result["left"] == [[], []]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_handles_raise_after_closing_and_arrays_stay(transport: str) -> None:
    for result in ranks.run("group.closing.used_after", 2, transport):
        assert set(result["raised"].values()) == {"ClosedError"}, result["raised"]
        assert result["right"]
        assert result["unmapped"] == 1


def test_closing_the_communicator_closes_what_was_made_on_it() -> None:
    assert ranks.run("group.closing.with_communicator", 2) == [["ClosedError"] * 5] * 2


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_rows_of_a_refused_round_may_arrive_while_it_closes(transport: str) -> None:
    assert ranks.run("group.closing.over_capacity", 4, transport) == [["CapacityError"] * 5] * 4


def test_a_block_that_raises_closes_on_its_rank_alone() -> None:
    first, *others = ranks.run("group.closing.one_fails", 3)
    assert first == {"failed": "ZeroDivisionError", "lacked": "", "after": "ClosedError"}
    for other in others:
        assert other == {"failed": "", "lacked": "WaitTimeoutError", "after": "ClosedError"}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_in_a_poisoned_group_nothing_is_waited_for(transport: str) -> None:
    for result in ranks.run("group.closing.poisoned", 4, transport):
        assert result["error"] == "GroupPoisonedError"
        assert result["maps"] <= 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_released_region_is_not_taken_for_the_next_one(transport: str) -> None:
    assert ranks.run("group.closing.stale", 2, transport) == [["UnknownError"] * 3] * 2
