"""Dispatch and combine, and collectives, between the GPUs of one host, with torch tensors.

`HierarchicalCollectives` has collectives between GPUs of several hosts.

`Collectives` has all-reduce, all-gather and others: see its documentation. All below is about
`AllToAll`: the same calls as on the CPU, on the tensors of this rank's GPU::

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

What is different from the CPU:

- Every call puts a kernel on torch's current stream and returns without a wait on the host, so the
  calls may be captured into a CUDA graph; results are allocated by torch, from the graph's pool
  too, and belong to the caller.
- Counts stay on the device: `Received.positions` is the greatest number possible, `expert_counts`
  and `expert_offsets` are tensors.
- Errors of the device are recorded there: `weft.check()` raises them, and a `watchdog` polls for
  them. Outputs of a failed round are NaN: every byte is 0xFF, counts are 0.
- `torch.compile` traces through all of it: in compiled code the calls are the operators
  `weft::moe_dispatch`, `weft::moe_combine` and their halves. There are no gradients.
- `device="twin"` does the same on the CPU with CPU tensors, to try things out and for tests.

Importing this module imports torch; importing `weft` does not.
"""

from weft.cuda.all_to_all import AllToAll
from weft.cuda.carveout import sm_carveout
from weft.cuda.collective_transfers import Receive, Send
from weft.cuda.collectives import Collectives, local_collectives, local_symmetric_empty
from weft.cuda.combine import Combine
from weft.cuda.compiled import compile_collectives
from weft.cuda.dispatch import Dispatch
from weft.cuda.group import local_group
from weft.cuda.hierarchical import HierarchicalCollectives
from weft.cuda.outputs import Outputs
from weft.cuda.planned import Handle, HostCounts
from weft.cuda.received import Received
from weft.cuda.streams import Event
from weft.moe import check

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
