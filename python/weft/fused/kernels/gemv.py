"""Kernel: all-reduce GEMV for a few tokens; residual and RMS norm.

A tile is `block_n` result columns (weight rows) for all tokens. A program computes tiles over
the whole inner dimension and sends each as packets once it is finished; it receives only after it
has sent all, so no two programs on two ranks wait for each other.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.triton as wt
from weft.fused.kernels.agreement import agree, announce
from weft.fused.kernels.packets import (
    distances_of,
    float_of,
    half_of,
    halves_of,
    keep_round,
    last_round,
    pack,
    receive,
    receive_halves,
    receive_sum,
    send,
    words_of,
)
from weft.fused.kernels.tracing import COMPUTE, FINISH, SEND, WAIT

__all__ = [
    "LOCAL",
    "ONE_SHOT",
    "TWO_SHOT",
    "Exchange",
    "Modes",
    "Operands",
    "Sizes",
    "Tiles",
    "gemv_kernel",
]

#: Modes: only the partial result; partial results to all ranks; to owners, and sums to all.
LOCAL, ONE_SHOT, TWO_SHOT = 0, 1, 2
_LOCAL, _ONE_SHOT, _TWO_SHOT = (tl.constexpr(each) for each in (LOCAL, ONE_SHOT, TWO_SHOT))


class Operands(NamedTuple):
    """A call's tensors.

    Attributes:
        x: [tokens, inner], contiguous.
        weight: [hidden, inner], with row stride `8 * stride_by_8` elements.
        weight_scale: float32, [1] or [hidden] as `scales` is 1 or 2; 0: none.
        residual: [tokens, hidden], if `has_residual`.
        norm_weight: [hidden], if `has_norm`.
        output: [tokens, hidden]: the normed rows if `has_norm`, else the sum.
        summed: [tokens, hidden], if `has_norm`: the rows before the norm.
    """

    x: Any
    weight: Any
    weight_scale: Any
    residual: Any
    norm_weight: Any
    output: Any
    summed: Any


class Exchange(NamedTuple):
    """Memory for packets to peers and to other programs.

    Attributes:
        inboxes: int64, symmetric, two halves with `16 * half_by_16` packets each.
        squares: int64 on this GPU, a packet for each token and tile.
        state: see `last_round`.
        context: for `inboxes`.
    """

    inboxes: Any
    squares: Any
    state: Any
    context: Any


class Sizes(NamedTuple):
    """Sizes for which Triton does not compile the kernel again.

    Attributes:
        tokens: number of tokens, at most `block_t`.
        hidden_by_8: result columns, divided by 8.
        half_by_16: packets in an inbox half, divided by 16.
    """

    tokens: Any
    hidden_by_8: Any
    half_by_16: Any


class Modes(NamedTuple):
    """Constants that select what the kernel does.

    Attributes:
        mode: `LOCAL`, `ONE_SHOT` or `TWO_SHOT`.
        ranks: number of ranks.
        group: see `receive_sum`.
        dot: multiply all tokens by `tl.dot`; else one token, by elements.
        scales: 0, 1 or 2, see `weight_scale`.
        has_residual: `residual` is added.
        has_norm: rows are normed.
        single: there is one tile for each program.
        halves: packets have two 16-bit elements; else one float32.
    """

    mode: int
    ranks: int
    group: int
    dot: bool
    scales: int
    has_residual: bool
    has_norm: bool
    single: bool
    halves: bool


class Tiles(NamedTuple):
    """Tile sizes and weight loads.

    Attributes:
        block_t: rows in a tile.
        block_n: columns in a tile; with `block_t` at least an element for each thread.
        block_k: inner elements in a step.
        even: `block_k` divides the inner dimension.
        chunk: tiles whose squares are read at a time.
        stages: stages in the weight loads.
    """

    block_t: int
    block_n: int
    block_k: int
    even: bool
    chunk: int
    stages: int


class _Shape(NamedTuple):
    """Sizes in elements; `size`: packets in this rank's part; `width`: packets for a token."""

    tokens: Any
    hidden: Any
    inner: Any
    stride_by_8: Any
    width: Any
    size: Any


class _Indices(NamedTuple):
    """Token, column and packet indices in a tile."""

    token: Any
    column: Any
    packet: Any


class _Peers(NamedTuple):
    """This rank, the last round's epoch, and the distances to all ranks, loaded ahead."""

    rank: Any
    last: Any
    distances: Any


class _Round(NamedTuple):
    """A round's epoch, and where packets and sums begin in the inboxes."""

    epoch: Any
    inbox: Any
    sums: Any


@triton.jit(do_not_specialize=["sizes", "digest"])
def gemv_kernel(
    operands: Operands,
    exchange: Exchange,
    sizes: Sizes,
    inner_by_8,
    stride_by_8,
    eps,
    modes: tl.constexpr,
    tiles: tl.constexpr,
    trace=None,
    agreement=None,
    digest=0,
):
    """One call; a one-dimensional grid, resident as a whole if `has_norm`.

    Args:
        operands: tensors.
        exchange: memory for packets.
        sizes: sizes that may change from call to call.
        inner_by_8: inner size, divided by 8.
        stride_by_8: weight row stride in elements, divided by 8.
        eps: added to the mean square.
        modes: `Modes`.
        tiles: `Tiles`.
        trace: span buffer, or None.
        agreement: see `weft.fused.kernels.agreement`, or None.
        digest: argument digest for `agreement`.
    """
    spans = 0
    block_t: tl.constexpr = tiles.block_t
    block_n: tl.constexpr = tiles.block_n
    ranks: tl.constexpr = modes.ranks
    output, inboxes, squares = operands.output, exchange.inboxes, exchange.squares
    state, context, summed = exchange.state, exchange.context, operands.summed
    tokens, hidden, inner = sizes.tokens, sizes.hidden_by_8 * 8, inner_by_8 * 8
    count = tl.cdiv(hidden, block_n)
    program, programs = tl.program_id(0), tl.num_programs(0)
    token, column = tl.arange(0, block_t), tl.arange(0, block_n)
    dtype: tl.constexpr = output.dtype.element_ty
    # Packets for a token, a tile, a rank.
    width = hidden // 2 if modes.halves else hidden
    block_p: tl.constexpr = block_n // 2 if modes.halves else block_n
    packet = tl.arange(0, block_p)
    size = tokens * width
    if modes.mode == _LOCAL:
        rank, last, distances = 0, 0, ()
    else:
        # Loaded now, and not used before the first tile is computed, so that the weight loads need
        # not wait.
        rank, last = wt.rank(context), last_round(state)
        distances = distances_of(context, ranks)
    shape = _Shape(tokens, hidden, inner, stride_by_8, width, size)
    indices = _Indices(token, column, packet)
    peers = _Peers(rank, last, distances)
    half = sizes.half_by_16
    if modes.single:
        spans = _send_gemv_tile(
            operands, exchange, peers, half, shape, indices, program, modes, tiles, trace, spans
        )
    else:
        for tile in range(program, count, programs):
            spans = _send_gemv_tile(
                operands, exchange, peers, half, shape, indices, tile, modes, tiles, trace, spans
            )
    if modes.mode != _LOCAL:
        epoch = wt.next_epoch(last)
        inbox = half_of(epoch, half)
        sums = inbox + ranks * size
        this = _Round(epoch, inbox, sums)
        # After the GEMV, so that the weight loads need not wait.
        if agreement is not None:  # noqa: SIM102 (a constant)
            if program == 0:
                announce(context, agreement, digest, epoch)
        keep_round(state, epoch)
        if agreement is not None:  # noqa: SIM102 (a constant)
            if program == 0:
                agree(context, agreement, digest, epoch)
        if modes.mode == _TWO_SHOT:
            for tile in range(program, count, programs):
                if tile % ranks == rank:
                    began = wt.span_begin(trace)
                    places, present = _places(tile, tokens, width, token, packet, block_p)
                    words = _owned(
                        context, inboxes + inbox + places, size, present, epoch, tile, dtype, modes
                    )
                    spans = wt.span_end(trace, spans, WAIT, began)
                    began = wt.span_begin(trace)
                    send(inboxes, distances, sums + places, pack(words, epoch), present, ranks)
                    spans = wt.span_end(trace, spans, SEND, began)
            tl.debug_barrier()
        if modes.has_norm and modes.single:
            began = wt.span_begin(trace)
            places, present = _places(program, tokens, hidden, token, column, block_n)
            columns = program * block_n + column
            factors = tl.load(operands.norm_weight + columns, mask=columns < hidden, other=0.0)
            rows = _rows(operands, exchange, this, shape, indices, places, present, program, modes)
            spans = wt.span_end(trace, spans, WAIT, began)
            began = wt.span_begin(trace)
            _send_squares(squares, rows, present, token, tokens, program, count, epoch)
            tl.store(summed + places, rows, mask=present)
            scale = _scale(exchange, shape, token, count, eps, rank, epoch, tiles)
            tl.store(output + places, _normed(rows, scale, factors), mask=present)
            spans = wt.span_end(trace, spans, FINISH, began)
        else:
            for tile in range(program, count, programs):
                began = wt.span_begin(trace)
                places, present = _places(tile, tokens, hidden, token, column, block_n)
                rows = _rows(operands, exchange, this, shape, indices, places, present, tile, modes)
                spans = wt.span_end(trace, spans, WAIT, began)
                began = wt.span_begin(trace)
                if modes.has_norm:
                    _send_squares(squares, rows, present, token, tokens, tile, count, epoch)
                    tl.store(summed + places, rows, mask=present)
                else:
                    tl.store(output + places, rows, mask=present)
                spans = wt.span_end(trace, spans, FINISH, began)
            if modes.has_norm:
                began = wt.span_begin(trace)
                # Rows before the norm are stored before they are loaded.
                tl.debug_barrier()
                scale = _scale(exchange, shape, token, count, eps, rank, epoch, tiles)
                for tile in range(program, count, programs):
                    places, present = _places(tile, tokens, hidden, token, column, block_n)
                    columns = tile * block_n + column
                    factors = tl.load(
                        operands.norm_weight + columns, mask=columns < hidden, other=0.0
                    )
                    rows = tl.load(summed + places, mask=present, other=0.0)
                    tl.store(output + places, _normed(rows, scale, factors), mask=present)
                spans = wt.span_end(trace, spans, FINISH, began)


@triton.jit
def _send_gemv_tile(
    operands: Operands,
    exchange: Exchange,
    peers: _Peers,
    half_by_16,
    shape: _Shape,
    indices: _Indices,
    tile,
    modes: tl.constexpr,
    tiles: tl.constexpr,
    trace,
    spans,
):
    """Computes a tile in this rank's part, and sends it; stores it if the mode is `LOCAL`.

    Returns the span count.
    """
    block_n: tl.constexpr = tiles.block_n
    tokens, hidden, stride = shape.tokens, shape.hidden, shape.stride_by_8 * 8
    inboxes = exchange.inboxes
    ranks: tl.constexpr = modes.ranks
    began = wt.span_begin(trace)
    columns = tile * block_n + indices.column
    if modes.scales == 1:
        factor = tl.load(operands.weight_scale)
    if modes.scales == 2:
        scale = operands.weight_scale
        factor = tl.load(scale + columns, mask=columns < hidden, other=0.0)[None, :]
    part = _gemv_tile(operands, shape, stride, indices, tile, modes, tiles)
    if modes.scales != 0:
        part *= factor
    spans = wt.span_end(trace, spans, COMPUTE, began)
    began = wt.span_begin(trace)
    places, present = _places(tile, tokens, hidden, indices.token, indices.column, block_n)
    if modes.mode == _LOCAL:
        output = operands.output
        tl.store(output + places, part.to(output.dtype.element_ty), mask=present)
    else:
        epoch = wt.next_epoch(peers.last)
        if modes.halves:
            dtype: tl.constexpr = operands.output.dtype.element_ty
            half_n: tl.constexpr = block_n // 2
            low, high = tl.split(tl.reshape(part, [tiles.block_t, half_n, 2]))
            part = words_of(low, high, dtype)
            places, present = _places(
                tile, tokens, shape.width, indices.token, indices.packet, half_n
            )
        offsets = half_of(epoch, half_by_16) + peers.rank * shape.size + places
        if modes.mode == _ONE_SHOT:
            send(inboxes, peers.distances, offsets, pack(part, epoch), present, ranks)
        else:
            context = exchange.context
            wt.put(context, inboxes + offsets, pack(part, epoch), tile % ranks, present)
    return wt.span_end(trace, spans, SEND, began)


@triton.jit
def _gemv_tile(
    operands: Operands,
    shape: _Shape,
    stride,
    indices: _Indices,
    tile,
    modes: tl.constexpr,
    tiles: tl.constexpr,
):
    """A tile in this rank's partial result, float32 [block_t, block_n]."""
    x, weight, inner = operands.x, operands.weight, shape.inner
    token, column = indices.token, indices.column
    block_t: tl.constexpr = tiles.block_t
    block_n: tl.constexpr = tiles.block_n
    block_k: tl.constexpr = tiles.block_k
    dtype: tl.constexpr = x.dtype.element_ty
    # Columns beyond the last are computed as the last, and not stored.
    rows = tl.minimum(tile * block_n + column, shape.hidden - 1).to(tl.int64) * stride
    places = tl.arange(0, block_k)
    if modes.dot:
        part = tl.zeros([block_n, block_t], tl.float32)
    else:
        part = tl.zeros([block_n, block_k], tl.float32)
    for first in tl.range(0, inner, block_k, num_stages=tiles.stages):
        k = first + places
        if tiles.even:
            weights = tl.load(weight + rows[:, None] + k[None, :])
        else:
            weights = tl.load(
                weight + rows[:, None] + k[None, :], mask=(k < inner)[None, :], other=0.0
            )
        if modes.dot:
            present = (token < shape.tokens)[:, None]
            if not tiles.even:
                present &= (k < inner)[None, :]
            inputs = tl.load(x + token[:, None] * inner + k[None, :], mask=present, other=0.0)
            part = tl.dot(weights.to(dtype), tl.trans(inputs), part, input_precision="ieee")
        else:
            inputs = tl.load(x + k, mask=k < inner, other=0.0)
            part += weights.to(tl.float32) * inputs.to(tl.float32)[None, :]
    if modes.dot:
        return tl.trans(part)
    return tl.sum(part, axis=1)[None, :] + tl.zeros([block_t, block_n], tl.float32)


@triton.jit
def _places(tile, tokens, hidden, token, column, block_n: tl.constexpr):
    """Indices for a tile in [tokens, hidden], and which exist."""
    columns = tile * block_n + column
    places = token[:, None] * hidden + columns[None, :]
    return places, (token < tokens)[:, None] & (columns < hidden)[None, :]


@triton.jit
def _rows(
    operands: Operands,
    exchange: Exchange,
    this: _Round,
    shape: _Shape,
    indices: _Indices,
    places,
    present,
    tile,
    modes: tl.constexpr,
):
    """A tile summed over all ranks, rounded; with the residual, again. NaN on failure."""
    context, inboxes, epoch = exchange.context, exchange.inboxes, this.epoch
    dtype: tl.constexpr = operands.output.dtype.element_ty
    ranks: tl.constexpr = modes.ranks
    group: tl.constexpr = modes.group
    if modes.has_residual:
        # Loaded while packets are in flight.
        added = tl.load(operands.residual + places, mask=present, other=0.0)
    # In packets.
    packet = indices.packet
    block_p: tl.constexpr = packet.shape[0]
    offsets, sent = _places(tile, shape.tokens, shape.width, indices.token, packet, block_p)
    if modes.mode == _ONE_SHOT:
        parts = inboxes + this.inbox + offsets
        if modes.halves:
            low, high, fine = receive_halves(
                context, parts, shape.size, sent, epoch, tile, dtype, ranks, group
            )
            total = tl.reshape(tl.join(low, high), places.shape)
        else:
            total, fine = receive_sum(context, parts, shape.size, sent, epoch, tile, ranks, group)
    else:
        sums = inboxes + this.sums + offsets
        packets, fine = receive(context, sums, sent, epoch, tile % ranks, tile)
        if modes.halves:
            low, high = halves_of(packets.to(tl.int32), dtype)
            total = tl.reshape(tl.join(low, high), places.shape)
        else:
            total = float_of(packets)
    rows = tl.where(fine, total, float("nan")).to(dtype)
    if modes.has_residual:
        rows = (rows.to(tl.float32) + added.to(tl.float32)).to(dtype)
    return rows


@triton.jit
def _owned(context, inbox, size, present, epoch, tile, dtype: tl.constexpr, modes: tl.constexpr):
    """Words for a tile's sum: float32, or two elements, rounded. NaN on failure."""
    ranks: tl.constexpr = modes.ranks
    group: tl.constexpr = modes.group
    if modes.halves:
        low, high, fine = receive_halves(
            context, inbox, size, present, epoch, tile, dtype, ranks, group
        )
        low = tl.where(fine, low, float("nan"))
        words = words_of(low, tl.where(fine, high, float("nan")), dtype)
    else:
        total, fine = receive_sum(context, inbox, size, present, epoch, tile, ranks, group)
        words = tl.where(fine, total, float("nan"))
    return words


@triton.jit
def _send_squares(squares, rows, present, token, tokens, tile, tiles, epoch):
    """Sums of squares over a tile's rows, to all programs on this GPU."""
    values = tl.where(present, rows.to(tl.float32), 0.0)
    packets = pack(tl.sum(values * values, axis=1), epoch)
    tl.store(squares + token * tiles + tile, packets, mask=token < tokens)


@triton.jit
def _scale(exchange: Exchange, shape: _Shape, token, count, eps, rank, epoch, tiles: tl.constexpr):
    """Factor for each row by which its mean square becomes 1. NaN on failure."""
    block_t: tl.constexpr = tiles.block_t
    chunk: tl.constexpr = tiles.chunk
    total = tl.zeros([block_t], tl.float32)
    some = tl.arange(0, chunk)
    for first in range(0, count, chunk):
        present = (token < shape.tokens)[:, None] & (first + some < count)[None, :]
        places = exchange.squares + (token[:, None] * count + (first + some)[None, :])
        packets, fine = receive(exchange.context, places, present, epoch, rank, first)
        values = tl.where(fine, float_of(packets), float("nan"))
        total += tl.sum(tl.where(present, values, 0.0), axis=1)
    return tl.rsqrt(total / shape.hidden + eps)


@triton.jit
def _normed(rows, scale, factors):
    """Rows times factors, rounded; times the column factors, rounded again."""
    values = (rows.to(tl.float32) * scale[:, None]).to(rows.dtype).to(tl.float32)
    return (values * factors.to(tl.float32)[None, :]).to(rows.dtype)
