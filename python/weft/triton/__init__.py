"""Device functions for kernels in stock Triton that write to peers' symmetric memory.

A kernel gets a symmetric tensor and the tensor's *context*, an int64 tensor through which the
functions find this rank, the domain's table and the tensor at each peer. For example::

    words = weft.symmetric_empty(ranks, torch.int32)         # one word of each rank
    kernel[1,](words, weft.triton.context(words), rounds)

    @triton.jit
    def kernel(words, context, rounds):
        epoch = weft.triton.next_epoch(tl.load(rounds))
        weft.triton.barrier(context, words, epoch)
        tl.store(rounds, epoch)

- `context`: a tensor's context, on the host
- `rank`, `world_size`, `peer`: addresses, in a kernel
- `put`, `put_signal`, `signal`, `signal_add`, `fetch_add`: toward a peer
- `wait`, `reached`, `next_epoch`, `barrier`: 32-bit words that peers raise
- `last_arrival`: the last program of several
- `tile_count`, `tile_at`, `destination_at`, `source_at`: persistent loop orders
- `span_begin`, `span_end`: spans by the device's clock; on the host `trace_empty`, `align_clocks`
  and `timeline`
- `Proxy`: toward ranks on other hosts, by a host thread; in a kernel `remote_put_signal`,
  `remote_scatter`, `remote_signal`, `remote_wait`, `remote_release`, `remote_drained`,
  `remote_rank`, `remote_world_size`
- `weft.triton.lint`: checks on compiled PTX

Kernels run unchanged under Triton's interpreter (`TRITON_INTERPRET=1`, set before the import;
https://triton-lang.org/main/programming-guide/chapter-3/debugging.html) on `device="twin"` tensors,
one process for each rank. Importing this module imports torch and triton; importing `weft` does
not.
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
from weft.triton.remote import (
    remote_drained,
    remote_put_signal,
    remote_rank,
    remote_release,
    remote_scatter,
    remote_signal,
    remote_wait,
    remote_world_size,
)
from weft.triton.spans import span_begin, span_end
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
    "remote_drained",
    "remote_put_signal",
    "remote_rank",
    "remote_release",
    "remote_scatter",
    "remote_signal",
    "remote_wait",
    "remote_world_size",
    "signal",
    "signal_add",
    "source_at",
    "span_begin",
    "span_end",
    "tile_at",
    "tile_count",
    "timeline",
    "trace_empty",
    "wait",
    "world_size",
]
