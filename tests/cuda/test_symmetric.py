"""Symmetric memory as tensors, on the twin."""

from typing import Any

import pytest

from tests import ranks

pytestmark = pytest.mark.torch

pytest.importorskip("torch")


@pytest.mark.parametrize("count", [1, 3])
def test_ranks_write_to_each_others_tensors(count: int) -> None:
    for rank, (zeroed, own, words, _) in enumerate(ranks.run("cuda.symmetric.ring", count)):
        expected = [[0.0] * 4 for _ in range(3)]
        expected[1][2] = 10.0 + (rank - 1) % count
        assert zeroed
        assert own == expected
        assert words == {"version": 3, "rank": rank, "ranks": count, "dead": 0}


@pytest.mark.parametrize("transport", ["shm", "tcp", "copy"])
def test_a_counted_write_arrives_in_symmetric_memory(transport: str) -> None:
    for rank, result in enumerate(ranks.run("cuda.symmetric.written", 2, transport)):
        sent = [100 * (1 - rank) + value for value in range(8, 32)]
        assert result.pop("arrived") == sent + [0] * 8
        assert "weft.symmetric_empty" in result.pop("refused")
        assert result == {"one region": True, "addressed": True, "segments": 1, "again": True}


def test_memory_is_used_again_once_all_ranks_have_dropped_it() -> None:
    results = ranks.run("cuda.symmetric.reuse", 3)
    places = {key: [result[key] for result in results] for key in ("at", "apart", "still", "again")}
    for key, found in places.items():
        assert found == [found[0]] * 3, key
    assert places["apart"] != places["at"] != places["still"]
    assert places["again"] == places["at"]
    for result in results:
        assert result["kept"]
        assert result["clean"]
        assert result["layer"] >= result["needed"] > 0
        assert result["heap"] >= 2 << 20


def test_what_cannot_be_is_refused() -> None:
    for message in ranks.run("cuda.symmetric.refused", 2):
        assert message == [
            "RegionError",
            "ConfigurationMismatchError",
            "UnknownError",
            "ConfigurationError",
        ]


@pytest.mark.parametrize("count", [1, 3])
def test_tensors_of_the_user_are_reached_where_they_lie(count: int) -> None:
    right = {"right": True, "read": True, "same": True, "kept": True}
    for result in ranks.run("cuda.symmetric.registered", count):
        assert result == right | {"errors": ["UnknownError", "ClosedError"]}


def test_tensors_that_cannot_be_registered_are_refused() -> None:
    for message in ranks.run("cuda.symmetric.registered_refused", 2):
        assert message == [
            "ConfigurationError",
            "ShapeError",
            "ShapeError",
            "ConfigurationError",
            "ConfigurationMismatchError",
            "ClosedError",
        ]


def test_errors_of_a_closed_communicator_are_not_raised_again() -> None:
    import torch

    import weft
    from weft.gpu import symmetric

    class Memory:
        addresses = (0,)

        def check(self) -> None:
            raise weft.errors.WaitTimeoutError("rank 1 did not come")

    memory: Any = Memory()
    with weft.init(rank=0, world_size=1) as communicator:
        owner = symmetric.Owner(memory, torch.device("cpu"), 0, communicator)
        with pytest.raises(weft.errors.WaitTimeoutError):
            owner.check()
    owner.check()
