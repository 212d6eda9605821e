"""Counters' callbacks."""

import pytest

from tests import ranks


@pytest.mark.parametrize("transport", ["shm", "tcp", "mixed"])
@pytest.mark.parametrize("length", [64, 3 << 20])
def test_a_callback_follows_each_round(transport: str, length: int) -> None:
    for result in ranks.run(
        "group.counter_callbacks.called_back", 4, transport, length=length, rounds=10
    ):
        assert result == {"right": 30, "errors": []}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_callback_ends_once_with_the_error_of_a_wait(transport: str) -> None:
    for found in ranks.run("group.counter_callbacks.refused", 2, transport):
        assert found == {
            "beyond": "CreditError",
            "no peer": "UnknownError",
            "after": "ClosedError",
            "called": {
                "at once": "NoneType",
                "credited": "CreditError",
                "next round": "NoneType",
                "released": "UnknownError",
                "closed": "ClosedError",
            },
            "caught": ["ZeroDivisionError('in a callback')"],
        }


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_threads_share_the_callbacks_of_a_communicator(transport: str) -> None:
    for result in ranks.run("group.counter_callbacks.threaded", 2, transport, rounds=100):
        assert result == {"seen": [100, 100]}
