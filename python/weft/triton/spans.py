"""Device functions that record spans in a kernel's programs by the device's clock.

A traceable kernel has one more parameter, `trace` (from `weft.triton.trace_empty`, or None), and
counts spans in a register, for example::

    spans = 0
    began = wt.span_begin(trace)
    ...
    spans = wt.span_end(trace, spans, 0, began)

With None the functions compile to no instructions. Otherwise each has a block barrier, so that a
span covers the work in all program threads. Triton does not pipeline loops with barriers:
in such loops pass `meet=False`, for the first thread's time. A program's spans lie side by side or
within each other.
"""

import triton
import triton.language as tl

from weft.triton.clock import now
from weft.triton.primitives import barrier, next_epoch

__all__ = ["FIELDS", "meetings", "span_begin", "span_end"]

#: Span fields, int64: kind, begin and end in nanoseconds. A program's first group has instead its
#: span count, the capacity for each program, and the number of programs.
FIELDS = 3
_FIELDS = tl.constexpr(FIELDS)


@triton.jit
def span_begin(trace, meet: tl.constexpr = True):
    """Device time in nanoseconds, int64, once all threads are here; 0 without trace.

    Args:
        trace: same as in `span_end`.
        meet: false: without a block barrier, the first thread's time.
    """
    time = tl.cast(0, tl.int64)
    if trace is not None:
        if meet:
            tl.debug_barrier()
        time = tl.cast(now(), tl.int64)
    return time


@triton.jit
def span_end(trace, count, kind, began, meet: tl.constexpr = True):
    """Records a span in this program, which ends once all threads are here.

    Spans beyond the trace's capacity are counted and dropped. A launch overwrites the previous
    launch's spans.

    Args:
        trace: pointer to int64, from `weft.triton.trace_empty`, or None: no instructions.
        count: number of spans that this program has recorded in this launch.
        kind: index into the names of the timeline.
        began: time from `span_begin`.
        meet: false: without a block barrier, the first thread's time.

    Returns:
        `count` + 1, or `count` without trace.
    """
    if trace is not None:
        if meet:
            tl.debug_barrier()
        ended = tl.cast(now(), tl.int64)
        program = tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
        program = tl.program_id(0) + tl.num_programs(0) * program
        capacity = tl.load(trace + 1)
        traced = program < tl.load(trace + 2)
        row = trace + program * (capacity + 1) * _FIELDS
        place = row + (count + 1) * _FIELDS
        fits = traced & (count < capacity)
        tl.store(place, tl.cast(kind, tl.int64), mask=fits)
        tl.store(place + 1, began, mask=fits)
        tl.store(place + 2, ended, mask=fits)
        count += 1
        tl.store(row, tl.cast(count, tl.int64), mask=traced)
    return count


@triton.jit
def meetings(words, context, times, failed, count):
    """Runs `count` barriers over all ranks in one program, from epoch 1 on.

    A rank leaves a barrier after each has come, on whichever clock, so differences between the
    times bound the differences between the clocks.

    Args:
        words: words for `weft.triton.barrier`.
        context: for `words`.
        times: pointer to int64: before and after each barrier.
        failed: pointer to int32, set to 1 if a barrier failed.
        count: number of barriers.
    """
    epoch = tl.cast(0, tl.int32)
    for index in range(count):
        epoch = next_epoch(epoch)
        tl.debug_barrier()
        tl.store(times + 2 * index, tl.cast(now(), tl.int64))
        if not barrier(context, words, epoch):
            tl.store(failed, 1)
        tl.store(times + 2 * index + 1, tl.cast(now(), tl.int64))
