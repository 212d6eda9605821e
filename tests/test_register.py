"""Memory of the caller as regions: any dtype, any library, any owner; and what cannot be one."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import ranks
import weft
from workers.buffers import Tensor


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_memory_of_every_kind_is_bytes_to_the_fabric(transport: str) -> None:
    assert ranks.run("buffers.sent", 2, transport) == [[], []]


def test_an_array_can_be_a_destination_over_tcp_but_not_if_it_is_read_only() -> None:
    first, second = ranks.run("buffers.destination", 2, "tcp")
    assert second["arrived"] == [1, 2, 3, 0]
    for result in (first, second):
        assert result["read-only"].startswith("RegionError: a read-only array")
        assert result["shared"] == "NoneType"


def test_an_array_cannot_be_a_destination_over_shm() -> None:
    for result in ranks.run("buffers.destination", 2, "shm"):
        assert result["shared"] == "RegionError"


class OnDevice:
    """An array that only CUDA's own interface describes."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (1 << 40, False), "shape": (4,), "typestr": "<f4", "version": 3}


UNUSABLE: dict[str, tuple[Any, type[weft.WeftError], str]] = {
    "a transposed array": (np.ones((3, 4)).T, weft.errors.ShapeError, "ascontiguousarray"),
    "every second element": (np.arange(8)[::2], weft.errors.ShapeError, "not contiguous"),
    "an array read backwards": (np.arange(8)[::-1], weft.errors.ShapeError, "not contiguous"),
    "a transposed tensor": (Tensor(np.ones((3, 4)).T), weft.errors.ShapeError, "not contiguous"),
    "bytes read backwards": (memoryview(b"abc")[::-1], weft.errors.ShapeError, "not contiguous"),
    "Python objects": (np.array([{}]), weft.errors.ShapeError, "Python objects"),
    "a list": ([1, 2], weft.errors.ShapeError, "a list, which has no bytes"),
    "nothing": (None, weft.errors.ShapeError, "NoneType"),
    "a tensor of a GPU": (Tensor(np.ones(3), device=2), weft.errors.RegionError, "CPU memory"),
    "an array of a GPU": (OnDevice(), weft.errors.RegionError, "memory of a GPU"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_be_a_region_is_refused_with_the_reason(name: str) -> None:
    value, error, reason = UNUSABLE[name]
    with weft.init(rank=0, world_size=1) as communicator, pytest.raises(error, match=reason):
        communicator.register(value)


@pytest.mark.parametrize(
    "value", [b"", np.empty((0, 3)), np.empty((3, 0)).T, Tensor(np.empty((0, 3)).T)]
)
def test_memory_of_no_bytes_is_a_region_of_no_bytes(value: Any) -> None:
    with weft.init(rank=0, world_size=1) as communicator:
        region = communicator.register(value)
        assert len(region) == 0
        assert region.bytes.shape == (0,)


def test_the_owner_lives_as_long_as_the_region_and_what_looks_at_it() -> None:
    with weft.init(rank=0, world_size=1) as communicator:
        values = np.arange(4, dtype=np.int8)
        alive = weakref.ref(values)
        region = communicator.register(values)
        seen = region.bytes
        del values
        region.release()
        del region
        gc.collect()
        assert alive() is not None
        assert seen.tolist() == [0, 1, 2, 3]
        del seen
        gc.collect()
        assert alive() is None


def test_a_bytearray_cannot_shrink_while_it_is_registered() -> None:
    with weft.init(rank=0, world_size=1) as communicator:
        values = bytearray(8)
        region = communicator.register(values)
        with pytest.raises(BufferError):
            values.clear()
        region.release()
        del region
        gc.collect()
        values.clear()


def test_a_result_is_not_written_to_a_read_only_array() -> None:
    out = np.zeros((1, 2), dtype=np.float32)
    out.flags.writeable = False
    with weft.init(rank=0, world_size=1) as communicator:
        all_to_all = weft.moe.AllToAll(communicator, experts=1, top_k=1, hidden=2, max_tokens=1)
        with all_to_all.dispatch(np.ones((1, 2), np.float32), [[0]]) as received:
            combine = all_to_all.combine_send(received, received.tokens)
            with pytest.raises(weft.errors.RegionError, match="out is read-only"):
                combine.recv(out=out)
            assert combine.recv().tolist() == [[1, 1]]
