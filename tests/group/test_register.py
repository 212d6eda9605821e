"""The caller's memory as regions: any dtype, library and owner; and unsuitable memory."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import weft
from tests import ranks
from tests.workers.group.buffers import Tensor
from tests.workers.group.device_tensor import EXPORTED, DeviceTensor


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_memory_of_every_kind_is_bytes_to_the_fabric(transport: str) -> None:
    assert ranks.run("group.buffers.sent", 2, transport) == [[], []]


def test_an_array_can_be_a_destination_over_tcp_but_not_if_it_is_read_only() -> None:
    first, second = ranks.run("group.buffers.destination", 2, "tcp")
    assert second["arrived"] == [1, 2, 3, 0]
    for result in (first, second):
        assert result["read-only"].startswith("RegionError: a read-only array")
        assert result["shared"] == "NoneType"


def test_an_array_cannot_be_a_destination_over_shm() -> None:
    for result in ranks.run("group.buffers.destination", 2, "shm"):
        assert result["shared"] == "RegionError"


def test_all_ranks_raise_when_one_shares_an_array_over_shm() -> None:
    first, second = ranks.run("group.buffers.refused_by_one", 2, "shm")
    assert (second["error"], second["prompt"], second["granted"]) == ("RegionError", True, 1)
    reports = (first["error"], first["rank"], first["prompt"], first["granted"])
    assert reports == ("ConfigurationMismatchError", 1, True, 1)
    assert "rank 1 rejected" in first["message"]
    assert "alloc" in first["message"]


class OnDevice:
    """An array with only CUDA's array interface."""

    def __init__(self, shape: tuple[int, ...] = (4,), **more: Any) -> None:
        data = (1 << 40 if 0 not in shape else 0, False)
        self.__cuda_array_interface__ = {
            "data": data,
            "shape": shape,
            "typestr": "<f4",
            "version": 3,
        } | more


Kinds = type[weft.WeftError] | tuple[type[weft.WeftError], ...]

UNUSABLE: dict[str, tuple[Any, Kinds, str]] = {
    "a transposed array": (np.ones((3, 4)).T, weft.errors.ShapeError, "ascontiguousarray"),
    "every second element": (np.arange(8)[::2], weft.errors.ShapeError, "not contiguous"),
    "an array read backwards": (np.arange(8)[::-1], weft.errors.ShapeError, "not contiguous"),
    "a transposed tensor": (Tensor(np.ones((3, 4)).T), weft.errors.ShapeError, "not contiguous"),
    "bytes read backwards": (memoryview(b"abc")[::-1], weft.errors.ShapeError, "not contiguous"),
    "Python objects": (np.array([{}]), weft.errors.ShapeError, "Python objects"),
    "a list": ([1, 2], weft.errors.ShapeError, "a list, which has no bytes"),
    "nothing": (None, weft.errors.ShapeError, "NoneType"),
    "a tensor of ROCm": (Tensor(np.ones(3), device=10), weft.errors.RegionError, "type 10"),
    "a transposed tensor of a GPU": (
        DeviceTensor(np.ones((3, 4)).T),
        weft.errors.ShapeError,
        "not contiguous",
    ),
    "a tensor that is on another device than it names": (
        DeviceTensor(np.ones(3), (2, 0), held=(2, 1)),
        weft.errors.RegionError,
        "device type 2, number 1; CUDA device 0.*is expected",
    ),
    "a CPU tensor that names a GPU": (
        DeviceTensor(np.ones(3), (2, 0), held=(1, 0)),
        weft.errors.RegionError,
        "device type 1, number 0; CUDA device 0.*is expected",
    ),
    "a tensor of a GPU that names the CPU": (
        DeviceTensor(np.ones(3), (1, 0), held=(2, 0)),
        weft.errors.RegionError,
        "not in CPU memory",
    ),
    "a tensor whose library refuses the stream": (
        Tensor(np.ones(3), device=2),
        weft.errors.RegionError,
        "cannot be shared by DLPack",
    ),
    "a transposed array of a GPU": (
        OnDevice((3, 4), strides=(4, 12)),
        weft.errors.ShapeError,
        "not contiguous",
    ),
    "a masked array of a GPU": (OnDevice(mask=OnDevice()), weft.errors.ShapeError, "mask"),
    "an address that is no GPU's": (
        OnDevice(strides=(4,)),
        (weft.errors.ProviderError, weft.errors.RegionError),
        "CUDA",
    ),
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


def test_a_tensor_of_a_gpu_is_a_region_of_its_device() -> None:
    with weft.init(rank=0, world_size=1, providers=["copy-twin"]) as communicator:
        tensor = DeviceTensor(np.ones((2, 3), np.float32), (2, 1))
        region = communicator.register(tensor)
        assert tensor.streams == [1], "the legacy default stream, as the array API numbers it"
        assert (region.device, len(region)) == ("cuda:1", 24)
        assert region.address == tensor.values.ctypes.data
        assert region.cuda.__cuda_array_interface__["data"] == (region.address, False)
        with pytest.raises(weft.errors.RegionError, match="memory of cuda:1"):
            _ = region.bytes


def test_a_tensor_of_a_gpu_has_a_reader() -> None:
    with weft.init(rank=0, world_size=1, providers=["copy-twin"]) as communicator:
        tensor = DeviceTensor(np.ones(3, np.float32))
        regions = [communicator.register(tensor, reader="owner"), communicator.register(tensor)]
        assert regions[0].address == regions[1].address
        unknown: Any = "peers"
        with pytest.raises(weft.errors.ConfigurationError, match="all and owner are known"):
            communicator.register(tensor, reader=unknown)


def test_a_tensor_of_a_gpu_lives_as_long_as_its_region() -> None:
    with weft.init(rank=0, world_size=1, providers=["copy-twin"]) as communicator:
        before = len(EXPORTED)
        region = communicator.register(DeviceTensor(np.ones(3, np.float32)))
        gc.collect()
        assert len(EXPORTED) == before + 1
        region.release()
        gc.collect()
        assert len(EXPORTED) == before


def test_a_tensor_of_a_gpu_is_a_source_over_copy_and_no_destination() -> None:
    results = ranks.run("group.device_tensor.sent", 2, "copy", kind="twin")
    for result in results:
        assert (result["device"], result["length"]) == ("cuda:0", 20_000)
        assert "use `alloc`" in result["shared"]
    assert results[1]["arrived"]
    assert results[1]["arrived on the host"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_tensor_of_a_gpu_that_no_provider_can_use_is_refused_with_the_remedy(
    transport: str,
) -> None:
    for message in ranks.run("group.device_tensor.refused", 2, transport):
        assert message.startswith(f"RegionError: {transport} cannot use region")
        assert "WEFT_PROVIDERS=copy,tcp" in message


def test_an_empty_tensor_of_a_gpu_is_a_region_of_no_bytes() -> None:
    with weft.init(rank=0, world_size=1, providers=["copy-twin"]) as communicator:
        for value in (DeviceTensor(np.empty((0, 3), np.float32)), OnDevice((0, 3))):
            region = communicator.register(value)
            assert (len(region), region.device) == (0, "cuda:0")


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
