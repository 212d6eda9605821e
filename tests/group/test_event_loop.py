"""Communicators in an event loop: only the loop's own sleep blocks."""

import pytest

from tests import ranks


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("length", [64, 3 << 20])
def test_a_selector_drives_a_communicator(transport: str, length: int) -> None:
    rounds = 20
    for result in ranks.run("group.loops.selected", 2, transport, rounds=rounds, length=length):
        assert result["right"] == rounds
        assert result["credits"] == rounds


@pytest.mark.parametrize("transport", ["shm", "tcp", "mixed"])
def test_asyncio_drives_a_communicator(transport: str) -> None:
    for result in ranks.run("group.loops.driven_by_asyncio", 4, transport, messages=50):
        assert result == {"arrived": 50, "sent": 50, "ticked": True}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_another_call_came_across_is_not_slept_on(transport: str) -> None:
    first, _ = ranks.run("group.loops.come_across", 2, transport)
    assert first == [False, True, True]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_poison_wakes_a_loop_that_sleeps(transport: str) -> None:
    for result in ranks.run("group.loops.poisoned", 2, transport):
        assert result == "GroupPoisonedError: rank 0 poisoned the group: wake up"


def test_a_closed_communicator_cannot_be_polled() -> None:
    assert ranks.run("group.loops.closed", 2) == [["ClosedError"] * 6] * 2
