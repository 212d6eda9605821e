"""Kernels of gradients of embedding bags, from those of the pooled rows; without peers.

`segment_sums` and `join_segments` make dense gradients of tables, in a fixed order of sums;
`entries` makes the entries of sparse ones, `factor_gradients` those of sample weights.
"""

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

__all__ = ["GRADIENT_FIELDS", "entries", "factor_gradients", "join_segments", "segment_sums"]

#: Fields of a table for gradients, int64: first element in the gradients of all tables, dim, first
#: column among those of this rank, mode, first key.
GRADIENT_FIELDS = 5
_GRADIENT_FIELDS = tl.constexpr(GRADIENT_FIELDS)
_GRADIENT_FIRST, _GRADIENT_DIM, _GRADIENT_COLUMN, _GRADIENT_MODE, _GRADIENT_KEY = map(
    tl.constexpr, range(5)
)


@triton.jit
def _gradient_row(
    keys,
    bags,
    offsets,
    factors,
    table,
    gradients,
    stride,
    batch,
    position,
    end,
    missing,
    align: tl.constexpr,
    weighted: tl.constexpr,
    columns: tl.constexpr,
):
    """Key at a sorted position and the gradient that its bag passes on, float32 of `[columns]`."""
    some = position < end
    key = tl.load(keys + position, mask=some, other=missing)
    bag = tl.load(bags + position, mask=some, other=0)
    number = bag // batch
    its = table + number * _GRADIENT_FIELDS
    dim = tl.multiple_of(tl.load(its + _GRADIENT_DIM), align)
    column = tl.multiple_of(tl.load(its + _GRADIENT_COLUMN), align)
    mode = tl.load(its + _GRADIENT_MODE)
    place = tl.arange(0, columns)
    row = gradients + column + (bag - number * batch).to(tl.int64) * stride + place
    values = tl.load(row, mask=(place < dim) & (key < missing), other=0.0).to(tl.float32)
    # Without a branch, which would part the loads of several rows.
    is_mean = mode == _MEAN
    length = tl.load(offsets + bag + 1, mask=is_mean, other=1)
    length -= tl.load(offsets + bag, mask=is_mean, other=0)
    values = values / tl.maximum(length, 1).to(tl.float32)
    if weighted:
        factor = tl.load(factors + position, mask=some, other=0.0).to(tl.float32)
        values = values * tl.where(mode == _WEIGHTED_SUM, factor, 1.0)
    return key, number, values


@triton.jit
def _store_row(
    outputs, table, key, number, values, missing, align: tl.constexpr, columns: tl.constexpr
):
    """Stores the gradient of a row of a table."""
    its = table + number * _GRADIENT_FIELDS
    dim = tl.multiple_of(tl.load(its + _GRADIENT_DIM), align)
    first = tl.multiple_of(tl.load(its + _GRADIENT_FIRST), 16)
    row = key - tl.load(its + _GRADIENT_KEY)
    place = tl.arange(0, columns)
    pointers = outputs + first + row * dim + place
    mask = (place < dim) & (key < missing)
    tl.store(pointers, values.to(outputs.dtype.element_ty), mask=mask)


@triton.jit
def _add_row(
    outputs,
    heads,
    table,
    key,
    number,
    values,
    current,
    current_number,
    is_head,
    sums,
    missing,
    align: tl.constexpr,
    columns: tl.constexpr,
):
    """Adds a row to the run of its key; stores the run before, if that has ended."""
    if key != current:
        if is_head:
            tl.store(heads + tl.arange(0, columns), sums)
        else:
            _store_row(outputs, table, current, current_number, sums, missing, align, columns)
        is_head = key < 0
        sums = tl.zeros([columns], tl.float32)
    return key, number, is_head, sums + values


@triton.jit(do_not_specialize=["batch", "total", "missing"])
def segment_sums(
    outputs,
    heads,
    tails,
    keys,
    bags,
    offsets,
    factors,
    table,
    gradients,
    batch,
    total,
    missing,
    strides,
    align: tl.constexpr,
    weighted: tl.constexpr,
    chunk: tl.constexpr,
    columns: tl.constexpr,
):
    """Gradients of the rows of all tables, for runs of a key that are inside of a chunk.

    A program sums the chunk of its number, in order. A run that began in a chunk before leaves its
    sum in `heads`; one that goes on in the next chunk, in `tails`: `join_segments` adds these.

    Parameters:
        outputs: gradients of all tables, zero; `table` has the first element of each.
        heads, tails: float32 of `[chunks, columns]`.
        keys: int64 of `[total]`, ascending: rows, numbered through all tables; `missing` if none.
        bags: int32 of `[total]`, in the order of `keys`.
        factors: sample weights in the order of `keys`, if `weighted`.
        table: int64 of `[tables, GRADIENT_FIELDS]`.
        gradients: of the pooled rows, `[batch, stride]`; `strides` is in units of `align`.
        chunk: sorted positions of a program, a multiple of 4.
    """
    # By a product, since the compiler has no information on the divisibility of a parameter.
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
        # Four loads are on their way before the first is used.
        key0, number0, values0 = _gradient_row(
            *(keys, bags, offsets, factors, table, gradients, stride, batch, position, end),
            *(missing, align, weighted, columns),
        )
        key1, number1, values1 = _gradient_row(
            *(keys, bags, offsets, factors, table, gradients, stride, batch, position + 1, end),
            *(missing, align, weighted, columns),
        )
        key2, number2, values2 = _gradient_row(
            *(keys, bags, offsets, factors, table, gradients, stride, batch, position + 2, end),
            *(missing, align, weighted, columns),
        )
        key3, number3, values3 = _gradient_row(
            *(keys, bags, offsets, factors, table, gradients, stride, batch, position + 3, end),
            *(missing, align, weighted, columns),
        )
        if position == first:
            number = number0
        current, number, is_head, sums = _add_row(
            *(outputs, heads, table, key0, number0, values0, current, number, is_head, sums),
            *(missing, align, columns),
        )
        current, number, is_head, sums = _add_row(
            *(outputs, heads, table, key1, number1, values1, current, number, is_head, sums),
            *(missing, align, columns),
        )
        current, number, is_head, sums = _add_row(
            *(outputs, heads, table, key2, number2, values2, current, number, is_head, sums),
            *(missing, align, columns),
        )
        current, number, is_head, sums = _add_row(
            *(outputs, heads, table, key3, number3, values3, current, number, is_head, sums),
            *(missing, align, columns),
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
    """Gradients of the rows whose runs are in several chunks; a program for each chunk.

    A program adds a run that begins in its chunk and goes on in the next. See `segment_sums`.
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


@triton.jit(do_not_specialize=["batch", "first", "end", "searches"])
def entries(
    values,
    rows,
    indices,
    offsets,
    factors,
    table,
    limits,
    gradients,
    batch,
    all_bags,
    first,
    end,
    searches,
    widths,
    strides,
    align: tl.constexpr,
    weighted: tl.constexpr,
    positions: tl.constexpr,
    columns: tl.constexpr,
):
    """Row and gradient of each index of adjacent tables of equal width.

    Parameters:
        values: `[end - first, width]`: that of the index's bag, by its length or sample weight;
            zero if the index is outside of its table.
        rows: int64 of `[end - first]`: the index, or 0 if it is outside.
        offsets: `[all_bags + 1]`, of the bags of all tables; `batch` of each.
        factors: sample weights by index, if `weighted`.
        table: int64 of `[tables, GRADIENT_FIELDS]`.
        limits: int64 of `[tables + 1]`: rows of the tables before.
        gradients: of the pooled rows, `[batch, stride]`; `strides` is in units of `align`, and so
            is `widths`, the width of the tables.
        first, end: indices of the tables.
        searches: at least the bits of `all_bags`.
        positions: indices of a program; `columns`: a power of 2 from the width on.
    """
    at = first + tl.program_id(0).to(tl.int64) * positions + tl.arange(0, positions)
    some = at < end
    # The last bag that begins at or before the index: of equal offsets, those before are empty.
    bag, after = tl.zeros([positions], tl.int32), tl.zeros([positions], tl.int32) + all_bags
    for _ in range(searches):
        middle = (bag + after) // 2
        begun = tl.load(offsets + middle).to(tl.int64) <= at
        bag, after = tl.where(begun, middle, bag), tl.where(begun, after, middle)
    number = bag // batch
    its = table + number * _GRADIENT_FIELDS
    index = tl.load(indices + at, mask=some, other=-1).to(tl.int64)
    count = tl.load(limits + number + 1) - tl.load(limits + number)
    is_valid = (index >= 0) & (index < count)
    tl.store(rows + at - first, tl.where(is_valid, index, 0), mask=some)
    mode = tl.load(its + _GRADIENT_MODE)
    is_mean = mode == _MEAN
    length = tl.load(offsets + bag + 1, mask=is_mean, other=1)
    length -= tl.load(offsets + bag, mask=is_mean, other=0)
    scale = 1.0 / tl.maximum(length, 1).to(tl.float32)
    if weighted:
        factor = tl.load(factors + at, mask=some, other=0.0).to(tl.float32)
        scale *= tl.where(mode == _WEIGHTED_SUM, factor, 1.0)
    width = widths * align
    place = tl.arange(0, columns)
    inside = (place < width)[None, :] & some[:, None]
    column = tl.multiple_of(tl.load(its + _GRADIENT_COLUMN), align)
    row = gradients + column + (bag - number * batch).to(tl.int64) * (strides * align)
    mask = inside & is_valid[:, None]
    found = tl.load(row[:, None] + place[None, :], mask=mask, other=0.0).to(tl.float32)
    found *= scale[:, None]
    to = values + (at - first)[:, None] * width + place[None, :]
    tl.store(to, found.to(values.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["batch", "total", "widest"])
def factor_gradients(
    outputs,
    bags,
    indices,
    table,
    gradients,
    batch,
    total,
    widest,
    strides,
    element: tl.constexpr,
    align: tl.constexpr,
    positions: tl.constexpr,
    columns: tl.constexpr,
):
    """Gradients of the sample weights: products of rows of tables and gradients of their bags.

    Parameters:
        outputs: `[total]`; zero for tables of other modes and indices outside of them.
        bags: int32 of `[total]`, in the order of `indices`.
        table: int64 of `[tables, FIELDS]`: a piece for each table.
        gradients: of the pooled rows, `[batch, stride]`; `strides` is in units of `align`.
        widest: columns of the widest table.
        positions: indices of a program; `columns`: that it multiplies at a time.
    """
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
