"""Tensors in symmetric memory that process groups allocate, as FSDP2 takes them, on the twin."""

from typing import Any

import pytest

from tests import ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]

pytest.importorskip("torch")

from weft.torch.device_memory import SHORTEST, block_bytes  # noqa: E402


def results(worker: str, count: int, **arguments: Any) -> list[Any]:
    return ranks.run(
        f"backend.device_memory.{worker}",
        count,
        timeout=150,
        with_torch=True,
        quiet=False,
        **arguments,
    )


def test_blocks_are_an_eighth_longer_at_most() -> None:
    sizes = set()
    for length in [*range(0, 70_000, 7), (1 << 30) + 1, 12_345_678_901]:
        size = block_bytes(length)
        assert size % SHORTEST == 0
        assert length <= size <= max(length * 9 / 8, length + SHORTEST)
        assert block_bytes(size) == size
        sizes.add(size)
    assert len(sizes) < 25


def test_tensors_are_at_the_same_place_on_all_ranks() -> None:
    for found in results("shared", 3):
        assert found["supported"]
        assert found["shapes"] == [
            [[0], "torch.int64"],
            [[1], "torch.int8"],
            [[5000], "torch.float64"],
        ]
        assert found["direct"] == [True] * 3
        assert "must be symmetric memory" in found["ordinary"]
        assert found["negative"] == "ValueError: allocate_tensor of -1 elements: expected 0 or more"
        assert found["kept"] == [7]
        assert not found["on the CPU"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_memory_is_used_again_once_its_tensors_are_gone_on_all_ranks(count: int) -> None:
    for found in results("reused", count):
        assert found["first three"]
        assert found["held elsewhere"] == (count > 1)
        assert found["direct"] == [True] * 4
        assert found["unchanged"]
        # The spare blocks make exchanges fewer: 20 with two blocks.
        assert found["blocks"] <= 10
        assert found["exchanges"] <= 10


def test_ranks_that_ask_for_other_sizes_are_named() -> None:
    for rank, (error,) in enumerate(results("differing", 2)):
        assert error.startswith("DistBackendError: weft: allocate_tensor: allocate_tensor of ")
        assert f"rank {1 - rank} asks for" in error


def test_without_room_on_one_rank_all_take_ordinary_memory() -> None:
    for found in results("no_room", 2):
        assert found == {
            "length": 24 << 20,
            "refused": True,
            "sum": True,
            "small": True,
            "again": True,
        }


def test_fsdp2_has_the_same_bits_with_buffers_of_the_group() -> None:
    for found in results("fsdp", 2):
        assert found["losses"]
        assert found["parameters"]
        # Three groups' all-gathers in each forward pass, and reduce-scatters.
        assert found["symmetric"] >= 4 * 6
        assert found["blocks"] < 40
        assert found["exchanges"] < found["blocks"] + 5
