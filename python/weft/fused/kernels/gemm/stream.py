"""Stream-K GEMM for small batches, which are bound by weight bandwidth. A tile spans all rows.

The steps in all tiles are divided evenly among programs, as in Osama et al., "Stream-K",
https://arxiv.org/abs/2301.03598. A program that computes part of a tile stores it in float32 to a
workspace on this GPU; the tile's last program adds the parts in step order, so the same inputs give
the same bits. Tiles span the rows from all ranks: the weight is read once.

Words in symmetric memory are the same as in `send` and `receive`, with one slice for each source.

Interpreted programs run one after another, so there (`interpreted`) only the first program sends
rows, and the last does what follows a wait for tiles.
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
    enter,
    fence_bulk_loads,
    inside,
    place_of,
    scaled,
    store_tile,
    tile_offsets,
)
from weft.fused.kernels.gemm.receive import Sources, send_rows
from weft.fused.kernels.gemm.send import ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Destinations
from weft.fused.kernels.rounds import Peers, end_round, this_round
from weft.triton import layout

__all__ = [
    "MAX_PROGRAMS",
    "ReceiveCounts",
    "SendCounts",
    "multiply",
    "multiply_send",
    "receive_multiply",
]

#: Maximum programs in a kernel, each with an arrival counter for one tile.
MAX_PROGRAMS = 2048

_SLICES = tl.constexpr(MAX_SLICES)
_ARRIVALS = tl.constexpr(ARRIVALS)
_ALL_TO_ALL = tl.constexpr(ALL_TO_ALL)
_REDUCE_SCATTER = tl.constexpr(REDUCE_SCATTER)
_ALL_REDUCE = tl.constexpr(ALL_REDUCE)
_SHIFTS = tl.constexpr(layout.CONTEXT_SHIFTS // 8)
#: Fewer steps than this do not pay for the sum over another part.
_LEAST_STEPS = tl.constexpr(8)
#: Steps whose weights a program loads into the L2 before it waits.
_STEPS_AHEAD = tl.constexpr(8)


class SendCounts(NamedTuple):
    """Numbers for which Triton does not compile `multiply_send` again.

    Attributes:
        rows: for the whole GEMM.
        block: rows in the part for one rank; for all-reduce, the last may have fewer.
        digest: see `weft.fused.kernels.agreement`.
    """

    rows: Any
    block: Any
    digest: Any = 0


class ReceiveCounts(NamedTuple):
    """Numbers for which Triton does not compile `receive_multiply` again.

    Attributes:
        rows: for each rank pair.
        senders: programs that send, at most all.
        digest: see `weft.fused.kernels.agreement`.
    """

    rows: Any
    senders: Any
    digest: Any = 0


class _Workspace(NamedTuple):
    """Memory on this GPU for tiles that several programs compute.

    Attributes:
        parts: float32 [programs, 2, block_rows, block_columns]: the part for the tile that another
            program began, and for the tile that this program began.
        counters: [programs], zero at first and in the end; for the tile that the program began.
    """

    parts: Any
    counters: Any


@triton.jit
def _share(down, along, steps):
    """First and last step for this program, and steps for each program."""
    each = tl.maximum(tl.cdiv(down * along * steps, tl.num_programs(0)), _LEAST_STEPS)
    end = tl.minimum((tl.program_id(0) + 1) * each, down * along * steps)
    return tl.minimum(tl.program_id(0) * each, end), end, each


@triton.jit
def _load_ahead(matrix, sizes: Sizes, blocks: tl.constexpr, interpreted: tl.constexpr):
    """Requests the weights for this program's first steps into the L2; `matrix` points to them."""
    rows, columns, inner = sizes.rows, sizes.columns, sizes.inner
    block_rows: tl.constexpr = blocks.block_rows
    block_columns: tl.constexpr = blocks.block_columns
    block_inner: tl.constexpr = blocks.block_inner
    if not interpreted:
        down, along = tl.cdiv(rows, block_rows), tl.cdiv(columns, block_columns)
        steps = tl.maximum(tl.cdiv(inner, block_inner), 1)
        begin, end, _ = _share(down, along, steps)
        if (end > begin) & (inner > 0):
            _, column = place_of(begin // steps, down, along, blocks.group)
            # A 128-byte line for each row in a step.
            line: tl.constexpr = 1024 // matrix.dtype.element_ty.primitive_bitwidth
            column, at = column * block_columns, begin % steps * block_inner
            if blocks.transposed:
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
    sizes: Sizes,
    fine,
    spread: tl.constexpr,
    scales: Scales,
    blocks: tl.constexpr,
):
    """Stores a tile, times the scales.

    Stores to `out` [rows, columns], NaN if not `fine`; or sends the rows to their ranks: with
    `spread`, row block r goes to this rank's [block, columns] in `out` at rank r.
    """
    block_rows: tl.constexpr = values.shape[0]
    block_columns: tl.constexpr = values.shape[1]
    dtype = out.dtype.element_ty
    rows, columns = sizes.rows, sizes.columns
    values = scaled(values, scales, row, column, rows, columns, blocks)
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
    workspace: _Workspace,
    fine,
    block,
    sizes: Sizes,
    spread: tl.constexpr,
    interpreted: tl.constexpr,
    scales: Scales,
    blocks: tl.constexpr,
):
    """Computes and stores the GEMM; all programs call it.

    Parameters:

    - `out`, `context`, `block`, `fine`, `spread`: as in `_store`.
    - `workspace`: for partial tiles.
    - `scales`: as in `scaled`.
    - others as in `add_step`.
    """
    parts, counters = workspace.parts, workspace.counters
    rows, columns, inner = sizes.rows, sizes.columns, sizes.inner
    block_rows: tl.constexpr = blocks.block_rows
    block_columns: tl.constexpr = blocks.block_columns
    block_inner: tl.constexpr = blocks.block_inner
    group: tl.constexpr = blocks.group
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
        # Multiples of constants: the compiler derives the stores' alignment from them.
        row, column = down_at * block_rows, along_at * block_columns
        total = add_step(total, x, weight, row, column, step * block_inner, sizes, blocks)
        if step == steps - 1:
            if tile * steps >= begin:
                _store(
                    *(context, out, total, row, column, block, sizes, fine, spread, scales, blocks),
                )
            else:
                values = tl.where(fine, total, float("nan"))
                tl.store(parts + tl.cast(program, tl.int64) * 2 * size + packed, values)
            total = tl.zeros([block_rows, block_columns], tl.float32)

    # At most two partial tiles: the first, and the last.
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
                    *(context, out, total, row, column, block, sizes, fine, spread, scales, blocks),
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
    scales: Scales,
    interpreted: tl.constexpr,
    blocks: tl.constexpr,
):
    """GEMM without communication; parameters as in `_multiply`."""
    workspace, sizes = _Workspace(parts, counters), Sizes(rows, columns, inner)
    _multiply(
        *(x, weight, out, counters, workspace, rows >= 0, rows, sizes, False, interpreted),
        *(scales, blocks),
    )


@triton.jit(do_not_specialize=["counts"])
def multiply_send(
    x,
    weight,
    matrix,
    parts,
    destinations: Destinations,
    peers: Peers,
    counts: SendCounts,
    widths: Widths,
    scales: Scales,
    modes: tl.constexpr,
    blocks: tl.constexpr,
):
    """One call on a rank for a GEMM whose rows are sent.

    Parameters are the same as in `weft.fused.kernels.gemm.send.multiply_send`, and:

    - `matrix`: pointer to the weight.
    - `parts`: as in `_Workspace`.
    - `destinations`: `partials` is [ranks, block, columns] by source.
    """
    context, words, state = peers.context, peers.words, peers.state
    agreement, digest = peers.agreement, counts.digest
    out, partials = destinations.out, destinations.partials
    landing, landing_context = destinations.landing, destinations.landing_context
    rows, columns, block = counts.rows, widths.columns, counts.block
    sizes = Sizes(rows, columns, widths.inner)
    operation: tl.constexpr = modes.operation
    in_place: tl.constexpr = modes.in_place
    interpreted: tl.constexpr = modes.interpreted
    bulk: tl.constexpr = blocks.bulk
    rank, ranks = wt.rank(context), wt.world_size(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = this_round(state)
    flags, results = words + ranks, words + ranks + ranks * _SLICES
    counters = state + _ARRIVALS
    result_counters = counters + ranks * _SLICES
    dtype = out.dtype.element_ty
    piece: tl.constexpr = 16 * blocks.block_columns
    here = tl.arange(0, piece)
    each = tl.cast(block, tl.int64) * columns
    if program == 0:
        if agreement is not None:
            announce(context, agreement, digest, epoch)
        enter(context, words, state, epoch)
    _load_ahead(matrix, sizes, blocks, interpreted)
    fine = rank >= 0
    for other in range(ranks - 1):
        to = wt.destination_at(other, rank, ranks)
        fine &= wt.wait(context, words + to, epoch, to)
    if agreement is not None:
        fine &= agree(context, agreement, digest, epoch)
    fence_bulk_loads(bulk, interpreted)
    _multiply(
        *(x, weight, landing if operation == _ALL_TO_ALL else partials),
        *(landing_context if operation == _ALL_TO_ALL else context,),
        *(_Workspace(parts, result_counters + _SLICES), fine, block, sizes, True, interpreted),
        *(scales, blocks),
    )
    if arrive(counters, programs, fine, interpreted):
        for step in range(ranks):
            to = wt.destination_at(step, rank, ranks)
            wt.signal(context, flags + rank * _SLICES, epoch, to)

    # Tiles from all ranks have arrived.
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
    """Copies chunks of `count` elements, NaN if not `fine`; in place, only those NaN are stored."""
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


@triton.jit(do_not_specialize=["counts"])
def receive_multiply(
    weight,
    matrix,
    received,
    out,
    parts,
    peers: Peers,
    sources: Sources,
    counts: ReceiveCounts,
    widths: Widths,
    scales: Scales,
    modes: tl.constexpr,
    blocks: tl.constexpr,
):
    """One call on a rank for a GEMM whose rows are received.

    Parameters are the same as in `weft.fused.kernels.gemm.receive.receive_multiply`, with
    `matrix` as in `multiply_send` and `parts` as in `_Workspace`. The inbox receives the local rows
    too.
    """
    context, words, state = peers.context, peers.words, peers.state
    agreement, digest = peers.agreement, counts.digest
    rows, senders, inner = counts.rows, counts.senders, widths.inner
    interpreted: tl.constexpr = modes.interpreted
    rank, ranks = wt.rank(context), wt.world_size(context)
    program = tl.program_id(0)
    epoch = this_round(state)
    flags = words + ranks
    counters = state + _ARRIVALS
    if program == 0:
        if agreement is not None:
            announce(context, agreement, digest, epoch)
        enter(context, words, state, epoch)
    if program < senders:
        send_rows(
            *(peers, sources, counters, epoch, rows, inner, rows, senders, True, modes, blocks),
        )
    sizes = Sizes(ranks * rows, widths.columns, inner)
    _load_ahead(matrix, sizes, blocks, interpreted)
    fine = rank >= 0
    if agreement is not None:
        fine &= agree(context, agreement, digest, epoch)
    for step in range(ranks):
        source = wt.source_at(step, rank, ranks)
        fine &= wt.wait(context, flags + source * _SLICES, epoch, source)
    fence_bulk_loads(blocks.bulk, interpreted)
    workspace = _Workspace(parts, counters + (ranks + 1) * _SLICES)
    _multiply(
        *(received, weight, out, context, workspace, fine, rows, sizes, False, interpreted),
        *(scales, blocks),
    )
    end_round(state, epoch)
