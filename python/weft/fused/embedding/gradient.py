"""Table gradients for embedding bags, from the pooled rows' gradients."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

import torch

from weft.base.errors import ConfigurationError
from weft.fused.embedding.tables import ELEMENTS, MOST_COLUMNS
from weft.fused.kernels import embedding_gradient as kernels
from weft.fused.spaces import launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.fused.embedding.bags import Bags
    from weft.fused.embedding.tables import Tables, Tiling

__all__ = ["Ends", "dense_gradients", "factor_gradients", "sparse_gradients"]

#: Indices for a program with sample-weight gradients, and columns that it multiplies at a time.
_POSITIONS: Final = 32
_COLUMNS: Final = 64
#: Elements for a program with sparse gradient entries.
_ENTRIES: Final = 4096
#: Table gradient alignment in elements.
_ALIGNMENT: Final = 16


def dense_gradients(
    tables: Tables, bags: Bags, gradients: torch.Tensor, tiling: Tiling
) -> list[torch.Tensor]:
    """Gradients for all tables, as views on one tensor. Ordered sums make the bits reproducible.

    Args:
        tables: this rank's tables.
        bags: the call's bags.
        gradients: pooled rows' gradients, `[batch, columns on this rank]`.
        tiling: task sizes.
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
        weights = keys if factors is None else factors
        table = tables.gradient_table(firsts, bases)
        chunks = -(-total // tiling.chunk)
        columns = 1 << (max(columns for _, columns in tables.shapes) - 1).bit_length()
        heads, tails = torch.empty(2, chunks, columns, dtype=torch.float32, device=device)
        align = tables.layout.align
        launch(
            kernels.segment_sums,
            chunks,
            device,
            kernels.Sums(outputs, heads, tails),
            kernels.Sorted(keys, owners, bags.offsets, weights, table, gradients),
            kernels.Counts(bags.batch, total, bases[-1]),
            gradients.stride(0) // align,
            kernels.SegmentModes(align, factors is not None, tiling.chunk, columns),
            num_warps=1,
        )
        launch(
            kernels.join_segments,
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
    """Index counts up to each table, in flight to the host.

    Args:
        bags: a call's bags.
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
        """Index counts, `[tables + 1]`.

        Raises:
            ConfigurationError: if the call was captured into a CUDA graph.
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
    """Gradients for all tables as sparse tensors, not coalesced: an entry for each index.

    Args:
        tables: this rank's tables.
        bags: the call's bags.
        gradients: pooled rows' gradients, `[batch, columns on this rank]`.
        ends: the bags' ends; the host waits for them.
    """
    firsts, bases = _places(tables)
    counts = ends.wait()
    found: list[torch.Tensor] = []
    # Adjacent tables with equal width are handled together.
    for columns, run in groupby(tables.shapes, key=lambda shape: shape[1]):
        numbers = range(len(found), len(found) + sum(1 for _ in run))
        first, end = counts[numbers.start], counts[numbers.stop]
        values = gradients.new_empty((end - first, columns), dtype=tables.dtype)
        rows = gradients.new_empty(end - first, dtype=torch.int64)
        if end > first:
            wide = 1 << (columns - 1).bit_length()
            positions = max(1, _ENTRIES // wide)
            align, every = tables.layout.align, len(tables.shapes) * bags.batch
            tensors = kernels.Entries(
                *(values, rows, bags.indices, bags.offsets),
                bags.offsets if bags.factors is None else bags.factors,
                *(tables.gradient_table(firsts, bases), tables.limits(bases), gradients),
            )
            launch(
                kernels.entries,
                -(-(end - first) // positions),
                gradients.device,
                tensors,
                kernels.EntryCounts(bags.batch, first, end, every.bit_length()),
                *(every, columns // align, gradients.stride(0) // align),
                kernels.EntryModes(align, bags.factors is not None, positions, wide),
            )
        # As in torch's own embeddings: without an index check, since indices are in range here.
        make = torch.ops.aten._sparse_coo_tensor_unsafe
        for number in numbers:
            its = slice(counts[number] - first, counts[number + 1] - first)
            found.append(make(rows[None, its], values[its], tables.shapes[number]))
    return found


def _places(tables: Tables) -> tuple[list[int], list[int]]:
    """First element for each table in all dense gradients, and row count in earlier tables."""
    firsts, bases = [0], [0]
    for rows, columns in tables.shapes:
        size = rows * columns
        firsts.append(firsts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        bases.append(bases[-1] + rows)
    return firsts, bases


def factor_gradients(
    tables: Tables, bags: Bags, gradients: torch.Tensor, weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Sample-weight gradients, `[total]`."""
    assert bags.factors is not None
    outputs = torch.zeros_like(bags.factors)
    total = bags.indices.numel()
    if total > 0 and bags.batch > 0:
        last = len(tables.shapes) * bags.batch - 1
        widest = max(columns for _, columns in tables.shapes)
        launch(
            kernels.factor_gradients,
            -(-total // _POSITIONS),
            outputs.device,
            *(outputs, bags.owners().clamp_(0, last).to(torch.int32), bags.indices),
            *(tables.pieces(weights, MOST_COLUMNS), gradients),
            kernels.FactorCounts(bags.batch, total, widest),
            gradients.stride(0) // tables.layout.align,
            kernels.FactorModes(
                element=ELEMENTS[gradients.dtype if tables.dtype is None else tables.dtype],
                align=tables.layout.align,
                positions=_POSITIONS,
                columns=_COLUMNS,
            ),
        )
    return outputs


def _keys(tables: Tables, bags: Bags, bases: list[int]) -> torch.Tensor:
    """Row for each index, numbered through all tables; the row count if outside."""
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
