"""Tensors on a GPU as sources: torch's, or a stand-in over the copy engine twin."""

import ctypes
import gc
import os
from typing import Any

import numpy as np

import weft
from tests.workers.group.transfer import raised_by

COUNT = 5000


class _Managed(ctypes.Structure):
    """DLPack's DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("number", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


#: Objects kept by capsules, by tensor address.
EXPORTED: dict[int, Any] = {}

_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)


def _forget(capsule: int) -> None:
    del EXPORTED[_pointer(capsule, b"dltensor")]


_end = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_forget)


class DeviceTensor:
    """A tensor from another library on a CUDA device; its bytes are the CPU's.

    `device` is its attribute's device, `held` its capsule's.
    """

    def __init__(
        self, values: Any, device: tuple[int, int] = (2, 0), held: tuple[int, int] | None = None
    ) -> None:
        self.values = np.asarray(values)
        self.device = device
        self.held = device if held is None else held
        self.streams: list[object] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: object = None) -> object:
        self.streams.append(stream)
        values, size = self.values, self.values.itemsize
        shape = (ctypes.c_int64 * values.ndim)(*values.shape)
        strides = (ctypes.c_int64 * values.ndim)(*(stride // size for stride in values.strides))
        tensor = _Managed(
            data=values.ctypes.data,
            kind=self.held[0],
            number=self.held[1],
            dimensions=values.ndim,
            code=2,
            bits=8 * size,
            lanes=1,
            shape=ctypes.addressof(shape),
            strides=ctypes.addressof(strides),
        )
        address = ctypes.addressof(tensor)
        EXPORTED[address] = tensor, shape, strides, values
        return _new(address, b"dltensor", ctypes.cast(_end, ctypes.c_void_p))


def tensor(kind: str, values: Any) -> Any:
    """A tensor on device 0: torch's for "cuda", a stand-in for "twin"."""
    if kind == "twin":
        return DeviceTensor(values)
    import torch

    # Computed on a separate stream, which registration orders and `synchronize` waits for.
    with torch.cuda.stream(torch.cuda.Stream()):
        return torch.from_numpy(values).to("cuda:0") * 2 / 2


def content(kind: str, region: weft.Region) -> bytes:
    """A region's bytes on a device."""
    if kind == "twin":
        return ctypes.string_at(region.address, len(region))
    import torch

    copied = torch.as_tensor(region.cuda, device=region.device).cpu()
    return bytes(copied.numpy())


def sent(kind: str) -> dict[str, Any]:
    """Rank 0 writes from tensors on a device, whole and in part, to a device and to the CPU."""
    with weft.init() as communicator:
        return exchanged(kind, communicator)


def dial(address: str) -> None:
    """The dialling end of a pair over tcp, which takes rank 0's tensors on a twin's device."""
    with weft.connect(address, providers=["tcp"]) as pair:
        result = exchanged("twin", pair)
    assert result["arrived"], result
    assert result["arrived on the host"], result


def exchanged(kind: str, communicator: weft.Communicator) -> dict[str, Any]:
    """`sent` over a group or a pair of two ranks."""
    values = np.random.default_rng(5).random(COUNT, dtype=np.float32)
    inbox = communicator.alloc(4 * COUNT, device=f"{kind}:0")
    on_host = communicator.alloc(4 * COUNT)
    counter = communicator.counter()
    granted = communicator.share([inbox, on_host], [counter])[1 - communicator.rank]
    result: dict[str, Any] = {}
    given = tensor(kind, values)
    region = communicator.register(given)
    part = communicator.register(tensor(kind, values[:10]))
    result |= {"device": region.device, "length": len(region)}
    if communicator.rank == 0:
        if kind == "cuda":
            import torch

            torch.cuda.synchronize()
        del given
        gc.collect()
        pages = [
            weft.Page(region, 40, granted[0], 40, 4 * COUNT - 40),
            weft.Page(part, 0, granted[0], 0, 40),
            weft.Page(region, 0, granted[1], 0, 4 * COUNT),
        ]
        communicator.write(1, counter, pages).wait()
        region.release()
        part.release()
        counter.wait_for_credit(1, 1)
    else:
        counter.wait({0: communicator.parts(0, [4 * COUNT - 40, 40, 4 * COUNT])})
        expected = values.tobytes()
        result["arrived"] = content(kind, inbox) == expected
        result["arrived on the host"] = on_host.bytes.tobytes() == expected
        counter.credit(0)
    communicator.barrier()
    destination = communicator.register(tensor(kind, values))
    result["shared"] = str(raised_by(lambda: communicator.share([destination], [])))
    return result


def refused() -> str:
    """Registering a tensor on a device where no provider can use one."""
    with weft.init() as communicator:
        error = raised_by(lambda: communicator.register(DeviceTensor(np.ones(3, np.float32))))
        communicator.barrier()
        return f"{type(error).__name__}: {error}"


def host_traffic() -> dict[str, int]:
    """Threads and descriptors in a rank whose memory is all on the host, after some writes."""
    with weft.init() as communicator:
        peer = 1 - communicator.rank
        inbox, source = communicator.alloc(4 * COUNT), communicator.alloc(4 * COUNT)
        counter = communicator.counter()
        remote = communicator.share([inbox], [counter])[peer][0]
        for _ in range(3):
            counter.wait_for_credit(peer)
            communicator.write(peer, counter, [weft.Page(source, 0, remote, 0, 4 * COUNT)]).wait()
            counter.wait({peer: communicator.parts(peer, [4 * COUNT])})
            counter.credit(peer)
        counts = {what: len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")}
        communicator.barrier()
        return counts
