"""Kernels for all-reduce with residual and RMS norm.

Rows consist of words: one float32, or two 16-bit elements. `packets_kernel`, for few rows, sends
words in packets; the tiles are rows or row parts. `flags_kernel`, for more rows, sends
them by plain stores, with one flag for each program's rows: half as many bytes, but a release and
an acquire. In both, a program sends all that it has before it waits, and it waits only for the
peers' programs with the same number.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.triton as wt
from weft.fused.kernels.agreement import agree, announce
from weft.fused.kernels.flags import await_flags, raise_flags
from weft.fused.kernels.packets import (
    distances_of,
    float_of,
    half_of,
    keep_round,
    last_round,
    pack,
    parts_of,
    receive,
    receive_words,
    send,
    words_of,
)

__all__ = [
    "MAX_ROWS",
    "FlagModes",
    "FlagSizes",
    "Flags",
    "PacketModes",
    "PacketSizes",
    "Packets",
    "Tensors",
    "flags_kernel",
    "packets_kernel",
]

#: Maximum rows in a call; flags are at fixed places, whatever the shape.
MAX_ROWS = 1024
_MAX_ROWS = tl.constexpr(MAX_ROWS)


class Tensors(NamedTuple):
    """A call's tensors.

    Attributes:
        x: [rows, 4 * width_by_4] words: int32 with two 16-bit elements, or float32.
        residual: words in the same format as `x`.
        norm_weight: words for a row.
        output: words for the normed rows; it may be `x`.
        summed: words for the rows before the norm.
    """

    x: Any
    residual: Any
    norm_weight: Any
    output: Any
    summed: Any


class Packets(NamedTuple):
    """Memory for packets to peers and to other programs.

    Attributes:
        inboxes: int64, symmetric, two halves with `16 * half_by_16` packets each.
        squares: int64 on this GPU, a packet for each tile.
        state: see `last_round`.
        context: for `inboxes`.
    """

    inboxes: Any
    squares: Any
    state: Any
    context: Any


class PacketSizes(NamedTuple):
    """Sizes for which Triton does not compile `packets_kernel` again.

    Attributes:
        rows: number of rows.
        width_by_4: words in a row, divided by 4.
        half_by_16: packets in an inbox half, divided by 16.
    """

    rows: Any
    width_by_4: Any
    half_by_16: Any


class PacketModes(NamedTuple):
    """Constants for `packets_kernel`.

    Attributes:
        dtype: element dtype.
        two_shot: tile t is summed by rank t modulo `ranks`, which sends it to all.
        ranks: number of ranks.
        group: see `receive_words`.
        block: words in a tile; at least the threads in a program.
        divided: a row has several tiles; else `block` is at least a row's words.
        single: there is one tile for each program.
        chunk: at least the tiles in a row, and the threads in a program.
    """

    dtype: Any
    two_shot: bool
    ranks: int
    group: int
    block: int
    divided: bool
    single: bool
    chunk: int


@triton.jit(do_not_specialize=["sizes", "digest"])
def packets_kernel(
    tensors: Tensors,
    packets: Packets,
    sizes: PacketSizes,
    eps,
    modes: tl.constexpr,
    agreement=None,
    digest=0,
):
    """One call; a one-dimensional grid, resident as a whole if `divided`.

    Args:
        tensors: input and output words.
        packets: memory for packets.
        sizes: sizes that may change from call to call.
        eps: added to the mean square.
        modes: `PacketModes`.
        agreement: see `weft.fused.kernels.agreement`, or None.
        digest: argument digest for `agreement`.
    """
    x, residual, norm_weight = tensors.x, tensors.residual, tensors.norm_weight
    output, summed = tensors.output, tensors.summed
    inboxes, squares = packets.inboxes, packets.squares
    state, context = packets.state, packets.context
    rows, width_by_4, half_by_16 = sizes.rows, sizes.width_by_4, sizes.half_by_16
    dtype: tl.constexpr = modes.dtype
    two_shot: tl.constexpr = modes.two_shot
    ranks: tl.constexpr = modes.ranks
    group: tl.constexpr = modes.group
    block: tl.constexpr = modes.block
    divided: tl.constexpr = modes.divided
    single: tl.constexpr = modes.single
    chunk: tl.constexpr = modes.chunk
    width = width_by_4 * 4
    size = rows * width
    program, programs = tl.program_id(0), tl.num_programs(0)
    parts = tl.cdiv(width, block) if divided else 1
    tiles = rows * parts
    rank, last = wt.rank(context), last_round(state)
    distances = distances_of(context, ranks)
    # The first tile is loaded along with these.
    places, _, present = _tile(program, tiles, parts, width, block)
    words = tl.load(x + places, mask=present, other=0)
    epoch = wt.next_epoch(last)
    inbox = half_of(epoch, half_by_16)
    sums = inbox + ranks * size
    for tile in range(program, tiles, programs):
        places, _, present = _tile(tile, tiles, parts, width, block)
        offsets = inbox + rank * size + places
        if two_shot:
            owned = present & (tile % ranks != rank)
            wt.put(context, inboxes + offsets, pack(words, epoch), tile % ranks, owned)
        else:
            send(inboxes, distances, offsets, pack(words, epoch), present, ranks, rank)
        if not single:
            places, _, present = _tile(tile + programs, tiles, parts, width, block)
            words = tl.load(x + places, mask=present, other=0)
    if agreement is not None:  # noqa: SIM102 (a constant)
        if program == 0:
            announce(context, agreement, digest, epoch)
    keep_round(state, epoch)
    if agreement is not None:  # noqa: SIM102 (a constant)
        if program == 0:
            agree(context, agreement, digest, epoch)
    if two_shot:
        for tile in range(program, tiles, programs):
            if tile % ranks == rank:
                places, _, present = _tile(tile, tiles, parts, width, block)
                own = tl.load(x + places, mask=present, other=0)
                low, high, fine = receive_words(
                    *(context, inboxes + inbox + places, size, own, rank, present, epoch, tile),
                    *(dtype, ranks, group),
                )
                low = tl.where(fine, low, float("nan"))
                high = tl.where(fine, high, float("nan"))
                sent = pack(words_of(low, high, dtype), epoch)
                send(inboxes, distances, sums + places, sent, present, ranks)
        tl.debug_barrier()
    for tile in range(program, tiles, programs):
        places, columns, present = _tile(tile, tiles, parts, width, block)
        # Loaded while packets are in flight.
        added = tl.load(residual + places, mask=present, other=0)
        factors = tl.load(norm_weight + columns, mask=present, other=0)
        if two_shot:
            arrived, fine = receive(
                context, inboxes + sums + places, present, epoch, tile % ranks, tile
            )
            low, high = parts_of(arrived.to(tl.int32), dtype)
        else:
            if not single:
                words = tl.load(x + places, mask=present, other=0)
            low, high, fine = receive_words(
                *(context, inboxes + inbox + places, size, words, rank, present, epoch, tile),
                *(dtype, ranks, group),
            )
        low, high = _add(low, high, added, fine, dtype)
        square = _squares(low, high, present, dtype)
        if divided:
            tl.store(squares + tile, pack(square, epoch))
        tl.store(summed + places, words_of(low, high, dtype), mask=present)
        if divided and single:
            square = _row_squares(context, squares, tile, parts, epoch, rank, chunk)
        if single or not divided:
            words = _normed(low, high, factors, square, width, eps, dtype)
            tl.store(output + places, words, mask=present)
    if divided and not single:
        # Rows before the norm are stored before they are loaded.
        tl.debug_barrier()
        for tile in range(program, tiles, programs):
            places, columns, present = _tile(tile, tiles, parts, width, block)
            factors = tl.load(norm_weight + columns, mask=present, other=0)
            low, high = parts_of(tl.load(summed + places, mask=present, other=0), dtype)
            square = _row_squares(context, squares, tile, parts, epoch, rank, chunk)
            words = _normed(low, high, factors, square, width, eps, dtype)
            tl.store(output + places, words, mask=present)


class Flags(NamedTuple):
    """Memory for rows from peers, and their flags.

    Attributes:
        inboxes: words like `x`, symmetric, two halves with `16 * half_by_16` each.
        flags: int32 in `context`'s tensor, [ranks + 1, MAX_ROWS]: for each rank's parts, and for
            sums.
        state: see `last_round`.
        context: for `inboxes` and `flags`.
    """

    inboxes: Any
    flags: Any
    state: Any
    context: Any


class FlagSizes(NamedTuple):
    """Sizes for which Triton does not compile `flags_kernel` again.

    Attributes:
        rows: number of rows.
        unit: rows that share a flag.
        width_by_4: words in a row, divided by 4.
        half_by_16: words in an inbox half, divided by 16.
    """

    rows: Any
    unit: Any
    width_by_4: Any
    half_by_16: Any


class FlagModes(NamedTuple):
    """Constants for `flags_kernel`.

    Attributes:
        dtype: element dtype.
        two_shot: unit u is summed by rank u modulo `ranks`, which sends it to all.
        ranks: number of ranks.
        block: at least a row's words and the threads in a program.
    """

    dtype: Any
    two_shot: bool
    ranks: int
    block: int


@triton.jit(do_not_specialize=["sizes", "digest"])
def flags_kernel(
    tensors: Tensors,
    exchange: Flags,
    sizes: FlagSizes,
    eps,
    modes: tl.constexpr,
    agreement=None,
    digest=0,
):
    """One call; a one-dimensional grid.

    Args:
        tensors: input and output words.
        exchange: memory for rows and flags.
        sizes: sizes that may change from call to call.
        eps: added to the mean square.
        modes: `FlagModes`.
        agreement: see `weft.fused.kernels.agreement`, or None.
        digest: argument digest for `agreement`.
    """
    x, residual, norm_weight = tensors.x, tensors.residual, tensors.norm_weight
    output, summed = tensors.output, tensors.summed
    inboxes, flags = exchange.inboxes, exchange.flags
    state, context = exchange.state, exchange.context
    rows, unit = sizes.rows, sizes.unit
    width_by_4, half_by_16 = sizes.width_by_4, sizes.half_by_16
    dtype: tl.constexpr = modes.dtype
    two_shot: tl.constexpr = modes.two_shot
    ranks: tl.constexpr = modes.ranks
    block: tl.constexpr = modes.block
    width = width_by_4 * 4
    size = rows * width
    units = tl.cdiv(rows, unit)
    program, programs = tl.program_id(0), tl.num_programs(0)
    place = tl.arange(0, block)
    present = place < width
    # The first row is loaded along with the others of these.
    words = tl.load(x + program * unit * width + place, mask=present & (program < units), other=0)
    rank, last = wt.rank(context), last_round(state)
    distances = distances_of(context, ranks)
    epoch = wt.next_epoch(last)
    inbox = half_of(epoch, half_by_16)
    sums = inbox + ranks * size
    sum_flags = flags + ranks * _MAX_ROWS
    for index in range(program, units, programs):
        owner = index % ranks
        end = tl.minimum(index * unit + unit, rows)
        for row in range(index * unit, end):
            offsets = inbox + rank * size + row * width + place
            if two_shot:
                wt.put(context, inboxes + offsets, words, owner, present & (owner != rank))
            else:
                send(inboxes, distances, offsets, words, present, ranks, rank)
            following = tl.where(row + 1 < end, row + 1, (index + programs) * unit)
            words = tl.load(
                x + following * width + place, mask=present & (following < rows), other=0
            )
        own_flag = flags + rank * _MAX_ROWS + index
        if two_shot:
            raise_flags(context, own_flag, owner, owner + 1, epoch, rank)
        else:
            raise_flags(context, own_flag, 0, ranks, epoch, rank)
    if agreement is not None:  # noqa: SIM102 (a constant)
        if program == 0:
            announce(context, agreement, digest, epoch)
    keep_round(state, epoch)
    if agreement is not None:  # noqa: SIM102 (a constant)
        if program == 0:
            agree(context, agreement, digest, epoch)
    if two_shot:
        for index in range(program, units, programs):
            if index % ranks == rank:
                fine = await_flags(context, flags + index, _MAX_ROWS, 0, ranks, epoch, rank, index)
                for row in range(index * unit, tl.minimum(index * unit + unit, rows)):
                    places = row * width + place
                    own = tl.load(x + places, mask=present, other=0)
                    low, high = _sum(
                        inboxes + inbox + places, size, own, rank, present, dtype, ranks
                    )
                    low = tl.where(fine, low, float("nan"))
                    high = tl.where(fine, high, float("nan"))
                    words = words_of(low, high, dtype)
                    send(inboxes, distances, sums + places, words, present, ranks)
                raise_flags(context, sum_flags + index, 0, ranks, epoch, rank)
        tl.debug_barrier()
    factors = tl.load(norm_weight + place, mask=present, other=0)
    for index in range(program, units, programs):
        owner = index % ranks
        end = tl.minimum(index * unit + unit, rows)
        # Loaded while rows are in flight.
        places = index * unit * width + place
        added = tl.load(residual + places, mask=present, other=0)
        own = tl.load(x + places, mask=present & (not two_shot), other=0)
        if two_shot:
            fine = await_flags(context, sum_flags + index, 0, owner, owner + 1, epoch, rank, index)
        else:
            fine = await_flags(context, flags + index, _MAX_ROWS, 0, ranks, epoch, rank, index)
        for row in range(index * unit, end):
            places = row * width + place
            if two_shot:
                words = tl.load(inboxes + sums + places, mask=present, other=0)
                low, high = parts_of(words, dtype)
            else:
                low, high = _sum(inboxes + inbox + places, size, own, rank, present, dtype, ranks)
            low, high = _add(low, high, added, fine, dtype)
            tl.store(summed + places, words_of(low, high, dtype), mask=present)
            following = present & (row + 1 < end)
            added = tl.load(residual + places + width, mask=following, other=0)
            own = tl.load(x + places + width, mask=following & (not two_shot), other=0)
            square = _squares(low, high, present, dtype)
            words = _normed(low, high, factors, square, width, eps, dtype)
            tl.store(output + places, words, mask=present)


@triton.jit
def _tile(tile, tiles, parts, width, block: tl.constexpr):
    """Indices for a tile in all rows' words, and within a row, and which exist."""
    columns = tile % parts * block + tl.arange(0, block)
    return tile // parts * width + columns, columns, (columns < width) & (tile < tiles)


@triton.jit
def _sum(inbox, size, own, rank, present, dtype: tl.constexpr, ranks: tl.constexpr):
    """Sums over a row's low and high elements, in rank order."""
    low = tl.zeros(inbox.shape, tl.float32)
    high = tl.zeros(inbox.shape, tl.float32)
    for source in tl.static_range(ranks):
        words = tl.load(inbox + source * size, mask=present & (rank != source), other=0)
        lows, highs = parts_of(tl.where(rank == source, own, words), dtype)
        # The first is taken unchanged: -0 remains -0.
        low = lows if source == 0 else low + lows
        high = highs if source == 0 else high + highs
    return low, high


@triton.jit
def _add(low, high, added, fine, dtype: tl.constexpr):
    """Sums with the residual, each step rounded to the dtype, as float32. NaN on failure."""
    added_low, added_high = parts_of(added, dtype)
    low = (low.to(dtype).to(tl.float32) + added_low).to(dtype).to(tl.float32)
    high = (high.to(dtype).to(tl.float32) + added_high).to(dtype).to(tl.float32)
    return tl.where(fine, low, float("nan")), tl.where(fine, high, float("nan"))


@triton.jit
def _squares(low, high, present, dtype: tl.constexpr):
    """Sum of squares over a tile."""
    squares = low * low if dtype == tl.float32 else low * low + high * high
    return tl.sum(tl.where(present, squares, 0.0), axis=0)


@triton.jit
def _row_squares(context, squares, tile, parts, epoch, rank, chunk: tl.constexpr):
    """Sum of squares over a tile's row, once all tiles in the row have stored a sum."""
    some = tl.arange(0, chunk)
    present = some < parts
    places = squares + tile // parts * parts + some
    packets, fine = receive(context, places, present, epoch, rank, tile)
    values = tl.where(fine, float_of(packets), float("nan"))
    return tl.sum(tl.where(present, values, 0.0), axis=0)


@triton.jit
def _normed(low, high, factors, square, width, eps, dtype: tl.constexpr):
    """Words for a tile in normed rows, each step rounded to the dtype."""
    elements = width if dtype == tl.float32 else 2 * width
    scale = tl.rsqrt(square / elements + eps)
    low_factors, high_factors = parts_of(factors, dtype)
    low = (low * scale).to(dtype).to(tl.float32) * low_factors
    high = (high * scale).to(dtype).to(tl.float32) * high_factors
    return words_of(low, high, dtype)
