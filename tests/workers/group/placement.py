"""Memory with a NUMA node or huge pages, as a source and as a destination."""

from typing import Any

import numpy as np

import weft

LENGTH = (2 << 20) + 5


def placed(communicator: weft.Communicator, **placement: Any) -> weft.Region | None:
    """Memory, if the allocation succeeded on every rank."""
    try:
        region = communicator.alloc(LENGTH, **placement)
    except weft.errors.AllocationError:
        region = None
    had = communicator.all_gather(b"" if region is None else b"1")
    return region if all(had) else None


def sent() -> dict[str, bool]:
    """Rank 0 writes to memory in each placement at rank 1; by placement, whether it arrived."""
    with weft.init() as communicator:
        result = {}
        placements: dict[str, dict[str, Any]] = {
            "node": {"numa_node": 0},
            "huge": {"huge_pages": True},
            "both": {"numa_node": 0, "huge_pages": True},
        }
        for name, placement in placements.items():
            region, counter = placed(communicator, **placement), communicator.counter()
            if region is None:
                continue
            granted = communicator.share([region], [counter])
            values = np.random.default_rng(3).integers(0, 256, LENGTH, dtype=np.uint8)
            if communicator.rank == 0:
                region.bytes[:] = values
                page = weft.Page(region, 0, granted[1][0], 0, LENGTH)
                communicator.write(1, counter, [page]).wait()
                counter.wait_for_credit(1, 1)
            else:
                counter.wait({0: communicator.parts(0, [LENGTH])})
                result[name] = bool(np.array_equal(region.bytes, values))
                counter.credit(0)
            region.release()
        communicator.barrier()
        return result
