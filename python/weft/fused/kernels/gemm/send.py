"""GEMM that sends tiles as they are computed: all-to-all, reduce-scatter, all-reduce.

Each destination gets `tiles` tiles. The next rank's tiles come first, this rank's last. The program
that stores a slice's last tile (a slice is a run of `slice_tiles` tiles) to the destination sets
the slice's flag there.

By default a tile is stored at once. With bulk or paced stores it is in flight while the next one is
computed, and is counted near the end of that tile's main loop. With paced stores
(`weft.fused.kernels.gemm.parts`), step 1 also computes each program's first local tile. Ranks may
store in different ways.

1. Tiles for other ranks: computed and sent.
2. Local tiles: for sums, added in float32 to the tiles that the other ranks have sent, in rank
   order; for all-reduce, sent to all ranks.
3. All-to-all and all-reduce: waits for the others' tiles, and copies unless `in_place`.

Words in symmetric memory, set to epochs: [ranks] entries, [ranks, MAX_SLICES] slices in step 1 by
source, [ranks, MAX_SLICES] slices in step 2.

A step waits only for the peers' earlier steps. Interpreted programs run one after another, so there
(`interpreted`) the last program does all work in steps 2 and 3.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.triton as wt
from weft.fused.kernels.agreement import agree, announce
from weft.fused.kernels.gemm.gemm import (
    ARRIVALS,
    MAX_SLICES,
    Scales,
    Sizes,
    Widths,
    add_step,
    arrive,
    block_barrier,
    complete_bulk_stores,
    enter,
    fence_bulk_loads,
    gemm_tile,
    inside,
    place_of,
    scaled,
    signal,
    store_tile,
    tile_offsets,
)
from weft.fused.kernels.gemm.parts import PARTS, gemm_tile_with_send, part_is_due, send_part
from weft.fused.kernels.gemm.sums import Flags, Place, arrive_sums, finish_tile
from weft.fused.kernels.rounds import Peers, end_round, this_round
from weft.fused.kernels.tracing import COMPUTE, FINISH, SEND, WAIT

__all__ = [
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "REDUCE_SCATTER",
    "Counts",
    "Destinations",
    "Modes",
    "multiply_send",
]

ALL_TO_ALL = 1
REDUCE_SCATTER = 2
ALL_REDUCE = 3
_SLICES = tl.constexpr(MAX_SLICES)
_ARRIVALS = tl.constexpr(ARRIVALS)
_PARTS = tl.constexpr(PARTS)
_ALL_TO_ALL = tl.constexpr(ALL_TO_ALL)
_REDUCE_SCATTER = tl.constexpr(REDUCE_SCATTER)
_ALL_REDUCE = tl.constexpr(ALL_REDUCE)


class Destinations(NamedTuple):
    """Memory for tiles and sums.

    Attributes:
        out: [rows, columns]; for reduce-scatter, [rows // ranks, columns].
        partials: in symmetric memory, [ranks, tiles, block_rows, block_columns] by source.
        landing: in symmetric memory, [rows, columns]; `out` if `in_place`.
        landing_context: for `landing`.
        staging: for paced stores, or None; in this GPU's memory, a tile for each program, in the
            dtype that is sent.
    """

    out: Any
    partials: Any
    landing: Any
    landing_context: Any
    staging: Any = None


class Counts(NamedTuple):
    """Numbers for which Triton does not compile the kernel again.

    Attributes:
        rows: for the whole GEMM.
        tiles: for each destination.
        slice_tiles: tiles in a slice; `tiles` has at most MAX_SLICES slices.
        digest: see `weft.fused.kernels.agreement`.
    """

    rows: Any
    tiles: Any
    slice_tiles: Any
    digest: Any = 0


class Modes(NamedTuple):
    """Constants that select what the kernel does.

    Attributes:
        operation: ALL_TO_ALL, REDUCE_SCATTER or ALL_REDUCE.
        in_place: peers store into `out`.
        interpreted: programs run one after another.
    """

    operation: int
    in_place: bool
    interpreted: bool


@triton.jit
def _arrive_sent(
    peers: Peers, flags: Flags, counts: Counts, index, rank, ranks, fine, interpreted: tl.constexpr
):
    """Counts a tile that was sent in step 1; the last in a slice sets the flag at the peer."""
    tiles, slice_tiles, epoch = counts.tiles, counts.slice_tiles, flags.epoch
    to, part = wt.destination_at(index // tiles, rank, ranks), index % tiles // slice_tiles
    parts = tl.minimum(tiles - part * slice_tiles, slice_tiles)
    if arrive(flags.counters + to * _SLICES + part, parts, fine, interpreted):
        word = flags.sent + rank * _SLICES + part
        signal(peers.context, word, epoch, to, interpreted)


@triton.jit(do_not_specialize=["counts"])
def multiply_send(
    x,
    weight,
    destinations: Destinations,
    peers: Peers,
    counts: Counts,
    widths: Widths,
    scales: Scales,
    modes: tl.constexpr,
    blocks: tl.constexpr,
    trace=None,
    peer_tiles=None,
    own_tiles=None,
):
    """One call on a rank.

    Parameters:

    - `x`, `weight`: operands.
    - `destinations`, `peers`, `counts`, `widths`, `scales`: groups, described above and in
      `weft.fused.kernels.gemm.gemm`.
    - `modes`, `blocks`: `Modes` and `weft.fused.kernels.gemm.gemm.Blocks`.
    - `trace`: span buffer, or None.
    - `peer_tiles`, `own_tiles`: for bulk stores in a two-rank all-to-all, or None; tensor
      descriptors with tile blocks, for this rank's part in the peer's `landing` and in `out`,
      [rows // ranks, columns].
    """
    context, words, state = peers.context, peers.words, peers.state
    agreement, digest = peers.agreement, counts.digest
    out, partials, staging = destinations.out, destinations.partials, destinations.staging
    landing, landing_context = destinations.landing, destinations.landing_context
    rows, tiles, slice_tiles = counts.rows, counts.tiles, counts.slice_tiles
    columns, inner = widths.columns, widths.inner
    sizes = Sizes(rows, columns, inner)
    block_rows: tl.constexpr = blocks.block_rows
    block_columns: tl.constexpr = blocks.block_columns
    block_inner: tl.constexpr = blocks.block_inner
    group: tl.constexpr = blocks.group
    bulk: tl.constexpr = blocks.bulk
    operation: tl.constexpr = modes.operation
    in_place: tl.constexpr = modes.in_place
    interpreted: tl.constexpr = modes.interpreted
    rank, ranks = wt.rank(context), wt.world_size(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = this_round(state)
    flags, results = words + ranks, words + ranks + ranks * _SLICES
    counters = state + _ARRIVALS
    result_counters = counters + ranks * _SLICES
    round_flags = Flags(flags, results, counters, result_counters, epoch)
    size: tl.constexpr = block_rows * block_columns
    packed = tile_offsets(block_columns, block_rows, block_columns)
    dtype = out.dtype.element_ty
    # Rows in a tile block, and a destination's first tile number in its block.
    if operation == _ALL_REDUCE:
        block, first = rows, tiles
    else:
        block, first = rows // ranks, tiles * 0
    down, along = tl.cdiv(block, block_rows), tl.cdiv(columns, block_columns)
    if program == 0:
        if agreement is not None:
            announce(context, agreement, digest, epoch)
        enter(context, words, state, epoch)

    # Step 1, and the local tiles in an all-to-all: one loop runs over the steps in all tiles, so
    # that loads for the next tile are in flight while one is stored. Triton does not pipeline a
    # loop that waits, so waits come before.
    fine = rank >= 0
    spans = 0
    began = wt.span_begin(trace)
    for other in range(ranks - 1):
        to = wt.destination_at(other, rank, ranks)
        fine &= wt.wait(context, words + to, epoch, to)
    # All programs compare: no tile is stored at a rank that has other places.
    if agreement is not None:
        fine &= agree(context, agreement, digest, epoch)
    spans = wt.span_end(trace, spans, WAIT, began)
    fence_bulk_loads(bulk, interpreted)
    others = (ranks - 1) * tiles
    until = ranks * tiles if operation == _ALL_TO_ALL else others
    bulk_stores: tl.constexpr = peer_tiles is not None
    paced: tl.constexpr = staging is not None
    is_sum: tl.constexpr = operation != _ALL_TO_ALL
    # The tiles in step 2. The program stride goes on from step 1.
    begin, stride = (program - others % programs + programs) % programs, programs
    if interpreted:
        begin, stride = tl.where(program == programs - 1, 0, tiles), 1
    # The main loop of the first own tile hides the last paced stores.
    more = 0
    if paced and is_sum:
        more = (begin < tiles).to(tl.int32)
    steps = tl.maximum(tl.cdiv(inner, block_inner), 1)
    index = program - programs
    step, down_at, along_at, above = -1, 0, 0, 0
    total = tl.zeros([block_rows, block_columns], tl.float32)
    amount = (tl.cdiv(until - program, programs) + more) * steps
    if paced:
        staging += tl.cast(program, tl.int64) * size
        sink = landing if operation == _ALL_TO_ALL else partials
        # For the tile in flight: turn, rows and columns, and the next part.
        none = tiles * 0
        pending, sink_rows, sink_columns, part = none - 1, none, none, none
        held = tl.zeros([block_rows // _PARTS, block_columns], staging.dtype.element_ty)
    began = wt.span_begin(trace, meet=False)
    for passed in tl.range(0, amount):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            index += programs
            to, tile = wt.destination_at(index // tiles, rank, ranks), index % tiles
            if paced and is_sum:
                to, tile = tl.where(index < others, to, rank), tl.where(index < others, tile, begin)
            down_at, along_at = place_of(to * first + tile, down, along, group)
            above = 0 if operation == _ALL_REDUCE else to * block
        # Multiples of constants: the compiler derives the stores' alignment from them.
        row, column = down_at * block_rows, along_at * block_columns
        top = above + row
        total = add_step(total, x, weight, top, column, step * block_inner, sizes, blocks)
        if paced:
            width = columns if operation == _ALL_TO_ALL else block_columns
            due = (pending >= 0) & part_is_due(part, step, steps)
            held = send_part(
                held, staging, block_columns, sink, width, part, due, sink_rows, sink_columns
            )
            part += due.to(tl.int32)
            if (pending >= 0) & (step == steps - 2):
                _arrive_sent(peers, round_flags, counts, pending, rank, ranks, fine, interpreted)
                fence_bulk_loads(bulk, interpreted)
                pending = none - 1
        if bulk_stores:
            # The last tile: the buffer is needed soon, and so is the flag at the peer. Not in the
            # same step as the store: Triton puts this block behind that one.
            late = tl.maximum(steps - 2 - tl.minimum(steps // 16, 4), 0)
            if (step == late) & (index >= programs):
                sent = index - programs
                if sent < others:
                    complete_bulk_stores(interpreted)
                    _arrive_sent(peers, round_flags, counts, sent, rank, ranks, fine, interpreted)
                    fence_bulk_loads(bulk, interpreted)
        is_stored = step == steps - 1
        if paced and is_sum:
            is_stored &= index < others
        if is_stored:
            total = scaled(total, scales, above + row, column, rows, columns, blocks)
            spans = wt.span_end(trace, spans, COMPUTE, began, meet=False)
            began = wt.span_begin(trace, meet=False)
            to, tile = wt.destination_at(index // tiles, rank, ranks), index % tiles
            # Tiles are not stored to ranks that have not entered.
            if bulk_stores:
                values = total.to(dtype)
                if index < others:
                    peer_tiles.store([tl.where(fine, row, block), column], values)
                else:
                    own_tiles.store([row, column], values)
            else:
                if operation == _ALL_TO_ALL:
                    at = out
                    if index < others:
                        at = wt.peer(landing_context, landing, to)
                    at += tl.cast(rank, tl.int64) * block * columns
                    at += tl.cast(row, tl.int64) * columns + column
                    height, along_tile, width = block - row, columns - column, columns
                else:
                    at = wt.peer(context, partials, to)
                    at += (tl.cast(rank, tl.int64) * tiles + tile) * size
                    height, along_tile, width = block_rows, block_columns, block_columns
                height = tl.where(fine | (index >= others), height, 0)
                values = total.to(at.dtype.element_ty)
                later = False
                if paced:
                    later = (index < others) & (passed + 1 < amount)
                    if later:
                        block_barrier(interpreted)
                        tl.store(staging + packed, values)
                        block_barrier(interpreted)
                        pending, sink, part = index, at, none
                        sink_rows, sink_columns = height + none, along_tile + none
                if not later:
                    mask = (tl.arange(0, block_rows) < height)[:, None]
                    mask &= (tl.arange(0, block_columns) < along_tile)[None, :]
                    tl.store(at + tile_offsets(width, block_rows, block_columns), values, mask=mask)
                    if index < others:
                        _arrive_sent(
                            peers, round_flags, counts, index, rank, ranks, fine, interpreted
                        )
                        fence_bulk_loads(bulk, interpreted)
            spans = wt.span_end(trace, spans, SEND, began, meet=False)
            began = wt.span_begin(trace, meet=False)
            total = tl.zeros([block_rows, block_columns], tl.float32)

    if bulk_stores:
        complete_bulk_stores(interpreted)
        if (index >= 0) & (index < others):
            _arrive_sent(peers, round_flags, counts, index, rank, ranks, fine, interpreted)

    # Step 2. The first tile is separate: total in both loops would take too many registers.
    if is_sum:
        above = 0 if operation == _ALL_REDUCE else rank * block
        # The sum tile that is sent during the next main loop.
        kept = tiles * 0 - 1
        if paced and more > 0:
            down_at, along_at = place_of(rank * first + begin, down, along, group)
            row, column = down_at * block_rows, along_at * block_columns
            total = scaled(total, scales, above + row, column, rows, columns, blocks)
            spans = wt.span_end(trace, spans, COMPUTE, began)
            is_kept = (begin + stride < tiles) & (ranks == 2)
            fine, spans = finish_tile(
                *(total, begin, Place(row, column, block, columns), destinations, peers),
                *(
                    round_flags,
                    counts,
                    trace,
                    spans,
                    is_kept,
                    operation == _ALL_REDUCE,
                    interpreted,
                ),
            )
            kept = tl.where(is_kept, begin, -1)
            begin += stride
        for tile in range(begin, tiles, stride):
            down_at, along_at = place_of(rank * first + tile, down, along, group)
            row, column = down_at * block_rows, along_at * block_columns
            fence_bulk_loads(bulk, interpreted)
            began = wt.span_begin(trace)
            if paced and operation == _ALL_REDUCE:
                before_down, before_along = place_of(
                    rank * first + tile - stride, down, along, group
                )
                its_row, its_column = before_down * block_rows, before_along * block_columns
                at = tl.cast(its_row, tl.int64) * columns + its_column
                peer_landing = wt.peer(landing_context, landing, wt.destination_at(0, rank, ranks))
                own = gemm_tile_with_send(
                    *(x, weight, above + row, column, sizes, blocks, out + at, peer_landing + at),
                    *(tl.where(fine, block - its_row, 0), columns - its_column, kept >= 0),
                )
                if kept >= 0:
                    arrive_sums(peers, round_flags, counts, kept, fine, interpreted)
            else:
                own = gemm_tile(x, weight, above + row, column, sizes, blocks)
            own = scaled(own, scales, above + row, column, rows, columns, blocks)
            spans = wt.span_end(trace, spans, COMPUTE, began)
            is_kept = tile < 0
            if paced:
                is_kept = (tile + stride < tiles) & (ranks == 2)
            fine, spans = finish_tile(
                *(own, tile, Place(row, column, block, columns), destinations, peers),
                *(
                    round_flags,
                    counts,
                    trace,
                    spans,
                    is_kept,
                    operation == _ALL_REDUCE,
                    interpreted,
                ),
            )
            kept = tl.where(is_kept, tile, -1)

    # Step 3.
    if operation != _REDUCE_SCATTER:
        words_of_step = results if operation == _ALL_REDUCE else flags
        count = tl.cdiv(tiles, slice_tiles) if in_place else tiles
        begin, stride = program, programs
        if interpreted:
            begin, stride = tl.where(program == programs - 1, 0, ranks * tiles), 1
        for index in range(begin, (ranks - 1) * count, stride):
            source = wt.source_at(1 + index // count, rank, ranks)
            each = index % count
            part = each if in_place else each // slice_tiles
            word = words_of_step + source * _SLICES + part
            began = wt.span_begin(trace)
            fine = wt.wait(context, word, epoch, source, part + 1)
            spans = wt.span_end(trace, spans, WAIT, began)
            began = wt.span_begin(trace)
            # In place, only what did not arrive has to be written.
            start = each * slice_tiles if in_place else each
            end = tl.minimum(start + slice_tiles, tiles) if in_place else each + 1
            if in_place:
                end = tl.where(fine, start, end)
            for tile in range(start, end):
                down_at, along_at = place_of(source * first + tile, down, along, group)
                row, column = down_at * block_rows, along_at * block_columns
                above = 0 if operation == _ALL_REDUCE else source * block
                moved = tl.cast(above, tl.int64) * columns
                if in_place:
                    values = tl.full([block_rows, block_columns], float("nan"), dtype)
                else:
                    at = landing + moved + tl.cast(row, tl.int64) * columns + column
                    at += tile_offsets(columns, block_rows, block_columns)
                    mask = inside(row, column, block, columns, block_rows, block_columns)
                    values = tl.load(at, mask=mask, other=0.0)
                    values = tl.where(fine, values, float("nan")).to(dtype)
                store_tile(out + moved, values, row, column, block, columns)
            spans = wt.span_end(trace, spans, FINISH, began)
    end_round(state, epoch)
