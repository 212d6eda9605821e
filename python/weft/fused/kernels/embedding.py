"""Kernels for table-wise sharded embedding bags: pooling with all-to-all, and the gradient.

`pool` computes the bags in this rank's tables for the global batch and stores each pooled row at
the rank that has its sample. `return_gradients` stores the output gradients at the ranks that have
the tables, where the `embedding_gradient` kernels follow.

In both kernels, later kernels on the stream read the inbox. The protocol:

1. First, program 0 sets `entry[rank]` at each peer: the inbox here is free, since kernels
   that read it come earlier on the stream.
2. A program waits for `entry[destination]` before its first store to a destination.
3. Programs add finished tasks to a counter for the destination; the one that completes it
   sets `ready[rank]` there. Words are set to the epoch, whatever the shapes.
4. The program that ends last waits for `ready` from all ranks, and compares the arguments with
   this rank's: ranks with another batch would store rows at other places.

So a program waits only for peers, and a program that holds an SM on this GPU never waits for
programs that have not started: the grid need not be resident at once.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.triton as wt
from weft.fused.kernels.agreement import agree, announce
from weft.fused.kernels.rounds import STATE_WORDS, Peers, this_round
from weft.fused.kernels.tracing import COMPUTE, SEND, WAIT

__all__ = [
    "COUNTERS",
    "FIELDS",
    "MEAN",
    "PIECE_ALIGNMENT",
    "SUM",
    "UNCOVERED",
    "WEIGHTED_SUM",
    "Bags",
    "Counts",
    "GradientCounts",
    "GradientModes",
    "Modes",
    "pool",
    "return_gradients",
]

#: Fields for a table segment, int64: columns that one program pools.
FIELDS = 8
_ADDRESS, _ROWS, _DIM, _WIDTH, _COLUMN, _OWN_COLUMN, _TABLE, _MODE = map(tl.constexpr, range(8))
_FIELDS = tl.constexpr(FIELDS)
#: Pooling modes.
SUM, MEAN, WEIGHTED_SUM = range(3)
_MEAN, _WEIGHTED_SUM = tl.constexpr(MEAN), tl.constexpr(WEIGHTED_SUM)
#: Written in place of a table number if offsets do not cover all indices.
UNCOVERED = -1
_UNCOVERED = tl.constexpr(UNCOVERED)
#: Required table alignment in bytes.
PIECE_ALIGNMENT = 16

#: First state word with a counter for each destination; the one before it marks a failure.
COUNTERS = STATE_WORDS + 1
_COUNTERS = tl.constexpr(COUNTERS)
_FAILED = tl.constexpr(STATE_WORDS)
_STATE_ENDED = tl.constexpr(1)


class Bags(NamedTuple):
    """A batch's bags, and this rank's tables.

    Attributes:
        table: int64 `[pieces, FIELDS]`.
        indices: int32 or int64 `[total]`.
        offsets: int32 or int64 `[tables * batch + 1]`: first index in each bag, by table.
        sample_weights: `[total]`, if `weighted`.
    """

    table: Any
    indices: Any
    offsets: Any
    sample_weights: Any


class Counts(NamedTuple):
    """Numbers for which Triton does not compile `pool` again.

    Attributes:
        rank: this rank.
        batch: samples on all ranks.
        total: number of indices.
        pieces: number of table segments.
        elements: inbox elements in use here.
        own_last: eighths of the local tasks that come after all others: see `_task_at`; -1: all of
            them come before.
        tables: this rank's table count.
        digest: argument digest for `agreement`.
    """

    rank: Any
    batch: Any
    total: Any
    pieces: Any
    elements: Any
    own_last: Any
    tables: Any = 0
    digest: Any = 0


class Modes(NamedTuple):
    """Constants for `pool`.

    Attributes:
        ranks: number of ranks.
        element: table dtype.
        align: number that divides all widths and columns.
        weighted: positions have sample weights.
        fused: rows are stored at the ranks that have the samples; else here.
        bags: bags in a task.
        columns: columns in a task.
        unroll: positions in a bag that are loaded at a time.
    """

    ranks: int
    element: Any
    align: int
    weighted: bool
    fused: bool
    bags: int
    columns: int
    unroll: int


class GradientCounts(NamedTuple):
    """Numbers for which Triton does not compile `return_gradients` again.

    Attributes:
        rank: this rank.
        batch: samples on all ranks.
        elements: inbox elements in use here.
        digest: argument digest for `agreement`.
    """

    rank: Any
    batch: Any
    elements: Any
    digest: Any = 0


class GradientModes(NamedTuple):
    """Constants for `return_gradients`.

    Attributes:
        ranks: number of ranks.
        align: number that divides all widths and columns.
        rows: rows in a task.
        columns: columns in a task.
    """

    ranks: int
    align: int
    rows: int
    columns: int


@triton.jit
def _slice_of(batch, to, ranks):
    """First sample and sample count for a rank, as in `torch.tensor_split`."""
    extra = batch % ranks
    return to * (batch // ranks) + tl.minimum(to, extra), batch // ranks + (to < extra).to(tl.int32)


@triton.jit
def _begin(peers: Peers, epoch, rank, ranks: tl.constexpr, tasks):
    """Program 0 signals that this rank's inbox is free, and that it is ready if it has no tasks.

    Uses a thread for each peer. Memory order: release.
    """
    context, words = peers.context, peers.words
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
def _wait_entry(peers: Peers, epoch, to, fine):
    """Waits until a destination's inbox is free; marks a failure."""
    fine &= wt.wait(peers.context, peers.words + to, epoch, to, 0)
    if fine == 0:
        tl.atomic_xchg(peers.state + _FAILED, 1, sem="relaxed", scope="gpu")
    return fine


@triton.jit
def _arrive(peers: Peers, epoch, rank, ranks: tl.constexpr, step, done, tasks, fine):
    """Counts tasks for a destination; the program that completes them signals it."""
    if (done > 0) & (step < ranks - 1) & fine:
        tl.debug_barrier()
        before = tl.atomic_add(peers.state + _COUNTERS + step, done, sem="acq_rel", scope="gpu")
        if before + done == tasks:
            tl.atomic_xchg(peers.state + _COUNTERS + step, 0, sem="relaxed", scope="gpu")
            to = wt.destination_at(step, rank, ranks)
            wt.signal(peers.context, peers.words + ranks + rank, epoch, to)


@triton.jit
def _first_missing(ready, epoch, rank, ranks: tl.constexpr):
    """Lowest other rank whose word has not reached the epoch, else `ranks`. Acquire, system."""
    others = tl.arange(0, triton.next_power_of_2(ranks))
    present = (others < ranks) & (others != rank)
    zeros = tl.zeros_like(others)
    seen = tl.atomic_add(ready + others, zeros, mask=present, sem="acquire", scope="sys")
    missing = present & (wt.reached(seen, zeros + epoch) == 0)
    return tl.min(tl.where(missing, others, ranks), axis=0)


@triton.jit
def _finish(
    inbox, elements, peers: Peers, epoch, rank, ranks: tl.constexpr, fill: tl.constexpr, digest
):
    """Ends a round: the last program waits for all ranks; on failure the inbox becomes NaN."""
    words, context, state = peers.words, peers.context, peers.state
    tl.debug_barrier()
    before = tl.atomic_add(state + _STATE_ENDED, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        fine = tl.atomic_add(state + _FAILED, 0, sem="relaxed", scope="gpu") == 0
        if peers.agreement is not None:
            fine &= agree(context, peers.agreement, digest, epoch)
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
def _pooled(piece, block, start, count, batch, given: Bags, total, errors, modes: tl.constexpr):
    """Pooled rows in a block of bags, float32 `[bags, columns]`.

    Loads for `unroll` positions are independent. Positions in a bag are summed in order. An index
    outside the table is not read; the bag is counted without it, and `errors` gets the table.
    """
    indices, offsets = given.indices, given.offsets
    element: tl.constexpr = modes.element
    align: tl.constexpr = modes.align
    bags: tl.constexpr = modes.bags
    columns: tl.constexpr = modes.columns
    unroll: tl.constexpr = modes.unroll
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

    # Separate from the sums, which have another layout than this check; it brings indices into the
    # L1.
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
            if modes.weighted:
                factors = tl.load(given.sample_weights + begin + position, mask=some, other=0.0)
                factors = tl.where(mode == _WEIGHTED_SUM, factors.to(tl.float32), 1.0)
                values *= factors[:, None]
            sums += values
    if tl.max(wrong.to(tl.int32), axis=0) > 0:
        tl.store(errors, (number + 1).to(tl.int32))
    divisors = tl.where(mode == _MEAN, tl.maximum(lengths, 1), 1)
    return sums / divisors.to(tl.float32)[:, None]


@triton.jit
def _task_at(index, tasks, held, ranks: tl.constexpr):
    """Step, number and place for the task at `index` in this rank's order.

    Peers' tasks are in `destination_at` order. One local task follows each `ranks - 1` of these, so
    that the link is in use while local bags are pooled. The last `held` local tasks come after all
    others, while the last stores to peers are in flight.

    Returns:
        The step, `ranks - 1` for local tasks; the number among the `tasks` in the step; true for
        the last local tasks.
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


@triton.jit(do_not_specialize=["counts"])
def pool(
    outputs,
    peers: Peers,
    errors,
    given: Bags,
    counts: Counts,
    strides,
    modes: tl.constexpr,
    trace=None,
):
    """Pools all samples' bags for this rank's tables.

    Parameters:
        outputs: `fused`: inbox in symmetric memory, `[local batch, stride]` at each rank. Otherwise
            `[batch, stride]` here, with only this rank's columns.
        peers: `words` are `entry` and `ready`, for all ranks.
        errors: int32; gets the number of a table, from 1, with an index outside it, or `UNCOVERED`
            if offsets do not begin with 0 or do not end with `total`.
        given: bags and tables.
        counts: numbers that may change from call to call.
        strides: row stride in units of `align`.
        modes: `Modes`.
        trace: span buffer, or None.
    """
    context, state = peers.context, peers.state
    agreement, digest = peers.agreement, counts.digest
    table, offsets = given.table, given.offsets
    rank, batch, total, pieces = counts.rank, counts.batch, counts.total, counts.pieces
    own_last, tables = counts.own_last, counts.tables
    ranks: tl.constexpr = modes.ranks
    align: tl.constexpr = modes.align
    fused: tl.constexpr = modes.fused
    bags: tl.constexpr = modes.bags
    columns: tl.constexpr = modes.columns
    spans = 0
    # As a multiplication, since the compiler does not know what divides a parameter.
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
        if agreement is not None:  # noqa: SIM102 (a constant)
            if tl.program_id(0) == 0:
                announce(context, agreement, digest, epoch)
        _begin(peers, epoch, rank, ranks, tasks)
    if tl.program_id(0) == 0:
        begin = tl.load(offsets).to(tl.int64)
        end = tl.load(offsets + tl.cast(tables, tl.int64) * batch).to(tl.int64)
        if (begin != 0) | (end != total):
            tl.store(errors, _UNCOVERED)
    held = tl.where(own_last < 0, tasks, tasks * own_last // 8)
    # Programs rotate from one wave to the next, so that each gets all tables in turn: one table's
    # bags may be longer than others.
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
        # Local tasks first: the order with all peers' tasks first, rotated.
        index += tl.where(own_last < 0, (ranks - 1) * tasks, 0)
        index = tl.where(index < ranks * tasks, index, index - ranks * tasks)
        next_step, inside, is_last = _task_at(index, tasks, held, ranks)
        block = inside // pieces
        piece = table + inside % pieces * _FIELDS
        # Local tasks between a peer's do not end the peer's. Nested, because the outer condition is
        # a constant.
        if fused:  # noqa: SIM102
            if (next_step != step) & ((next_step < ranks - 1) | is_last):
                began = wt.span_begin(trace)
                _arrive(peers, epoch, rank, ranks, step, done, tasks, fine)
                spans = wt.span_end(trace, spans, SEND, began)
                done = 0
                step = next_step
        to = wt.destination_at(next_step, rank, ranks)
        start, count = _slice_of(batch, to, ranks)
        began = wt.span_begin(trace)
        values = _pooled(piece, block, start, count, batch, given, total, errors, modes)
        spans = wt.span_end(trace, spans, COMPUTE, began)
        began = wt.span_begin(trace)
        if fused:
            if (next_step != waited) & (next_step < ranks - 1):
                fine = _wait_entry(peers, epoch, to, fine)
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
        _arrive(peers, epoch, rank, ranks, step, done, tasks, fine)
        spans = wt.span_end(trace, spans, SEND, began)
        began = wt.span_begin(trace)
        _finish(outputs, counts.elements, peers, epoch, rank, ranks, bags * columns, digest)
        spans = wt.span_end(trace, spans, WAIT, began)


@triton.jit(do_not_specialize=["counts"])
def return_gradients(
    inbox,
    gradients,
    peers: Peers,
    firsts,
    counts: GradientCounts,
    strides,
    modes: tl.constexpr,
):
    """Stores the gradients for this rank's outputs at the ranks that have the tables.

    Parameters:
        inbox: in symmetric memory: `[batch, this rank's columns]` at each rank.
        gradients: `[local batch, stride]`, contiguous; `strides` is in units of `align`.
        peers: `words` are `entry` and `ready`, for all ranks.
        firsts: int64 `[ranks + 1]`: first column for each rank.
        counts: numbers that may change from call to call.
        modes: `GradientModes`.
    """
    context, words = peers.context, peers.words
    agreement, digest = peers.agreement, counts.digest
    rank, batch = counts.rank, counts.batch
    ranks: tl.constexpr = modes.ranks
    align: tl.constexpr = modes.align
    rows: tl.constexpr = modes.rows
    columns: tl.constexpr = modes.columns
    # As a multiplication, since the compiler does not know what divides a parameter.
    stride = strides * align
    epoch = this_round(peers.state)
    start, count = _slice_of(batch, rank, ranks)
    if agreement is not None:  # noqa: SIM102 (a constant)
        if tl.program_id(0) == 0:
            announce(context, agreement, digest, epoch)
    _begin(peers, epoch, rank, ranks, 1)
    for step in range(ranks):
        to = wt.destination_at(step, rank, ranks)
        first = tl.multiple_of(tl.load(firsts + to), align)
        width = tl.multiple_of(tl.load(firsts + to + 1) - first, align)
        across = tl.cdiv(width, columns).to(tl.int32)
        tasks = tl.cdiv(count, rows) * across
        fine = rank >= 0
        done = 0
        # Rotated by destination, so that a few tasks for several do not go to the same programs.
        own = (tl.program_id(0) + step * tasks) % tl.num_programs(0)
        if (step < ranks - 1) & (own < tasks):
            fine = _wait_entry(peers, epoch, to, fine)
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
        _arrive(peers, epoch, rank, ranks, step, done, tasks, fine)
    _finish(inbox, counts.elements, peers, epoch, rank, ranks, rows * columns, digest)
