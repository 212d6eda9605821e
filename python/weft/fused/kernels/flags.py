"""Device functions for flags on several ranks, which release and announce plain stores.

A flag is an int32 that one program on one rank sets to the round's epoch. Rounds in a space are as
in `packets`: a peer may have begun the round after this one, but no later one. So this round's flag
has its epoch or the next, and any other value comes from an earlier round, however long ago that
was.
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
    """Sets a flag at several other ranks. Releases all stores by the program.

    Args:
        context: for the tensor that `flag` points into.
        flag: pointer to int32 in this rank's tensor.
        first: first rank.
        last: the rank after the last one.
        epoch: this round's epoch.
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
    """Waits for flags from several other ranks; true once all are set. Acquire.

    Args:
        context: for any tensor in the communicator.
        flags: pointer to int32 in this rank's tensor: rank 0's flag.
        stride: words between one rank's flag and the next rank's.
        first: first rank.
        last: the rank after the last one.
        epoch: this round's epoch.
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
    """Lowest rank whose flag is not set, else `_MAX_RANKS`; flags from all ranks."""
    zeros = tl.zeros([_MAX_RANKS], tl.int32)
    seen = tl.atomic_add(flags + sources * stride, zeros, mask=awaited, sem="acquire", scope="sys")
    missing = awaited & (seen != epoch) & (seen != next_epoch(epoch))
    return tl.min(tl.where(missing, sources, _MAX_RANKS), axis=0), seen
