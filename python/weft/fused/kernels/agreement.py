"""Device functions that compare a call's arguments with all other ranks' arguments.

Each rank sends a digest over what ranks must agree on (operator, shapes, dtypes, options) as a
packet: the digest in the low half, the round's epoch in the high half. A 64-bit store arrives
whole, so neither a fence nor a flag is needed. A round's packets lie in the table half that its
epoch's parity selects; a kernel ends only after packets from all ranks, so a half is read before it
is written again (`weft.fused.kernels.packets`).
"""

import triton
import triton.language as tl

from weft.triton import layout
from weft.triton.clock import POLLS
from weft.triton.primitives import disagree, expired

__all__ = ["TABLE_WORDS", "agree", "announce"]

#: Packets in a table, int64: two halves with one for each rank.
TABLE_WORDS = 2 * layout.MAX_RANKS
_MAX_RANKS = tl.constexpr(layout.MAX_RANKS)
_RANK = tl.constexpr(layout.CONTEXT_RANK // 4)
_RANKS = tl.constexpr(layout.CONTEXT_RANKS // 4)
_SHIFTS = tl.constexpr(layout.CONTEXT_SHIFTS // 8)


@triton.jit
def announce(context, table, digest, epoch):
    """Stores this rank's digest at all other ranks. Relaxed; one program calls it, before it waits.

    Args:
        context: of the tensor that `table` points into.
        table: pointer to int64 `[TABLE_WORDS]`, symmetric, zero at first.
        digest: int32.
        epoch: this round's epoch.
    """
    peers = tl.arange(0, _MAX_RANKS)
    words = context.to(tl.pointer_type(tl.int32))
    rank, ranks = tl.load(words + _RANK), tl.load(words + _RANKS)
    others = (peers < ranks) & (peers != rank)
    shifts = tl.load(context + _SHIFTS + peers, mask=others, other=0)
    own = table + (epoch & 1) * _MAX_RANKS + rank
    theirs = (own.to(tl.pointer_type(tl.int8)) + shifts).to(tl.pointer_type(tl.int64))
    packet = (tl.cast(digest, tl.int64) & 0xFFFFFFFF) | (tl.cast(epoch, tl.int64) << 32)
    tl.store(theirs, tl.zeros([_MAX_RANKS], tl.int64) + packet, mask=others)


@triton.jit
def agree(context, table, digest, epoch):
    """True once all other ranks' digests are here, and equal to this rank's.

    It returns false on a difference, which is recorded for the host and ends all waits on this
    rank, and if the time limit has passed or the group has failed, as in `weft.triton.wait`.
    """
    peers = tl.arange(0, _MAX_RANKS)
    words = context.to(tl.pointer_type(tl.int32))
    rank, ranks = tl.load(words + _RANK), tl.load(words + _RANKS)
    others = (peers < ranks) & (peers != rank)
    places = table + (epoch & 1) * _MAX_RANKS + peers
    began = tl.cast(0, tl.int64)
    polls = 0
    packets = _read(places, others)
    missing = _first(others & ((packets >> 32).to(tl.int32) != epoch))
    while (began >= 0) & (missing < _MAX_RANKS):
        polls += 1
        if polls == POLLS:
            seen = _at(packets >> 32, missing)
            began = expired(context, missing, 0, epoch, seen, began)
            polls = 0
        packets = _read(places, others)
        missing = _first(others & ((packets >> 32).to(tl.int32) != epoch))
    here = others & ((packets >> 32).to(tl.int32) == epoch)
    other = _first(here & (packets.to(tl.int32) != digest))
    if other < _MAX_RANKS:
        disagree(context, other, digest, _at(packets, other))
    return (missing == _MAX_RANKS) & (other == _MAX_RANKS)


@triton.jit
def _read(places, mask):
    """Packets, read with atomics, so that all threads have the same values. 0 without the mask."""
    none = tl.zeros([_MAX_RANKS], tl.int64)
    packets = tl.atomic_add(places, none, mask=mask, sem="relaxed", scope="sys")
    return tl.where(mask, packets, none)


@triton.jit
def _first(mask):
    """Lowest rank with the mask, else `_MAX_RANKS`: the same in all threads."""
    return tl.min(tl.where(mask, tl.arange(0, _MAX_RANKS), _MAX_RANKS), axis=0)


@triton.jit
def _at(values, rank):
    """Low word of a rank's value."""
    own = tl.where(tl.arange(0, _MAX_RANKS) == rank, values, 0)
    return tl.sum(own, axis=0).to(tl.int32)
