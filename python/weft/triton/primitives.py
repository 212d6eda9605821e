"""Device functions: peer addresses, puts with signals, bounded waits, barrier, last arrival.

All programs in a kernel may call them; a whole program (a thread block) makes each call. `context`
is a pointer to int64, from `weft.triton.context`; words are int32 in symmetric memory.

Memory order: a function that releases begins with a block barrier, so the stores by all threads
precede it. A function that acquires ends with one, so the loads by all threads follow it. Peers'
words are accessed at system scope.
"""

import triton
import triton.language as tl

from weft.triton import layout
from weft.triton.clock import POLLS, now

__all__ = [
    "barrier",
    "disagree",
    "distance",
    "expired",
    "fetch_add",
    "last_arrival",
    "next_epoch",
    "peer",
    "put",
    "put_signal",
    "rank",
    "reached",
    "signal",
    "signal_add",
    "wait",
    "world_size",
]

# Fields in a context, in int64 or int32 elements.
_TABLE = tl.constexpr(layout.CONTEXT_TABLE // 8)
_RANK = tl.constexpr(layout.CONTEXT_RANK // 4)
_RANKS = tl.constexpr(layout.CONTEXT_RANKS // 4)
_CLOCK = tl.constexpr(layout.CONTEXT_CLOCK // 8)
_HAS_ABORTED = tl.constexpr(layout.CONTEXT_ABORTED // 4)
_SHIFTS = tl.constexpr(layout.CONTEXT_SHIFTS // 8)
_MAX_RANKS = tl.constexpr(layout.MAX_RANKS)

# Fields in the table and in a record, in bytes.
_DEAD = tl.constexpr(layout.TABLE_DEAD)
_LIMIT = tl.constexpr(layout.TABLE_LIMIT_NS)
_LOOKED = tl.constexpr(layout.TABLE_LOOKED_NS)
_OWN_RANK = tl.constexpr(layout.TABLE_RANK)
_PROXY_RANK = tl.constexpr(layout.TABLE_PROXY_RANK)
_RECORD = tl.constexpr(layout.TABLE_RECORD)
_ABORT = tl.constexpr(layout.TABLE_ABORT)
_RECORD_CODE = tl.constexpr(layout.RECORD_CODE)
_RECORD_RANK = tl.constexpr(layout.RECORD_RANK)
_RECORD_PHASE = tl.constexpr(layout.RECORD_PHASE)
_RECORD_PEER = tl.constexpr(layout.RECORD_PEER)
_RECORD_CHANNEL = tl.constexpr(layout.RECORD_CHANNEL)
_RECORD_SLOT = tl.constexpr(layout.RECORD_SLOT)
_RECORD_EXPECTED = tl.constexpr(layout.RECORD_EXPECTED)
_RECORD_SEEN = tl.constexpr(layout.RECORD_SEEN)

_TIMEOUT = tl.constexpr(layout.CODE_TIMEOUT)
_ABORTED = tl.constexpr(layout.CODE_ABORTED)
_DISAGREEMENT = tl.constexpr(layout.CODE_DISAGREEMENT)
_WAIT = tl.constexpr(layout.PHASE_WAIT)
_BARRIER = tl.constexpr(layout.PHASE_BARRIER)
_PROXY_WAIT = tl.constexpr(layout.PHASE_PROXY_WAIT)
# As in `weft/wait.cuh`: one GPU thread reads the abort word for all, this often.
_ABORT_CHECK_NS = tl.constexpr(50_000)


@triton.jit
def rank(context):
    """This rank, int32."""
    return tl.load(context.to(tl.pointer_type(tl.int32)) + _RANK)


@triton.jit
def world_size(context):
    """Number of ranks, int32."""
    return tl.load(context.to(tl.pointer_type(tl.int32)) + _RANKS)


@triton.jit
def peer(context, pointer, rank):
    """The address at `rank` that corresponds to `pointer` here.

    For example, `tl.store(peer(context, words, 1), 7)` stores to the words at rank 1.

    Args:
        context: for the tensor that `pointer` points into.
        pointer: scalar or block of pointers. Stores to the result are as wide as stores to it.
        rank: whose memory; this rank is allowed.
    """
    # Addition to a pointer, unlike integer addition, keeps the compiler's contiguity data.
    return (pointer.to(tl.pointer_type(tl.int8)) + distance(context, rank)).to(pointer.dtype)


@triton.jit
def distance(context, rank):
    """Bytes from this rank's memory to memory at `rank`, int64: what `peer` adds.

    A kernel that loads it long before the use does not wait for it.
    """
    # Blocks begin at multiples of 16 bytes on all ranks.
    return tl.multiple_of(tl.load(context + _SHIFTS + rank), 16)


@triton.jit
def put(context, pointer, values, rank, mask=None):
    """Stores a block of values at a peer, at `pointer`'s place. Relaxed: a signal releases it.

    Args:
        context: for the tensor that `pointer` points into.
        pointer: block of pointers into this rank's tensor.
        values: block with the same shape.
        rank: destination.
        mask: int1 block; by default all elements are stored.
    """
    tl.store(peer(context, pointer, rank), values, mask=mask)


@triton.jit
def signal(context, word, epoch, rank):
    """Sets a peer's word. Release: all earlier stores by the program are visible before it.

    Args:
        context: for the tensor that `word` points into.
        word: pointer to int32 in this rank's tensor; only this program writes it at the peer.
        epoch: int32.
        rank: destination.
    """
    tl.debug_barrier()
    tl.atomic_xchg(peer(context, word, rank), epoch, sem="release", scope="sys")


@triton.jit
def signal_add(context, word, amount, rank):
    """Adds to a peer's word, which several programs or ranks raise. Release, as in `signal`.

    Counters wrap around: `wait` compares modulo 2^32.
    """
    tl.debug_barrier()
    tl.atomic_add(peer(context, word, rank), amount, sem="release", scope="sys")


@triton.jit
def fetch_add(context, word, amount, rank):
    """Adds to a peer's word and returns the old value. Relaxed, at system scope."""
    return tl.atomic_add(peer(context, word, rank), amount, sem="relaxed", scope="sys")


@triton.jit
def put_signal(context, pointer, values, word, epoch, rank, mask=None):
    """`put`, then `signal`: a program that has waited for `epoch` observes the values.

    `pointer` and `word` must be in tensors from one allocation.
    """
    put(context, pointer, values, rank, mask)
    signal(context, word, epoch, rank)


@triton.jit
def reached(seen, epoch):
    """True if a counter with value `seen` has reached `epoch`, modulo 2^32."""
    ahead = tl.cast(seen, tl.int64) - tl.cast(epoch, tl.int64)
    return ahead.to(tl.int32) >= 0


@triton.jit
def next_epoch(epoch):
    """The epoch after `epoch`, int32 with wrap-around. Epochs are kept in device memory."""
    return (tl.cast(epoch, tl.int64) + 1).to(tl.int32)


@triton.jit
def wait(context, word, epoch, source, slot=0):
    """Waits until a word on this rank is at least `epoch`, modulo 2^32; returns true if it is.

    Acquire: all threads observe what was released before. It returns false once `context`'s time
    limit has passed or the group has failed: the host raises the error, and the kernel fills its
    outputs with NaN and returns.

    Args:
        context: for any tensor in the communicator.
        word: pointer to int32 in this rank's tensor.
        epoch: int32.
        source: rank that raises the word, for the error.
        slot: number for the error, such as a tile number.
    """
    fine = _reach(context, _WAIT, word, epoch, source, slot)
    tl.debug_barrier()
    return fine


@triton.jit
def _reach(context, phase, word, epoch, source, slot):
    """`wait` without the block barrier, in any phase."""
    began = tl.cast(0, tl.int64)
    polls = 0
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    while (began >= 0) & (reached(seen, epoch) == 0):
        polls += 1
        if polls == POLLS:
            began = _check(context, phase, source, slot, epoch, seen, began)
            polls = 0
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    return reached(seen, epoch)


@triton.jit
def expired(context, source, slot, epoch, seen, began):
    """Checks the time limit in a kernel's own wait loop, after several polls without success.

    All threads in the program call it, with equal arguments. The result is the next call's `began`,
    or -1 once the wait must end, because the limit has passed or the group has failed. The host
    gets the same record as from `wait`.

    Args:
        context: for any tensor in the communicator.
        source: rank awaited, for the error.
        slot: number for the error, such as a tile number.
        epoch: int32, expected.
        seen: int32, observed.
        began: int64, 0 in a wait's first call.
    """
    return _check(context, _WAIT, source, slot, epoch, seen, began)


@triton.jit
def disagree(context, peer, expected, seen):
    """Ends all waits on this rank, since a peer passed other arguments; the first call is recorded.

    Args:
        context: for any tensor in the communicator.
        peer: rank with the other arguments.
        expected: int32, this rank's argument digest, known to the host.
        seen: int32, the peer's digest.
    """
    _fail(tl.load(context + _TABLE), _DISAGREEMENT, _WAIT, peer, 0, expected, seen)


@triton.jit
def barrier(context, words, epoch):
    """Barrier over all ranks: rank r raises `words[r]` at each rank. True if all ranks came.

    One program on each rank calls it, with int32 epochs 1, 2, 3, ... It releases that program's
    earlier stores and acquires the other programs' stores; on failure see `wait`.

    Args:
        context: for the tensor that `words` points into.
        words: pointer to as many int32 as there are ranks.
        epoch: int32.
    """
    ranks = tl.arange(0, _MAX_RANKS)
    present = ranks < world_size(context)
    shifts = tl.load(context + _SHIFTS + ranks, mask=present, other=0)
    theirs = (words + rank(context)).to(tl.pointer_type(tl.int8)) + shifts
    tl.debug_barrier()
    epochs = tl.zeros([_MAX_RANKS], tl.int32) + epoch
    tl.atomic_xchg(
        theirs.to(tl.pointer_type(tl.int32)), epochs, mask=present, sem="release", scope="sys"
    )
    began = tl.cast(0, tl.int64)
    polls = 0
    first, seen = _first_missing(words, ranks, present, epochs)
    while (began >= 0) & (first < _MAX_RANKS):
        polls += 1
        if polls == POLLS:
            its = tl.sum(tl.where(ranks == first, seen, 0), axis=0)
            began = _check(context, _BARRIER, first, 0, epoch, its, began)
            polls = 0
        first, seen = _first_missing(words, ranks, present, epochs)
    tl.debug_barrier()
    return first == _MAX_RANKS


@triton.jit
def _first_missing(words, ranks, present, epochs):
    """Lowest rank whose word has not reached the epoch, else `_MAX_RANKS`; words from all ranks."""
    zeros = tl.zeros([_MAX_RANKS], tl.int32)
    seen = tl.atomic_add(words + ranks, zeros, mask=present, sem="acquire", scope="sys")
    missing = present & (reached(seen, epochs) == 0)
    return tl.min(tl.where(missing, ranks, _MAX_RANKS), axis=0), seen


@triton.jit
def last_arrival(mask, bit, all_bits):
    """True in the last of a kernel's programs, once in each round.

    Each program sets a bit once all stores are complete; the one that completes the mask clears
    it for the next round, which begins after that, for example in a later kernel. Release and
    acquire at GPU scope: the last program may signal peers on behalf of all stores.

    Args:
        mask: pointer to int32 in this GPU's memory, zero at first.
        bit: this program's bit number, 0 to 31.
        all_bits: int32 with all programs' bits.
    """
    tl.debug_barrier()
    own = (tl.cast(1, tl.int64) << bit).to(tl.int32)
    before = tl.atomic_or(mask, own, sem="acq_rel", scope="gpu")
    last = (before | own) == all_bits
    if last:
        tl.atomic_xchg(mask, 0, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    return last


@triton.jit
def _check(context, phase, source, slot, epoch, seen, began):
    """Checks a wait that began at `began` (0: now); returns that time, or -1 once it has ended.

    Threads that read a clock or a host word individually may differ, and a branch on the value
    would diverge them at later barriers. Here one thread reads, and the others take the value from
    memory, with scalar atomics.
    """
    tl.debug_barrier()
    table = tl.load(context + _TABLE)
    tl.atomic_max(context + _CLOCK, tl.cast(now(), tl.int64), sem="relaxed", scope="gpu")
    time = _read(context + _CLOCK)
    began = tl.where(began == 0, time, began)
    dead = _read(_at(table + _DEAD, tl.int32))
    limit = _read(_at(table + _LIMIT, tl.int64)).to(tl.uint64)
    looked = _at(table + _LOOKED, tl.int64)
    last = _read(looked)
    code = tl.cast(0, tl.int32)
    # Nested, so that one program at a time makes the exchange.
    if time - last >= _ABORT_CHECK_NS:  # noqa: SIM102
        if tl.atomic_cas(looked, last, time, sem="relaxed", scope="sys") == last:
            # Host memory: a plain load.
            abort = tl.load(_at(table + _ABORT, tl.int64))
            word = tl.load(_at(abort, tl.int32), volatile=True)
            aborted = context.to(tl.pointer_type(tl.int32)) + _HAS_ABORTED
            tl.atomic_xchg(aborted, word, sem="relaxed", scope="gpu")
            code = tl.where(_read(aborted) != 0, _ABORTED, 0)
    code = tl.where((code == 0) & ((time - began).to(tl.uint64) > limit), _TIMEOUT, code)
    if (code != 0) & (dead == 0):
        _fail(table, code, phase, source, slot, epoch, seen)
    return tl.where((code != 0) | (dead != 0), tl.cast(-1, tl.int64), began)


@triton.jit
def _read(pointer):
    """A word in this GPU's memory, equal in all of the program's threads."""
    return tl.atomic_add(pointer, 0, sem="relaxed", scope="sys")


@triton.jit
def _fail(table, code, phase, source, slot, epoch, seen):
    """Marks the domain dead; the first caller writes the record for the host."""
    if tl.atomic_cas(_at(table + _DEAD, tl.int32), 0, code, sem="relaxed", scope="sys") == 0:
        record = tl.load(_at(table + _RECORD, tl.int64))
        # Records about a proxy number ranks as its communicator does.
        own = tl.load(_at(table + _OWN_RANK, tl.int32))
        own = tl.where(phase >= _PROXY_WAIT, tl.load(_at(table + _PROXY_RANK, tl.int32)), own)
        tl.store(_at(record + _RECORD_RANK, tl.int32), own)
        tl.store(_at(record + _RECORD_PHASE, tl.int32), phase)
        tl.store(_at(record + _RECORD_PEER, tl.int32), source)
        tl.store(_at(record + _RECORD_CHANNEL, tl.int32), 0)
        tl.store(_at(record + _RECORD_SLOT, tl.int32), slot)
        tl.store(_at(record + _RECORD_EXPECTED, tl.int64), _unsigned(epoch))
        tl.store(_at(record + _RECORD_SEEN, tl.int64), _unsigned(seen))
        tl.debug_barrier()
        tl.atomic_xchg(_at(record + _RECORD_CODE, tl.int32), code, sem="release", scope="sys")


@triton.jit
def _at(address, dtype: tl.constexpr):
    return address.to(tl.pointer_type(dtype))


@triton.jit
def _unsigned(word):
    return tl.cast(word, tl.int64) & 0xFFFFFFFF
