"""The caller's memory, every kind, as a source and as a destination."""

import array
import mmap
import time
from typing import Any

import ml_dtypes
import numpy as np

import weft
from tests.workers.group.transfer import raised_by


class Tensor:
    """An array from another library."""

    def __init__(self, values: Any, device: int = 1) -> None:
        self.values = np.asarray(values)
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


def of_every_kind() -> dict[str, tuple[Any, bytes]]:
    """Sources by name, with their bytes."""
    mapped = mmap.mmap(-1, 4096)
    mapped[:5] = b"woven"
    read_only = np.arange(9)
    read_only.flags.writeable = False
    record = np.dtype([("id", np.int32), ("weight", np.float16)])
    arrays: dict[str, Any] = {
        "int64": np.arange(5) - 2,
        "uint8": np.arange(7, dtype=np.uint8),
        "bool": np.array([True, False, True]),
        "complex": np.array([1 + 2j]),
        "bfloat16": np.arange(6).astype(ml_dtypes.bfloat16),
        "float8": np.arange(6).astype(ml_dtypes.float8_e4m3fn),
        "datetime": np.array(["2000-01-01"], dtype="datetime64[D]"),
        "records": np.array([(1, 0.5), (2, 0.25)], dtype=record),
        "three dimensions": np.arange(24, dtype=np.int16).reshape(2, 3, 4),
        "no dimension": np.array(3.0),
        "read-only": read_only,
        "a row": np.arange(12).reshape(3, 4)[1],
    }
    sources = {name: (value, value.tobytes()) for name, value in arrays.items()}
    for name in ("int64", "bool", "complex", "three dimensions", "no dimension"):
        sources[f"DLPack {name}"] = (Tensor(arrays[name]), arrays[name].tobytes())
    sources["pinned for a GPU"] = (Tensor(arrays["int64"], device=3), arrays["int64"].tobytes())
    for value in (b"bytes", bytearray(b"bytearray"), array.array("d", [0.5, 2]), mapped):
        sources[type(value).__name__] = (value, bytes(value))
    sources["memoryview"] = (memoryview(b"a long story")[2:6], b"long")
    return sources


def sent() -> list[str]:
    """Names of rank 0's sources whose bytes arrived wrong."""
    with weft.init() as communicator:
        sources = of_every_kind()
        inbox, counter = communicator.alloc(1 << 13), communicator.counter()
        granted = communicator.share([inbox], [counter])
        wrong = []
        for round, (name, (value, expected)) in enumerate(sources.items()):
            if communicator.rank == 0:
                region = communicator.register(value)
                counter.wait_for_credit(1, round)
                page = weft.Page(region, 0, granted[1][0], 0, len(region))
                communicator.write(1, counter, [page], round=round).wait()
                if region.bytes.tobytes() != expected:
                    wrong.append(name)
                region.release()
            else:
                counter.wait({0: 1})
                if inbox.bytes[: len(expected)].tobytes() != expected:
                    wrong.append(name)
                counter.credit(0)
        communicator.barrier()
        return wrong


def refused_by_one() -> dict[str, Any]:
    """Rank 1 shares an array over shm; every rank raises, and later shares the same counter."""
    with weft.init() as communicator:
        counter = communicator.counter()
        lent = communicator.register(np.zeros(4, dtype=np.int32))
        memory = communicator.alloc(16)
        mine = lent if communicator.rank == 1 else memory
        begin = time.monotonic()
        error = raised_by(lambda: communicator.share([mine], [counter], timeout=30))
        waited = time.monotonic() - begin
        granted = communicator.share([memory], [counter])
        peer = 1 - communicator.rank
        communicator.signal(peer, counter)
        counter.wait({peer: 1})
        communicator.barrier()
        rank = getattr(error, "rank", None)
        result = {"error": type(error).__name__, "rank": rank, "message": str(error)}
        return result | {"prompt": waited < 10, "granted": len(granted[peer])}


def destination() -> dict[str, Any]:
    """Rank 0 writes into an array on rank 1; read-only ones, and ones over shm, are rejected."""
    with weft.init() as communicator:
        mine = np.zeros(4, dtype=np.int32)
        region, counter = communicator.register(mine), communicator.counter()
        fixed = communicator.register(b"fixed")
        refused = raised_by(lambda: communicator.share([fixed], []))
        assert (region.writable, fixed.writable) == (True, False)
        assert not fixed.bytes.flags.writeable
        result: dict[str, Any] = {"arrived": None}
        result["read-only"] = f"{type(refused).__name__}: {refused}"
        if "shm" in communicator.routes():
            error = raised_by(lambda: communicator.share([region], [counter]))
            return result | {"shared": type(error).__name__}
        granted = communicator.share([region], [counter])
        if communicator.rank == 0:
            source = communicator.register(np.arange(4, dtype=np.int32))
            page = weft.Page(source, 4, granted[1][0], 0, 12)
            communicator.write(1, counter, [page]).wait()
        else:
            counter.wait({0: 1})
            result["arrived"] = mine.tolist()
        communicator.barrier()
        return result | {"shared": "NoneType"}
