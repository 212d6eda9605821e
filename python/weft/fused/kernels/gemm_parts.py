"""A tile that is sent in parts, during the main loop of the next one.

Stores to a peer wait for the link if all programs store at the same time. So a tile stays in memory
of this GPU, and each of its PARTS parts is loaded in one step of the main loop and stored to the
peer in a later one, evenly over the steps.
"""

import triton
import triton.language as tl

from weft.fused.kernels.gemm import add_step, tile_offsets

__all__ = ["PARTS", "STEPS", "part_is_due", "product_with_send", "send_part"]

#: Parts of a tile.
PARTS = 16
#: Least number of steps of a main loop in which a tile is sent.
STEPS = PARTS + 3

_PARTS = tl.constexpr(PARTS)


@triton.jit
def part_is_due(part, step, steps):
    """True if `send_part` has to be called for a part in a step; PARTS + 1 times for each tile."""
    return (part <= _PARTS) & (step * _PARTS >= part * (steps - 3))


@triton.jit
def send_part(held, source, source_width, sink, sink_width, part, due, rows, columns):
    """If due, stores the part before, which is held, and loads this one; the part that is held.

    Its parameters:

    - `source`: the tile, in a matrix of `source_width` columns of this GPU.
    - `sink`: its place in a matrix of `sink_width` columns of the peer.
    - `rows`, `columns`: of the tile that are sent.
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
def product_with_send(
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
    scaling: tl.constexpr,
    source,
    sink,
    height,
    breadth,
    is_due,
):
    """As `weft.fused.kernels.gemm.product`; meanwhile another tile is sent.

    Its parameters:

    - `source`, `sink`: that tile, in matrices of `columns` columns, here and at the peer.
    - `height`, `breadth`: rows and columns of it that are sent.
    - `is_due`: false without such a tile.
    - others as of `weft.fused.kernels.gemm.add_step`.
    """
    steps = tl.maximum(tl.cdiv(inner, block_inner), 1)
    part = rows * 0
    held = tl.zeros([block_rows // _PARTS, block_columns], source.dtype.element_ty)
    total = tl.zeros([block_rows, block_columns], tl.float32)
    for step in tl.range(0, steps):
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
        due = is_due & part_is_due(part, step, steps)
        held = send_part(held, source, columns, sink, columns, part, due, height, breadth)
        part += due.to(tl.int32)
    return total
