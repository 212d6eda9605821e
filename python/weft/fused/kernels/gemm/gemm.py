"""GEMM main loop, tile order and slice arrivals; the kernel without communication.

`x` is [rows, inner]; `weight` is [columns, inner], or with `transposed` a contiguous
[inner, columns]. Both are tensor descriptors with the blocks of the tiling (`bulk`), loaded by the
bulk tensor copy engine, or pointers to contiguous matrices. Accumulation is in float32.

Float8 operands have scales, which multiply a tile before it is stored or sent: `scaling` is then
the sum of SCALED and, where they apply, ROW_SCALES, COLUMN_SCALES and FAST_SUMS; else 0.

Tiles in a matrix come in groups of `group` tile rows, column by column in a group, so that programs
at work at the same time share operands in the L2, as in Triton's tutorial
(see https://triton-lang.org/main/getting-started/tutorials/03-matrix-multiplication.html).
"""

from typing import Any, NamedTuple

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
    "Blocks",
    "Scales",
    "Sizes",
    "Widths",
    "add_step",
    "arrive",
    "block_barrier",
    "complete_bulk_stores",
    "enter",
    "fence_bulk_loads",
    "gemm_tile",
    "inside",
    "multiply",
    "place_of",
    "scaled",
    "signal",
    "store_gemm_tiles",
    "store_tile",
    "tile_offsets",
]

#: Flags for a pair of ranks: a slice is a run of tiles, or of rows that are sent.
MAX_SLICES = 64
# State: rounds; two tile counters, for even and odd rounds, each zeroed in the round before its
# own; arrival counters [ranks, MAX_SLICES] and [MAX_SLICES].
CLAIMS = STATE_WORDS
ARRIVALS = CLAIMS + 2
_CLAIMS = tl.constexpr(CLAIMS)
#: Float8 operands, with a scale for x and a scale for the weight.
SCALED = 1
#: A scale for each row in x.
ROW_SCALES = 2
#: A scale for each weight row, a result column.
COLUMN_SCALES = 4
#: Sums over several steps in the tensor cores, which have fewer bits for float8 than float32.
FAST_SUMS = 8
_SCALED = tl.constexpr(SCALED)
_ROW_SCALES = tl.constexpr(ROW_SCALES)
_COLUMN_SCALES = tl.constexpr(COLUMN_SCALES)
_FAST_SUMS = tl.constexpr(FAST_SUMS)
#: Added to an arrival counter for data that were not sent.
_FAILED = tl.constexpr(1 << 16)


class Sizes(NamedTuple):
    """GEMM sizes: x is [rows, inner], the result [rows, columns]."""

    rows: Any
    columns: Any
    inner: Any


class Widths(NamedTuple):
    """Sizes whose divisors matter, so that Triton compiles a kernel again for other ones."""

    columns: Any
    inner: Any


class Blocks(NamedTuple):
    """Tile constants.

    Attributes:
        block_rows: tile rows.
        block_columns: tile columns.
        block_inner: inner elements in a step.
        group: tile rows in a group.
        transposed: the weight is [inner, columns].
        bulk: operands are tensor descriptors.
        scaling: flags for float8 operands, added.
    """

    block_rows: int
    block_columns: int
    block_inner: int
    group: int
    transposed: bool
    bulk: bool
    scaling: int = 0


class Scales(NamedTuple):
    """Scales for float8 operands, else None.

    Attributes:
        scale_x: pointer to float32 [rows] with ROW_SCALES, else [1].
        scale_weight: pointer to float32 [columns] with COLUMN_SCALES, else [1].
    """

    scale_x: Any = None
    scale_weight: Any = None


@triton.jit
def add_step(total, x, weight, row, column, at, sizes: Sizes, blocks: tl.constexpr):
    """The sum of `total` and one main-loop step.

    Parameters:

    - `total`: float32 [block_rows, block_columns], a tile in x @ weight.T.
    - `x`, `weight`: operands.
    - `row`, `column`: where the tile begins, in x and in the result.
    - `at`: where the step begins, in inner.
    - `sizes`: for x and the result. The tile is zero outside.
    - `blocks`: `Blocks`; `scaled` applies the scales, not this function.
    """
    rows, columns, inner = sizes.rows, sizes.columns, sizes.inner
    block_inner: tl.constexpr = blocks.block_inner
    transposed: tl.constexpr = blocks.transposed
    scaling: tl.constexpr = blocks.scaling
    if blocks.bulk:
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
def scaled(total, scales: Scales, row, column, rows, columns, blocks: tl.constexpr):
    """A float8 GEMM tile times the scales; without `scaling`, the tile.

    Parameters:

    - `total`: float32 [block_rows, block_columns].
    - `scales`: for the result's rows and columns.
    - `row`, `column`: where the tile begins, in the scales.
    - `rows`, `columns`: scale lengths.
    - `blocks`: `Blocks`.
    """
    scale_x, scale_weight = scales.scale_x, scales.scale_weight
    scaling: tl.constexpr = blocks.scaling
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
def gemm_tile(x, weight, row, column, sizes: Sizes, blocks: tl.constexpr):
    """A tile in x @ weight.T, float32 [block_rows, block_columns]; parameters as in `add_step`."""
    block_rows: tl.constexpr = blocks.block_rows
    block_columns: tl.constexpr = blocks.block_columns
    total = tl.zeros([block_rows, block_columns], tl.float32)
    for at in tl.range(0, sizes.inner, blocks.block_inner):
        total = add_step(total, x, weight, row, column, at, sizes, blocks)
    return total


@triton.jit
def place_of(tile, tiles_down, tiles_along, group: tl.constexpr):
    """Row and column, in tiles, for the tile at a place in the order; row past the end: no tile."""
    per_group = group * tiles_along
    first = tile // per_group * group
    height = tl.maximum(tl.minimum(tiles_down - first, group), 1)
    rest = tile % per_group
    return first + rest % height, rest // height


@triton.jit
def tile_offsets(columns, block_rows: tl.constexpr, block_columns: tl.constexpr):
    """Offsets for a tile's elements in a contiguous matrix with `columns` columns, int32."""
    return tl.arange(0, block_rows)[:, None] * columns + tl.arange(0, block_columns)[None, :]


@triton.jit
def inside(row, column, rows, columns, block_rows: tl.constexpr, block_columns: tl.constexpr):
    """Mask for a tile's elements inside a matrix [rows, columns]."""
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
    """Sets word `rank` at each peer: this rank's earlier kernels have ended, the inbox is free.

    One program calls it, before it waits. A rank stores to a peer only after it has waited for word
    `peer`, so one inbox serves all rounds: a rank in round e has read all rounds before.
    """
    rank, ranks = wt.rank(context), wt.world_size(context)
    tl.store(state + _CLAIMS + ((epoch + 1) & 1), 0)
    for step in range(ranks - 1):
        wt.signal(context, words + rank, epoch, wt.destination_at(step, rank, ranks))


@triton.jit
def block_barrier(interpreted: tl.constexpr):
    """Block barrier like `tl.debug_barrier`, with which Triton does not pipeline a loop."""
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
    """Counts a slice part: true in the last part if all parts are fine.

    The last of `total` parts resets the counter for the next round, which is a later kernel.
    Release and acquire at GPU scope: the last may signal peers on behalf of all stores.

    Args:
        counter: pointer to int32 in this GPU's memory, zero at first.
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
    """Same as `weft.triton.signal`, but for a pipelined loop."""
    block_barrier(interpreted)
    tl.atomic_xchg(wt.peer(context, word, rank), epoch, sem="release", scope="sys")


@triton.jit
def fence_bulk_loads(bulk: tl.constexpr, interpreted: tl.constexpr):
    """Orders bulk loads from global memory behind what this program has acquired."""
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
def store_gemm_tiles(
    x,
    weight,
    out,
    start,
    stride,
    above,
    block,
    sizes: Sizes,
    scales: Scales,
    scale_above,
    scale_rows,
    blocks: tl.constexpr,
):
    """Computes and stores a program's GEMM tiles for some rows.

    One loop runs over the steps in all tiles: loads for the next tile are in flight while one is
    stored.

    Parameters:

    - `out`: [block, columns].
    - `start`, `stride`: the first tile's place in the order, and the distance between tiles.
    - `above`, `block`: first row and row count in x.
    - `scales`: as in `scaled`; the first row's index in `scale_x` is `scale_above`, and
      `scale_rows` the row count.
    - others as in `add_step`.
    """
    columns, inner = sizes.columns, sizes.inner
    block_rows: tl.constexpr = blocks.block_rows
    block_columns: tl.constexpr = blocks.block_columns
    block_inner: tl.constexpr = blocks.block_inner
    down, along = tl.cdiv(block, block_rows), tl.cdiv(columns, block_columns)
    steps = tl.maximum(tl.cdiv(inner, block_inner), 1)
    tile = start - stride
    step, down_at, along_at = -1, 0, 0
    total = tl.zeros([block_rows, block_columns], tl.float32)
    for _ in tl.range(0, tl.maximum(tl.cdiv(down * along - start, stride), 0) * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += stride
            down_at, along_at = place_of(tile, down, along, blocks.group)
        # Multiples of constants: the compiler derives the stores' alignment from them.
        row, column = down_at * block_rows, along_at * block_columns
        top = above + row
        total = add_step(total, x, weight, top, column, step * block_inner, sizes, blocks)
        if step == steps - 1:
            first = scale_above + row
            total = scaled(total, scales, first, column, scale_rows, columns, blocks)
            store_tile(out, total.to(out.dtype.element_ty), row, column, block, columns)
            total = tl.zeros([block_rows, block_columns], tl.float32)


@triton.jit(do_not_specialize=["rows"])
def multiply(x, weight, out, rows, columns, inner, scales: Scales, blocks: tl.constexpr):
    """GEMM without communication; kernels with sends and receives use the same loop and order."""
    sizes = Sizes(rows, columns, inner)
    start, stride = tl.program_id(0), tl.num_programs(0)
    store_gemm_tiles(x, weight, out, start, stride, 0, rows, sizes, scales, 0, rows, blocks)
