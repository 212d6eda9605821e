"""Gradients of tables of embedding bags, from those of the pooled rows."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from weft.fused.embedding_tables import ELEMENTS, MOST_COLUMNS
from weft.fused.kernels import embedding, embedding_gradient
from weft.fused.spaces import launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.fused.embedding_tables import Tables, Tiling

__all__ = ["Bags", "dense_gradients", "factor_gradients", "sparse_gradients"]

#: Indices of a program for gradients of sample weights, and columns that it multiplies at a time.
_POSITIONS: Final = 32
_COLUMNS: Final = 64
#: Elements to whose multiples gradients of tables are aligned.
_ALIGNMENT: Final = 16


class Bags(NamedTuple):
    """Bags of a call.

    Attributes:
        indices: `[total]`.
        offsets: `[tables * batch + 1]`.
        factors: sample weights, `[total]`, if a table uses them.
        batch: global batch.
    """

    indices: torch.Tensor
    offsets: torch.Tensor
    factors: torch.Tensor | None
    batch: int

    def owners(self) -> torch.Tensor:
        """Number of the bag of each index, int64; -1 or too great outside of all bags."""
        places = torch.arange(self.indices.numel(), device=self.indices.device)
        # The last of equal offsets: those before it are of empty bags.
        return torch.searchsorted(self.offsets.to(torch.int64), places, right=True) - 1


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
    firsts, bases = [0], [0]
    for rows, columns in tables.shapes:
        size = rows * columns
        firsts.append(firsts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        bases.append(bases[-1] + rows)
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


def sparse_gradients(tables: Tables, bags: Bags, gradients: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of all tables as sparse tensors, not coalesced: an entry for each index.

    The host waits for the number of indices of each table.
    """
    owners = bags.owners()
    ends = bags.offsets[:: bags.batch].tolist() if bags.batch else [0] * (len(tables.shapes) + 1)
    found: list[torch.Tensor] = []
    column = 0
    # Adjacent tables of equal width together.
    for columns, run in groupby(tables.shapes, key=lambda shape: shape[1]):
        rows = [count for count, _ in run]
        numbers = range(len(found), len(found) + len(rows))
        part = slice(ends[numbers.start], ends[numbers.stop])
        ids = bags.indices[part].to(torch.int64)
        is_valid = ids >= 0
        parts = [
            slice(ends[number] - part.start, ends[number + 1] - part.start) for number in numbers
        ]
        for its, count in zip(parts, rows, strict=True):
            is_valid[its] &= ids[its] < count
        its_columns = gradients[:, column : column + columns * len(rows)]
        values = _entries(tables, bags, its_columns, numbers, owners[part], is_valid, part)
        ids = torch.where(is_valid, ids, 0)
        # As torch's own embeddings: without a check of the indices, which are in range here.
        make = torch.ops.aten._sparse_coo_tensor_unsafe
        found += [
            make(ids[None, its], values[its], (count, columns))
            for its, count in zip(parts, rows, strict=True)
        ]
        column += columns * len(rows)
    return found


def _entries(
    tables: Tables,
    bags: Bags,
    gradients: torch.Tensor,
    numbers: range,
    owners: torch.Tensor,
    is_valid: torch.Tensor,
    part: slice,
) -> torch.Tensor:
    """Gradient of each index of adjacent tables of equal width, zero if it is not valid.

    Args:
        tables: of this rank.
        bags: of the call.
        gradients: of the tables' pooled rows, `[batch, width * tables]`.
        numbers: of the tables.
        owners: number of the bag of each index.
        is_valid: for each index.
        part: of the indices of all tables.
    """
    count, batch = len(numbers), bags.batch
    modes = [tables.modes[number] for number in numbers]
    is_weighted = bags.factors is not None and embedding.WEIGHTED_SUM in modes
    # By bag, with a row of zeros at the end.
    columns = gradients.shape[1] // count
    by_bag = gradients.reshape(batch, count, columns).transpose(0, 1)
    rows = by_bag.new_zeros((count * batch + 1, columns))
    if is_weighted:
        rows = rows.float()
    own = rows[:-1].view(count, batch, columns)
    own.copy_(by_bag)
    lengths = bags.offsets.diff()
    for place, mode in enumerate(modes):
        if mode == embedding.MEAN:
            of_bags = lengths[numbers[place] * batch : (numbers[place] + 1) * batch]
            own[place].copy_(by_bag[place].float() / of_bags.clamp(min=1)[:, None])
    values = rows[torch.where(is_valid, owners - numbers.start * batch, count * batch)]
    if is_weighted and bags.factors is not None:
        factors = bags.factors[part].to(torch.float32)
        for place, mode in enumerate(modes):
            if mode != embedding.WEIGHTED_SUM:
                first, last = numbers[place] * batch, (numbers[place] + 1) * batch
                factors = torch.where((owners >= first) & (owners < last), 1.0, factors)
        values *= factors[:, None]
    return values.to(tables.dtype)


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
