"""Counters between real processes: windows, default rounds, release, strided pages."""

import pytest

from tests import ranks

TRANSPORTS = ["shm", "tcp"]
MIB = 1 << 20


@pytest.mark.parametrize("slot", [64, 3 * MIB])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_ring_of_slots_is_one_counter(transport: str, slot: int) -> None:
    window, rounds = 4, 13
    writer, owner = ranks.run(
        "group.counters.ring", 2, transport, window=window, slot=slot, rounds=rounds
    )
    released = ["UnknownError", "UnknownError"]
    assert writer == {
        "ahead": window - 1,
        "full": "CreditError",
        "credits": rounds,
        "credited": "CreditError",
        "released": released,
    }
    assert owner == {
        "beyond": "CreditError",
        "counts": [True] * window,
        "wrong": [],
        "over": "CreditError",
        "twice": "CreditError",
        "open": rounds,
        "released": released,
    }


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_calls_on_a_counter_that_are_refused_change_nothing(transport: str) -> None:
    for result in ranks.run("group.counters.refusals", 2, transport, rounds=5):
        assert result == {
            "write before share": "NotSharedError",
            "credit before share": "NotSharedError",
            "shared twice": "AlreadySharedError",
            "shared with another": "AlreadySharedError",
            "credited round": "CreditError",
            "round ahead": "CreditError",
            "credited twice": "CreditError",
            "rounds": [6, 6],
            "released": "UnknownError",
            "window": "LimitError",
            "no window": "ConfigurationError",
            "no such peer": "UnknownError",
            "windows differ": "ConfigurationMismatchError",
        }


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_counter_connects_the_peers_that_it_was_made_for(transport: str) -> None:
    for result in ranks.run("group.counters.pairs", 4, transport):
        assert result == {"lopsided": "ConfigurationMismatchError", "stranger": "UnknownError"}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_write_without_a_round_is_the_next_one(transport: str) -> None:
    results = ranks.run("group.counters.rounds_by_default", 3, transport)
    assert results == [
        {"next": [3, 2]},
        {"counts": [1, 2, 1, 0]},
        {"counts": [1, 1, 0, 0]},
    ]


@pytest.mark.parametrize("transport", [*TRANSPORTS, "copy"])
def test_a_page_with_a_count_is_slices_at_regular_distances(transport: str) -> None:
    writer, owner = ranks.run(
        "group.counters.strided", 2, transport, rows=300, columns=40, block=16
    )
    refused = dict.fromkeys(["too many", "far apart"], "OutOfRangeError")
    assert writer == {**refused, "far too many": "LimitError"}
    assert owner == {"right": True}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_counters_that_were_released_leave_room_for_others(transport: str) -> None:
    times = 10_000
    assert ranks.run("group.counters.many", 2, transport, timeout=180, times=times) == [times] * 2


@pytest.mark.timeout(200)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_to_alls_that_were_closed_leave_room_for_others(transport: str) -> None:
    times = 300
    results = ranks.run("group.counters.many_all_to_alls", 4, transport, timeout=180, times=times)
    assert results == [times] * 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_polling_a_counter_takes_no_memory(transport: str) -> None:
    for grown in ranks.run("group.counters.polled", 2, transport, times=100_000):
        assert grown < 4 * MIB
