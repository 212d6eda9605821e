"""Kernel: a product of few tokens with a weight, summed over the ranks; residual and RMS norm.

A tile is `block_n` columns of the result (rows of the weight) for all tokens. A program computes
its tiles over the whole inner dimension and sends each as packets once it is finished; it receives
only after it has sent all, so no two programs of two ranks wait for each other.
"""

import triton
import triton.language as tl

import weft.triton as wt
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

__all__ = ["LOCAL", "ONE_SHOT", "TWO_SHOT", "gemv_kernel"]

#: Modes: the partial result alone; partial results to all ranks; to owners, and sums to all.
LOCAL, ONE_SHOT, TWO_SHOT = 0, 1, 2
_LOCAL, _ONE_SHOT, _TWO_SHOT = (tl.constexpr(each) for each in (LOCAL, ONE_SHOT, TWO_SHOT))


@triton.jit(do_not_specialize=["tokens", "hidden_by_8", "half_by_16"])
def gemv_kernel(
    x,
    weight,
    weight_scale,
    residual,
    norm_weight,
    output,
    summed,
    inboxes,
    squares,
    state,
    context,
    tokens,
    hidden_by_8,
    inner_by_8,
    stride_by_8,
    half_by_16,
    eps,
    mode: tl.constexpr,
    ranks: tl.constexpr,
    group: tl.constexpr,
    dot: tl.constexpr,
    scales: tl.constexpr,
    has_residual: tl.constexpr,
    has_norm: tl.constexpr,
    single: tl.constexpr,
    halves: tl.constexpr,
    block_t: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    even: tl.constexpr,
    chunk: tl.constexpr,
    stages: tl.constexpr,
    trace=None,
):
    """One call; a grid of one dimension, resident as a whole if `has_norm`.

    Args:
        x: [tokens, inner], contiguous.
        weight: [hidden, inner], rows of `8 * stride_by_8` elements.
        weight_scale: float32, [1] or [hidden] as `scales` is 1 or 2; 0: none.
        residual: [tokens, hidden], if `has_residual`.
        norm_weight: [hidden], if `has_norm`.
        output: [tokens, hidden]: the normed rows if `has_norm`, else the sum.
        summed: [tokens, hidden], if `has_norm`: the rows before the norm.
        inboxes: int64, symmetric, two halves of `16 * half_by_16` packets.
        squares: int64 on this GPU, a packet for each token and tile.
        state: of `last_round`.
        context: of `inboxes`.
        tokens: number of tokens, at most `block_t`.
        hidden_by_8: columns of the result, by 8.
        inner_by_8: length of the inner dimension, by 8.
        stride_by_8: elements from a row of the weight to the next, by 8.
        half_by_16: packets of half of an inbox, by 16.
        eps: added to the mean of squares.
        mode: `LOCAL`, `ONE_SHOT` or `TWO_SHOT`.
        ranks: number of ranks.
        group: of `receive_sum`.
        dot: products of all tokens by `tl.dot`; else of one token, by elements.
        scales: 0, 1 or 2, see `weight_scale`.
        has_residual: `residual` is added.
        has_norm: rows are normed.
        single: there is one tile for each program.
        halves: packets have two elements of 16 bits; else one float32.
        block_t: rows of a tile.
        block_n: columns of a tile; with `block_t` at least an element for each thread.
        block_k: elements of the inner dimension in a step.
        even: `block_k` divides the inner dimension.
        chunk: tiles whose squares are read at a time.
        stages: of the loads of weights.
        trace: of spans, or None.
    """
    spans = 0
    hidden, inner = hidden_by_8 * 8, inner_by_8 * 8
    tiles = tl.cdiv(hidden, block_n)
    program, programs = tl.program_id(0), tl.num_programs(0)
    token, column = tl.arange(0, block_t), tl.arange(0, block_n)
    dtype: tl.constexpr = output.dtype.element_ty
    # Packets of a token, a tile, a rank.
    width = hidden // 2 if halves else hidden
    block_p: tl.constexpr = block_n // 2 if halves else block_n
    packet = tl.arange(0, block_p)
    size = tokens * width
    if mode == _LOCAL:
        rank, last, distances = 0, 0, ()
    else:
        # Loaded now, and not used before the first product, lest the loads of weights wait.
        rank, last = wt.rank(context), last_round(state)
        distances = distances_of(context, ranks)
    if single:
        spans = _send_product(
            *(x, weight, weight_scale, output, context, inboxes, rank, last, distances, program),
            *(tokens, hidden, inner, stride_by_8 * 8, half_by_16, token, column, size),
            *(mode, ranks, dot, scales, halves, block_t, block_n, block_k, even, stages),
            *(trace, spans),
        )
    else:
        for tile in range(program, tiles, programs):
            spans = _send_product(
                *(x, weight, weight_scale, output, context, inboxes, rank, last, distances, tile),
                *(tokens, hidden, inner, stride_by_8 * 8, half_by_16, token, column, size),
                *(mode, ranks, dot, scales, halves, block_t, block_n, block_k, even, stages),
                *(trace, spans),
            )
    if mode != _LOCAL:
        epoch = wt.next_epoch(last)
        inbox = half_of(epoch, half_by_16)
        sums = inbox + ranks * size
        keep_round(state, epoch)
        if mode == _TWO_SHOT:
            for tile in range(program, tiles, programs):
                if tile % ranks == rank:
                    began = wt.span_begin(trace)
                    places, present = _places(tile, tokens, width, token, packet, block_p)
                    words = _owned(
                        *(context, inboxes + inbox + places, size, present, epoch, tile),
                        *(dtype, halves, ranks, group),
                    )
                    spans = wt.span_end(trace, spans, WAIT, began)
                    began = wt.span_begin(trace)
                    send(inboxes, distances, sums + places, pack(words, epoch), present, ranks)
                    spans = wt.span_end(trace, spans, SEND, began)
            tl.debug_barrier()
        if has_norm and single:
            began = wt.span_begin(trace)
            places, present = _places(program, tokens, hidden, token, column, block_n)
            columns = program * block_n + column
            factors = tl.load(norm_weight + columns, mask=columns < hidden, other=0.0)
            rows = _rows(
                *(context, inboxes, inbox, sums, size, residual, places, present, epoch, program),
                *(tokens, width, token, packet, dtype, mode, has_residual, halves, ranks, group),
            )
            spans = wt.span_end(trace, spans, WAIT, began)
            began = wt.span_begin(trace)
            _send_squares(squares, rows, present, token, tokens, program, tiles, epoch)
            tl.store(summed + places, rows, mask=present)
            scale = _scale(
                *(context, squares, token, tokens, tiles, hidden, eps, rank, epoch),
                *(block_t, chunk),
            )
            tl.store(output + places, _normed(rows, scale, factors), mask=present)
            spans = wt.span_end(trace, spans, FINISH, began)
        else:
            for tile in range(program, tiles, programs):
                began = wt.span_begin(trace)
                places, present = _places(tile, tokens, hidden, token, column, block_n)
                rows = _rows(
                    *(context, inboxes, inbox, sums, size, residual, places, present, epoch, tile),
                    *(
                        tokens,
                        width,
                        token,
                        packet,
                        dtype,
                        mode,
                        has_residual,
                        halves,
                        ranks,
                        group,
                    ),
                )
                spans = wt.span_end(trace, spans, WAIT, began)
                began = wt.span_begin(trace)
                if has_norm:
                    _send_squares(squares, rows, present, token, tokens, tile, tiles, epoch)
                    tl.store(summed + places, rows, mask=present)
                else:
                    tl.store(output + places, rows, mask=present)
                spans = wt.span_end(trace, spans, FINISH, began)
            if has_norm:
                began = wt.span_begin(trace)
                # Rows before the norm are stored before they are loaded.
                tl.debug_barrier()
                scale = _scale(
                    *(context, squares, token, tokens, tiles, hidden, eps, rank, epoch),
                    *(block_t, chunk),
                )
                for tile in range(program, tiles, programs):
                    places, present = _places(tile, tokens, hidden, token, column, block_n)
                    columns = tile * block_n + column
                    factors = tl.load(norm_weight + columns, mask=columns < hidden, other=0.0)
                    rows = tl.load(summed + places, mask=present, other=0.0)
                    tl.store(output + places, _normed(rows, scale, factors), mask=present)
                spans = wt.span_end(trace, spans, FINISH, began)


@triton.jit
def _send_product(
    x,
    weight,
    weight_scale,
    output,
    context,
    inboxes,
    rank,
    last,
    distances,
    tile,
    tokens,
    hidden,
    inner,
    stride,
    half_by_16,
    token,
    column,
    size,
    mode: tl.constexpr,
    ranks: tl.constexpr,
    dot: tl.constexpr,
    scales: tl.constexpr,
    halves: tl.constexpr,
    block_t: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    even: tl.constexpr,
    stages: tl.constexpr,
    trace,
    spans,
):
    """Computes a tile of this rank's part, and sends it; stores it if the mode is `LOCAL`.

    Returns the number of spans.
    """
    began = wt.span_begin(trace)
    columns = tile * block_n + column
    if scales == 1:
        factor = tl.load(weight_scale)
    if scales == 2:
        factor = tl.load(weight_scale + columns, mask=columns < hidden, other=0.0)[None, :]
    part = _product(
        *(x, weight, tile, tokens, hidden, inner, stride, column, token),
        *(dot, block_t, block_n, block_k, even, stages),
    )
    if scales != 0:
        part *= factor
    spans = wt.span_end(trace, spans, COMPUTE, began)
    began = wt.span_begin(trace)
    places, present = _places(tile, tokens, hidden, token, column, block_n)
    if mode == _LOCAL:
        tl.store(output + places, part.to(output.dtype.element_ty), mask=present)
    else:
        epoch = wt.next_epoch(last)
        if halves:
            dtype: tl.constexpr = output.dtype.element_ty
            half_n: tl.constexpr = block_n // 2
            low, high = tl.split(tl.reshape(part, [block_t, half_n, 2]))
            part = words_of(low, high, dtype)
            places, present = _places(
                tile, tokens, hidden // 2, token, tl.arange(0, half_n), half_n
            )
        offsets = half_of(epoch, half_by_16) + rank * size + places
        if mode == _ONE_SHOT:
            send(inboxes, distances, offsets, pack(part, epoch), present, ranks)
        else:
            wt.put(context, inboxes + offsets, pack(part, epoch), tile % ranks, present)
    return wt.span_end(trace, spans, SEND, began)


@triton.jit
def _product(
    x,
    weight,
    tile,
    tokens,
    hidden,
    inner,
    stride,
    column,
    token,
    dot: tl.constexpr,
    block_t: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    even: tl.constexpr,
    stages: tl.constexpr,
):
    """A tile of this rank's partial result, float32 [block_t, block_n]."""
    dtype: tl.constexpr = x.dtype.element_ty
    # Columns beyond the last are computed as the last, and not stored.
    rows = tl.minimum(tile * block_n + column, hidden - 1).to(tl.int64) * stride
    places = tl.arange(0, block_k)
    if dot:
        part = tl.zeros([block_n, block_t], tl.float32)
    else:
        part = tl.zeros([block_n, block_k], tl.float32)
    for first in tl.range(0, inner, block_k, num_stages=stages):
        k = first + places
        if even:
            weights = tl.load(weight + rows[:, None] + k[None, :])
        else:
            weights = tl.load(
                weight + rows[:, None] + k[None, :], mask=(k < inner)[None, :], other=0.0
            )
        if dot:
            present = (token < tokens)[:, None]
            if not even:
                present &= (k < inner)[None, :]
            inputs = tl.load(x + token[:, None] * inner + k[None, :], mask=present, other=0.0)
            part = tl.dot(weights.to(dtype), tl.trans(inputs), part, input_precision="ieee")
        else:
            inputs = tl.load(x + k, mask=k < inner, other=0.0)
            part += weights.to(tl.float32) * inputs.to(tl.float32)[None, :]
    if dot:
        return tl.trans(part)
    return tl.sum(part, axis=1)[None, :] + tl.zeros([block_t, block_n], tl.float32)


@triton.jit
def _places(tile, tokens, hidden, token, column, block_n: tl.constexpr):
    """Indices of a tile in [tokens, hidden], and which of them exist."""
    columns = tile * block_n + column
    places = token[:, None] * hidden + columns[None, :]
    return places, (token < tokens)[:, None] & (columns < hidden)[None, :]


@triton.jit
def _rows(
    context,
    inboxes,
    inbox,
    sums,
    size,
    residual,
    places,
    present,
    epoch,
    tile,
    tokens,
    width,
    token,
    packet,
    dtype: tl.constexpr,
    mode: tl.constexpr,
    has_residual: tl.constexpr,
    halves: tl.constexpr,
    ranks: tl.constexpr,
    group: tl.constexpr,
):
    """A tile of the sum of all ranks, rounded; with the residual, rounded again. NaN on failure."""
    if has_residual:
        # Loaded while packets are on their way.
        added = tl.load(residual + places, mask=present, other=0.0)
    # Of packets.
    block_p: tl.constexpr = packet.shape[0]
    offsets, sent = _places(tile, tokens, width, token, packet, block_p)
    if mode == _ONE_SHOT:
        if halves:
            low, high, fine = receive_halves(
                context, inboxes + inbox + offsets, size, sent, epoch, tile, dtype, ranks, group
            )
            total = tl.reshape(tl.join(low, high), places.shape)
        else:
            total, fine = receive_sum(
                context, inboxes + inbox + offsets, size, sent, epoch, tile, ranks, group
            )
    else:
        packets, fine = receive(context, inboxes + sums + offsets, sent, epoch, tile % ranks, tile)
        if halves:
            low, high = halves_of(packets.to(tl.int32), dtype)
            total = tl.reshape(tl.join(low, high), places.shape)
        else:
            total = float_of(packets)
    rows = tl.where(fine, total, float("nan")).to(dtype)
    if has_residual:
        rows = (rows.to(tl.float32) + added.to(tl.float32)).to(dtype)
    return rows


@triton.jit
def _owned(
    context,
    inbox,
    size,
    present,
    epoch,
    tile,
    dtype: tl.constexpr,
    halves: tl.constexpr,
    ranks: tl.constexpr,
    group: tl.constexpr,
):
    """Words of the sum of a tile: float32, or two elements, rounded. NaN on failure."""
    if halves:
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
    """Sums of squares of the rows of a tile, to all programs of this GPU."""
    values = tl.where(present, rows.to(tl.float32), 0.0)
    packets = pack(tl.sum(values * values, axis=1), epoch)
    tl.store(squares + token * tiles + tile, packets, mask=token < tokens)


@triton.jit
def _scale(
    context,
    squares,
    token,
    tokens,
    tiles,
    hidden,
    eps,
    rank,
    epoch,
    block_t: tl.constexpr,
    chunk: tl.constexpr,
):
    """Factor of each row by which its mean square becomes 1. NaN on failure."""
    total = tl.zeros([block_t], tl.float32)
    some = tl.arange(0, chunk)
    for first in range(0, tiles, chunk):
        present = (token < tokens)[:, None] & (first + some < tiles)[None, :]
        places = token[:, None] * tiles + (first + some)[None, :]
        packets, fine = receive(context, squares + places, present, epoch, rank, first)
        values = tl.where(fine, float_of(packets), float("nan"))
        total += tl.sum(tl.where(present, values, 0.0), axis=1)
    return tl.rsqrt(total / hidden + eps)


@triton.jit
def _normed(rows, scale, factors):
    """Rows by their factors, rounded; by those of the columns, rounded again."""
    values = (rows.to(tl.float32) * scale[:, None]).to(rows.dtype).to(tl.float32)
    return (values * factors.to(tl.float32)[None, :]).to(rows.dtype)
