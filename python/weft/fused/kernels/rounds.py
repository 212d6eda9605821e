"""Device functions: rounds of a kernel of several programs.

The number of the last round is in device memory, so that a replayed CUDA graph uses the next one.
A state has `STATE_WORDS` int32: the number, and a count of programs that have ended.
"""

import triton
import triton.language as tl

from weft.triton.primitives import next_epoch

__all__ = ["STATE_WORDS", "end_round", "this_round"]

#: Words of int32 that the functions use at the begin of a state.
STATE_WORDS = 2


@triton.jit
def this_round(state):
    """Epoch of this kernel's round, int32: the same in all programs.

    Args:
        state: pointer to int32 in memory of this GPU, zero at first; no program may have called
            `end_round` for all programs before.
    """
    return next_epoch(tl.load(state))


@triton.jit
def end_round(state, epoch):
    """Ends a program's part of a round; the last program stores its epoch.

    All programs of a grid of one dimension call it, as their last access to the state.
    """
    tl.debug_barrier()
    before = tl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.atomic_xchg(state + 1, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(state, epoch, sem="relaxed", scope="gpu")
