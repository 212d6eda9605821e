"""Device functions: flags of several ranks, which release and announce plain stores.

A flag is an int32 that one program of one rank sets to the epoch of its round. Rounds of a space
are as in `packets`: a peer may have begun the round after this one, and no later one. So a flag of
this round has its epoch or the next, and a flag with any other value is one of an earlier round,
however long ago that was.
"""

import triton
import triton.language as tl

from weft.triton import layout
from weft.triton.clock import POLLS
from weft.triton.primitives import expired, next_epoch

__all__ = ["await_flags", "raise_flags"]

_SHIFTS = tl.constexpr(layout.CONTEXT_SHIFTS // 8)
_MAX_RANKS = tl.constexpr(layout.MAX_RANKS)


@triton.jit
def raise_flags(context, flag, first, last, epoch, rank):
    """Sets a flag at several ranks, but this one. Release of stores of the whole program.

    Args:
        context: of the tensor that `flag` points into.
        flag: pointer to int32 in this rank's tensor.
        first: first rank.
        last: the rank after the last one.
        epoch: of the round.
        rank: this rank.
    """
    peers = tl.arange(0, _MAX_RANKS)
    others = (peers >= first) & (peers < last) & (peers != rank)
    shifts = tl.load(context + _SHIFTS + peers, mask=others, other=0)
    theirs = (flag.to(tl.pointer_type(tl.int8)) + shifts).to(tl.pointer_type(tl.int32))
    epochs = tl.zeros([_MAX_RANKS], tl.int32) + epoch
    tl.debug_barrier()
    tl.atomic_xchg(theirs, epochs, mask=others, sem="release", scope="sys")


@triton.jit
def await_flags(context, flags, stride, first, last, epoch, rank, slot):
    """Waits for flags of several ranks, but this one; true once all are set. Acquire.

    Args:
        context: of any tensor of the communicator.
        flags: pointer to int32 in this rank's tensor: the flag of rank 0.
        stride: words from the flag of a rank to that of the next.
        first: first rank.
        last: the rank after the last one.
        epoch: of the round.
        rank: this rank.
        slot: number for the error.
    """
    sources = tl.arange(0, _MAX_RANKS)
    awaited = (sources >= first) & (sources < last) & (sources != rank)
    began = tl.cast(0, tl.int64)
    polls = 0
    missing, seen = _first_missing(flags, stride, sources, awaited, epoch)
    while (began >= 0) & (missing < _MAX_RANKS):
        polls += 1
        if polls == POLLS:
            its = tl.sum(tl.where(sources == missing, seen, 0), axis=0)
            began = expired(context, missing, slot, epoch, its, began)
            polls = 0
        missing, seen = _first_missing(flags, stride, sources, awaited, epoch)
    tl.debug_barrier()
    return missing == _MAX_RANKS


@triton.jit
def _first_missing(flags, stride, sources, awaited, epoch):
    """Lowest rank whose flag is not set, `_MAX_RANKS` if none; flags of all."""
    zeros = tl.zeros([_MAX_RANKS], tl.int32)
    seen = tl.atomic_add(flags + sources * stride, zeros, mask=awaited, sem="acquire", scope="sys")
    missing = awaited & (seen != epoch) & (seen != next_epoch(epoch))
    return tl.min(tl.where(missing, sources, _MAX_RANKS), axis=0), seen
