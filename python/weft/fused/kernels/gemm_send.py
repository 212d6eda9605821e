"""Product whose tiles are sent as they are computed: all-to-all, reduce-scatter, all-reduce.

Each destination gets `tiles` tiles. Those of the next rank come first, those of this rank last. A
tile is stored to its destination at once, and the program that stores the last tile of a slice (a
run of `slice_tiles` tiles) sets the slice's flag there.

With bulk stores, a tile is on its way while the next one is computed, and is counted near the end
of that one's main loop; step 1 then also computes the first own tile of each program. Ranks may
differ in the way of storing.

1. Tiles of other ranks: computed and sent.
2. Own tiles: for sums, added in float32 to those that the other ranks have sent, in rank order; for
   all-reduce, sent to all ranks.
3. All-to-all and all-reduce: waits for what others have sent, and copies unless `in_place`.

Words in symmetric memory, set to epochs: [ranks] entries, [ranks, MAX_SLICES] slices of step 1 by
source, [ranks, MAX_SLICES] slices of step 2.

A step waits only for earlier steps of peers. Programs of the interpreter run one after another, so
there (`interpreted`) the last program does all of steps 2 and 3.
"""

import triton
import triton.language as tl

import weft.triton as wt
from weft.fused.kernels.gemm import (
    ARRIVALS,
    MAX_SLICES,
    add_step,
    arrive,
    complete_bulk_stores,
    enter,
    fence_bulk_loads,
    inside,
    place_of,
    product,
    scaled,
    signal,
    store_tile,
    tile_offsets,
)
from weft.fused.kernels.rounds import end_round, this_round
from weft.fused.kernels.tracing import COMPUTE, FINISH, SEND, WAIT

__all__ = ["ALL_REDUCE", "ALL_TO_ALL", "REDUCE_SCATTER", "multiply_send"]

ALL_TO_ALL = 1
REDUCE_SCATTER = 2
ALL_REDUCE = 3

_SLICES = tl.constexpr(MAX_SLICES)
_ARRIVALS = tl.constexpr(ARRIVALS)
_ALL_TO_ALL = tl.constexpr(ALL_TO_ALL)
_REDUCE_SCATTER = tl.constexpr(REDUCE_SCATTER)
_ALL_REDUCE = tl.constexpr(ALL_REDUCE)


@triton.jit
def _turn(index, tiles, programs, alternate: tl.constexpr):
    """Number of the tile that comes at a place in the order.

    Without `alternate` they are equal. With it, a wave of tiles that are sent comes first, then
    each of the others behind an own one, then a wave of own tiles, which hides the last sends.
    """
    turn = index
    if alternate:
        wave = tl.minimum(programs, tiles)
        at = index - wave
        # Both of a pair are in one wave of an even number of programs.
        swapped = at // programs * ((programs + 1) % 2)
        turn = tl.where((at + swapped) % 2 == 0, tiles + at // 2, wave + at // 2)
        turn = tl.where((index < wave) | (index >= 2 * tiles - wave), index, turn)
    return turn


@triton.jit
def _arrive_sent(
    context,
    flags,
    counters,
    index,
    tiles,
    slice_tiles,
    rank,
    ranks,
    epoch,
    fine,
    interpreted: tl.constexpr,
):
    """Counts a tile that was sent in step 1; the last of a slice sets its flag at the peer."""
    to, part = wt.destination_at(index // tiles, rank, ranks), index % tiles // slice_tiles
    parts = tl.minimum(tiles - part * slice_tiles, slice_tiles)
    if arrive(counters + to * _SLICES + part, parts, fine, interpreted):
        signal(context, flags + rank * _SLICES + part, epoch, to, interpreted)


@triton.jit
def _arrive_sums(
    context,
    results,
    counters,
    tile,
    tiles,
    slice_tiles,
    rank,
    ranks,
    epoch,
    fine,
    interpreted: tl.constexpr,
):
    """Counts a tile of sums that was sent; the last of a slice sets its flag at all peers."""
    part = tile // slice_tiles
    parts = tl.minimum(tiles - part * slice_tiles, slice_tiles)
    if arrive(counters + part, parts, fine, interpreted):
        for other in range(ranks - 1):
            to = wt.destination_at(other, rank, ranks)
            wt.signal(context, results + rank * _SLICES + part, epoch, to)


@triton.jit(do_not_specialize=["rows", "tiles", "slice_tiles"])
def multiply_send(
    x,
    weight,
    out,
    context,
    words,
    state,
    partials,
    landing,
    landing_context,
    rows,
    columns,
    inner,
    tiles,
    slice_tiles,
    operation: tl.constexpr,
    in_place: tl.constexpr,
    interpreted: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    group: tl.constexpr,
    transposed: tl.constexpr,
    bulk: tl.constexpr,
    trace=None,
    peer_tiles=None,
    own_tiles=None,
    peer_sums=None,
    alternate: tl.constexpr = False,
    scale_x=None,
    scale_weight=None,
    scaling: tl.constexpr = 0,
):
    """One call of a rank.

    Its parameters:

    - `x`, `weight`: operands.
    - `out`: [rows, columns]; of reduce-scatter, [rows // ranks, columns].
    - `context`: of the space.
    - `words`: of the space, in symmetric memory.
    - `state`: of the space.
    - `partials`: in symmetric memory, [ranks, tiles, block_rows, block_columns] by source.
    - `landing`: in symmetric memory, [rows, columns]; `out` if `in_place`.
    - `landing_context`: of `landing`.
    - `rows`, `columns`, `inner`: of the whole product.
    - `tiles`: for each destination.
    - `slice_tiles`: tiles of a slice; `tiles` has at most MAX_SLICES slices.
    - `operation`: ALL_TO_ALL, REDUCE_SCATTER or ALL_REDUCE.
    - `in_place`: peers store into `out`.
    - `interpreted`: programs run one after another.
    - `block_rows`, `block_columns`, `block_inner`, `group`, `transposed`, `bulk`: as in
      `weft.fused.kernels.gemm`.
    - `trace`: of spans, or None.
    - `peer_tiles`, `own_tiles`, `peer_sums`: for bulk stores, or None; tensor descriptors with
      blocks of a tile. `peer_tiles` is the part of this rank in the peer's `partials`, as
      [tiles * block_rows, block_columns], or in its `landing`, [rows // ranks, columns].
      `own_tiles` is `out`, or that part of it (all-to-all). `peer_sums` is the peer's `landing`
      (all-reduce).
    - `alternate`: for an all-to-all of two ranks: own tiles between those that are sent.
    - `scale_x`, `scale_weight`, `scaling`: as in `weft.fused.kernels.gemm`.
    """
    rank, ranks = wt.rank(context), wt.world_size(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = this_round(state)
    flags, results = words + ranks, words + ranks + ranks * _SLICES
    counters = state + _ARRIVALS
    result_counters = counters + ranks * _SLICES
    size: tl.constexpr = block_rows * block_columns
    packed = tile_offsets(block_columns, block_rows, block_columns)
    dtype = out.dtype.element_ty
    # Rows of a block of tiles, and the number of the first tile of a destination in its block.
    if operation == _ALL_REDUCE:
        block, first = rows, tiles
    else:
        block, first = rows // ranks, tiles * 0
    down, along = tl.cdiv(block, block_rows), tl.cdiv(columns, block_columns)
    if program == 0:
        enter(context, words, state, epoch)

    # Step 1, and the own tiles of an all-to-all: one loop over the steps of all tiles, so that
    # loads for the next tile are in flight while one is stored. Triton does not pipeline a loop
    # with a wait in it: waits come before.
    fine = rank >= 0
    spans = 0
    began = wt.span_begin(trace)
    for other in range(ranks - 1):
        to = wt.destination_at(other, rank, ranks)
        fine &= wt.wait(context, words + to, epoch, to)
    spans = wt.span_end(trace, spans, WAIT, began)
    fence_bulk_loads(bulk, interpreted)
    others = (ranks - 1) * tiles
    until = ranks * tiles if operation == _ALL_TO_ALL else others
    bulk_stores: tl.constexpr = peer_tiles is not None
    # The tiles of step 2. The stride of programs goes on from step 1.
    begin, stride = (program - others % programs + programs) % programs, programs
    if interpreted:
        begin, stride = tl.where(program == programs - 1, 0, tiles), 1
    # The main loop of the first own tile hides the last bulk stores.
    more = 0
    if bulk_stores and operation != _ALL_TO_ALL:
        more = (begin < tiles).to(tl.int32)
    steps = tl.maximum(tl.cdiv(inner, block_inner), 1)
    index = program - programs
    step, down_at, along_at, above = -1, 0, 0, 0
    total = tl.zeros([block_rows, block_columns], tl.float32)
    began = wt.span_begin(trace, meet=False)
    for _ in tl.range(0, (tl.cdiv(until - program, programs) + more) * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            index += programs
            turn = _turn(index, tiles, programs, alternate)
            to, tile = wt.destination_at(turn // tiles, rank, ranks), turn % tiles
            if bulk_stores and operation != _ALL_TO_ALL:
                to, tile = tl.where(index < others, to, rank), tl.where(index < others, tile, begin)
            down_at, along_at = place_of(to * first + tile, down, along, group)
            above = 0 if operation == _ALL_REDUCE else to * block
        # Multiples of constants: the compiler derives the alignment of stores from them.
        row, column = down_at * block_rows, along_at * block_columns
        total = add_step(
            total,
            x,
            weight,
            above + row,
            column,
            step * block_inner,
            rows,
            columns,
            inner,
            block_inner,
            transposed,
            bulk,
            scaling,
        )
        if bulk_stores:
            # The last tile: its buffer is needed soon, and so is its flag at the peer. Not in the
            # step of the store: Triton puts this block behind that one.
            late = tl.maximum(steps - 2 - tl.minimum(steps // 16, 4), 0)
            if (step == late) & (index >= programs):
                sent = _turn(index - programs, tiles, programs, alternate)
                if sent < others:
                    complete_bulk_stores(interpreted)
                    _arrive_sent(
                        context,
                        flags,
                        counters,
                        sent,
                        tiles,
                        slice_tiles,
                        rank,
                        ranks,
                        epoch,
                        fine,
                        interpreted,
                    )
                    fence_bulk_loads(bulk, interpreted)
        is_stored = step == steps - 1
        if bulk_stores and operation != _ALL_TO_ALL:
            is_stored &= index < others
        if is_stored:
            total = scaled(
                total, scale_x, scale_weight, above + row, column, rows, columns, scaling
            )
            spans = wt.span_end(trace, spans, COMPUTE, began, meet=False)
            began = wt.span_begin(trace, meet=False)
            turn = _turn(index, tiles, programs, alternate)
            to, tile = wt.destination_at(turn // tiles, rank, ranks), turn % tiles
            # Tiles are not stored to ranks that have not entered.
            if bulk_stores:
                values = total.to(peer_tiles.dtype)
                if operation == _ALL_TO_ALL:
                    if turn < others:
                        peer_tiles.store([tl.where(fine, row, block), column], values)
                    else:
                        own_tiles.store([row, column], values)
                else:
                    place = tl.where(fine, tile, tiles) * block_rows
                    peer_tiles.store([place, 0], values)
            elif operation == _ALL_TO_ALL:
                at = out
                if turn < others:
                    at = wt.peer(landing_context, landing, to)
                at += tl.cast(rank, tl.int64) * block * columns
                present = tl.where(fine | (turn >= others), block, 0)
                store_tile(at, total.to(dtype), row, column, present, columns)
            else:
                at = wt.peer(context, partials, to)
                at += (tl.cast(rank, tl.int64) * tiles + tile) * size
                values = total.to(partials.dtype.element_ty)
                store_tile(at, values, 0, 0, tl.where(fine, block_rows, 0), block_columns)
            if not bulk_stores and turn < others:
                _arrive_sent(
                    context,
                    flags,
                    counters,
                    turn,
                    tiles,
                    slice_tiles,
                    rank,
                    ranks,
                    epoch,
                    fine,
                    interpreted,
                )
                fence_bulk_loads(bulk, interpreted)
            spans = wt.span_end(trace, spans, SEND, began, meet=False)
            began = wt.span_begin(trace, meet=False)
            total = tl.zeros([block_rows, block_columns], tl.float32)

    if bulk_stores:
        complete_bulk_stores(interpreted)
        turn = _turn(index, tiles, programs, alternate)
        if (index >= 0) & (turn < others):
            _arrive_sent(
                context,
                flags,
                counters,
                turn,
                tiles,
                slice_tiles,
                rank,
                ranks,
                epoch,
                fine,
                interpreted,
            )

    # Step 2.
    if operation != _ALL_TO_ALL:
        sent = -1
        for tile in range(begin, tiles, stride):
            down_at, along_at = place_of(rank * first + tile, down, along, group)
            row, column = down_at * block_rows, along_at * block_columns
            above = 0 if operation == _ALL_REDUCE else rank * block
            fence_bulk_loads(bulk, interpreted)
            began = wt.span_begin(trace)
            if not bulk_stores or tile != begin:
                total = product(
                    x,
                    weight,
                    above + row,
                    column,
                    rows,
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
                total, scale_x, scale_weight, above + row, column, rows, columns, scaling
            )
            spans = wt.span_end(trace, spans, COMPUTE, began)
            if bulk_stores:
                complete_bulk_stores(interpreted)
                if (operation == _ALL_REDUCE) & (sent >= 0):
                    _arrive_sums(
                        context,
                        results,
                        result_counters,
                        sent,
                        tiles,
                        slice_tiles,
                        rank,
                        ranks,
                        epoch,
                        fine,
                        interpreted,
                    )
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
                at = partials + (tl.cast(source, tl.int64) * tiles + tile) * size + packed
                total += tl.load(at).to(tl.float32)
            values = tl.where(fine, total, float("nan")).to(dtype)
            if bulk_stores:
                own_tiles.store([row, column], values)
            else:
                store_tile(out, values, row, column, block, columns)
            if operation == _ALL_REDUCE:
                present = tl.where(fine, block, 0)
                if bulk_stores:
                    peer_sums.store([tl.where(fine, row, block), column], values)
                    sent = tile
                else:
                    for other in range(ranks - 1):
                        to = wt.destination_at(other, rank, ranks)
                        at = wt.peer(landing_context, landing, to)
                        store_tile(at, values, row, column, present, columns)
                    _arrive_sums(
                        context,
                        results,
                        result_counters,
                        tile,
                        tiles,
                        slice_tiles,
                        rank,
                        ranks,
                        epoch,
                        fine,
                        interpreted,
                    )
            spans = wt.span_end(trace, spans, FINISH, began)
        if bulk_stores:
            complete_bulk_stores(interpreted)
            if (operation == _ALL_REDUCE) & (sent >= 0):
                _arrive_sums(
                    context,
                    results,
                    result_counters,
                    sent,
                    tiles,
                    slice_tiles,
                    rank,
                    ranks,
                    epoch,
                    fine,
                    interpreted,
                )

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
