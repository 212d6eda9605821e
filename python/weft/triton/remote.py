"""Device functions: puts to ranks on any host, which a host thread sends, and waits for them.

`context` is `weft.triton.Proxy.context`, or the context of a symmetric tensor in `Proxy.local`. A
put names windows, words and ranks by number: windows and words as they were passed to `Proxy`,
ranks as in the communicator that it was made with.

Memory order: a put releases all earlier stores by the program, behind a block barrier and
system-wide, before the host sees the command. The host raises a word behind the bytes; a wait
acquires it, and ends with a block barrier. Each quarter of a command has its use number stored with
release, so nothing is assumed about wide stores to host memory.
"""

import triton
import triton.language as tl

from weft.triton import layout
from weft.triton.clock import POLLS
from weft.triton.primitives import _at, _check, _read, _unsigned, reached

__all__ = [
    "remote_drained",
    "remote_put_signal",
    "remote_rank",
    "remote_release",
    "remote_scatter",
    "remote_signal",
    "remote_wait",
    "remote_world_size",
]

_TABLE = tl.constexpr(layout.CONTEXT_TABLE // 8)
_DEAD = tl.constexpr(layout.TABLE_DEAD)
_RING = tl.constexpr(layout.TABLE_RING)
_TICKET = tl.constexpr(layout.TABLE_TICKET)
_RELEASED = tl.constexpr(layout.TABLE_RELEASED)
_SEEN_RELEASED = tl.constexpr(layout.TABLE_SEEN_RELEASED)
_POLLER = tl.constexpr(layout.TABLE_POLLER)
_WORDS = tl.constexpr(layout.TABLE_WORDS)
_LIST = tl.constexpr(layout.TABLE_LIST)
_LENGTHS = tl.constexpr(layout.TABLE_LENGTHS)
_SLOTS = tl.constexpr(layout.TABLE_SLOTS)
_READERS = tl.constexpr(layout.TABLE_READERS)
_WORDS_EACH = tl.constexpr(layout.TABLE_WORDS_EACH)
_PROXY_RANK = tl.constexpr(layout.TABLE_PROXY_RANK)
_PROXY_RANKS = tl.constexpr(layout.TABLE_PROXY_RANKS)
_WAIT = tl.constexpr(layout.PHASE_PROXY_WAIT)
_PUSH = tl.constexpr(layout.PHASE_PROXY_PUSH)

# Kinds and flag as in `weft/command.cuh`; a test compares them.
_PUT, _SIGNAL, _SCATTER, _RELEASE, _DRAINED = (
    tl.constexpr(1),
    tl.constexpr(2),
    tl.constexpr(3),
    tl.constexpr(4),
    tl.constexpr(5),
)
_HOLD = tl.constexpr(1)
_SLOT_BYTES = tl.constexpr(64)
_READS = tl.constexpr(1 << 32)


@triton.jit
def remote_rank(context):
    """This rank in the proxy's communicator, int32; see `Proxy`."""
    return tl.load(_at(tl.load(context + _TABLE) + _PROXY_RANK, tl.int32))


@triton.jit
def remote_world_size(context):
    """Number of ranks in the proxy's communicator, int32; 0 without a proxy."""
    return tl.load(_at(tl.load(context + _TABLE) + _PROXY_RANKS, tl.int32))


@triton.jit
def remote_put_signal(
    context,
    rank,
    word,
    source_window,
    source_offset,
    window,
    offset,
    length,
    hold: tl.constexpr = False,
):
    """Writes bytes from a window here into a window at a rank, then raises a word there by 1.

    It returns once the command is in the ring: true, or false once the wait limit has passed, after
    a wait has failed, or without a proxy. For the source's next use see `remote_drained`. Puts from
    one program to one rank and word are counted in order.

    Args:
        context: as above.
        rank: destination, another rank.
        word: word number; the destination waits for it with `remote_wait`.
        source_window: window number here.
        source_offset: first byte in it.
        window: window number at `rank`.
        offset: first byte there.
        length: bytes, 1 to `Proxy.max_put_bytes`.
        hold: true for a word with `hold`: the destination gives the round back by
            `remote_release`.
    """
    head = _head(_PUT, rank, hold)
    windows = tl.cast(source_window, tl.int32) | (tl.cast(window, tl.int32) << 16)
    return _push(context, head, length, windows, word, source_offset, 0, offset, 0)


@triton.jit
def remote_signal(context, rank, word, hold: tl.constexpr = False):
    """Raises a word at a rank by 1, without bytes; as `remote_put_signal`."""
    return _push(context, _head(_SIGNAL, rank, hold), 0, 0, word, 0, 0, 0, 0)


@triton.jit
def remote_scatter(
    context,
    template,
    word,
    source_window,
    source_offset,
    window,
    offset,
    lengths,
    first,
    count,
    hold: tl.constexpr = False,
):
    """Writes to a template's first `count` ranks, and raises a word at each by 1: one command.

    As `remote_put_signal` for each rank, with the template's offsets added. The lengths travel in a
    list in host memory, whose entries from `first` to `first + count` may be stored to again once a
    `remote_drained` behind this command has raised its word.

    Args:
        context: as above.
        template: number in `Proxy(templates=...)`.
        word: word number, the same at all destinations.
        source_window: window number here.
        source_offset: first byte in it, before the template's offset.
        window: window number at the destinations.
        offset: first byte there, before the template's offset.
        lengths: int32 `[n]`, `n` a power of two and at least `count`: bytes for each destination, 0
            to `Proxy.max_put_bytes`; 0 only raises the word.
        first: first entry in the list, so that `first + count` is at most `Proxy(lengths=...)`; the
            host refuses a command whose lengths are not all in the list.
        count: destinations, 1 to the template's.
        hold: as for `remote_put_signal`.
    """
    table = tl.load(context + _TABLE)
    ring = tl.load(_at(table + _RING, tl.int64))
    each = tl.arange(0, lengths.shape[0])
    wide_first, wide_count = tl.cast(first, tl.int64), tl.cast(count, tl.int64)
    at = tl.load(_at(table + _LIST, tl.int64)) + 4 * wide_first
    # Out of range nothing is stored, and the host refuses the command for its first entry.
    entries = tl.load(_at(table + _LENGTHS, tl.int32))
    inside = (ring != 0) & (wide_first >= 0) & (wide_first + wide_count <= entries)
    inside &= wide_count <= lengths.shape[0]
    tl.store(_at(at, tl.int32) + each, lengths, mask=(each < count) & inside)
    head = _head(_SCATTER, template, hold)
    windows = tl.cast(source_window, tl.int32) | (tl.cast(window, tl.int32) << 16)
    first = tl.where(inside, wide_first, -1)
    return _push(context, head, 0, windows, word, source_offset, count, offset, first)


@triton.jit
def remote_release(context, source, word, rounds):
    """Gives `rounds` rounds from `source` back, after all programs' loads from them.

    Args:
        context: as above.
        source: rank that put them with `hold`.
        word: word number.
        rounds: 1 up to the number of rounds that have arrived and were not given back.
    """
    return _push(context, _head(_RELEASE, source, False), 0, 0, word, 0, rounds, 0, 0)


@triton.jit
def remote_drained(context, word):
    """Raises this rank's own word by 1 once the sources of all earlier puts may be reused.

    Wait for it with `remote_wait(context, remote_rank(context), word, count)`.
    """
    return _push(context, _head(_DRAINED, 0, False), 0, 0, word, 0, 0, 0, 0)


@triton.jit
def remote_wait(context, source, word, rounds):
    """Waits until `rounds` puts and signals from a rank have raised a word here, modulo 2^32.

    Acquire: all threads observe the bytes. False once the wait limit has passed or the proxy has
    failed: `Proxy.check` raises the error. False at once without a proxy, or if there is no such
    rank or word.

    Args:
        context: as above.
        source: rank that raises the word; this rank for `remote_drained`.
        word: word number.
        rounds: int32, counted since the proxy was made.
    """
    table = tl.load(context + _TABLE)
    each = tl.load(_at(table + _WORDS_EACH, tl.int32))
    ranks = tl.load(_at(table + _PROXY_RANKS, tl.int32))
    fine = tl.load(_at(table + _RING, tl.int64)) != 0
    fine &= (source >= 0) & (source < ranks) & (word >= 0) & (word < each)
    if fine:
        position = tl.cast(source, tl.int64) * each + word
        address = _at(tl.load(_at(table + _WORDS, tl.int64)) + 4 * position, tl.int32)
        readers = tl.load(_at(table + _READERS, tl.int64))
        reader = _at(readers + 8 * position, tl.int64)
        fine = _reach(context, address, reader, readers != 0, rounds, source, word)
    tl.debug_barrier()
    return fine


@triton.jit
def _reach(context, address, reader, elects, rounds, source, word):
    """Waits for a word, as `weft::wait_rounds` does; without the block barrier.

    If it elects, one waiting program for each word reads it, over PCIe, and publishes it for the
    others.
    """
    began = tl.cast(0, tl.int64)
    polls = 0
    recent = 0
    # 1: it reads for all; 2: each wait reads.
    reads = tl.where(elects, 0, 2)
    seen = tl.atomic_add(address, 0, sem="acquire", scope="sys")
    while (began >= 0) & (reached(seen, rounds) == 0):
        if reads != 0:
            before = seen
            seen = tl.atomic_add(address, 0, sem="acquire", scope="sys")
            if (reads == 1) & (seen != before):
                _publish(reader, seen, _READS)
        else:
            published = tl.atomic_add(reader, 0, sem="acquire", scope="sys")
            recent = tl.where(published >= _READS, 1, recent)
            seen = tl.where(recent != 0, published.to(tl.int32), seen)
            if (published < _READS) & (reached(seen, rounds) == 0):
                tl.debug_barrier()
                mine = _READS | _unsigned(seen)
                found = tl.atomic_cas(reader, published, mine, sem="release", scope="sys")
                reads = (found == published).to(tl.int32)
                recent = 1
        polls += 1
        if (polls >= POLLS) & (reached(seen, rounds) == 0):
            began = _check(context, _WAIT, source, word, rounds, seen, began)
            polls = 0
    if reads == 1:
        _publish(reader, seen, 0)
    return reached(seen, rounds)


@triton.jit
def _publish(reader, seen, state):
    """Publishes the value of a word that this program has acquired."""
    tl.debug_barrier()
    tl.atomic_xchg(reader, _unsigned(seen) | state, sem="release", scope="sys")


@triton.jit
def _head(kind: tl.constexpr, rank, hold: tl.constexpr):
    flags: tl.constexpr = _HOLD.value if hold else 0
    return tl.cast(rank, tl.int32) << 16 | (kind | flags << 8)


@triton.jit
def _room(context, table, ticket, slots):
    """Waits until a ticket's slot was released, as `weft::wait_for_room` does; false on failure.

    One waiting program at a time reads the host's count over PCIe, and publishes it for the others.
    """
    known = _at(table + _SEEN_RELEASED, tl.int64)
    poller = _at(table + _POLLER, tl.int32)
    needed = (ticket - slots + 1).to(tl.int32)
    slot = (ticket % slots).to(tl.int32)
    began = tl.cast(0, tl.int64)
    polls = 0
    is_poller = 0
    seen = tl.atomic_add(known, 0, sem="relaxed", scope="sys")
    while (began >= 0) & (ticket - seen >= slots):
        if is_poller == 0:
            is_poller = (tl.atomic_cas(poller, 0, 1, sem="relaxed", scope="sys") == 0).to(tl.int32)
        if is_poller != 0:
            released = tl.load(_at(table + _RELEASED, tl.int64))
            seen = tl.atomic_add(_at(released, tl.int64), 0, sem="acquire", scope="sys")
            tl.atomic_max(known, seen, sem="relaxed", scope="sys")
        else:
            seen = tl.atomic_add(known, 0, sem="relaxed", scope="sys")
        polls += 1
        if (polls >= POLLS) & (ticket - seen >= slots):
            began = _check(context, _PUSH, -1, slot, needed, seen.to(tl.int32), began)
            polls = 0
    if is_poller != 0:
        tl.atomic_xchg(poller, 0, sem="relaxed", scope="sys")
    return ticket - seen < slots


@triton.jit
def _push(context, head, length, windows, word, source, count, destination, first):
    """Pushes a command, as `weft::push` does; true if it is in the ring."""
    table = tl.load(context + _TABLE)
    ring = tl.load(_at(table + _RING, tl.int64))
    fine = (ring != 0) & (_read(_at(table + _DEAD, tl.int32)) == 0)
    if fine:
        ticket = tl.atomic_add(_at(table + _TICKET, tl.int64), 1, sem="relaxed", scope="sys")
        slots = tl.load(_at(table + _SLOTS, tl.int32)).to(tl.int64)
        fine = _room(context, table, ticket, slots)
        at = ring + ticket % slots * _SLOT_BYTES
        low = _at(at, tl.int32)
        wide_length, wide_source = tl.cast(length, tl.int64), tl.cast(source, tl.int64)
        wide_destination = tl.cast(destination, tl.int64)
        tl.store(low, head, mask=fine)
        tl.store(low + 1, wide_length.to(tl.int32), mask=fine)
        tl.store(low + 2, (wide_length >> 32).to(tl.int32), mask=fine)
        tl.store(low + 4, windows, mask=fine)
        tl.store(low + 5, tl.cast(word, tl.int32), mask=fine)
        tl.store(low + 6, 0, mask=fine)
        tl.store(low + 8, wide_source.to(tl.int32), mask=fine)
        tl.store(low + 9, (wide_source >> 32).to(tl.int32), mask=fine)
        tl.store(low + 10, tl.cast(count, tl.int32), mask=fine)
        tl.store(low + 12, wide_destination.to(tl.int32), mask=fine)
        tl.store(low + 13, (wide_destination >> 32).to(tl.int32), mask=fine)
        tl.store(low + 14, tl.cast(first, tl.int32), mask=fine)
        tl.debug_barrier()
        use = (ticket // slots + 1).to(tl.int32)
        quarters = tl.arange(0, 4)
        tl.atomic_xchg(
            low + 4 * quarters + 3,
            tl.zeros([4], tl.int32) + use,
            mask=(quarters < 4) & fine,
            sem="release",
            scope="sys",
        )
    return fine
