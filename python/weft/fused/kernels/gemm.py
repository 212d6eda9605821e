"""Main loop of products of matrices, places of tiles, arrivals of slices; the product alone.

`x` is [rows, inner]; `weight` is [columns, inner], or with `transposed` a contiguous
[inner, columns]. Both are tensor descriptors with the blocks of the tiling (`bulk`), loaded by the
bulk tensor copy engine, or pointers to contiguous matrices. Accumulation is in float32.

Operands of float8 have scales, by which a tile is multiplied before it is stored or sent: `scaling`
is then a sum of SCALED and what applies of ROW_SCALES, COLUMN_SCALES and FAST_SUMS; else 0.

Tiles of a matrix come in groups of `group` rows of tiles, column by column in a group, so that
programs at work at the same time share operands in the L2.
"""

import triton
import triton.language as tl

import weft.triton as wt
from weft.fused.kernels.rounds import STATE_WORDS

__all__ = [
    "ARRIVALS",
    "CLAIMS",
    "COLUMN_SCALES",
    "FAST_SUMS",
    "MAX_SLICES",
    "ROW_SCALES",
    "SCALED",
    "add_step",
    "arrive",
    "block_barrier",
    "complete_bulk_stores",
    "enter",
    "fence_bulk_loads",
    "inside",
    "multiply",
    "place_of",
    "product",
    "scaled",
    "signal",
    "store_products",
    "store_tile",
    "tile_offsets",
]

#: Flags of a pair of ranks: a slice is a run of tiles, or of rows that are sent.
MAX_SLICES = 64
# State: rounds; two counters of tiles, for even and odd rounds, each set to zero in the round
# before its own; counters of arrivals [ranks, MAX_SLICES] and [MAX_SLICES].
CLAIMS = STATE_WORDS
ARRIVALS = CLAIMS + 2
_CLAIMS = tl.constexpr(CLAIMS)
#: Operands of float8, with a scale of x and a scale of the weight.
SCALED = 1
#: A scale for each row of x.
ROW_SCALES = 2
#: A scale for each row of the weight, a column of the product.
COLUMN_SCALES = 4
#: Sums of several steps by the tensor cores, whose sums of float8 have fewer bits than float32.
FAST_SUMS = 8
_SCALED = tl.constexpr(SCALED)
_ROW_SCALES = tl.constexpr(ROW_SCALES)
_COLUMN_SCALES = tl.constexpr(COLUMN_SCALES)
_FAST_SUMS = tl.constexpr(FAST_SUMS)
#: Added to a counter of arrivals for one whose data were not sent.
_FAILED = tl.constexpr(1 << 16)


@triton.jit
def add_step(
    total,
    x,
    weight,
    row,
    column,
    at,
    rows,
    columns,
    inner,
    block_inner: tl.constexpr,
    transposed: tl.constexpr,
    bulk: tl.constexpr,
    scaling: tl.constexpr = 0,
):
    """The sum of `total` and a step of the product's main loop.

    Its parameters:

    - `total`: float32 [block_rows, block_columns], a tile of x @ weight.T.
    - `x`, `weight`: operands.
    - `row`, `column`: first of the tile, in x and in the product.
    - `at`: first of the step, in inner.
    - `rows`, `columns`: of x and of the product. The tile is zero outside.
    - `inner`: of both operands; `block_inner` of it in a step.
    - `transposed`: the weight is [inner, columns].
    - `bulk`: operands are tensor descriptors.
    - `scaling`: of operands of float8; scales are applied by `scaled`, not here.
    """
    if bulk:
        left = x.load([row, at])
        right = weight.load([at, column]) if transposed else weight.load([column, at]).T
    else:
        down = row + tl.arange(0, total.shape[0])
        along = column + tl.arange(0, total.shape[1])
        steps = at + tl.arange(0, block_inner)
        has_row, has_column, has_step = down < rows, along < columns, steps < inner
        left = x + tl.cast(down, tl.int64)[:, None] * inner + steps[None, :]
        left = tl.load(left, mask=has_row[:, None] & has_step[None, :], other=0.0)
        if transposed:
            right = weight + tl.cast(steps, tl.int64)[:, None] * columns + along[None, :]
        else:
            right = weight + tl.cast(along, tl.int64)[None, :] * inner + steps[:, None]
        right = tl.load(right, mask=has_step[:, None] & has_column[None, :], other=0.0)
    if _SCALED & scaling and not _FAST_SUMS & scaling:
        return tl.dot(left, right, total, max_num_imprecise_acc=block_inner)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def scaled(total, scale_x, scale_weight, row, column, rows, columns, scaling: tl.constexpr):
    """A tile of a product of float8, times its scales; without `scaling`, the tile.

    Its parameters:

    - `total`: float32 [block_rows, block_columns].
    - `scale_x`: pointer to float32 [rows] with ROW_SCALES, else [1].
    - `scale_weight`: pointer to float32 [columns] with COLUMN_SCALES, else [1].
    - `row`, `column`: first of the tile, in `scale_x` and in `scale_weight`.
    - `rows`, `columns`: lengths of scales.
    """
    if _SCALED & scaling:
        if _ROW_SCALES & scaling:
            down = row + tl.arange(0, total.shape[0])
            total *= tl.load(scale_x + down, mask=down < rows, other=0.0)[:, None]
        else:
            total *= tl.load(scale_x)
        if _COLUMN_SCALES & scaling:
            along = column + tl.arange(0, total.shape[1])
            total *= tl.load(scale_weight + along, mask=along < columns, other=0.0)[None, :]
        else:
            total *= tl.load(scale_weight)
    return total


@triton.jit
def product(
    x,
    weight,
    row,
    column,
    rows,
    columns,
    inner,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    transposed: tl.constexpr,
    bulk: tl.constexpr,
    scaling: tl.constexpr = 0,
):
    """A tile of x @ weight.T, float32 [block_rows, block_columns]; parameters as of `add_step`."""
    total = tl.zeros([block_rows, block_columns], tl.float32)
    for at in tl.range(0, inner, block_inner):
        total = add_step(
            total,
            x,
            weight,
            row,
            column,
            at,
            rows,
            columns,
            inner,
            block_inner,
            transposed,
            bulk,
            scaling,
        )
    return total


@triton.jit
def place_of(tile, tiles_down, tiles_along, group: tl.constexpr):
    """Row and column, in tiles, of the tile at a place in the order; row past the end: no tile."""
    per_group = group * tiles_along
    first = tile // per_group * group
    height = tl.maximum(tl.minimum(tiles_down - first, group), 1)
    rest = tile % per_group
    return first + rest % height, rest // height


@triton.jit
def tile_offsets(columns, block_rows: tl.constexpr, block_columns: tl.constexpr):
    """Offsets of a tile's elements in a contiguous matrix of `columns` columns, int32."""
    return tl.arange(0, block_rows)[:, None] * columns + tl.arange(0, block_columns)[None, :]


@triton.jit
def inside(row, column, rows, columns, block_rows: tl.constexpr, block_columns: tl.constexpr):
    """Mask of a tile's elements that are in a matrix of [rows, columns]."""
    down = tl.arange(0, block_rows) < rows - row
    along = tl.arange(0, block_columns) < columns - column
    return down[:, None] & along[None, :]


@triton.jit
def store_tile(pointer, values, row, column, rows, columns):
    """Stores a tile to a contiguous [rows, columns] at `pointer`."""
    block_rows: tl.constexpr = values.shape[0]
    block_columns: tl.constexpr = values.shape[1]
    at = pointer + tl.cast(row, tl.int64) * columns + column
    mask = inside(row, column, rows, columns, block_rows, block_columns)
    tl.store(at + tile_offsets(columns, block_rows, block_columns), values, mask=mask)


@triton.jit
def enter(context, words, state, epoch):
    """Sets word `rank` at each peer: earlier kernels of this rank have ended, its inbox is free.

    One program calls it, before it waits. A rank stores to a peer only after it has waited for word
    `peer`, so one inbox serves all rounds: a rank in round e has read all of the rounds before.
    """
    rank, ranks = wt.rank(context), wt.world_size(context)
    tl.store(state + _CLAIMS + ((epoch + 1) & 1), 0)
    for step in range(ranks - 1):
        wt.signal(context, words + rank, epoch, wt.destination_at(step, rank, ranks))


@triton.jit
def block_barrier(interpreted: tl.constexpr):
    """Barrier of the program, as `tl.debug_barrier`, with which Triton does not pipeline a loop."""
    if not interpreted:
        tl.inline_asm_elementwise(
            "bar.sync 0; mov.u32 $0, $1;",
            "=r,r",
            [tl.program_id(0)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def arrive(counter, total, fine, interpreted: tl.constexpr):
    """Counts a part of a slice: true in the last part if all parts are fine.

    The last of `total` parts resets the counter for the next round, which is a later kernel.
    Release and acquire at the scope of the GPU: the last may signal peers for the stores of all.

    Args:
        counter: pointer to int32 in memory of this GPU, zero at first.
        total: number of parts, below 65,536.
        fine: true if the part was stored.
        interpreted: without barriers.
    """
    block_barrier(interpreted)
    amount = tl.where(fine, 1, 1 + _FAILED)
    before = tl.atomic_add(counter, amount, sem="acq_rel", scope="gpu")
    last = before % _FAILED == total - 1
    if last:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    block_barrier(interpreted)
    return last & fine & (before < _FAILED)


@triton.jit
def signal(context, word, epoch, rank, interpreted: tl.constexpr):
    """As `weft.triton.signal`, in a loop that is pipelined."""
    block_barrier(interpreted)
    tl.atomic_xchg(wt.peer(context, word, rank), epoch, sem="release", scope="sys")


@triton.jit
def fence_bulk_loads(bulk: tl.constexpr, interpreted: tl.constexpr):
    """Orders bulk loads of global memory behind what this program has acquired."""
    if bulk and not interpreted:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, $1;",
            "=r,r",
            [tl.program_id(0)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def complete_bulk_stores(interpreted: tl.constexpr):
    """Waits for this program's bulk stores: complete, and ordered ahead of a later `arrive`."""
    if not interpreted:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, $1;",
            "=r,r",
            [tl.program_id(0)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def store_products(
    x,
    weight,
    out,
    start,
    stride,
    above,
    block,
    rows,
    columns,
    inner,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_inner: tl.constexpr,
    group: tl.constexpr,
    transposed: tl.constexpr,
    bulk: tl.constexpr,
    scale_x=None,
    scale_weight=None,
    scale_above=0,
    scale_rows=0,
    scaling: tl.constexpr = 0,
):
    """Computes and stores a program's tiles of the product of some rows.

    One loop over the steps of all tiles: loads for the next tile are in flight while one is stored.

    Its parameters:

    - `out`: [block, columns].
    - `start`, `stride`: places of the first tile in the order, and between tiles.
    - `above`, `block`: first and number of the rows of x, which has `rows`.
    - `scale_x`, `scale_weight`: as of `scaled`; of them `scale_above` is that of the first row, and
      `scale_rows` the number of rows.
    - others as of `add_step`.
    """
    down, along = tl.cdiv(block, block_rows), tl.cdiv(columns, block_columns)
    steps = tl.maximum(tl.cdiv(inner, block_inner), 1)
    tile = start - stride
    step, down_at, along_at = -1, 0, 0
    total = tl.zeros([block_rows, block_columns], tl.float32)
    for _ in tl.range(0, tl.maximum(tl.cdiv(down * along - start, stride), 0) * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += stride
            down_at, along_at = place_of(tile, down, along, group)
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
        if step == steps - 1:
            total = scaled(
                total,
                scale_x,
                scale_weight,
                scale_above + row,
                column,
                scale_rows,
                columns,
                scaling,
            )
            store_tile(out, total.to(out.dtype.element_ty), row, column, block, columns)
            total = tl.zeros([block_rows, block_columns], tl.float32)


@triton.jit(do_not_specialize=["rows"])
def multiply(
    x,
    weight,
    out,
    rows,
    columns,
    inner,
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
    """The product alone: the kernels with sends and receives use the same loop and order."""
    store_products(
        x,
        weight,
        out,
        tl.program_id(0),
        tl.num_programs(0),
        0,
        rows,
        rows,
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
        0,
        rows,
        scaling,
    )
