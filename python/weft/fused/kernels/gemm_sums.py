"""Sums of a product's tiles over ranks, by the rank that owns them."""

import triton
import triton.language as tl

import weft.triton as wt
from weft.fused.kernels.gemm import MAX_SLICES, arrive, block_barrier, store_tile, tile_offsets
from weft.fused.kernels.tracing import FINISH, WAIT

__all__ = ["arrive_sums", "finish_tile"]

_SLICES = tl.constexpr(MAX_SLICES)


@triton.jit
def arrive_sums(
    context, results, counters, tile, tiles, slice_tiles, epoch, fine, interpreted: tl.constexpr
):
    """Counts a tile of sums that was sent; the last of a slice sets its flag at all peers."""
    rank, ranks = wt.rank(context), wt.world_size(context)
    part = tile // slice_tiles
    parts = tl.minimum(tiles - part * slice_tiles, slice_tiles)
    if arrive(counters + part, parts, fine, interpreted):
        for other in range(ranks - 1):
            to = wt.destination_at(other, rank, ranks)
            wt.signal(context, results + rank * _SLICES + part, epoch, to)


@triton.jit
def finish_tile(
    total,
    tile,
    row,
    column,
    block,
    columns,
    out,
    context,
    flags,
    partials,
    landing_context,
    landing,
    results,
    counters,
    tiles,
    slice_tiles,
    epoch,
    trace,
    spans,
    is_kept,
    is_sent: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Adds what other ranks have sent of an own tile, in rank order; stores and sends the sum.

    Its parameters:

    - `total`: float32 [block_rows, block_columns], of this rank.
    - `tile`: its number among the own ones.
    - `row`, `column`, `block`, `columns`: its place in `out`, [block, columns].
    - `flags`, `partials`: of step 1 of `weft.fused.kernels.gemm_send.multiply_send`.
    - `results`, `counters`: flags of sums at peers, and the counters of their slices.
    - `spans`: number of spans before.
    - `is_kept`: the sum is sent later, from `out`.
    - `is_sent`: of an all-reduce.
    - others as of `multiply_send`.

    Returns:
        Whether all ranks have sent, without which sums are NaN; the number of spans.
    """
    block_rows: tl.constexpr = total.shape[0]
    block_columns: tl.constexpr = total.shape[1]
    rank, ranks = wt.rank(context), wt.world_size(context)
    part = tile // slice_tiles
    fine = rank >= 0
    began = wt.span_begin(trace)
    for other in range(ranks - 1):
        source = other + (other >= rank).to(tl.int32)
        word = flags + source * _SLICES + part
        fine &= wt.wait(context, word, epoch, source, part + 1)
    spans = wt.span_end(trace, spans, WAIT, began)
    began = wt.span_begin(trace)
    for other in range(ranks - 1):
        source = other + (other >= rank).to(tl.int32)
        at = partials + (tl.cast(source, tl.int64) * tiles + tile) * (block_rows * block_columns)
        total += tl.load(at + tile_offsets(block_columns, block_rows, block_columns)).to(tl.float32)
    values = tl.where(fine, total, float("nan")).to(out.dtype.element_ty)
    store_tile(out, values, row, column, block, columns)
    if is_sent:
        if is_kept:
            # All threads have stored before others load.
            block_barrier(interpreted)
        else:
            present = tl.where(fine, block, 0)
            for other in range(ranks - 1):
                to = wt.destination_at(other, rank, ranks)
                at = wt.peer(landing_context, landing, to)
                store_tile(at, values, row, column, present, columns)
            arrive_sums(
                context, results, counters, tile, tiles, slice_tiles, epoch, fine, interpreted
            )
    return fine, wt.span_end(trace, spans, FINISH, began)
