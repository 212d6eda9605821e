"""Mixture-of-experts dispatch and combine: sends tokens to their experts' ranks, and results back.

Every rank makes the same calls in the same order::

    with (
        weft.init() as communicator,
        AllToAll(communicator, experts=8, top_k=2, hidden=64, max_tokens=128) as all_to_all,
    ):
        with all_to_all.dispatch(tokens, ids, weights) as received:
            outputs = run_experts(received)
            combined = all_to_all.combine(received, outputs)

A token goes once to each rank that owns any of its experts; with `combine="reduce"` that rank forms
the weighted sum over its experts in float32, rounds it once, and returns only the sum.

Tokens may be 8-bit floats with a scale for each block of elements::

    codes, scales = weft.float8.quantise(tokens, block=128)
    all_to_all = weft.moe.AllToAll(communicator, ..., dtype="float8_e4m3fn", block=128)
    with all_to_all.dispatch(codes, ids, weights, scales=scales) as received:
        run_experts(received.tokens, received.scales)

With `gradients=True` rounds of torch tensors are differentiable.

With `device="cuda"` tokens, ids and weights are torch tensors on a GPU, and kernels do the work
without waits on the host: see `weft.cuda`. docs/coming-from-deepep.md compares the calls with
[DeepEP](https://github.com/deepseek-ai/DeepEP).
"""

from weft.gpu.errors import check
from weft.moe.all_to_all import AllToAll, DeviceOptions
from weft.moe.placement import Placement, balance
from weft.moe.rounds import Combine, Dispatch, Received

__all__ = [
    "AllToAll",
    "Combine",
    "DeviceOptions",
    "Dispatch",
    "Placement",
    "Received",
    "balance",
    "check",
]
