"""Peer groups between real processes."""

import pytest

from tests import ranks


@pytest.mark.parametrize("transport", ["shm", "tcp", "copy", "mixed"])
def test_scatters_over_a_peer_group_arrive_whole(transport: str) -> None:
    for result in ranks.run("group.peer_groups.scatters", 4, transport):
        assert result == {
            "ended": [None] * 4,
            "wrong": [],
            "next": 4,
            "member": "UnknownError",
            "round": "CreditError",
            "range": "OutOfRangeError",
            "unshared": "NotSharedError",
            "foreign": "WrongGroupError",
            "released": "UnknownError",
        }
