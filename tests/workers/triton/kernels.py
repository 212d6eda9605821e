"""Kernels in the `weft.triton` tests, for the interpreter and the compiler alike."""

import triton
import triton.language as tl

import weft.triton as wt


@triton.jit
def ring(data, words, context, outputs, rounds, length: tl.constexpr, window: tl.constexpr):
    """Each rank puts `rank * 1000 + epoch` to the next one, and outputs its arrivals.

    `window` buffers with `length` elements are used in turn; words[0] counts arrivals, words[1] the
    rounds that the next rank has read, which it signals back.
    """
    ranks = wt.world_size(context)
    own = wt.rank(context)
    after = (own + 1) % ranks
    before = (own + ranks - 1) % ranks
    offsets = tl.arange(0, length)
    epoch = wt.next_epoch(tl.load(rounds))
    slot = epoch.to(tl.uint32) % window
    # The buffer is free once the next rank has read the round `window` before.
    fine = wt.wait(context, words + 1, (epoch.to(tl.int64) - window).to(tl.int32), after)
    values = tl.zeros([length], tl.int32) + own * 1000 + epoch % 1000
    wt.put_signal(context, data + slot * length + offsets, values, words, epoch, after)
    fine &= wt.wait(context, words, epoch, before)
    arrived = tl.load(data + slot * length + offsets)
    tl.store(outputs + offsets, tl.where(fine, arrived, -1))
    wt.signal(context, words + 1, epoch, before)
    tl.store(rounds, epoch)


@triton.jit
def all_to_all(data, inputs, words, context, outputs, rounds, length, block: tl.constexpr):
    """Row r in `inputs` goes to row `rank` of rank r's `data`, and from there to `outputs`.

    words[0:ranks] count arrivals by source; words[ranks:] count rows read, by destination. The one
    a source's buffer is used again in each round.
    """
    ranks = wt.world_size(context)
    own = wt.rank(context)
    offsets = tl.arange(0, block)
    inside = offsets < length
    before = tl.load(rounds)
    epoch = wt.next_epoch(before)
    fine = own >= 0
    for step in range(ranks):
        to = wt.destination_at(step, own, ranks)
        fine &= wt.wait(context, words + ranks + to, before, to, step)
        values = tl.load(inputs + to * length + offsets, mask=inside)
        wt.put(context, data + own * length + offsets, values, to, mask=inside)
        wt.signal_add(context, words + own, 1, to)
    for step in range(ranks):
        source = wt.source_at(step, own, ranks)
        fine &= wt.wait(context, words + source, epoch, source, step)
        values = tl.load(data + source * length + offsets, mask=inside)
        values = tl.where(fine, values, -1)
        tl.store(outputs + source * length + offsets, values, mask=inside)
        wt.signal_add(context, words + ranks + own, 1, source)
    tl.store(rounds, epoch)


@triton.jit
def barriers(data, words, context, errors, rounds, count):
    """`count` times: each rank stores the epoch at all ranks, and reads all ranks' after it."""
    ranks = wt.world_size(context)
    own = wt.rank(context)
    wrong = 0
    for _ in range(count):
        epoch = wt.next_epoch(tl.load(rounds))
        for to in range(ranks):
            tl.store(wt.peer(context, data + own, to), epoch)
        wrong += tl.where(wt.barrier(context, words, epoch), 0, 1)
        for source in range(ranks):
            wrong += tl.where(tl.load(data + source) == epoch, 0, 1)
        epoch = wt.next_epoch(epoch)
        wrong += tl.where(wt.barrier(context, words, epoch), 0, 1)
        tl.debug_barrier()
        tl.store(rounds, epoch)
        tl.debug_barrier()
    tl.store(errors, wrong)


@triton.jit
def slices(data, words, mask, context, last, epoch, block: tl.constexpr):
    """Each program puts its tile to the next rank; the last one signals for all of them."""
    to = (wt.rank(context) + 1) % wt.world_size(context)
    tile = tl.program_id(0)
    offsets = tile * block + tl.arange(0, block)
    wt.put(context, data + offsets, offsets + epoch, to)
    all_bits = ((tl.cast(1, tl.int64) << tl.num_programs(0)) - 1).to(tl.int32)
    is_last = wt.last_arrival(mask, tile, all_bits)
    tl.store(last + tile, is_last.to(tl.int32))
    if is_last:
        wt.signal(context, words, epoch, to)


@triton.jit
def receive(data, words, context, outputs, epoch, count, block: tl.constexpr):
    """Outputs `count` elements once they are there, or -1."""
    ranks = wt.world_size(context)
    fine = wt.wait(context, words, epoch, (wt.rank(context) + ranks - 1) % ranks, 7)
    offsets = tl.arange(0, block)
    inside = offsets < count
    values = tl.load(data + offsets, mask=inside, other=0)
    tl.store(outputs + offsets, tl.where(fine, values, -1), mask=inside)


@triton.jit
def wait_for(words, context, outputs, epoch, source, slot):
    """A wait's outcome."""
    tl.store(outputs, wt.wait(context, words, epoch, source, slot).to(tl.int32))


@triton.jit
def meet(words, context, outputs, epoch):
    """A barrier's outcome."""
    tl.store(outputs, wt.barrier(context, words, epoch).to(tl.int32))


@triton.jit
def claims(words, context, outputs, count):
    """Claims `count` numbers from a counter at rank 0."""
    for index in range(count):
        tl.store(outputs + index, wt.fetch_add(context, words, 1, 0))


@triton.jit
def tiles(outputs, rows, columns, rank, ranks, block: tl.constexpr):
    """Row, column and destination for all tiles in a rank's order."""
    index = tl.arange(0, block)
    inside = index < wt.tile_count(rows, columns)
    row, column, destination = wt.tile_at(index, rows, columns, rank, ranks)
    tl.store(outputs + index * 3, row, mask=inside)
    tl.store(outputs + index * 3 + 1, column, mask=inside)
    tl.store(outputs + index * 3 + 2, destination, mask=inside)


@triton.jit
def comparisons(seen, epochs, outputs, block: tl.constexpr):
    """`reached` and `next_epoch` for each pair."""
    index = tl.arange(0, block)
    reached = wt.reached(tl.load(seen + index), tl.load(epochs + index))
    tl.store(outputs + index, reached.to(tl.int32))
    tl.store(outputs + block + index, wt.next_epoch(tl.load(seen + index)))


@triton.jit
def gemm(left, right, words, context, outputs, depth, block: tl.constexpr, inside: tl.constexpr):
    """A tiled GEMM whose operands a peer has put; `inside`: an acquire is in its loop."""
    rows = tl.arange(0, block)
    if not inside:
        wt.wait(context, words, 1, 0)
    seen = 0
    total = tl.zeros([block, block], tl.float32)
    for step in tl.range(0, depth, block, num_stages=3):
        if inside:
            seen += tl.atomic_add(words, 0, sem="acquire", scope="sys")
        a = tl.load(left + rows[:, None] * depth + step + rows[None, :])
        b = tl.load(right + (step + rows[:, None]) * block + rows[None, :])
        total = tl.dot(a, b, total)
    tl.store(outputs + rows[:, None] * block + rows[None, :], total.to(tl.float16))
    wt.signal(context, words + 1, 1 + seen, 0)


@triton.jit
def traced(data, words, context, outputs, rounds, trace, block: tl.constexpr):
    """Each program puts a tile to the next rank and outputs the one that it gets, with spans."""
    ranks = wt.world_size(context)
    own = wt.rank(context)
    program = tl.program_id(0)
    offsets = program * block + tl.arange(0, block)
    epoch = wt.next_epoch(tl.load(rounds + program))
    spans = 0
    whole = wt.span_begin(trace)
    began = wt.span_begin(trace)
    values = tl.load(outputs + offsets) + own
    spans = wt.span_end(trace, spans, 1, began)
    began = wt.span_begin(trace)
    wt.put_signal(context, data + offsets, values, words + program, epoch, (own + 1) % ranks)
    spans = wt.span_end(trace, spans, 2, began)
    began = wt.span_begin(trace)
    fine = wt.wait(context, words + program, epoch, (own + ranks - 1) % ranks, program)
    spans = wt.span_end(trace, spans, 3, began)
    tl.store(outputs + offsets, tl.where(fine, tl.load(data + offsets), -1))
    tl.store(rounds + program, epoch)
    spans = wt.span_end(trace, spans, 0, whole)


@triton.jit
def untraced(data, words, context, outputs, rounds, block: tl.constexpr):
    """`traced` without the calls for spans."""
    ranks = wt.world_size(context)
    own = wt.rank(context)
    program = tl.program_id(0)
    offsets = program * block + tl.arange(0, block)
    epoch = wt.next_epoch(tl.load(rounds + program))
    values = tl.load(outputs + offsets) + own
    wt.put_signal(context, data + offsets, values, words + program, epoch, (own + 1) % ranks)
    fine = wt.wait(context, words + program, epoch, (own + ranks - 1) % ranks, program)
    tl.store(outputs + offsets, tl.where(fine, tl.load(data + offsets), -1))
    tl.store(rounds + program, epoch)


@triton.jit
def remote_ring(context, outbox, inbox, outputs, rounds, programs, block: tl.constexpr):
    """Each program puts `rank * 1000 + round` to the next rank by the proxy, and outputs arrivals.

    Word `program` counts arrivals from the rank before, word `programs + program` rounds that the
    next one has read; toward this rank itself, puts whose source may be reused.
    """
    program = tl.program_id(0)
    rank, ranks = wt.remote_rank(context), wt.remote_world_size(context)
    after, before = (rank + 1) % ranks, (rank + ranks - 1) % ranks
    own, first = program * block + tl.arange(0, block), program * block * 4
    last = tl.load(rounds + program)
    epoch = wt.next_epoch(last)
    consumed = programs + program
    fine = wt.remote_wait(context, rank, program, last)
    fine &= wt.remote_wait(context, after, consumed, last)
    tl.store(outbox + own, tl.zeros([block], tl.int32) + rank * 1000 + epoch % 1000)
    fine &= wt.remote_put_signal(context, after, program, 0, first, 1, first, block * 4)
    fine &= wt.remote_drained(context, program)
    fine &= wt.remote_wait(context, before, program, epoch)
    tl.store(outputs + own, tl.where(fine, tl.load(inbox + own), -1))
    fine &= wt.remote_signal(context, before, consumed)
    tl.store(rounds + program, epoch)


@triton.jit
def remote_store(context, outbox, outputs, peer, value, block: tl.constexpr):
    """Each program stores `value` plus its number, and puts it to a rank; true if it was put."""
    program = tl.program_id(0)
    first = program * block
    stored = tl.zeros([block], tl.int32) + value + program
    tl.store(outbox + first + tl.arange(0, block), stored)
    first *= 4
    fine = wt.remote_put_signal(context, peer, 0, 0, first, 1, first, block * 4)
    tl.store(outputs + program, fine.to(tl.int32))


@triton.jit
def remote_put(
    context, peer, word, window, offset, length, puts, outputs, hold: tl.constexpr = False
):
    """As many puts from window 0, until one fails; the number of those in the ring."""
    number = 0
    fine = True
    while fine & (number < puts):
        fine = wt.remote_put_signal(context, peer, word, 0, 0, window, offset, length, hold)
        number += fine.to(tl.int32)
    tl.store(outputs, number)


@triton.jit
def remote_scatter(
    context, lengths, outputs, template, word, offset, first, count, block: tl.constexpr
):
    """A scatter's outcome, and a wait for its sources."""
    each = tl.arange(0, block)
    bytes = tl.load(lengths + each, mask=each < count, other=0)
    fine = wt.remote_scatter(context, template, word, 0, offset, 1, offset, bytes, first, count)
    fine &= wt.remote_drained(context, word)
    tl.store(outputs, fine.to(tl.int32))


@triton.jit
def remote_put_held(context, source, outbox, peer, word, first, puts):
    """Puts that the destination gives back: `first`, `first + 1`, ..., each once it is stored."""
    for number in range(puts):
        tl.store(outbox + number, first + number)
        wt.remote_put_signal(
            context, peer, word, 0, number * 4, 1, source * 64 + number * 4, 4, hold=True
        )


@triton.jit
def remote_receive(context, outputs, source, word, rounds):
    """A wait's outcome."""
    tl.store(outputs, wt.remote_wait(context, source, word, rounds).to(tl.int32))


@triton.jit
def remote_consume(context, inbox, outputs, source, word, rounds, block: tl.constexpr):
    """The elements behind a wait."""
    index = tl.arange(0, block)
    fine = wt.remote_wait(context, source, word, rounds)
    tl.store(outputs + index, tl.load(inbox + index), mask=fine)


@triton.jit
def remote_give_back(context, outputs, source, word, rounds):
    """A release's outcome."""
    tl.store(outputs, wt.remote_release(context, source, word, rounds).to(tl.int32))
