"""Device functions for rounds in a kernel with several programs.

The last round number is in device memory, so that a replayed CUDA graph uses the next one. A state
has `STATE_WORDS` int32: the number, and how many programs have ended.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.triton.primitives import next_epoch

__all__ = ["STATE_WORDS", "Peers", "end_round", "this_round"]

#: Words of int32 that the functions use where a state begins.
STATE_WORDS = 2


class Peers(NamedTuple):
    """Memory through which a kernel meets its peers.

    Attributes:
        context: for the space.
        words: int32 flags in the space's symmetric memory.
        state: the space's state.
        agreement: see `weft.fused.kernels.agreement`, or None.
    """

    context: Any
    words: Any
    state: Any
    agreement: Any = None


@triton.jit
def this_round(state):
    """This kernel's epoch, int32: the same in all programs.

    Args:
        state: pointer to int32 in this GPU's memory, zero at first; it must be called before all
            programs have called `end_round`.
    """
    return next_epoch(tl.load(state))


@triton.jit
def end_round(state, epoch):
    """Ends a program's part in a round; the last program stores its epoch.

    All programs in a one-dimensional grid call it, as their last access to the state.
    """
    tl.debug_barrier()
    before = tl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.atomic_xchg(state + 1, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(state, epoch, sem="relaxed", scope="gpu")
