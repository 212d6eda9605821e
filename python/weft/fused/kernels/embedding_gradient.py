"""Gradient kernels for embedding bags, from the pooled rows' gradients; without peers.

`segment_sums` and `join_segments` make dense table gradients, and sum in a fixed order; `entries`
makes the entries for sparse gradients, `factor_gradients` makes sample-weight gradients.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.fused.kernels.embedding import (
    _ADDRESS,
    _DIM,
    _FIELDS,
    _MEAN,
    _MODE,
    _OWN_COLUMN,
    _ROWS,
    _WEIGHTED_SUM,
)

__all__ = [
    "GRADIENT_FIELDS",
    "Counts",
    "Entries",
    "EntryCounts",
    "EntryModes",
    "FactorCounts",
    "FactorModes",
    "SegmentModes",
    "Sorted",
    "Sums",
    "entries",
    "factor_gradients",
    "join_segments",
    "segment_sums",
]

#: Fields for a table's gradients, int64: first element among all tables' gradients, dim, first
#: column among this rank's columns, mode, first key.
GRADIENT_FIELDS = 5
_GRADIENT_FIELDS = tl.constexpr(GRADIENT_FIELDS)
_GRADIENT_FIRST, _GRADIENT_DIM, _GRADIENT_COLUMN, _GRADIENT_MODE, _GRADIENT_KEY = map(
    tl.constexpr, range(5)
)


class Sums(NamedTuple):
    """Memory for row sums.

    Attributes:
        outputs: all tables' gradients, zero; `table` has the first element for each.
        heads: float32 `[chunks, columns]`: sums for runs that began in an earlier chunk.
        tails: float32 `[chunks, columns]`: sums for runs that go on in the next chunk.
    """

    outputs: Any
    heads: Any
    tails: Any


class Sorted(NamedTuple):
    """Indices and their bags, sorted by key.

    Attributes:
        keys: int64 `[total]`, ascending: rows, numbered through all tables; `missing` if none.
        bags: int32 `[total]`, in `keys` order.
        offsets: first index in each bag, by table.
        factors: sample weights in `keys` order, if `weighted`.
        table: int64 `[tables, GRADIENT_FIELDS]`.
        gradients: pooled rows' gradients, `[batch, stride]`.
    """

    keys: Any
    bags: Any
    offsets: Any
    factors: Any
    table: Any
    gradients: Any


class Counts(NamedTuple):
    """Numbers for which Triton does not compile the kernels for sums again.

    Attributes:
        batch: samples on all ranks.
        total: number of indices.
        missing: key for an index outside its table.
    """

    batch: Any
    total: Any
    missing: Any


class SegmentModes(NamedTuple):
    """Constants for `segment_sums`.

    Attributes:
        align: number that divides all widths and columns.
        weighted: indices have sample weights.
        chunk: sorted positions for a program, a multiple of 4.
        columns: a power of 2, at least each table's columns.
    """

    align: int
    weighted: bool
    chunk: int
    columns: int


@triton.jit
def _gradient_row(given: Sorted, stride, counts: Counts, position, end, modes: tl.constexpr):
    """Key at a sorted position and the gradient that the bag passes on, float32 `[columns]`."""
    keys, bags, offsets = given.keys, given.bags, given.offsets
    batch, missing = counts.batch, counts.missing
    align: tl.constexpr = modes.align
    columns: tl.constexpr = modes.columns
    some = position < end
    key = tl.load(keys + position, mask=some, other=missing)
    bag = tl.load(bags + position, mask=some, other=0)
    number = bag // batch
    its = given.table + number * _GRADIENT_FIELDS
    dim = tl.multiple_of(tl.load(its + _GRADIENT_DIM), align)
    column = tl.multiple_of(tl.load(its + _GRADIENT_COLUMN), align)
    mode = tl.load(its + _GRADIENT_MODE)
    place = tl.arange(0, columns)
    row = given.gradients + column + (bag - number * batch).to(tl.int64) * stride + place
    values = tl.load(row, mask=(place < dim) & (key < missing), other=0.0).to(tl.float32)
    # Without a branch, which would separate the loads of several rows.
    is_mean = mode == _MEAN
    length = tl.load(offsets + bag + 1, mask=is_mean, other=1)
    length -= tl.load(offsets + bag, mask=is_mean, other=0)
    values = values / tl.maximum(length, 1).to(tl.float32)
    if modes.weighted:
        factor = tl.load(given.factors + position, mask=some, other=0.0).to(tl.float32)
        values = values * tl.where(mode == _WEIGHTED_SUM, factor, 1.0)
    return key, number, values


@triton.jit
def _store_row(
    outputs, table, key, number, values, missing, align: tl.constexpr, columns: tl.constexpr
):
    """Stores a table row's gradient."""
    its = table + number * _GRADIENT_FIELDS
    dim = tl.multiple_of(tl.load(its + _GRADIENT_DIM), align)
    first = tl.multiple_of(tl.load(its + _GRADIENT_FIRST), 16)
    row = key - tl.load(its + _GRADIENT_KEY)
    place = tl.arange(0, columns)
    pointers = outputs + first + row * dim + place
    mask = (place < dim) & (key < missing)
    tl.store(pointers, values.to(outputs.dtype.element_ty), mask=mask)


class _Run(NamedTuple):
    """A run with one key: the key, its table, and whether the run began in an earlier chunk."""

    key: Any
    number: Any
    is_head: Any


@triton.jit
def _add_row(
    outputs,
    heads,
    table,
    key,
    number,
    values,
    run: _Run,
    sums,
    missing,
    align: tl.constexpr,
    columns: tl.constexpr,
):
    """Adds a row to the key's run; stores the previous run, if it has ended."""
    current, is_head = run.key, run.is_head
    if key != current:
        if is_head:
            tl.store(heads + tl.arange(0, columns), sums)
        else:
            _store_row(outputs, table, current, run.number, sums, missing, align, columns)
        is_head = key < 0
        sums = tl.zeros([columns], tl.float32)
    return key, number, is_head, sums + values


@triton.jit(do_not_specialize=["counts"])
def segment_sums(to: Sums, given: Sorted, counts: Counts, strides, modes: tl.constexpr):
    """Row gradients for all tables, for keys whose run is inside one chunk.

    Each program sums one chunk, in order. A run that began in an earlier chunk leaves its sum in
    `heads`; one that goes on in the next chunk, in `tails`: `join_segments` adds these.

    Parameters:
        to: memory for the sums.
        given: sorted indices.
        counts: numbers that may change from call to call.
        strides: `gradients` row stride, divided by `align`.
        modes: `SegmentModes`.
    """
    outputs, heads, tails = to.outputs, to.heads, to.tails
    keys, table, total, missing = given.keys, given.table, counts.total, counts.missing
    align: tl.constexpr = modes.align
    chunk: tl.constexpr = modes.chunk
    columns: tl.constexpr = modes.columns
    # As a multiplication, since the compiler does not know what divides a parameter.
    stride = strides * align
    number_of_chunk = tl.program_id(0).to(tl.int64)
    first = number_of_chunk * chunk
    end = tl.minimum(first + chunk, total)
    heads += number_of_chunk * columns
    current = tl.load(keys + first)
    before = tl.load(keys + first - 1, mask=first > 0, other=-1)
    is_head = before == current
    number = 0
    sums = tl.zeros([columns], tl.float32)
    for position in range(first, end, 4):
        # Four loads are in flight before the first is used.
        key0, number0, values0 = _gradient_row(given, stride, counts, position, end, modes)
        key1, number1, values1 = _gradient_row(given, stride, counts, position + 1, end, modes)
        key2, number2, values2 = _gradient_row(given, stride, counts, position + 2, end, modes)
        key3, number3, values3 = _gradient_row(given, stride, counts, position + 3, end, modes)
        if position == first:
            number = number0
        current, number, is_head, sums = _add_row(
            *(outputs, heads, table, key0, number0, values0, _Run(current, number, is_head)),
            *(sums, missing, align, columns),
        )
        current, number, is_head, sums = _add_row(
            *(outputs, heads, table, key1, number1, values1, _Run(current, number, is_head)),
            *(sums, missing, align, columns),
        )
        current, number, is_head, sums = _add_row(
            *(outputs, heads, table, key2, number2, values2, _Run(current, number, is_head)),
            *(sums, missing, align, columns),
        )
        current, number, is_head, sums = _add_row(
            *(outputs, heads, table, key3, number3, values3, _Run(current, number, is_head)),
            *(sums, missing, align, columns),
        )
    goes_on = tl.load(keys + end, mask=end < total, other=-1) == current
    place = tl.arange(0, columns)
    if is_head:
        tl.store(heads + place, sums)
    elif goes_on:
        tl.store(tails + number_of_chunk * columns + place, sums)
    else:
        _store_row(outputs, table, current, number, sums, missing, align, columns)


@triton.jit(do_not_specialize=["batch", "total", "missing"])
def join_segments(
    outputs,
    heads,
    tails,
    keys,
    bags,
    table,
    batch,
    total,
    missing,
    align: tl.constexpr,
    chunk: tl.constexpr,
    columns: tl.constexpr,
):
    """Gradients for rows whose runs span several chunks; a program for each chunk.

    A program adds the run that begins in its chunk and goes on in the next. See `segment_sums`.
    """
    first = tl.program_id(0).to(tl.int64) * chunk
    end = tl.minimum(first + chunk, total)
    key = tl.load(keys + end - 1)
    after = tl.load(keys + end, mask=end < total, other=-1)
    before = tl.load(keys + first - 1, mask=first > 0, other=-1)
    if (after == key) & (before != key) & (key < missing):
        more = tl.cast(0, tl.int64)
        while after == key:
            more += 1
            at = end + more * chunk
            after = tl.load(keys + at, mask=at < total, other=-1)
        place = tl.arange(0, columns)
        own = first // chunk
        sums = tl.load(tails + own * columns + place)
        for other in range(own + 1, own + 1 + more):
            sums += tl.load(heads + other * columns + place)
        number = tl.load(bags + first + chunk - 1) // batch
        _store_row(outputs, table, key, number, sums, missing, align, columns)


class Entries(NamedTuple):
    """Tensors for `entries`.

    Attributes:
        outputs: `[end - first, width]`: the gradient from the index's bag, scaled for its length or
            by sample weight; zero if the index is outside the table.
        rows: int64 `[end - first]`: the index, or 0 if it is outside.
        indices: all tables' indices.
        offsets: `[all_bags + 1]`, for the bags in all tables; `batch` for each table.
        factors: sample weights by index, if `weighted`.
        table: int64 `[tables, GRADIENT_FIELDS]`.
        limits: int64 `[tables + 1]`: rows in earlier tables.
        gradients: pooled rows' gradients, `[batch, stride]`.
    """

    outputs: Any
    rows: Any
    indices: Any
    offsets: Any
    factors: Any
    table: Any
    limits: Any
    gradients: Any


class EntryCounts(NamedTuple):
    """Numbers for which Triton does not compile `entries` again.

    Attributes:
        batch: samples on all ranks.
        first: first index for the tables.
        end: the index after the last one.
        searches: at least the bits of `all_bags`.
    """

    batch: Any
    first: Any
    end: Any
    searches: Any


class EntryModes(NamedTuple):
    """Constants for `entries`.

    Attributes:
        align: number that divides all widths and columns.
        weighted: indices have sample weights.
        positions: indices for a program.
        columns: a power of 2 from the width on.
    """

    align: int
    weighted: bool
    positions: int
    columns: int


@triton.jit(do_not_specialize=["counts"])
def entries(tensors: Entries, counts: EntryCounts, all_bags, widths, strides, modes: tl.constexpr):
    """Row and gradient for each index into adjacent tables of equal width.

    Parameters:
        tensors: inputs and outputs.
        counts: numbers that may change from call to call.
        all_bags: bags in all tables.
        widths: table width, divided by `align`.
        strides: `gradients` row stride, divided by `align`.
        modes: `EntryModes`.
    """
    outputs, rows, offsets, table = tensors.outputs, tensors.rows, tensors.offsets, tensors.table
    limits, batch = tensors.limits, counts.batch
    first, end, searches = counts.first, counts.end, counts.searches
    align: tl.constexpr = modes.align
    positions: tl.constexpr = modes.positions
    columns: tl.constexpr = modes.columns
    at = first + tl.program_id(0).to(tl.int64) * positions + tl.arange(0, positions)
    some = at < end
    # The last bag that begins at or before the index: among equal offsets, the earlier bags are
    # empty.
    bag, after = tl.zeros([positions], tl.int32), tl.zeros([positions], tl.int32) + all_bags
    for _ in range(searches):
        middle = (bag + after) // 2
        begun = tl.load(offsets + middle).to(tl.int64) <= at
        bag, after = tl.where(begun, middle, bag), tl.where(begun, after, middle)
    number = bag // batch
    its = table + number * _GRADIENT_FIELDS
    index = tl.load(tensors.indices + at, mask=some, other=-1).to(tl.int64)
    count = tl.load(limits + number + 1) - tl.load(limits + number)
    is_valid = (index >= 0) & (index < count)
    tl.store(rows + at - first, tl.where(is_valid, index, 0), mask=some)
    mode = tl.load(its + _GRADIENT_MODE)
    is_mean = mode == _MEAN
    length = tl.load(offsets + bag + 1, mask=is_mean, other=1)
    length -= tl.load(offsets + bag, mask=is_mean, other=0)
    scale = 1.0 / tl.maximum(length, 1).to(tl.float32)
    if modes.weighted:
        factor = tl.load(tensors.factors + at, mask=some, other=0.0).to(tl.float32)
        scale *= tl.where(mode == _WEIGHTED_SUM, factor, 1.0)
    width = widths * align
    place = tl.arange(0, columns)
    inside = (place < width)[None, :] & some[:, None]
    column = tl.multiple_of(tl.load(its + _GRADIENT_COLUMN), align)
    row = tensors.gradients + column + (bag - number * batch).to(tl.int64) * (strides * align)
    mask = inside & is_valid[:, None]
    found = tl.load(row[:, None] + place[None, :], mask=mask, other=0.0).to(tl.float32)
    found *= scale[:, None]
    to = outputs + (at - first)[:, None] * width + place[None, :]
    tl.store(to, found.to(outputs.dtype.element_ty), mask=inside)


class FactorCounts(NamedTuple):
    """Numbers for which Triton does not compile `factor_gradients` again.

    Attributes:
        batch: samples on all ranks.
        total: number of indices.
        widest: columns in the widest table.
    """

    batch: Any
    total: Any
    widest: Any


class FactorModes(NamedTuple):
    """Constants for `factor_gradients`.

    Attributes:
        element: table dtype.
        align: number that divides all widths and columns.
        positions: indices for a program.
        columns: columns that it multiplies at a time.
    """

    element: Any
    align: int
    positions: int
    columns: int


@triton.jit(do_not_specialize=["counts"])
def factor_gradients(
    outputs,
    bags,
    indices,
    table,
    gradients,
    counts: FactorCounts,
    strides,
    modes: tl.constexpr,
):
    """Sample-weight gradients: table rows multiplied by bag gradients.

    Parameters:
        outputs: `[total]`; zero for tables with other modes and for indices outside.
        bags: int32 `[total]`, in `indices` order.
        table: int64 `[tables, FIELDS]`: one segment for each table.
        gradients: pooled rows' gradients, `[batch, stride]`; `strides` is in units of `align`.
        counts: numbers that may change from call to call.
        modes: `FactorModes`.
    """
    batch, total, widest = counts.batch, counts.total, counts.widest
    element: tl.constexpr = modes.element
    align: tl.constexpr = modes.align
    positions: tl.constexpr = modes.positions
    columns: tl.constexpr = modes.columns
    place = tl.program_id(0).to(tl.int64) * positions + tl.arange(0, positions)
    some = place < total
    bag = tl.load(bags + place, mask=some, other=0)
    number = bag // batch
    piece = table + number * _FIELDS
    dim = tl.multiple_of(tl.load(piece + _DIM), align)
    column = tl.multiple_of(tl.load(piece + _OWN_COLUMN), align)
    index = tl.load(indices + place, mask=some, other=0).to(tl.int64)
    some &= (tl.load(piece + _MODE) == _WEIGHTED_SUM) & (index >= 0)
    some &= index < tl.load(piece + _ROWS)
    weights = tl.multiple_of(tl.load(piece + _ADDRESS), 16).to(tl.pointer_type(element))
    weights += index * dim
    rows = gradients + column + (bag - number * batch).to(tl.int64) * (strides * align)
    sums = tl.zeros([positions], tl.float32)
    for first in range(0, widest, columns):
        ahead = first + tl.arange(0, columns)
        mask = some[:, None] & (ahead[None, :] < dim[:, None])
        values = tl.load(weights[:, None] + ahead[None, :], mask=mask, other=0.0).to(tl.float32)
        passed = tl.load(rows[:, None] + ahead[None, :], mask=mask, other=0.0).to(tl.float32)
        sums += tl.sum(values * passed, axis=1)
    tl.store(outputs + place, sums.to(outputs.dtype.element_ty), mask=place < total)
