"""Product whose rows arrive while it is computed: after an all-gather or an all-to-all.

Programs below `senders` first send this rank's rows, the next rank's first: each sends its share of
a chunk (`chunk_rows` rows), and the last sets the chunk's flag at the destination. The other
programs compute the tiles of own rows, from `x`. Then all programs claim tiles of the other ranks
from a counter, in the order of arrival, each after its chunk, from the inbox.

Words in symmetric memory, set to epochs: [ranks] entries, [ranks, MAX_SLICES] chunks by source.

Programs below `senders` send before they wait for rows, so programs that run one after another end
too if there is one sender.
"""

import triton
import triton.language as tl

import weft.triton as wt
from weft.fused.kernels.gemm import (
    ARRIVALS,
    CLAIMS,
    MAX_SLICES,
    arrive,
    enter,
    fence_bulk_loads,
    place_of,
    product,
    scaled,
    store_products,
    store_tile,
)
from weft.fused.kernels.rounds import end_round, this_round
from weft.fused.kernels.tracing import COMPUTE, SEND, WAIT

__all__ = ["receive_multiply", "send_rows"]

_SLICES = tl.constexpr(MAX_SLICES)
_CLAIMS = tl.constexpr(CLAIMS)
_ARRIVALS = tl.constexpr(ARRIVALS)


@triton.jit(do_not_specialize=["rows", "chunk_rows", "senders"])
def receive_multiply(
    x,
    weight,
    received,
    out,
    context,
    words,
    state,
    source_rows,
    inbox,
    rows,
    columns,
    inner,
    chunk_rows,
    senders,
    scatter: tl.constexpr,
    interpreted: tl.constexpr,
    send_block: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    group: tl.constexpr,
    transposed: tl.constexpr,
    bulk: tl.constexpr,
    trace=None,
    scale_x=None,
    scale_weight=None,
    scaling: tl.constexpr = 0,
):
    """One call of a rank.

    Its parameters:

    - `x`: descriptor of this rank's rows, or the pointer to them: [rows, inner], or with `scatter`
      [ranks * rows, inner], of which block r is for rank r.
    - `weight`: operand.
    - `received`: descriptor of the inbox, or the pointer to it.
    - `out`: [ranks * rows, columns], by source.
    - `context`: of the space.
    - `words`: of the space, in symmetric memory.
    - `state`: of the space.
    - `source_rows`: pointer to the rows of x.
    - `inbox`: pointer to [ranks, rows, inner] by source, in symmetric memory.
    - `rows`: for each pair of ranks.
    - `columns`, `inner`: of the product.
    - `chunk_rows`: rows of a chunk, a multiple of block_rows; at most MAX_SLICES chunks.
    - `senders`: programs that send, at most all.
    - `scatter`: true for all-to-all, false for all-gather.
    - `interpreted`: programs run one after another.
    - `send_block`: elements that a sender has in flight.
    - `block_rows`, `block_columns`, `block_inner`, `group`, `transposed`, `bulk`: as in
      `weft.fused.kernels.gemm`.
    - `trace`: of spans, or None.
    - `scale_x`, `scale_weight`, `scaling`: as in `weft.fused.kernels.gemm`; `scale_x` is of the
      rows of `out`.
    """
    rank, ranks = wt.rank(context), wt.world_size(context)
    program = tl.program_id(0)
    epoch = this_round(state)
    flags = words + ranks
    counters = state + _ARRIVALS
    if program == 0:
        enter(context, words, state, epoch)
    spans = 0
    if program < senders:
        began = wt.span_begin(trace)
        send_rows(
            context,
            words,
            counters,
            source_rows,
            inbox,
            epoch,
            rows,
            inner,
            chunk_rows,
            senders,
            False,
            scatter,
            send_block,
            bulk,
            interpreted,
        )
        spans = wt.span_end(trace, spans, SEND, began)
    down, along = tl.cdiv(rows, block_rows), tl.cdiv(columns, block_columns)
    tiles = down * along
    # Own rows: by the programs that do not send, if there are any.
    programs = tl.num_programs(0)
    start, stride = program, programs
    if senders < programs:
        start, stride = tl.where(program < senders, tiles, program - senders), programs - senders
    fence_bulk_loads(bulk, interpreted)
    began = wt.span_begin(trace)
    store_products(
        x,
        weight,
        out + tl.cast(rank, tl.int64) * rows * columns,
        start,
        stride,
        rank * rows if scatter else 0,
        rows,
        ranks * rows if scatter else rows,
        columns,
        inner,
        block_rows,
        block_columns,
        block_inner,
        group,
        transposed,
        bulk,
        scale_x,
        scale_weight,
        rank * rows,
        ranks * rows,
        scaling,
    )
    spans = wt.span_end(trace, spans, COMPUTE, began)
    # Rows of the other ranks.
    claim = state + _CLAIMS + (epoch & 1)
    index = tiles + tl.atomic_add(claim, 1, sem="relaxed", scope="gpu")
    while index < ranks * tiles:
        source = wt.source_at(index // tiles, rank, ranks)
        row, column = place_of(index % tiles, down, along, group)
        row, column = row * block_rows, column * block_columns
        part = row // chunk_rows
        began = wt.span_begin(trace)
        fine = wt.wait(context, flags + source * _SLICES + part, epoch, source, part + 1)
        spans = wt.span_end(trace, spans, WAIT, began)
        began = wt.span_begin(trace)
        fence_bulk_loads(bulk, interpreted)
        total = product(
            received,
            weight,
            source * rows + row,
            column,
            ranks * rows,
            columns,
            inner,
            block_rows,
            block_columns,
            block_inner,
            transposed,
            bulk,
            scaling,
        )
        total = scaled(
            total,
            scale_x,
            scale_weight,
            source * rows + row,
            column,
            ranks * rows,
            columns,
            scaling,
        )
        values = tl.where(fine, total, float("nan")).to(out.dtype.element_ty)
        at = out + tl.cast(source, tl.int64) * rows * columns
        store_tile(at, values, row, column, rows, columns)
        spans = wt.span_end(trace, spans, COMPUTE, began)
        index = tiles + tl.atomic_add(claim, 1, sem="relaxed", scope="gpu")
    end_round(state, epoch)


@triton.jit
def send_rows(
    context,
    words,
    counters,
    source_rows,
    inbox,
    epoch,
    rows,
    inner,
    chunk_rows,
    senders,
    own: tl.constexpr,
    scatter: tl.constexpr,
    send_block: tl.constexpr,
    bulk: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Sends this program's shares of all chunks to all peers, and with `own` to this rank too."""
    rank, ranks = wt.rank(context), wt.world_size(context)
    flags = words + ranks
    here = tl.arange(0, send_block)
    each = tl.cast(rows, tl.int64) * inner
    for step in range(ranks if own else ranks - 1):
        to = wt.destination_at(step, rank, ranks)
        fine = rank >= 0
        if to != rank:
            fine = wt.wait(context, words + to, epoch, to)
        begin_of_rows = source_rows + to * each if scatter else source_rows
        for part in range(tl.cdiv(rows, chunk_rows)):
            begin = tl.cast(part, tl.int64) * chunk_rows * inner
            length = tl.minimum(each - begin, tl.cast(chunk_rows, tl.int64) * inner).to(tl.int32)
            if bulk:
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
            if arrive(counters + to * _SLICES + part, senders, fine, interpreted):
                wt.signal(context, flags + rank * _SLICES + part, epoch, to)
