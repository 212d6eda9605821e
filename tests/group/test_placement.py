"""Memory on a NUMA node and in huge pages: allocated as requested, or an error with the remedy."""

from typing import Any

import pytest

import weft
from tests import ranks


def test_memory_of_node_0_is_memory() -> None:
    with weft.init(rank=0, world_size=1) as communicator:
        region = communicator.alloc(100_000, numa_node=0)
        region.bytes[-1] = 7
        assert (len(region), int(region.bytes.sum())) == (100_000, 7)


@pytest.mark.parametrize("node", [63, 4_000_000_000])
def test_an_unknown_node_is_rejected_with_the_list_of_nodes(node: int) -> None:
    with (
        weft.init(rank=0, world_size=1) as communicator,
        pytest.raises(weft.errors.ConfigurationError, match=rf"NUMA node {node}: .*here: 0"),
    ):
        communicator.alloc(1, numa_node=node)


@pytest.mark.parametrize("node", [-1, 1 << 32])
def test_what_is_no_number_of_a_node_is_refused(node: int) -> None:
    with (
        weft.init(rank=0, world_size=1) as communicator,
        pytest.raises(weft.errors.ConfigurationError, match=f"numa_node={node}"),
    ):
        communicator.alloc(1, numa_node=node)


@pytest.mark.parametrize("node", [None, 0])
def test_huge_pages_are_given_or_refused_with_the_remedy(node: int | None) -> None:
    with weft.init(rank=0, world_size=1) as communicator:
        try:
            region = communicator.alloc(5, huge_pages=True, numa_node=node)
        except weft.errors.AllocationError as error:
            assert "5 bytes in huge pages of 2 MiB" in str(error)  # noqa: PT017
            assert "leave huge_pages out" in str(error)  # noqa: PT017
        else:
            assert region.address % (2 << 20) == 0
            assert region.bytes.tolist() == [0] * 5


def test_more_huge_pages_than_any_machine_has_are_refused() -> None:
    with (
        weft.init(rank=0, world_size=1) as communicator,
        pytest.raises(weft.errors.AllocationError, match="17592186044416 bytes in huge pages"),
    ):
        communicator.alloc(1 << 44, huge_pages=True)


@pytest.mark.parametrize("placement", [{"numa_node": 0}, {"huge_pages": True}])
def test_memory_of_a_device_is_not_placed(placement: dict[str, Any]) -> None:
    with (
        weft.init(rank=0, world_size=1) as communicator,
        pytest.raises(weft.errors.ConfigurationError, match="CPU memory alone"),
    ):
        communicator.alloc(1, device="cuda:0", **placement)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_memory_that_was_placed_is_written_to_by_peers(transport: str) -> None:
    _, arrived = ranks.run("group.placement.sent", 2, transport)
    assert arrived.pop("node")
    # Requires enough reserved huge pages.
    assert all(arrived.values())
