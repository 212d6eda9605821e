"""Kernel: sum of rows over the ranks, residual and RMS norm; a row is in registers of a program.

Elements of 16 bits are sent by two: a packet's payload is a word of the row, so partial sums arrive
as they are. A program sends all its rows before it receives one.
"""

import triton
import triton.language as tl

import weft.triton as wt
from weft.fused.kernels.packets import (
    distances_of,
    half_of,
    halves_of,
    keep_round,
    last_round,
    pack,
    receive,
    receive_halves,
    receive_sum,
    send,
    words_of,
)

__all__ = ["norm_kernel"]


@triton.jit
def norm_kernel(
    x,
    residual,
    norm_weight,
    output,
    summed,
    inboxes,
    state,
    context,
    rows,
    width_by_4,
    half_by_16,
    eps,
    dtype: tl.constexpr,
    two_shot: tl.constexpr,
    ranks: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
):
    """One call; a grid of one dimension.

    Args:
        x: [rows, 4 * width_by_4] words: int32 with two elements of 16 bits, or float32.
        residual: words as of `x`.
        norm_weight: words of a row.
        output: words of the normed rows.
        summed: words of the rows before the norm.
        inboxes: int64, symmetric, two halves of `16 * half_by_16` packets.
        state: of `last_round`.
        context: of `inboxes`.
        rows: number of rows.
        width_by_4: words of a row, by 4.
        half_by_16: packets of half of an inbox, by 16.
        eps: added to the mean of squares.
        dtype: of the elements.
        two_shot: row r is summed by rank r modulo `ranks`, which sends it to all.
        ranks: number of ranks.
        group: of `receive_sum`.
        block: at least the words of a row and the threads of a program.
    """
    width = width_by_4 * 4
    size = rows * width
    program, programs = tl.program_id(0), tl.num_programs(0)
    place = tl.arange(0, block)
    present = place < width
    rank, last = wt.rank(context), last_round(state)
    distances = distances_of(context, ranks)
    # The first row is loaded along with these.
    words = tl.load(x + program * width + place, mask=present & (program < rows), other=0)
    epoch = wt.next_epoch(last)
    inbox = half_of(epoch, half_by_16)
    sums = inbox + ranks * size
    for row in range(program, rows, programs):
        offsets = inbox + rank * size + row * width + place
        if two_shot:
            wt.put(context, inboxes + offsets, pack(words, epoch), row % ranks, present)
        else:
            send(inboxes, distances, offsets, pack(words, epoch), present, ranks)
        following = row + programs
        words = tl.load(x + following * width + place, mask=present & (following < rows), other=0)
    keep_round(state, epoch)
    if two_shot:
        for row in range(program, rows, programs):
            if row % ranks == rank:
                places = row * width + place
                low, high = _sum(
                    *(context, inboxes + inbox + places, size, present, epoch, row),
                    *(dtype, ranks, group),
                )
                words = low if dtype == tl.float32 else words_of(low, high, dtype)
                send(inboxes, distances, sums + places, pack(words, epoch), present, ranks)
        tl.debug_barrier()
    for row in range(program, rows, programs):
        places = row * width + place
        # Loaded while packets are on their way.
        added = tl.load(residual + places, mask=present, other=0)
        factors = tl.load(norm_weight + place, mask=present, other=0)
        if two_shot:
            packets, fine = receive(
                context, inboxes + sums + places, present, epoch, row % ranks, row
            )
            low, high = _parts(packets.to(tl.int32), dtype)
            low = tl.where(fine, low, float("nan"))
            high = tl.where(fine, high, float("nan"))
        else:
            low, high = _sum(
                *(context, inboxes + inbox + places, size, present, epoch, row),
                *(dtype, ranks, group),
            )
        _finish(
            *(low, high, places, present, added, factors, output, summed),
            *(width, eps, dtype),
        )


@triton.jit
def _sum(
    context,
    inbox,
    size,
    present,
    epoch,
    row,
    dtype: tl.constexpr,
    ranks: tl.constexpr,
    group: tl.constexpr,
):
    """Sums of the low and the high elements of a row; of float32, both are the sum of the words."""
    if dtype == tl.float32:
        low, fine = receive_sum(context, inbox, size, present, epoch, row, ranks, group)
        high = low
    else:
        low, high, fine = receive_halves(
            context, inbox, size, present, epoch, row, dtype, ranks, group
        )
    return tl.where(fine, low, float("nan")), tl.where(fine, high, float("nan"))


@triton.jit
def _parts(words, dtype: tl.constexpr):
    """Elements of words, as float32."""
    if dtype == tl.float32:
        low = words.to(tl.float32, bitcast=True)
        high = low
    else:
        low, high = halves_of(words, dtype)
    return low, high


@triton.jit
def _finish(
    low,
    high,
    places,
    present,
    added,
    factors,
    output,
    summed,
    width,
    eps,
    dtype: tl.constexpr,
):
    """Residual and norm of a row, each step rounded to the dtype."""
    if dtype == tl.float32:
        rows = low + added
        tl.store(summed + places, rows, mask=present)
        squares = tl.sum(tl.where(present, rows * rows, 0.0), axis=0)
        scale = tl.rsqrt(squares / width + eps)
        tl.store(output + places, rows * scale * factors, mask=present)
    else:
        added_low, added_high = halves_of(added, dtype)
        low = (low.to(dtype).to(tl.float32) + added_low).to(dtype).to(tl.float32)
        high = (high.to(dtype).to(tl.float32) + added_high).to(dtype).to(tl.float32)
        tl.store(summed + places, words_of(low, high, dtype), mask=present)
        squares = tl.sum(tl.where(present, low * low + high * high, 0.0), axis=0)
        scale = tl.rsqrt(squares / (2 * width) + eps)
        low_factors, high_factors = halves_of(factors, dtype)
        low = (low * scale).to(dtype).to(tl.float32) * low_factors
        high = (high * scale).to(dtype).to(tl.float32) * high_factors
        tl.store(output + places, words_of(low, high, dtype), mask=present)
