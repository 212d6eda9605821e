"""Device functions: puts to any rank by descriptors, which a thread of the host sends.

`proxy` is the state of `weft.triton.Proxy`, int64 in memory of this GPU. A put stores its values
and a descriptor into a slot of a ring in memory of the host; a free slot has `released` equal to
the number of its former uses, and is ready for the host once `ready` is one more.

Memory order: the descriptor and the values are released by `ready`, system-wide. The host at the
destination raises the word after the values are in memory there; `staged_wait` acquires it.
"""

import triton
import triton.language as tl

from weft.triton.clock import POLLS, now
from weft.triton.primitives import reached

__all__ = [
    "CLOCK",
    "DATA",
    "ENDED",
    "HEADER_BYTES",
    "LIMIT",
    "RECORD_BYTES",
    "RING",
    "SLOTS",
    "SLOT_BYTES",
    "STATE",
    "TICKET",
    "WORDS",
    "staged_put_signal",
    "staged_wait",
]

#: Elements of the state: address of the ring, next ticket, latest time read, nonzero once waits
#: end, limit of a wait in nanoseconds, number of slots, bytes of a slot's values, addresses of the
#: data and of the words; number of elements.
RING, TICKET, CLOCK, ENDED, LIMIT, SLOTS, SLOT_BYTES, DATA, WORDS, STATE = range(10)
#: Bytes before the ring: int32 `ended`, then the source, word, expected and seen of a failed wait.
RECORD_BYTES = 64
#: Bytes before the values of a slot: int32 `ready`, `released`, then the descriptor: int32 rank,
#: word (in elements), epoch, bytes, and int64 offset of the data.
HEADER_BYTES = 64

_RING, _TICKET, _CLOCK = tl.constexpr(RING), tl.constexpr(TICKET), tl.constexpr(CLOCK)
_ENDED, _LIMIT, _SLOTS = tl.constexpr(ENDED), tl.constexpr(LIMIT), tl.constexpr(SLOTS)
_SLOT_BYTES, _DATA, _WORDS = tl.constexpr(SLOT_BYTES), tl.constexpr(DATA), tl.constexpr(WORDS)
_RECORD, _HEADER = tl.constexpr(RECORD_BYTES), tl.constexpr(HEADER_BYTES)


@triton.jit
def staged_put_signal(proxy, pointer, values, count, word, epoch, rank):
    """Stores values at a rank of any host, then sets a word there. True if it was handed over.

    It waits while the ring is full. Its effects are asynchronous; puts of one program to one rank
    arrive in order.

    Args:
        proxy: state of `weft.triton.Proxy`.
        pointer: place in this rank's `data` that corresponds to the first value's.
        values: block of one dimension, at most as long as a slot.
        count: number of its values that are sent, from the first on.
        word: place in this rank's `words`; this rank alone raises it at `rank`.
        epoch: int32.
        rank: destination; this rank is allowed.
    """
    ticket = tl.atomic_add(proxy + _TICKET, 1, sem="relaxed", scope="gpu")
    slots, room = tl.load(proxy + _SLOTS), tl.load(proxy + _SLOT_BYTES)
    uses = (ticket // slots).to(tl.int32)
    slot = tl.load(proxy + _RING) + _RECORD + ticket % slots * (room + _HEADER)
    header = slot.to(tl.pointer_type(tl.int32))
    free = _reach(proxy, header + 1, uses, rank, -1)
    size = values.dtype.primitive_bitwidth // 8
    index = tl.arange(0, values.shape[0])
    inside = (index < count) & (index * size < room) & free
    target = (slot + _HEADER).to(tl.pointer_type(values.dtype))
    tl.store(target + index, values, mask=inside)
    offset = pointer.to(tl.int64) - tl.load(proxy + _DATA)
    number = (word.to(tl.int64) - tl.load(proxy + _WORDS)) // 4
    tl.store(header + 2, tl.cast(rank, tl.int32), mask=free)
    tl.store(header + 3, number.to(tl.int32), mask=free)
    tl.store(header + 4, tl.cast(epoch, tl.int32), mask=free)
    tl.store(header + 5, tl.cast(count * size, tl.int32), mask=free)
    tl.store((slot + 24).to(tl.pointer_type(tl.int64)), offset, mask=free)
    tl.debug_barrier()
    ready = tl.where(free, uses.to(tl.int64) + 1, uses.to(tl.int64)).to(tl.int32)
    tl.atomic_xchg(header, ready, mask=free, sem="release", scope="sys")
    return free


@triton.jit
def staged_wait(proxy, word, epoch, source):
    """Waits until a word of this rank is at least `epoch`, modulo 2^32; returns true if it is.

    Acquire: all threads observe the values that were put before. False once the limit of the proxy
    has passed, or its thread has failed: `Proxy.check` raises the error.

    Args:
        proxy: state of `weft.triton.Proxy`.
        word: place in this rank's `words`.
        epoch: int32.
        source: rank that raises the word, for the error.
    """
    number = (word.to(tl.int64) - tl.load(proxy + _WORDS)) // 4
    return _reach(proxy, word, epoch, source, number.to(tl.int32))


@triton.jit
def _reach(proxy, word, epoch, source, number):
    """Waits for a word in memory of the host; `number`: its index, -1 for that of a slot."""
    began = tl.cast(0, tl.int64)
    polls = 0
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    while (began >= 0) & (reached(seen, epoch) == 0):
        polls += 1
        if polls == POLLS:
            began = _check(proxy, source, number, epoch, seen, began)
            polls = 0
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    return reached(seen, epoch)


@triton.jit
def _check(proxy, source, number, epoch, seen, began):
    """Checks a wait that began at `began` (0: now); returns its begin, or -1 once it has ended.

    As in `primitives`, all threads take clock and words from memory of this GPU, by atomics.
    """
    tl.debug_barrier()
    tl.atomic_max(proxy + _CLOCK, tl.cast(now(), tl.int64), sem="relaxed", scope="gpu")
    time = _read(proxy + _CLOCK)
    began = tl.where(began == 0, time, began)
    record = tl.load(proxy + _RING).to(tl.pointer_type(tl.int32))
    stopped = tl.load(record, volatile=True).to(tl.int64)
    tl.atomic_or(proxy + _ENDED, stopped, sem="relaxed", scope="gpu")
    ended = _read(proxy + _ENDED)
    expired = time - began > tl.load(proxy + _LIMIT)
    # Nested, so that one program makes the exchange.
    if expired & (ended == 0):  # noqa: SIM102
        if tl.atomic_cas(proxy + _ENDED, tl.cast(0, tl.int64), tl.cast(1, tl.int64)) == 0:
            tl.store(record + 1, source)
            tl.store(record + 2, number)
            tl.store(record + 3, epoch)
            tl.store(record + 4, seen)
            tl.debug_barrier()
            tl.atomic_xchg(record, 1, sem="release", scope="sys")
    return tl.where(expired | (ended != 0), tl.cast(-1, tl.int64), began)


@triton.jit
def _read(pointer):
    """Value of a word of this GPU's memory, equal in all threads of the program."""
    return tl.atomic_add(pointer, 0, sem="relaxed", scope="sys")
