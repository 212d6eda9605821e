"""Tile and peer orders for persistent loops: first what a peer waits for.

A grid has `rows` by `columns` output tiles; the rows are divided among the destination ranks: rank
r gets rows `r * rows // ranks` to `(r + 1) * rows // ranks`. `tile_at` orders the tiles: rank + 1's
tiles first, then rank + 2's, and so on; this rank's are last. At each moment different ranks send
to different peers, and a peer's slice is complete early. For example::

    for index in range(tl.program_id(0), tile_count(rows, columns), tl.num_programs(0)):
        row, column, destination = tile_at(index, rows, columns, rank, ranks)
"""

import triton
import triton.language as tl  # noqa: F401 (Triton's interpreter requires it)

__all__ = ["destination_at", "source_at", "tile_at", "tile_count"]


@triton.jit
def tile_count(rows, columns):
    """Number of tiles."""
    return rows * columns


@triton.jit
def tile_at(index, rows, columns, rank, ranks):
    """Row, column and destination rank for the tile at `index` in this rank's order.

    Args:
        index: 0 to `rows * columns - 1`; each is another tile.
        rows: tile rows, at least 1; a rank may get none.
        columns: tile columns.
        rank: this rank.
        ranks: number of ranks.
    """
    first = (rank + 1) % ranks * rows // ranks
    row = (first + index // columns) % rows
    return row, index % columns, ((row + 1) * ranks - 1) // rows


@triton.jit
def destination_at(step, rank, ranks):
    """The rank to send to at a step from 0 to `ranks - 1`; this rank is last."""
    return (rank + 1 + step) % ranks


@triton.jit
def source_at(step, rank, ranks):
    """The rank to receive from at a step: this rank first, then in arrival order."""
    return (rank + ranks - step) % ranks
