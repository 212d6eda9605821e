"""Dispatch and combine between the GPUs of one host, with torch tensors.

The same calls as on the CPU, on the tensors of this rank's GPU::

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

- Every call puts a kernel on torch's current stream and returns. Nothing waits on the host, so the
  calls may be captured into a CUDA graph; what comes back is allocated by torch, from the graph's
  pool too, and belongs to the caller.
- Counts stay on the device: `Received.positions` is the most there can be, `expert_counts` and
  `expert_offsets` are tensors.
- What goes wrong on the device is recorded there: `weft.check()` raises it, and a `watchdog` looks
  by itself. Outputs of a round that failed are no numbers: every byte is 0xFF, counts are 0.
- `torch.compile` traces through all of it: in compiled code the calls are the operators
  `weft::moe_dispatch`, `weft::moe_combine` and their halves. There are no gradients.
- `device="twin"` does the same on the CPU with CPU tensors, to try things out and for tests.

Importing this module imports torch; importing `weft` does not.
"""

from weft.cuda.all_to_all import AllToAll, local_group
from weft.cuda.received import Combine, Dispatch, Received
from weft.moe import check

__all__ = ["AllToAll", "Combine", "Dispatch", "Received", "check", "local_group"]
