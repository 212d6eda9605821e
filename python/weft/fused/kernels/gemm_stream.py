"""Products of few rows, whose time is that of reading the weight: stream-K, all rows in a tile.

The steps of all tiles are divided evenly among programs. A program that computes a part of a tile
stores it in float32 to a workspace of this GPU; the last of the tile's programs adds the parts in
the order of steps, so the same inputs give the same bits. Tiles span the rows of all ranks: the
weight is read once.

Words in symmetric memory are those of `gemm_send` and `gemm_receive`; of each source one slice.

Programs of the interpreter run one after another, so there (`interpreted`) the first program sends
rows alone, and the last does what follows a wait for tiles.
"""

import triton
import triton.language as tl

import weft.triton as wt
from weft.fused.kernels.gemm import (
    ARRIVALS,
    MAX_SLICES,
    add_step,
    arrive,
    enter,
    fence_bulk_loads,
    inside,
    place_of,
    scaled,
    store_tile,
    tile_offsets,
)
from weft.fused.kernels.gemm_receive import send_rows
from weft.fused.kernels.gemm_send import ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from weft.fused.kernels.rounds import end_round, this_round
from weft.triton import layout

__all__ = ["MAX_PROGRAMS", "multiply", "multiply_send", "receive_multiply"]

#: Programs of a kernel, each with a counter of the arrivals at one tile.
MAX_PROGRAMS = 2048

_SLICES = tl.constexpr(MAX_SLICES)
_ARRIVALS = tl.constexpr(ARRIVALS)
_ALL_TO_ALL = tl.constexpr(ALL_TO_ALL)
_REDUCE_SCATTER = tl.constexpr(REDUCE_SCATTER)
_ALL_REDUCE = tl.constexpr(ALL_REDUCE)
_SHIFTS = tl.constexpr(layout.CONTEXT_SHIFTS // 8)
#: Fewer steps than this do not repay the sum of another part.
_LEAST_STEPS = tl.constexpr(8)
#: Steps whose weights a program loads into the L2 before it waits.
_STEPS_AHEAD = tl.constexpr(8)


@triton.jit
def _share(down, along, steps):
    """First and last step of this program, and the number of steps of each program."""
    each = tl.maximum(tl.cdiv(down * along * steps, tl.num_programs(0)), _LEAST_STEPS)
    end = tl.minimum((tl.program_id(0) + 1) * each, down * along * steps)
    return tl.minimum(tl.program_id(0) * each, end), end, each


@triton.jit
def _load_ahead(
    matrix,
    rows,
    columns,
    inner,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    group: tl.constexpr,
    transposed: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Requests the weights of this program's first steps into the L2; `matrix` points to them."""
    if not interpreted:
        down, along = tl.cdiv(rows, block_rows), tl.cdiv(columns, block_columns)
        steps = tl.maximum(tl.cdiv(inner, block_inner), 1)
        begin, end, _ = _share(down, along, steps)
        if (end > begin) & (inner > 0):
            _, column = place_of(begin // steps, down, along, group)
            # A line of 128 bytes for each row of a step.
            line: tl.constexpr = 1024 // matrix.dtype.element_ty.primitive_bitwidth
            column, at = column * block_columns, begin % steps * block_inner
            if transposed:
                across = at + tl.arange(0, _STEPS_AHEAD * block_inner)
                along_line = column + line * tl.arange(0, (block_columns + line - 1) // line)
                width, height = columns, inner
            else:
                across = column + tl.arange(0, block_columns)
                along_line = at + line * tl.arange(
                    0, (_STEPS_AHEAD * block_inner + line - 1) // line
                )
                width, height = inner, columns
            across = tl.minimum(across, height - 1)
            along_line = tl.minimum(along_line, width - 1)
            addresses = matrix + tl.cast(across, tl.int64)[:, None] * width + along_line[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [addresses.to(tl.int64)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def _store(
    context,
    out,
    values,
    row,
    column,
    block,
    rows,
    columns,
    fine,
    spread: tl.constexpr,
    scale_x=None,
    scale_weight=None,
    scaling: tl.constexpr = 0,
):
    """Stores a tile, times its scales.

    To `out` [rows, columns], NaN if not `fine`; or its rows to their ranks.
    With `spread`, row block r goes to [block, columns] of this rank in `out` at rank r.
    """
    block_rows: tl.constexpr = values.shape[0]
    block_columns: tl.constexpr = values.shape[1]
    dtype = out.dtype.element_ty
    values = scaled(values, scale_x, scale_weight, row, column, rows, columns, scaling)
    if spread:
        down = row + tl.arange(0, block_rows)
        to = down // block
        shifts = tl.load(context + _SHIFTS + to, mask=down < rows, other=0)
        at = out + tl.cast(wt.rank(context), tl.int64) * block * columns + column
        at = at.to(tl.pointer_type(tl.int8)) + tl.multiple_of(shifts, 16)
        at = at.to(out.dtype) + tl.cast(down - to * block, tl.int64) * columns
        at = at[:, None] + tl.arange(0, block_columns)[None, :]
        present = tl.where(fine, rows, 0)
        mask = inside(row, column, present, columns, block_rows, block_columns)
        tl.store(at, values.to(dtype), mask=mask)
    else:
        values = tl.where(fine, values, float("nan"))
        store_tile(out, values.to(dtype), row, column, rows, columns)


@triton.jit
def _multiply(
    x,
    weight,
    out,
    context,
    parts,
    counters,
    fine,
    block,
    rows,
    columns,
    inner,
    spread: tl.constexpr,
    interpreted: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    group: tl.constexpr,
    transposed: tl.constexpr,
    bulk: tl.constexpr,
    scale_x=None,
    scale_weight=None,
    scaling: tl.constexpr = 0,
):
    """Computes and stores the product; all programs call it.

    Its parameters:

    - `out`, `context`, `block`, `fine`, `spread`: as of `_store`.
    - `scale_x`, `scale_weight`, `scaling`: as of `scaled`.
    - `parts`: float32 [programs, 2, block_rows, block_columns]: the part of the tile that was begun
      by another program, and of the one that this program has begun.
    - `counters`: [programs], zero at first and in the end; of the tile begun by the program.
    - others as of `add_step`.
    """
    program = tl.program_id(0)
    size: tl.constexpr = block_rows * block_columns
    packed = tile_offsets(block_columns, block_rows, block_columns)
    down, along = tl.cdiv(rows, block_rows), tl.cdiv(columns, block_columns)
    steps = tl.maximum(tl.cdiv(inner, block_inner), 1)
    begin, end, each = _share(down, along, steps)
    first, begun = begin // steps, begin % steps
    last, left = end // steps, end % steps

    tile = tl.where(begun == 0, first - 1, first)
    step = begun - 1
    down_at, along_at = place_of(first, down, along, group)
    total = tl.zeros([block_rows, block_columns], tl.float32)
    for _ in tl.range(0, end - begin):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += 1
            down_at, along_at = place_of(tile, down, along, group)
        # Multiples of constants: the compiler derives the alignment of stores from them.
        row, column = down_at * block_rows, along_at * block_columns
        total = add_step(
            total,
            x,
            weight,
            row,
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
        if step == steps - 1:
            if tile * steps >= begin:
                _store(
                    context,
                    out,
                    total,
                    row,
                    column,
                    block,
                    rows,
                    columns,
                    fine,
                    spread,
                    scale_x,
                    scale_weight,
                    scaling,
                )
            else:
                values = tl.where(fine, total, float("nan"))
                tl.store(parts + tl.cast(program, tl.int64) * 2 * size + packed, values)
            total = tl.zeros([block_rows, block_columns], tl.float32)

    # Parts of two tiles at most: the first, and the last.
    has_last = (end > begin) & (left > 0)
    begins_last = last * steps >= begin
    if has_last:
        slot = tl.cast(program, tl.int64) * 2 + begins_last.to(tl.int32)
        tl.store(parts + slot * size + packed, tl.where(fine, total, float("nan")))
    for half in range(2):
        tile = tl.where(half == 0, first, last)
        has_part = tl.where(half == 0, (end > begin) & (begun > 0), has_last & begins_last)
        if has_part:
            low, high = tile * steps // each, ((tile + 1) * steps - 1) // each
            if arrive(counters + low, high - low + 1, high >= low, interpreted):
                total = tl.zeros([block_rows, block_columns], tl.float32)
                for other in range(low, high + 1):
                    slot = tl.cast(other, tl.int64) * 2 + (other == low).to(tl.int32)
                    total += tl.load(parts + slot * size + packed)
                down_at, along_at = place_of(tile, down, along, group)
                row, column = down_at * block_rows, along_at * block_columns
                _store(
                    context,
                    out,
                    total,
                    row,
                    column,
                    block,
                    rows,
                    columns,
                    fine,
                    spread,
                    scale_x,
                    scale_weight,
                    scaling,
                )


@triton.jit(do_not_specialize=["rows"])
def multiply(
    x,
    weight,
    out,
    parts,
    counters,
    rows,
    columns,
    inner,
    interpreted: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    group: tl.constexpr,
    transposed: tl.constexpr,
    bulk: tl.constexpr,
    scale_x=None,
    scale_weight=None,
    scaling: tl.constexpr = 0,
):
    """The product alone; parameters as of `_multiply`."""
    _multiply(
        x,
        weight,
        out,
        counters,
        parts,
        counters,
        rows >= 0,
        rows,
        rows,
        columns,
        inner,
        False,
        interpreted,
        block_rows,
        block_columns,
        block_inner,
        group,
        transposed,
        bulk,
        scale_x,
        scale_weight,
        scaling,
    )


@triton.jit(do_not_specialize=["rows", "block"])
def multiply_send(
    x,
    weight,
    matrix,
    out,
    context,
    words,
    state,
    parts,
    partials,
    landing,
    landing_context,
    rows,
    columns,
    inner,
    block,
    operation: tl.constexpr,
    in_place: tl.constexpr,
    interpreted: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    group: tl.constexpr,
    transposed: tl.constexpr,
    bulk: tl.constexpr,
    scale_x=None,
    scale_weight=None,
    scaling: tl.constexpr = 0,
):
    """One call of a rank of a product whose rows are sent.

    Its parameters are as of `weft.fused.kernels.gemm_send.multiply_send`, and:

    - `matrix`: pointer to the weight.
    - `parts`: of `_multiply`, in memory of this GPU.
    - `partials`: in symmetric memory, [ranks, block, columns] by source.
    - `block`: rows of which a rank is sent the products; for all-reduce, the last may have fewer.
    """
    rank, ranks = wt.rank(context), wt.world_size(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = this_round(state)
    flags, results = words + ranks, words + ranks + ranks * _SLICES
    counters = state + _ARRIVALS
    result_counters = counters + ranks * _SLICES
    dtype = out.dtype.element_ty
    piece: tl.constexpr = 16 * block_columns
    here = tl.arange(0, piece)
    each = tl.cast(block, tl.int64) * columns
    if program == 0:
        enter(context, words, state, epoch)
    _load_ahead(
        matrix,
        rows,
        columns,
        inner,
        block_rows,
        block_columns,
        block_inner,
        group,
        transposed,
        interpreted,
    )
    fine = rank >= 0
    for other in range(ranks - 1):
        to = wt.destination_at(other, rank, ranks)
        fine &= wt.wait(context, words + to, epoch, to)
    fence_bulk_loads(bulk, interpreted)
    _multiply(
        x,
        weight,
        landing if operation == _ALL_TO_ALL else partials,
        landing_context if operation == _ALL_TO_ALL else context,
        parts,
        result_counters + _SLICES,
        fine,
        block,
        rows,
        columns,
        inner,
        True,
        interpreted,
        block_rows,
        block_columns,
        block_inner,
        group,
        transposed,
        bulk,
        scale_x,
        scale_weight,
        scaling,
    )
    if arrive(counters, programs, fine, interpreted):
        for step in range(ranks):
            to = wt.destination_at(step, rank, ranks)
            wt.signal(context, flags + rank * _SLICES, epoch, to)

    # Tiles of all ranks have come.
    start, stride = program * piece, programs * piece
    if interpreted:
        start, stride = 0, piece
    if (program == programs - 1) | (not interpreted):
        for source in range(ranks):
            fine &= wt.wait(context, flags + source * _SLICES, epoch, source)
        if operation == _ALL_TO_ALL:
            _copy(landing, out, start, stride, rows * columns, fine, in_place, piece)
        else:
            count = tl.maximum(tl.minimum(rows - rank * block, block), 0) * columns
            moved = each * rank if operation == _ALL_REDUCE else each * 0
            for at in range(start, count, stride):
                present = at + here < count
                total = tl.zeros([piece], tl.float32)
                for source in range(ranks):
                    values = tl.load(partials + source * each + at + here, mask=present, other=0.0)
                    total += values.to(tl.float32)
                values = tl.where(fine, total, float("nan")).to(dtype)
                tl.store(out + moved + at + here, values, mask=present)
                if operation == _ALL_REDUCE:
                    present = (at + here < count) & fine
                    for other in range(ranks - 1):
                        to = wt.destination_at(other, rank, ranks)
                        wt.put(landing_context, landing + moved + at + here, values, to, present)
        if operation == _ALL_REDUCE:
            arrivals = 1 if interpreted else programs
            if arrive(result_counters, arrivals, fine, interpreted):
                for other in range(ranks - 1):
                    to = wt.destination_at(other, rank, ranks)
                    wt.signal(context, results + rank * _SLICES, epoch, to)
            for other in range(ranks - 1):
                source = wt.source_at(1 + other, rank, ranks)
                fine &= wt.wait(context, results + source * _SLICES, epoch, source)
                count = tl.maximum(tl.minimum(rows - source * block, block), 0) * columns
                moved = each * source
                _copy(landing + moved, out + moved, start, stride, count, fine, in_place, piece)
    end_round(state, epoch)


@triton.jit
def _copy(origin, out, start, stride, count, fine, in_place: tl.constexpr, piece: tl.constexpr):
    """Copies pieces of `count` elements, NaN if not `fine`; in place, only those NaN are stored."""
    here = tl.arange(0, piece)
    end = tl.where(fine, 0, count) if in_place else count
    for at in range(start, end, stride):
        present = at + here < count
        if in_place:
            values = tl.full([piece], float("nan"), out.dtype.element_ty)
        else:
            values = tl.load(origin + at + here, mask=present)
            values = tl.where(fine, values, float("nan")).to(out.dtype.element_ty)
        tl.store(out + at + here, values, mask=present)


@triton.jit(do_not_specialize=["rows", "senders"])
def receive_multiply(
    weight,
    matrix,
    received,
    out,
    context,
    words,
    state,
    parts,
    source_rows,
    inbox,
    rows,
    columns,
    inner,
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
    scale_x=None,
    scale_weight=None,
    scaling: tl.constexpr = 0,
):
    """One call of a rank of a product of rows that are received.

    Its parameters are as of `weft.fused.kernels.gemm_receive.receive_multiply`, `matrix` of
    `multiply_send`, and `parts` of `_multiply`. The inbox receives the own rows too.
    """
    rank, ranks = wt.rank(context), wt.world_size(context)
    program = tl.program_id(0)
    epoch = this_round(state)
    flags = words + ranks
    counters = state + _ARRIVALS
    if program == 0:
        enter(context, words, state, epoch)
    if program < senders:
        send_rows(
            context,
            words,
            counters,
            source_rows,
            inbox,
            epoch,
            rows,
            inner,
            rows,
            senders,
            True,
            scatter,
            send_block,
            bulk,
            interpreted,
        )
    _load_ahead(
        matrix,
        ranks * rows,
        columns,
        inner,
        block_rows,
        block_columns,
        block_inner,
        group,
        transposed,
        interpreted,
    )
    fine = rank >= 0
    for step in range(ranks):
        source = wt.source_at(step, rank, ranks)
        fine &= wt.wait(context, flags + source * _SLICES, epoch, source)
    fence_bulk_loads(bulk, interpreted)
    _multiply(
        received,
        weight,
        out,
        context,
        parts,
        counters + (ranks + 1) * _SLICES,
        fine,
        rows,
        ranks * rows,
        columns,
        inner,
        False,
        interpreted,
        block_rows,
        block_columns,
        block_inner,
        group,
        transposed,
        bulk,
        scale_x,
        scale_weight,
        scaling,
    )
    end_round(state, epoch)
