"""Gradients of tables of embedding bags, from those of the pooled rows."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

import torch

from weft.errors import ConfigurationError
from weft.fused.embedding_tables import ELEMENTS, MOST_COLUMNS
from weft.fused.kernels import embedding_gradient
from weft.fused.spaces import launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.fused.embedding_bags import Bags
    from weft.fused.embedding_tables import Tables, Tiling

__all__ = ["Ends", "dense_gradients", "factor_gradients", "sparse_gradients"]

#: Indices of a program for gradients of sample weights, and columns that it multiplies at a time.
_POSITIONS: Final = 32
_COLUMNS: Final = 64
#: Elements of a program for entries of sparse gradients.
_ENTRIES: Final = 4096
#: Elements to whose multiples gradients of tables are aligned.
_ALIGNMENT: Final = 16


def dense_gradients(
    tables: Tables, bags: Bags, gradients: torch.Tensor, tiling: Tiling
) -> list[torch.Tensor]:
    """Gradients of all tables, views of one tensor. Sums are in order, so bits are reproducible.

    Args:
        tables: of this rank.
        bags: of the call.
        gradients: of the pooled rows, `[batch, columns of this rank]`.
        tiling: sizes of tasks.
    """
    firsts, bases = _places(tables)
    device, dtype = gradients.device, tables.dtype
    outputs = torch.zeros(firsts[-1], dtype=dtype, device=device)
    total = bags.indices.numel()
    if total > 0:
        keys, order = torch.sort(_keys(tables, bags, bases), stable=True)
        last = len(tables.shapes) * bags.batch - 1
        owners = bags.owners().clamp_(0, last).to(torch.int32)[order]
        factors = None if bags.factors is None else bags.factors[order]
        table = tables.gradient_table(firsts, bases)
        chunks = -(-total // tiling.chunk)
        columns = 1 << (max(columns for _, columns in tables.shapes) - 1).bit_length()
        heads, tails = torch.empty(2, chunks, columns, dtype=torch.float32, device=device)
        align = tables.layout.align
        launch(
            embedding_gradient.segment_sums,
            chunks,
            device,
            *(outputs, heads, tails, keys, owners, bags.offsets),
            *(keys if factors is None else factors, table, gradients),
            *(bags.batch, total, bases[-1], gradients.stride(0) // align),
            align=align,
            weighted=factors is not None,
            chunk=tiling.chunk,
            columns=columns,
            num_warps=1,
        )
        launch(
            embedding_gradient.join_segments,
            chunks,
            device,
            *(outputs, heads, tails, keys, owners, table, bags.batch, total, bases[-1]),
            align=align,
            chunk=tiling.chunk,
            columns=columns,
            num_warps=1,
        )
    return [
        outputs[first : first + rows * columns].view(rows, columns)
        for first, (rows, columns) in zip(firsts, tables.shapes, strict=False)
    ]


class Ends:
    """Number of indices up to each table, on its way to the host.

    Args:
        bags: of a call.
        tables: number of tables.
    """

    def __init__(self, bags: Bags, tables: int) -> None:
        self._zeros = [0] * (tables + 1)
        self._is_captured = False
        self._event: torch.cuda.Event | None = None
        self._copy: torch.Tensor | None = None
        if bags.batch == 0 or tables == 0:
            return
        ends = bags.offsets[:: bags.batch]
        self._is_captured = ends.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._is_captured:
            return
        if ends.device.type == "cuda":
            self._copy = torch.empty(ends.shape, dtype=ends.dtype, pin_memory=True)
            self._copy.copy_(ends, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(ends.device))
        else:
            self._copy = ends.clone()

    def wait(self) -> list[int]:
        """The numbers, `[tables + 1]`.

        Raises:
            ConfigurationError: of a call that was captured into a CUDA graph.
        """
        if self._is_captured:
            raise ConfigurationError(
                "weft.fused.embedding_all_to_all: sparse gradients of a captured call: their "
                "number of entries is not known; take sparse=False"
            )
        if self._event is not None:
            self._event.synchronize()
        return self._zeros if self._copy is None else self._copy.tolist()


def sparse_gradients(
    tables: Tables, bags: Bags, gradients: torch.Tensor, ends: Ends
) -> list[torch.Tensor]:
    """Gradients of all tables as sparse tensors, not coalesced: an entry for each index.

    Args:
        tables: of this rank.
        bags: of the call.
        gradients: of the pooled rows, `[batch, columns of this rank]`.
        ends: of the bags; the host waits for them.
    """
    firsts, bases = _places(tables)
    counts = ends.wait()
    found: list[torch.Tensor] = []
    # Adjacent tables of equal width together.
    for columns, run in groupby(tables.shapes, key=lambda shape: shape[1]):
        numbers = range(len(found), len(found) + sum(1 for _ in run))
        first, end = counts[numbers.start], counts[numbers.stop]
        values = gradients.new_empty((end - first, columns), dtype=tables.dtype)
        rows = gradients.new_empty(end - first, dtype=torch.int64)
        if end > first:
            wide = 1 << (columns - 1).bit_length()
            positions = max(1, _ENTRIES // wide)
            align, every = tables.layout.align, len(tables.shapes) * bags.batch
            launch(
                embedding_gradient.entries,
                -(-(end - first) // positions),
                gradients.device,
                *(values, rows, bags.indices, bags.offsets),
                bags.offsets if bags.factors is None else bags.factors,
                *(tables.gradient_table(firsts, bases), tables.limits(bases), gradients),
                *(bags.batch, every, first, end, every.bit_length()),
                *(columns // align, gradients.stride(0) // align),
                align=align,
                weighted=bags.factors is not None,
                positions=positions,
                columns=wide,
            )
        # As torch's own embeddings: without a check of the indices, which are in range here.
        make = torch.ops.aten._sparse_coo_tensor_unsafe
        for number in numbers:
            its = slice(counts[number] - first, counts[number + 1] - first)
            found.append(make(rows[None, its], values[its], tables.shapes[number]))
    return found


def _places(tables: Tables) -> tuple[list[int], list[int]]:
    """First element of each table in dense gradients of all, and rows of the tables before it."""
    firsts, bases = [0], [0]
    for rows, columns in tables.shapes:
        size = rows * columns
        firsts.append(firsts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        bases.append(bases[-1] + rows)
    return firsts, bases


def factor_gradients(
    tables: Tables, bags: Bags, gradients: torch.Tensor, weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Gradients of the sample weights, `[total]`."""
    assert bags.factors is not None
    outputs = torch.zeros_like(bags.factors)
    total = bags.indices.numel()
    if total > 0 and bags.batch > 0:
        last = len(tables.shapes) * bags.batch - 1
        launch(
            embedding_gradient.factor_gradients,
            -(-total // _POSITIONS),
            outputs.device,
            *(outputs, bags.owners().clamp_(0, last).to(torch.int32), bags.indices),
            *(tables.pieces(weights, MOST_COLUMNS), gradients, bags.batch, total),
            *(max(columns for _, columns in tables.shapes),),
            *(gradients.stride(0) // tables.layout.align,),
            element=ELEMENTS[gradients.dtype if tables.dtype is None else tables.dtype],
            align=tables.layout.align,
            positions=_POSITIONS,
            columns=_COLUMNS,
        )
    return outputs


def _keys(tables: Tables, bags: Bags, bases: list[int]) -> torch.Tensor:
    """Row of each index, numbered through all tables; the number of rows if outside."""
    device = bags.indices.device
    limits = tables.limits(bases)
    owners = bags.owners()
    is_valid = (owners >= 0) & (owners < len(tables.shapes) * bags.batch)
    number = (owners // max(bags.batch, 1)).clamp_(0, len(tables.shapes) - 1)
    ids = bags.indices.to(torch.int64)
    first, end = limits[number], limits[number + 1]
    keys = first + ids
    is_valid &= (ids >= 0) & (keys < end)
    return torch.where(is_valid, keys, torch.full((), bases[-1], device=device))
