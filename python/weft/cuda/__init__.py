"""Dispatch and combine, and collectives, between GPUs on one host, with torch tensors.

`HierarchicalCollectives` has collectives between GPUs on several hosts.

`Collectives` has all-reduce, all-gather and others: see the class documentation. The rest is about
`AllToAll`: the same calls as on the CPU, on the tensors on this rank's GPU::

    torch.cuda.set_device(local_rank)
    with (
        weft.init() as communicator,
        weft.moe.AllToAll(
            communicator, experts=256, top_k=8, hidden=7168, max_tokens=128,
            dtype="bfloat16", device="cuda",
        ) as all_to_all,
    ):
        received = all_to_all.dispatch(tokens, ids, weights)
        outputs = grouped_gemm(received.tokens, received.expert_offsets)
        combined = all_to_all.combine(received, outputs)
        received.release()
        torch.cuda.synchronize()
        weft.check()

Differences from the CPU:

- Every call puts a kernel on torch's current stream and returns without waiting on the host, so the
  calls may be captured into a CUDA graph; torch allocates results, also from the graph's pool, and
  the caller owns them.
- Counts stay on the device: `Received.positions` is the maximum number possible, `expert_counts`
  and `expert_offsets` are tensors.
- The device records errors: `weft.check()` raises them, and a `watchdog` polls for them.
  Outputs in a failed round are NaN: every byte is 0xFF, counts are 0.
- [`torch.compile`](https://docs.pytorch.org/docs/stable/torch.compiler.html) traces through it: in
  compiled code the calls are the operators `weft::moe_dispatch`, `weft::moe_combine` and the halves
  of both. There are no gradients.
- `device="twin"` does the same on the CPU with CPU tensors, to try things out and for tests.

Importing this module imports torch; importing `weft` does not.
"""

from weft.collectives.device.collectives import (
    Collectives,
    local_collectives,
    local_symmetric_empty,
)
from weft.collectives.device.compiled import compile_collectives
from weft.collectives.device.transfers import Receive, Send
from weft.collectives.hosts.hierarchical import HierarchicalCollectives
from weft.cuda import symmetric as symmetric
from weft.gpu.carveout import sm_carveout
from weft.gpu.streams import Event
from weft.moe import check
from weft.moe.device.all_to_all import AllToAll
from weft.moe.device.combine import Combine
from weft.moe.device.dispatch import Dispatch
from weft.moe.device.local_group import local_group
from weft.moe.device.outputs import Outputs
from weft.moe.device.planned import Handle, HostCounts
from weft.moe.device.received import Received

__all__ = [
    "AllToAll",
    "Collectives",
    "Combine",
    "Dispatch",
    "Event",
    "Handle",
    "HierarchicalCollectives",
    "HostCounts",
    "Outputs",
    "Receive",
    "Received",
    "Send",
    "check",
    "compile_collectives",
    "local_collectives",
    "local_group",
    "local_symmetric_empty",
    "sm_carveout",
]
