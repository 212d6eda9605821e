"""Region descriptors: grants as bytes over any channel."""

import pytest

from tests import ranks


@pytest.mark.parametrize(
    ("transport", "registered"), [("shm", False), ("tcp", True), ("mixed", False)]
)
def test_granted_regions_are_written_to(transport: str, registered: bool) -> None:
    results = ranks.run("group.descriptors.exchange", 3, transport, registered=registered)
    for rank, found in enumerate(results):
        before = (rank - 1) % 3
        assert found["arrived"] == [[10 * before + round + 1] * 64 for round in range(2)]
        assert found["target"] == [(rank + 1) % 3, 64]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_descriptors_that_grant_nothing_are_refused(transport: str) -> None:
    for rank, found in enumerate(ranks.run("group.descriptors.refusals", 2, transport)):
        assert found["damaged"] == ["MalformedError"]
        assert found["other group"][0] == "MalformedError"
        assert "from another group" in found["other group"][2]
        assert found["own"][0] == found["none"][0] == "UnknownError"
        assert f"at rank {rank}, its own" in found["own"][2]
        assert [name for name, _, _ in found["peers"]] == ["UnknownError"] * 2
        assert found["read-only"][0] == "RegionError"
        assert found["released"][0] == "UnknownError"
        assert found["length"] == 64
