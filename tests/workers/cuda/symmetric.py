"""Symmetric memory between processes, on the CPU twin."""

from __future__ import annotations

import gc
import os
from functools import partial
from typing import Any

import numpy as np
import torch

import weft
from tests.workers.cuda import device_native
from weft.gpu import registered as cuda_registered
from weft.gpu import symmetric


def ring() -> list[Any]:
    """Each rank writes to the next one's tensor, then reads its own."""
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


def written(device: str = "twin") -> dict[str, Any]:
    """A counted write from one symmetric tensor into the peer's other one, through one region."""
    with weft.init() as communicator, communicator.counter() as counter:
        peer = 1 - communicator.rank
        if device == "cuda":
            torch.cuda.set_device(communicator.rank % torch.cuda.device_count())
        sources = weft.symmetric_empty((4, 8), torch.int32, device=device)
        inbox = weft.symmetric_empty((4, 8), torch.int32, device=device)
        sources.copy_(torch.arange(32).view(4, 8) + 100 * communicator.rank)
        if device == "cuda":
            torch.cuda.synchronize()
        region, start = weft.symmetric_region(sources[1:])
        same, offset = weft.symmetric_region(inbox, communicator=communicator)
        remote = communicator.share([region], [counter])[peer][0]
        page = weft.Page(region, start, remote, offset, sources[1:].nbytes)
        communicator.write(peer, counter, [page]).wait()
        counter.wait({peer: [page.length]})
        counter.credit(peer)
        communicator.barrier()
        result = {
            "one region": region is same,
            "arrived": inbox.view(-1).tolist(),
            "addressed": region.address + offset == inbox.data_ptr(),
            "segments": len(region) / (2 << 20),
        }
        region.release()
        again, _ = weft.symmetric_region(inbox)
        result["again"] = again is not region and len(again) == len(region)
        try:
            weft.symmetric_region(torch.zeros(4))
        except weft.errors.RegionError as error:
            result["refused"] = str(error)
        return result


def reuse() -> dict[str, Any]:
    """Block offsets before and after ranks drop them, one late."""
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
        # A view keeps the other ranks' memory.
        third, still = make(1000)
        if rank != 0:
            kept = bool((view == 7).all())
            del view
            gc.collect()
        else:
            kept = True
        fourth, again = make(1000)
        clean = not fourth.any()
        # The communicator's all-to-all takes its channels out of the same heap.
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
    """Errors from invalid calls."""
    with weft.init() as communicator:
        message = [
            device_native.named(lambda: weft.symmetric_peer(torch.empty(3), 0))[0],
            device_native.named(
                lambda: weft.symmetric_empty(4 + communicator.rank, torch.int64, device="twin")
            )[0],
        ]
        own = weft.symmetric_empty(2, torch.int64, device="twin")
        message.append(device_native.named(lambda: weft.symmetric_peer(own, 9))[0])
        own[0] = 5
    # Mapped still, although the communicator is closed.
    assert own[0] == 5
    message.append(device_native.named(lambda: weft.symmetric_empty(2, device="twin"))[0])
    return message


def registered() -> dict[str, Any]:
    """Each rank writes to the next one's tensor, at different addresses on each rank."""
    with weft.init() as communicator:
        rank, ranks = communicator.rank, communicator.world_size
        whole = torch.zeros(64 + rank).share_memory_()
        mine = whole[3 + rank : 3 + rank + 12].view(3, 4)
        made = weft.symmetric_register(mine)
        after = (rank + 1) % ranks
        made.peer(after)[1, 2] = 10.0 + rank
        communicator.barrier()
        # All other bytes are unchanged, and peers read the current contents.
        expected = torch.zeros(64 + rank)
        expected[3 + rank + 6] = 10.0 + (rank - 1) % ranks
        read = made.peer(after)[1, 2].item() == 10.0 + rank
        same = made.peer(rank).data_ptr() == mine.data_ptr()
        wrong = device_native.named(lambda: made.peer(ranks))[0]
        view = made.peer(after)
        communicator.barrier()
        made.close()
        made.close()
        # A view keeps a twin's mapping.
        kept = view[1, 2].item() == 10.0 + rank
        closed = device_native.named(lambda: made.peer(after))[0]
        return {
            "right": bool((whole == expected).all()),
            "read": read,
            "same": same,
            "kept": kept,
            "errors": [wrong, closed],
        }


def registered_refused() -> list[str]:
    """Tensors that cannot be registered, and a communicator that is closed first."""
    with weft.init() as communicator:
        tensors = {
            "own": torch.zeros(4),
            "strided": torch.zeros(4, 4).share_memory_()[:, 1],
            "empty": torch.zeros(0),
            "meta": torch.zeros(4, device="meta"),
            "other": torch.zeros(4 + communicator.rank).share_memory_(),
        }
        message = [
            device_native.named(partial(weft.symmetric_register, tensor))[0]
            for tensor in tensors.values()
        ]
        made = weft.symmetric_register(torch.ones(4).share_memory_())
        view = made.peer((communicator.rank + 1) % communicator.world_size)
    message.append(device_native.named(lambda: made.peer(0))[0])
    made.close()
    assert view.tolist() == [1.0] * 4
    return message


def registered_on_gpus() -> dict[str, Any]:
    """Torch tensors on GPUs, inside torch's segments, as destinations of peers' kernels."""
    torch.cuda.set_device(int(os.environ.get("WEFT_LOCAL_RANK", "0")) % torch.cuda.device_count())
    with weft.init() as communicator:
        rank, ranks = communicator.rank, communicator.world_size
        after = (rank + 1) % ranks
        # Tensors then have different offsets in their segments.
        fillers = [torch.zeros(512 * (rank + 1), device="cuda") for _ in range(3)]
        whole = torch.zeros(5000 + rank, device="cuda")
        mine = whole[7 + rank : 7 + rank + 1200].view(30, 40)
        other = torch.full((4, 5), float(rank), dtype=torch.bfloat16, device="cuda")
        made, second = weft.symmetric_register(mine), weft.symmetric_register(other)
        made.peer(after)[3, 5] = 10.0 + rank
        read = second.peer(after).float().mean().item() == float(after)
        torch.cuda.synchronize()
        communicator.barrier()
        expected = torch.zeros(5000 + rank)
        expected[7 + rank + 3 * 40 + 5] = 10.0 + (rank - 1) % ranks
        right = bool((whole.cpu() == expected).all())
        communicator.barrier()
        made.close()
        closed = device_native.named(lambda: made.peer(after))[0]
        # The closed one's memory returns to torch; the other stays registered.
        still = second.peer(after).float().mean().item() == float(after)
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        expandable = torch.zeros(64 << 20, device="cuda")
        refused = device_native.named(partial(weft.symmetric_register, expandable))
        del fillers
    return {
        "right": right,
        "read": read,
        "still": still,
        "closed": closed,
        "refused": refused[0],
        "remedy": "expandable_segments:False" in refused[2],
        "kept": len(cuda_registered._KEPT),
    }
