"""Sums of GEMM tiles over ranks, by the rank that owns them."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.triton as wt
from weft.fused.kernels.gemm.gemm import MAX_SLICES, arrive, block_barrier, store_tile, tile_offsets
from weft.fused.kernels.tracing import FINISH, WAIT

__all__ = ["Flags", "Place", "arrive_sums", "finish_tile"]

_SLICES = tl.constexpr(MAX_SLICES)


class Flags(NamedTuple):
    """A round's flags and counters in `weft.fused.kernels.gemm.send.multiply_send`.

    Attributes:
        sent: slice flags in step 1, by source.
        results: slice flags in step 2, by source.
        counters: tiles sent in step 1, by destination and slice.
        result_counters: tiles sent in step 2, by slice.
        epoch: the round's epoch.
    """

    sent: Any
    results: Any
    counters: Any
    result_counters: Any
    epoch: Any


class Place(NamedTuple):
    """A tile's first row and column in a matrix [block, columns]."""

    row: Any
    column: Any
    block: Any
    columns: Any


@triton.jit
def arrive_sums(peers, flags: Flags, counts, tile, fine, interpreted: tl.constexpr):
    """Counts a sum tile that was sent; the last in a slice sets the slice's flag at all peers."""
    context, epoch = peers.context, flags.epoch
    tiles, slice_tiles = counts.tiles, counts.slice_tiles
    rank, ranks = wt.rank(context), wt.world_size(context)
    part = tile // slice_tiles
    parts = tl.minimum(tiles - part * slice_tiles, slice_tiles)
    if arrive(flags.result_counters + part, parts, fine, interpreted):
        for other in range(ranks - 1):
            to = wt.destination_at(other, rank, ranks)
            wt.signal(context, flags.results + rank * _SLICES + part, epoch, to)


@triton.jit
def finish_tile(
    total,
    tile,
    place: Place,
    destinations,
    peers,
    flags: Flags,
    counts,
    trace,
    spans,
    is_kept,
    is_sent: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Adds what other ranks have sent for a local tile, in rank order; stores and sends the sum.

    Parameters:

    - `total`: float32 [block_rows, block_columns], on this rank.
    - `tile`: number among the local tiles.
    - `place`: in `out`.
    - `flags`: the round's flags and counters.
    - `spans`: span count before.
    - `is_kept`: the sum is sent later, from `out`.
    - `is_sent`: for an all-reduce.
    - others as in `multiply_send`.

    Returns:
        Whether all ranks have sent, without which sums are NaN; the span count.
    """
    block_rows: tl.constexpr = total.shape[0]
    block_columns: tl.constexpr = total.shape[1]
    context, out, partials = peers.context, destinations.out, destinations.partials
    row, column, block, columns = place.row, place.column, place.block, place.columns
    tiles, slice_tiles = counts.tiles, counts.slice_tiles
    rank, ranks = wt.rank(context), wt.world_size(context)
    part = tile // slice_tiles
    fine = rank >= 0
    began = wt.span_begin(trace)
    for other in range(ranks - 1):
        source = other + (other >= rank).to(tl.int32)
        word = flags.sent + source * _SLICES + part
        fine &= wt.wait(context, word, flags.epoch, source, part + 1)
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
                at = wt.peer(destinations.landing_context, destinations.landing, to)
                store_tile(at, values, row, column, present, columns)
            arrive_sums(peers, flags, counts, tile, fine, interpreted)
    return fine, wt.span_end(trace, spans, FINISH, began)
