"""Symmetric memory between processes, on the CPU twin."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch

import weft
from weft.cuda import symmetric
from workers import device_native


def ring() -> list[Any]:
    """Each rank writes to the next one's tensor, and reads what the one before wrote."""
    with weft.init() as communicator:
        rank, ranks = communicator.rank, communicator.world_size
        own = weft.symmetric_empty((3, 4), torch.float32, device="twin")
        assert own.shape == (3, 4)
        zeroed = not own.any()
        communicator.barrier()
        after = (rank + 1) % ranks
        weft.symmetric_peer(own[1:], after)[0, 2] = 10.0 + rank
        communicator.barrier()
        fields = symmetric.TABLE
        base = symmetric.table(own)
        words = {
            name: int(
                np.frombuffer(
                    _bytes(base + fields[name].offset, fields[name].width),
                    dtype=f"<u{fields[name].width}",
                )[0]
            )
            for name in ("version", "rank", "ranks", "dead")
        }
        return [zeroed, own.tolist(), words, communicator.rank == rank]


def _bytes(address: int, length: int) -> bytes:
    import ctypes

    return ctypes.string_at(address, length)


def reuse() -> dict[str, Any]:
    """Places of blocks before and after ranks drop them, one of them late."""
    with weft.init() as communicator:
        rank = communicator.rank

        def make(count: int) -> tuple[torch.Tensor, tuple[int, int]]:
            tensor = symmetric.empty(count, torch.int32, device="twin", communicator=communicator)
            return tensor, _place(tensor)

        first, at = make(1000)
        view = first[3:]
        first.fill_(7)
        if rank == 0:
            del first, view
            gc.collect()
        second, apart = make(1000)
        if rank != 0:
            del first
            gc.collect()
        # A view keeps the memory at the other ranks.
        third, still = make(1000)
        if rank != 0:
            kept = bool((view == 7).all())
            del view
            gc.collect()
        else:
            kept = True
        fourth, again = make(1000)
        clean = not fourth.any()
        # An all-to-all of the communicator takes its channels out of the same heap.
        layer = device_native.make(communicator)
        used, heap = symmetric._OWNERS[second.untyped_storage().data_ptr()].native.usage()
        layer.native.close(20.0)
        left, _ = symmetric._OWNERS[second.untyped_storage().data_ptr()].native.usage()
        del third
        return {
            "at": at,
            "apart": apart,
            "still": still,
            "again": again,
            "kept": kept,
            "clean": clean,
            "layer": used - left,
            "needed": layer.native.sizes()[1],
            "heap": heap,
        }


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return symmetric._OWNERS[tensor.untyped_storage().data_ptr()].native.place


def refused() -> list[str]:
    """Errors of calls that cannot be."""
    with weft.init() as communicator:
        said = [
            device_native.named(lambda: weft.symmetric_peer(torch.empty(3), 0))[0],
            device_native.named(
                lambda: weft.symmetric_empty(4 + communicator.rank, torch.int64, device="twin")
            )[0],
        ]
        own = weft.symmetric_empty(2, torch.int64, device="twin")
        said.append(device_native.named(lambda: weft.symmetric_peer(own, 9))[0])
        own[0] = 5
    # Mapped still, although the communicator is closed.
    assert own[0] == 5
    said.append(device_native.named(lambda: weft.symmetric_empty(2, device="twin"))[0])
    return said
