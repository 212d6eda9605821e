"""Device functions for kernels in stock Triton that write to peers' symmetric memory.

A kernel gets a symmetric tensor and the tensor's *context*, an int64 tensor by which the functions
find this rank, the domain's table and the tensor at each peer::

    words = weft.symmetric_empty(ranks, torch.int32)         # one word of each rank
    kernel[1,](words, weft.triton.context(words), rounds)

    @triton.jit
    def kernel(words, context, rounds):
        epoch = weft.triton.next_epoch(tl.load(rounds))
        weft.triton.barrier(context, words, epoch)
        tl.store(rounds, epoch)

- `context`: the context of a tensor, on the host
- `rank`, `world_size`, `peer`: places, in a kernel
- `put`, `put_signal`, `signal`, `signal_add`, `fetch_add`: toward a peer
- `wait`, `reached`, `next_epoch`, `barrier`: words of 32 bits that peers raise
- `last_arrival`: the last program of several
- `tile_count`, `tile_at`, `destination_at`, `source_at`: orders of a persistent loop
- `span_begin`, `span_end`: spans by the device's clock; on the host `trace_empty`, `align_clocks`
  and `timeline`
- `Proxy`, `staged_put_signal`, `staged_wait`: toward ranks of other hosts, by a thread of the host
- `weft.triton.lint`: checks of compiled PTX

Kernels run unchanged under Triton's interpreter (`TRITON_INTERPRET=1`, set before the import) on
tensors of `device="twin"`, one process for each rank. Importing this module imports torch and
triton; importing `weft` does not.
"""

try:
    import triton as _triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        "weft.triton: triton is not installed: expected triton 3.6 or later; install torch for "
        "CUDA, which includes it, or triton itself"
    ) from error

from weft.triton.contexts import context
from weft.triton.primitives import (
    barrier,
    fetch_add,
    last_arrival,
    next_epoch,
    peer,
    put,
    put_signal,
    rank,
    reached,
    signal,
    signal_add,
    wait,
    world_size,
)
from weft.triton.proxy import Proxy
from weft.triton.spans import span_begin, span_end
from weft.triton.staged import staged_put_signal, staged_wait
from weft.triton.tiles import destination_at, source_at, tile_at, tile_count
from weft.triton.timelines import Clocks, align_clocks, timeline, trace_empty

__all__ = [
    "Clocks",
    "Proxy",
    "align_clocks",
    "barrier",
    "context",
    "destination_at",
    "fetch_add",
    "last_arrival",
    "next_epoch",
    "peer",
    "put",
    "put_signal",
    "rank",
    "reached",
    "signal",
    "signal_add",
    "source_at",
    "span_begin",
    "span_end",
    "staged_put_signal",
    "staged_wait",
    "tile_at",
    "tile_count",
    "timeline",
    "trace_empty",
    "wait",
    "world_size",
]
