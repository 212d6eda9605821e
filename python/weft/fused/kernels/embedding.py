"""Kernels of table-wise sharded embedding bags: pooling with all-to-all, and its gradient.

`pool` computes the bags of this rank's tables for the global batch and stores each pooled row at
the rank of its sample; `return_gradients` stores the gradients of the outputs at the ranks of the
tables, where the kernels of `embedding_gradient` follow.

Protocol of `pool` and `return_gradients`, whose inbox is read by later kernels of the stream:

1. At its start, program 0 sets the word `entry[rank]` of each peer: the inbox here is free, since
   the kernels that read it come earlier on the stream.
2. A program waits for `entry[destination]` before its first store to a destination.
3. Programs add their finished tasks to a counter of the destination; the one that completes it
   sets `ready[rank]` there. Words are set to the epoch, whatever the shapes.
4. The program that ends last waits for `ready` of all ranks.

So a program waits for peers alone, and programs that have not begun are never waited for by one
that holds a multiprocessor of this GPU: the grid need not be resident at once.
"""

import triton
import triton.language as tl

import weft.triton as wt
from weft.fused.kernels.rounds import STATE_WORDS, this_round
from weft.fused.kernels.tracing import COMPUTE, SEND, WAIT

__all__ = [
    "COUNTERS",
    "FIELDS",
    "MEAN",
    "PIECE_ALIGNMENT",
    "SUM",
    "WEIGHTED_SUM",
    "pool",
    "return_gradients",
]

#: Fields of a piece, int64: columns of a table that one program pools.
FIELDS = 8
_ADDRESS, _ROWS, _DIM, _WIDTH, _COLUMN, _OWN_COLUMN, _TABLE, _MODE = map(tl.constexpr, range(8))
_FIELDS = tl.constexpr(FIELDS)
#: Modes of pooling.
SUM, MEAN, WEIGHTED_SUM = range(3)
_MEAN, _WEIGHTED_SUM = tl.constexpr(MEAN), tl.constexpr(WEIGHTED_SUM)
#: Bytes to whose multiples tables are aligned.
PIECE_ALIGNMENT = 16

#: First word of the state with a counter of each destination; the one before it marks a failure.
COUNTERS = STATE_WORDS + 1
_COUNTERS = tl.constexpr(COUNTERS)
_FAILED = tl.constexpr(STATE_WORDS)
_STATE_ENDED = tl.constexpr(1)


@triton.jit
def _slice_of(batch, to, ranks):
    """First sample and number of samples of a rank, as `torch.tensor_split`."""
    extra = batch % ranks
    return to * (batch // ranks) + tl.minimum(to, extra), batch // ranks + (to < extra).to(tl.int32)


@triton.jit
def _begin(words, context, epoch, rank, ranks: tl.constexpr, tasks):
    """Program 0 signals that this rank's inbox is free, and that it is ready if without tasks.

    A thread for each peer; release.
    """
    if (tl.program_id(0) == 0) & (ranks > 1):
        others = tl.arange(0, triton.next_power_of_2(ranks))
        present = (others < ranks) & (others != rank)
        epochs = tl.zeros_like(others) + epoch
        entry = wt.peer(context, words + rank, others)
        ready = wt.peer(context, words + ranks + rank, others)
        tl.debug_barrier()
        tl.atomic_xchg(entry, epochs, mask=present, sem="release", scope="sys")
        present = present & (tasks == 0)
        tl.debug_barrier()
        tl.atomic_xchg(ready, epochs, mask=present, sem="release", scope="sys")


@triton.jit
def _wait_entry(words, context, state, epoch, to, fine):
    """Waits until the inbox of a destination is free; marks a failure."""
    fine &= wt.wait(context, words + to, epoch, to, 0)
    if fine == 0:
        tl.atomic_xchg(state + _FAILED, 1, sem="relaxed", scope="gpu")
    return fine


@triton.jit
def _arrive(words, context, state, epoch, rank, ranks: tl.constexpr, step, done, tasks, fine):
    """Counts tasks of a destination; the program that completes them signals it."""
    if (done > 0) & (step < ranks - 1) & fine:
        tl.debug_barrier()
        before = tl.atomic_add(state + _COUNTERS + step, done, sem="acq_rel", scope="gpu")
        if before + done == tasks:
            tl.atomic_xchg(state + _COUNTERS + step, 0, sem="relaxed", scope="gpu")
            to = wt.destination_at(step, rank, ranks)
            wt.signal(context, words + ranks + rank, epoch, to)


@triton.jit
def _first_missing(ready, epoch, rank, ranks: tl.constexpr):
    """Lowest other rank whose word has not reached the epoch, `ranks` if none. Acquire, system."""
    others = tl.arange(0, triton.next_power_of_2(ranks))
    present = (others < ranks) & (others != rank)
    zeros = tl.zeros_like(others)
    seen = tl.atomic_add(ready + others, zeros, mask=present, sem="acquire", scope="sys")
    missing = present & (wt.reached(seen, zeros + epoch) == 0)
    return tl.min(tl.where(missing, others, ranks), axis=0)


@triton.jit
def _finish(
    inbox, elements, words, context, state, epoch, rank, ranks: tl.constexpr, fill: tl.constexpr
):
    """Ends a round: the last program waits for all ranks; on failure the inbox becomes NaN."""
    tl.debug_barrier()
    before = tl.atomic_add(state + _STATE_ENDED, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        fine = tl.atomic_add(state + _FAILED, 0, sem="relaxed", scope="gpu") == 0
        missing = _first_missing(words + ranks, epoch, rank, ranks)
        while fine & (missing < ranks):
            fine &= wt.wait(context, words + ranks + missing, epoch, missing, 1)
            missing = _first_missing(words + ranks, epoch, rank, ranks)
        tl.debug_barrier()
        if fine == 0:
            tl.atomic_xchg(state + _FAILED, 1, sem="relaxed", scope="gpu")
            offsets = tl.arange(0, fill)
            for first in range(0, elements, fill):
                values = tl.full([fill], float("nan"), inbox.dtype.element_ty)
                tl.store(inbox + first + offsets, values, mask=first + offsets < elements)
        tl.atomic_xchg(state + _STATE_ENDED, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(state, epoch, sem="relaxed", scope="gpu")


@triton.jit
def _pooled(
    piece,
    block,
    start,
    count,
    batch,
    indices,
    offsets,
    sample_weights,
    total,
    errors,
    element: tl.constexpr,
    align: tl.constexpr,
    weighted: tl.constexpr,
    bags: tl.constexpr,
    columns: tl.constexpr,
    unroll: tl.constexpr,
):
    """Pooled rows of a block of bags, float32 of `[bags, columns]`.

    Loads of `unroll` positions are independent. Positions of a bag are summed in order. An index
    outside of the table is not read; its bag is counted without it, and `errors` gets the table.
    """
    address = tl.multiple_of(tl.load(piece + _ADDRESS), 16)
    table = tl.multiple_of(address.to(tl.pointer_type(element)), 16)
    rows = tl.load(piece + _ROWS)
    dim = tl.multiple_of(tl.load(piece + _DIM), align)
    width = tl.multiple_of(tl.load(piece + _WIDTH).to(tl.int32), align)
    mode = tl.load(piece + _MODE)
    number = tl.load(piece + _TABLE)

    sample = block * bags + tl.arange(0, bags)
    present = sample < count
    bag = offsets + (number * batch + start + sample)
    begin = tl.load(bag, mask=present, other=0).to(tl.int64)
    end = tl.load(bag + 1, mask=present, other=0).to(tl.int64)
    wrong = (begin < 0) | (end < begin) | (end > total)
    begin = tl.maximum(begin, 0)
    lengths = tl.maximum(tl.minimum(end, total) - begin, 0).to(tl.int32)
    longest = tl.max(lengths, axis=0)

    # Apart from the sums, whose layout is not that of this check; it brings indices into the L1.
    span: tl.constexpr = 4 * unroll
    ahead = tl.arange(0, span)[None, :]
    outside = tl.zeros([bags, span], tl.int32)
    for first in range(0, longest, span):
        some = first + ahead < lengths[:, None]
        index = tl.load(indices + begin[:, None] + (first + ahead), mask=some, other=0)
        outside |= ((index < 0) | (index >= rows)).to(tl.int32)
    wrong |= tl.max(outside, axis=1) > 0

    place = tl.arange(0, columns)
    inside = place < width
    sums = tl.zeros([bags, columns], tl.float32)
    for first in range(0, longest, unroll):
        for step in tl.static_range(unroll):
            position = first + step
            some = position < lengths
            index = tl.load(indices + begin + position, mask=some, other=0).to(tl.int64)
            some &= (index >= 0) & (index < rows)
            pointers = (table + index * dim)[:, None] + place[None, :]
            mask = some[:, None] & inside[None, :]
            values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
            if weighted:
                factors = tl.load(sample_weights + begin + position, mask=some, other=0.0)
                factors = tl.where(mode == _WEIGHTED_SUM, factors.to(tl.float32), 1.0)
                values *= factors[:, None]
            sums += values
    if tl.max(wrong.to(tl.int32), axis=0) > 0:
        tl.store(errors, (number + 1).to(tl.int32))
    divisors = tl.where(mode == _MEAN, tl.maximum(lengths, 1), 1)
    return sums / divisors.to(tl.float32)[:, None]


@triton.jit
def _task_at(index, tasks, held, ranks: tl.constexpr):
    """Step, number and place of the task that is at `index` in the order of this rank.

    Tasks of peers are in the order of `destination_at`. An own task follows each `ranks - 1` of
    these, so that the link is in use while own bags are pooled; the last `held` own tasks come
    after all others, while the last stores to peers are on their way.

    Returns:
        The step, `ranks - 1` for own tasks; the number among the `tasks` of the step; true for the
        last own tasks.
    """
    mixed = tasks - held
    is_mixed = index < ranks * mixed
    rest = index - ranks * mixed - (ranks - 1) * held
    is_last = (is_mixed == 0) & (rest >= 0)
    is_own = is_last | (is_mixed & (index % ranks == ranks - 1))
    own = tl.where(is_mixed, index // ranks, mixed + rest)
    peers = tl.where(is_mixed, index - index // ranks, index - mixed)
    step = tl.where(is_own, ranks - 1, peers // tasks)
    return step, tl.where(is_own, own, peers % tasks), is_last


@triton.jit(do_not_specialize=["rank", "batch", "total", "pieces", "elements", "own_last"])
def pool(
    outputs,
    words,
    context,
    state,
    errors,
    table,
    indices,
    offsets,
    sample_weights,
    rank,
    batch,
    total,
    pieces,
    elements,
    own_last,
    strides,
    ranks: tl.constexpr,
    element: tl.constexpr,
    align: tl.constexpr,
    weighted: tl.constexpr,
    fused: tl.constexpr,
    bags: tl.constexpr,
    columns: tl.constexpr,
    unroll: tl.constexpr,
    trace=None,
):
    """Pools the bags of all samples for the tables of this rank.

    Parameters:
        outputs: `fused`: inbox in symmetric memory, `[local batch, stride]` at each rank. Otherwise
            `[batch, stride]` here, with the columns of this rank alone.
        strides: the stride of rows in units of `align`.
        words: `entry` and `ready`, of all ranks.
        errors: int32; gets the number of a table, from 1 on, with an index outside of it.
        table: int64 of `[pieces, FIELDS]`.
        indices: int32 or int64 of `[total]`.
        offsets: int32 or int64 of `[tables * batch + 1]`: first index of each bag, by table.
        sample_weights: of `[total]`, if `weighted`.
        elements: of the inbox that are in use here.
        own_last: eighths of the own tasks that come after all others: see `_task_at`; -1: all of
            them come before.
        element: dtype of the tables.
        align: number of elements of which widths and columns are multiples.
        bags, columns: of a task; `unroll`: positions of a bag that are loaded at a time.
        trace: of spans, or None.
    """
    spans = 0
    # By a product, since the compiler has no information on the divisibility of a parameter.
    stride = strides * align
    blocks = tl.cdiv(tl.cdiv(batch, ranks), bags)
    tasks = blocks * pieces
    step = 0
    waited = -1
    done = 0
    fine = rank >= 0
    epoch = 0
    if fused:
        epoch = this_round(state)
        _begin(words, context, epoch, rank, ranks, tasks)
    held = tl.where(own_last < 0, tasks, tasks * own_last // 8)
    # Programs are turned from one wave to the next, so that each gets all tables in turn: bags of
    # one may be longer than those of others.
    programs = tl.num_programs(0)
    period = tl.maximum(pieces, 1) * tl.where(held < tasks, ranks, 1)
    shift = (1 + period - programs % period) % period
    turn = 0
    for first in range(tl.program_id(0), tasks * ranks, programs):
        wave = first - tl.program_id(0)
        index = wave + (tl.program_id(0) + turn) % programs
        # The last wave may lack tasks.
        index = tl.where(wave + programs <= tasks * ranks, index, first)
        turn += shift
        # Own tasks first: the order in which all tasks for peers come first, turned.
        index += tl.where(own_last < 0, (ranks - 1) * tasks, 0)
        index = tl.where(index < ranks * tasks, index, index - ranks * tasks)
        next_step, inside, is_last = _task_at(index, tasks, held, ranks)
        block = inside // pieces
        piece = table + inside % pieces * _FIELDS
        # Own tasks between those of a peer do not end the peer's. Nested: the outer condition is a
        # constant.
        if fused:  # noqa: SIM102
            if (next_step != step) & ((next_step < ranks - 1) | is_last):
                began = wt.span_begin(trace)
                _arrive(words, context, state, epoch, rank, ranks, step, done, tasks, fine)
                spans = wt.span_end(trace, spans, SEND, began)
                done = 0
                step = next_step
        to = wt.destination_at(next_step, rank, ranks)
        start, count = _slice_of(batch, to, ranks)
        began = wt.span_begin(trace)
        values = _pooled(
            piece,
            block,
            start,
            count,
            batch,
            indices,
            offsets,
            sample_weights,
            total,
            errors,
            element,
            align,
            weighted,
            bags,
            columns,
            unroll,
        )
        spans = wt.span_end(trace, spans, COMPUTE, began)
        began = wt.span_begin(trace)
        if fused:
            if (next_step != waited) & (next_step < ranks - 1):
                fine = _wait_entry(words, context, state, epoch, to, fine)
                waited = next_step
                spans = wt.span_end(trace, spans, WAIT, began)
                began = wt.span_begin(trace)
            done += (next_step < ranks - 1).to(tl.int32)
        sample = block * bags + tl.arange(0, bags)
        place = tl.arange(0, columns)
        width = tl.multiple_of(tl.load(piece + _WIDTH).to(tl.int32), align)
        mask = ((sample < count) & fine)[:, None] & (place < width)[None, :]
        if fused:
            column = tl.multiple_of(tl.load(piece + _COLUMN), align)
            own = outputs + column + sample.to(tl.int64)[:, None] * stride + place[None, :]
            wt.put(context, own, values.to(outputs.dtype.element_ty), to, mask=mask)
        else:
            column = tl.multiple_of(tl.load(piece + _OWN_COLUMN), align)
            rows = (start + sample).to(tl.int64)
            own = outputs + column + rows[:, None] * stride + place[None, :]
            tl.store(own, values.to(outputs.dtype.element_ty), mask=mask)
        spans = wt.span_end(trace, spans, SEND, began)
    if fused:
        began = wt.span_begin(trace)
        _arrive(words, context, state, epoch, rank, ranks, step, done, tasks, fine)
        spans = wt.span_end(trace, spans, SEND, began)
        began = wt.span_begin(trace)
        _finish(outputs, elements, words, context, state, epoch, rank, ranks, bags * columns)
        spans = wt.span_end(trace, spans, WAIT, began)


@triton.jit(do_not_specialize=["rank", "batch", "elements"])
def return_gradients(
    inbox,
    gradients,
    words,
    context,
    state,
    firsts,
    rank,
    batch,
    elements,
    strides,
    ranks: tl.constexpr,
    align: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Stores the gradients of this rank's outputs at the ranks of the tables.

    Parameters:
        inbox: in symmetric memory: `[batch, columns of the rank]` at each rank.
        gradients: `[local batch, stride]`, contiguous; `strides` is in units of `align`.
        firsts: int64 of `[ranks + 1]`: first column of each rank.
        elements: of the inbox that are in use here.
        rows, columns: of a task.
    """
    # By a product, since the compiler has no information on the divisibility of a parameter.
    stride = strides * align
    epoch = this_round(state)
    start, count = _slice_of(batch, rank, ranks)
    _begin(words, context, epoch, rank, ranks, 1)
    for step in range(ranks):
        to = wt.destination_at(step, rank, ranks)
        first = tl.multiple_of(tl.load(firsts + to), align)
        width = tl.multiple_of(tl.load(firsts + to + 1) - first, align)
        across = tl.cdiv(width, columns).to(tl.int32)
        tasks = tl.cdiv(count, rows) * across
        fine = rank >= 0
        done = 0
        # Turned by the destination, so that few tasks of several do not fall to the same programs.
        own = (tl.program_id(0) + step * tasks) % tl.num_programs(0)
        if (step < ranks - 1) & (own < tasks):
            fine = _wait_entry(words, context, state, epoch, to, fine)
        for index in range(own, tasks, tl.num_programs(0)):
            sample = index // across * rows + tl.arange(0, rows)
            place = index % across * columns + tl.arange(0, columns)
            mask = ((sample < count) & fine)[:, None] & (place < width)[None, :]
            sample = sample.to(tl.int64)[:, None]
            values = tl.load(gradients + first + sample * stride + place[None, :], mask=mask)
            wt.put(context, inbox + (start + sample) * width + place[None, :], values, to, mask)
            done += 1
        if (tasks == 0) & (step < ranks - 1) & (tl.program_id(0) == 0):
            wt.signal(context, words + ranks + rank, epoch, to)
        _arrive(words, context, state, epoch, rank, ranks, step, done, tasks, fine)
    _finish(inbox, elements, words, context, state, epoch, rank, ranks, rows * columns)
