"""Kernels for `proxy_check`."""

import triton
import triton.language as tl

import weft.triton as wt
from weft.triton.clock import now


@triton.jit
def drain(context, stamps, first, rounds):
    """Round trips between this rank's kernel and its proxy."""
    own = wt.remote_rank(context)
    for number in range(rounds):
        begin = tl.cast(now(), tl.int64)
        wt.remote_drained(context, 0)
        wt.remote_wait(context, own, 0, first + number + 1)
        tl.store(stamps + number, tl.cast(now(), tl.int64) - begin)


@triton.jit
def answer(context, stamps, first, rounds, length):
    """Round trips between two kernels."""
    rank = wt.remote_rank(context)
    peer = 1 - rank
    for number in range(rounds):
        begin = tl.cast(now(), tl.int64)
        if rank == 1:
            wt.remote_wait(context, peer, 1, first + number + 1)
        send(context, peer, length)
        if rank == 0:
            wt.remote_wait(context, peer, 1, first + number + 1)
        tl.store(stamps + number, tl.cast(now(), tl.int64) - begin)


@triton.jit
def crowd(context, begins, ends, first, rounds, length):
    """Round trips between two kernels, all of whose programs wait for each of them."""
    rank = wt.remote_rank(context)
    peer = 1 - rank
    leads = tl.program_id(0) == 0
    for number in range(rounds):
        if leads & (rank == 0):
            tl.store(begins + number, tl.cast(now(), tl.int64))
            send(context, peer, length)
        wt.remote_wait(context, peer, 1, first + number + 1)
        # The last program's time.
        tl.atomic_max(ends + number, tl.cast(now(), tl.int64), sem="relaxed", scope="gpu")
        if leads & (rank == 1):
            send(context, peer, length)


@triton.jit
def send(context, peer, length):
    if length == 0:
        wt.remote_signal(context, peer, 1)
    else:
        wt.remote_put_signal(context, peer, 1, 0, 0, 1, 0, length)


@triton.jit
def echo(context, outbox, inbox, wrong, rounds, block: tl.constexpr):
    """Puts with other values in each round, checked at the other end."""
    rank = wt.remote_rank(context)
    peer = 1 - rank
    index = tl.arange(0, block)
    for number in range(rounds):
        wt.remote_wait(context, rank, 2, number)
        # The peer has read the round before.
        wt.remote_wait(context, peer, 3, number)
        tl.store(outbox + index, (rank + 1) * 1000003 * (number + 1) + index)
        wt.remote_put_signal(context, peer, 2, 0, 0, 1, 0, block * 4)
        wt.remote_drained(context, 2)
        fine = wt.remote_wait(context, peer, 2, number + 1)
        expected = (peer + 1) * 1000003 * (number + 1) + index
        differ = tl.sum((tl.load(inbox + index, volatile=True) != expected).to(tl.int32), axis=0)
        tl.store(wrong + number, tl.where(fine, differ, -1))
        # All threads have read.
        tl.debug_barrier()
        wt.remote_signal(context, peer, 3)


# One variant for all values and alignments: the first launch loads a variant, which waits for
# kernels that run.
@triton.jit(do_not_specialize=["word", "rounds"], do_not_specialize_on_alignment=["outcome"])
def wait_for(context, outcome, word, rounds):
    tl.store(
        outcome, wt.remote_wait(context, 1 - wt.remote_rank(context), word, rounds).to(tl.int32)
    )
