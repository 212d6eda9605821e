"""GEMM whose rows arrive while it computes: after an all-gather or an all-to-all.

Programs below `senders` first send this rank's rows, the next rank's first: each sends a share of
a chunk (`chunk_rows` rows), and the last sets the chunk's flag at the destination. The other
programs compute the local rows' tiles, from `x`. Then all programs claim tiles for the other ranks
from a counter, in arrival order, each after the chunk, from the inbox.

Words in symmetric memory, set to epochs: [ranks] entries, [ranks, MAX_SLICES] chunks by source.

Programs below `senders` send before they wait for rows, so programs that run one after another end
too if there is one sender.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.triton as wt
from weft.fused.kernels.agreement import agree, announce
from weft.fused.kernels.gemm.gemm import (
    ARRIVALS,
    CLAIMS,
    MAX_SLICES,
    Scales,
    Sizes,
    Widths,
    arrive,
    enter,
    fence_bulk_loads,
    gemm_tile,
    place_of,
    scaled,
    store_gemm_tiles,
    store_tile,
)
from weft.fused.kernels.rounds import Peers, end_round, this_round
from weft.fused.kernels.tracing import COMPUTE, SEND, WAIT

__all__ = ["Counts", "Modes", "Sources", "receive_multiply", "send_rows"]

_SLICES = tl.constexpr(MAX_SLICES)
_CLAIMS = tl.constexpr(CLAIMS)
_ARRIVALS = tl.constexpr(ARRIVALS)


class Sources(NamedTuple):
    """Rows to send, and where rows arrive.

    Attributes:
        source_rows: pointer to x's rows.
        inbox: pointer to [ranks, rows, inner] by source, in symmetric memory.
    """

    source_rows: Any
    inbox: Any


class Counts(NamedTuple):
    """Numbers for which Triton does not compile the kernel again.

    Attributes:
        rows: for each rank pair.
        chunk_rows: rows in a chunk, a multiple of block_rows; at most MAX_SLICES chunks.
        senders: programs that send, at most all.
        digest: see `weft.fused.kernels.agreement`.
    """

    rows: Any
    chunk_rows: Any
    senders: Any
    digest: Any = 0


class Modes(NamedTuple):
    """Constants that select what the kernel does.

    Attributes:
        scatter: true for all-to-all, false for all-gather.
        interpreted: programs run one after another.
        send_block: elements that a sender has in flight.
    """

    scatter: bool
    interpreted: bool
    send_block: int


@triton.jit(do_not_specialize=["counts"])
def receive_multiply(
    x,
    weight,
    received,
    out,
    peers: Peers,
    sources: Sources,
    counts: Counts,
    widths: Widths,
    scales: Scales,
    modes: tl.constexpr,
    blocks: tl.constexpr,
    trace=None,
):
    """One call on a rank.

    Parameters:

    - `x`: descriptor for this rank's rows, or the pointer to them: [rows, inner], or with `scatter`
      [ranks * rows, inner], whose block r is for rank r.
    - `weight`: operand.
    - `received`: descriptor for the inbox, or the pointer to it.
    - `out`: [ranks * rows, columns], by source.
    - `peers`, `sources`, `counts`, `widths`: groups, described above and in
      `weft.fused.kernels.gemm.gemm`.
    - `scales`: `scale_x` is for the rows in `out`.
    - `modes`, `blocks`: `Modes` and `weft.fused.kernels.gemm.gemm.Blocks`.
    - `trace`: span buffer, or None.
    """
    context, words, state = peers.context, peers.words, peers.state
    agreement, digest = peers.agreement, counts.digest
    rows, chunk_rows, senders = counts.rows, counts.chunk_rows, counts.senders
    columns, inner = widths.columns, widths.inner
    block_rows: tl.constexpr = blocks.block_rows
    block_columns: tl.constexpr = blocks.block_columns
    bulk: tl.constexpr = blocks.bulk
    interpreted: tl.constexpr = modes.interpreted
    scatter: tl.constexpr = modes.scatter
    rank, ranks = wt.rank(context), wt.world_size(context)
    program = tl.program_id(0)
    epoch = this_round(state)
    flags = words + ranks
    counters = state + _ARRIVALS
    if program == 0:
        if agreement is not None:
            announce(context, agreement, digest, epoch)
        enter(context, words, state, epoch)
    spans = 0
    if program < senders:
        began = wt.span_begin(trace)
        send_rows(
            *(peers, sources, counters, epoch, rows, inner, chunk_rows, senders, False),
            *(modes, blocks),
        )
        spans = wt.span_end(trace, spans, SEND, began)
    down, along = tl.cdiv(rows, block_rows), tl.cdiv(columns, block_columns)
    tiles = down * along
    # Local rows: by the programs that do not send, if there are any.
    programs = tl.num_programs(0)
    start, stride = program, programs
    if senders < programs:
        start, stride = tl.where(program < senders, tiles, program - senders), programs - senders
    fence_bulk_loads(bulk, interpreted)
    began = wt.span_begin(trace)
    store_gemm_tiles(
        *(x, weight, out + tl.cast(rank, tl.int64) * rows * columns, start, stride),
        *(rank * rows if scatter else 0, rows),
        *(Sizes(ranks * rows if scatter else rows, columns, inner), scales),
        *(rank * rows, ranks * rows, blocks),
    )
    spans = wt.span_end(trace, spans, COMPUTE, began)
    # Rows from the other ranks.
    agreed = rank >= 0
    if agreement is not None:
        agreed &= agree(context, agreement, digest, epoch)
    claim = state + _CLAIMS + (epoch & 1)
    index = tiles + tl.atomic_add(claim, 1, sem="relaxed", scope="gpu")
    while index < ranks * tiles:
        source = wt.source_at(index // tiles, rank, ranks)
        row, column = place_of(index % tiles, down, along, blocks.group)
        row, column = row * block_rows, column * block_columns
        part = row // chunk_rows
        began = wt.span_begin(trace)
        fine = agreed & wt.wait(context, flags + source * _SLICES + part, epoch, source, part + 1)
        spans = wt.span_end(trace, spans, WAIT, began)
        began = wt.span_begin(trace)
        fence_bulk_loads(bulk, interpreted)
        total = gemm_tile(
            *(received, weight, source * rows + row, column),
            *(Sizes(ranks * rows, columns, inner), blocks),
        )
        total = scaled(total, scales, source * rows + row, column, ranks * rows, columns, blocks)
        values = tl.where(fine, total, float("nan")).to(out.dtype.element_ty)
        at = out + tl.cast(source, tl.int64) * rows * columns
        store_tile(at, values, row, column, rows, columns)
        spans = wt.span_end(trace, spans, COMPUTE, began)
        index = tiles + tl.atomic_add(claim, 1, sem="relaxed", scope="gpu")
    end_round(state, epoch)


@triton.jit
def send_rows(
    peers: Peers,
    sources: Sources,
    counters,
    epoch,
    rows,
    inner,
    chunk_rows,
    senders,
    own: tl.constexpr,
    modes: tl.constexpr,
    blocks: tl.constexpr,
):
    """Sends this program's shares in all chunks to all peers, and with `own` to this rank too."""
    context, words, inbox = peers.context, peers.words, sources.inbox
    send_block: tl.constexpr = modes.send_block
    rank, ranks = wt.rank(context), wt.world_size(context)
    flags = words + ranks
    here = tl.arange(0, send_block)
    each = tl.cast(rows, tl.int64) * inner
    for step in range(ranks if own else ranks - 1):
        to = wt.destination_at(step, rank, ranks)
        fine = rank >= 0
        if to != rank:
            fine = wt.wait(context, words + to, epoch, to)
        begin_of_rows = sources.source_rows + to * each if modes.scatter else sources.source_rows
        for part in range(tl.cdiv(rows, chunk_rows)):
            begin = tl.cast(part, tl.int64) * chunk_rows * inner
            length = tl.minimum(each - begin, tl.cast(chunk_rows, tl.int64) * inner).to(tl.int32)
            if blocks.bulk:
                # Rows are whole multiples of 16 bytes.
                length = tl.multiple_of(
                    length, 16 // (inbox.dtype.element_ty.primitive_bitwidth // 8)
                )
            share = tl.cdiv(tl.cdiv(length, senders), send_block) * send_block
            start = tl.program_id(0) * share
            end = tl.minimum(start + tl.where(fine, share, 0), length)
            for at in range(start, end, send_block):
                present = at + here < end
                values = tl.load(begin_of_rows + begin + at + here, mask=present)
                place = inbox + rank * each + begin + at + here
                wt.put(context, place, values, to, mask=present)
            if arrive(counters + to * _SLICES + part, senders, fine, modes.interpreted):
                wt.signal(context, flags + rank * _SLICES + part, epoch, to)
