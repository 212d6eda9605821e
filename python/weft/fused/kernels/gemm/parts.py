"""Paced stores: a tile is sent in parts during the next tile's main loop.

Stores to a peer wait for the link if all programs store at the same time. So a tile stays in this
GPU's memory, and each of its PARTS parts is loaded in one main-loop step and stored to the peer in
a later one, evenly over the steps.
"""

import triton
import triton.language as tl

from weft.fused.kernels.gemm.gemm import Sizes, add_step, tile_offsets

__all__ = ["PARTS", "STEPS", "gemm_tile_with_send", "part_is_due", "send_part"]

#: Parts in a tile.
PARTS = 16
#: Minimum main-loop steps in which a tile is sent.
STEPS = PARTS + 3

_PARTS = tl.constexpr(PARTS)


@triton.jit
def part_is_due(part, step, steps):
    """True if `send_part` must be called for a part in a step; PARTS + 1 times for each tile."""
    return (part <= _PARTS) & (step * _PARTS >= part * (steps - 3))


@triton.jit
def send_part(held, source, source_width, sink, sink_width, part, due, rows, columns):
    """If due, stores the previous part, which is held, and loads this one; returns the part held.

    Parameters:

    - `source`: the tile, in a matrix with `source_width` columns on this GPU.
    - `sink`: the place in a matrix with `sink_width` columns at the peer.
    - `rows`, `columns`: the tile's rows and columns that are sent.
    """
    part_rows: tl.constexpr = held.shape[0]
    part_columns: tl.constexpr = held.shape[1]
    first = part * part_rows
    line, inside_columns = tl.arange(0, part_rows), tl.arange(0, part_columns) < columns
    mask = (line < rows - first + part_rows)[:, None] & inside_columns[None, :] & due & (part > 0)
    at = sink + tl.cast(first - part_rows, tl.int64) * sink_width
    tl.store(at + tile_offsets(sink_width, part_rows, part_columns), held, mask=mask)
    mask = (line < rows - first)[:, None] & inside_columns[None, :] & due & (part < _PARTS)
    at = source + tl.cast(first, tl.int64) * source_width
    at += tile_offsets(source_width, part_rows, part_columns)
    return tl.load(at, mask=mask, other=held, cache_modifier=".cg")


@triton.jit
def gemm_tile_with_send(
    x,
    weight,
    row,
    column,
    sizes: Sizes,
    blocks: tl.constexpr,
    source,
    sink,
    height,
    breadth,
    is_due,
):
    """Same as `weft.fused.kernels.gemm.gemm.gemm_tile`; meanwhile another tile is sent.

    Parameters:

    - `source`, `sink`: the other tile, in matrices with `columns` columns, here and at the peer.
    - `height`, `breadth`: rows and columns that are sent.
    - `is_due`: false without such a tile.
    - others as in `weft.fused.kernels.gemm.gemm.add_step`.
    """
    columns = sizes.columns
    block_rows: tl.constexpr = blocks.block_rows
    block_columns: tl.constexpr = blocks.block_columns
    block_inner: tl.constexpr = blocks.block_inner
    steps = tl.maximum(tl.cdiv(sizes.inner, block_inner), 1)
    part = sizes.rows * 0
    held = tl.zeros([block_rows // _PARTS, block_columns], source.dtype.element_ty)
    total = tl.zeros([block_rows, block_columns], tl.float32)
    for step in tl.range(0, steps):
        total = add_step(total, x, weight, row, column, step * block_inner, sizes, blocks)
        due = is_due & part_is_due(part, step, steps)
        held = send_part(held, source, columns, sink, columns, part, due, height, breadth)
        part += due.to(tl.int32)
    return total
