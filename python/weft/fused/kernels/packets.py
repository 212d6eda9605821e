"""Device functions: packets, which need no fence and no flag, and rounds of programs by themselves.

**Packets.** A packet is an int64 in an inbox: a payload of 32 bits below, the epoch of its round
above. A store of 64 bits arrives whole, so a packet with the epoch of this round has its payload.
Stores and loads are of two packets where they lie side by side; each of the two is whole by itself.

**Inboxes.** Packets of a round lie in the half of the inbox that the parity of its epoch selects. A
kernel ends only after it has received what depends on packets of all ranks. So when a rank sends in
round e + 2, its round e + 1 has ended, all ranks have sent in round e + 1, and hence their kernels
of round e have ended: all have read the half, whatever the shapes of these rounds were. Packets
of earlier rounds that a round of another shape has left there have earlier epochs; they would be
taken for new ones only if they stayed for 2^32 rounds.

**Rounds.** Each program has the epoch of its last round in a word of its own, so none waits for
others to begin or to end a round. Program 0 sets the words of programs that a smaller grid lacks.
"""

import triton
import triton.language as tl

from weft.triton.clock import POLLS
from weft.triton.primitives import distance, expired

__all__ = [
    "MAX_PROGRAMS",
    "distances_of",
    "float_of",
    "half_of",
    "halves_of",
    "keep_round",
    "last_round",
    "pack",
    "parts_of",
    "receive",
    "receive_halves",
    "receive_sum",
    "receive_words",
    "send",
    "words_of",
]

#: Words of int32 at the begin of a state: the epoch of each program's last round.
MAX_PROGRAMS = 1024
_PROGRAMS = tl.constexpr(MAX_PROGRAMS)


@triton.jit
def last_round(state):
    """Epoch of the last round, int32. Loaded at the begin of a kernel, it is there when needed."""
    return tl.load(state + tl.program_id(0))


@triton.jit
def keep_round(state, epoch):
    """Stores the epoch of this round; all programs call it once, after they have sent.

    The block barrier in it stands between the last packet sent and the first poll, and between
    the loads of all threads in `last_round` and the store.
    """
    program = tl.program_id(0)
    tl.debug_barrier()
    tl.store(state + program, epoch)
    if program == 0:
        others = tl.arange(0, _PROGRAMS)
        epochs = tl.zeros([_PROGRAMS], tl.int32) + epoch
        tl.store(state + others, epochs, mask=others >= tl.num_programs(0))


@triton.jit
def distances_of(context, ranks: tl.constexpr):
    """Distances to all ranks, in the order in which `send` needs them.

    Loaded ahead, as `last_round`. Programs begin with different ranks, in an order that depends on
    no load, since all that follows would wait for it.
    """
    found = ()
    for step in tl.static_range(ranks):
        found += (distance(context, (tl.program_id(0) + step) % ranks),)  # type: ignore[assignment]
    return found


@triton.jit
def send(inboxes, distances, offsets, packets, mask, ranks: tl.constexpr, but=None):
    """Stores packets at the same offsets of the inboxes of all ranks, but that of rank `but`."""
    for step in tl.static_range(ranks):
        peer = (inboxes.to(tl.pointer_type(tl.int8)) + distances[step]).to(inboxes.dtype)
        if but is None:
            tl.store(peer + offsets, packets, mask=mask)
        else:
            wanted = mask & ((tl.program_id(0) + step) % ranks != but)
            tl.store(peer + offsets, packets, mask=wanted)


@triton.jit
def half_of(epoch, half_by_16):
    """Offset of the half of the inbox that a round uses; `half_by_16`: its packets, by 16."""
    return (epoch & 1).to(tl.int64) * half_by_16 * 16


@triton.jit
def pack(payload, epoch):
    """Packets of int32 or float32 payloads."""
    low = payload.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return low | (epoch.to(tl.int64) << 32)


@triton.jit
def float_of(packets):
    """Payloads as float32."""
    return packets.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def receive(context, inbox, mask, epoch, source, slot):
    """Packets of one source, and true once all have arrived; false on failure.

    Here and below, the block has at least as many elements as the program has threads: no two
    threads then read a packet by themselves, and the number that have arrived is the same for all.

    Args:
        context: of the inbox.
        inbox: block of pointers to int64.
        mask: block of int1; packets without it are 0.
        epoch: of the round.
        source: rank, for the error.
        slot: number for the error.
    """
    began = tl.cast(0, tl.int64)
    polls = 0
    packets = tl.load(inbox, mask=mask, other=0, volatile=True)
    missing = _most(mask & (_epochs(packets) != epoch))
    while (began >= 0) & (missing != 0):
        polls += 1
        if polls == POLLS:
            seen = _seen(packets, mask, epoch)
            began = expired(context, source, slot, epoch, seen, began)
            polls = 0
        packets = tl.load(inbox, mask=mask, other=0, volatile=True)
        missing = _most(mask & (_epochs(packets) != epoch))
    return packets, missing == 0


@triton.jit
def receive_sum(
    context, inbox, stride, mask, epoch, slot, ranks: tl.constexpr, group: tl.constexpr
):
    """Sum of the float32 payloads of all ranks, in rank order; true once all have arrived.

    Args:
        context: of the inbox.
        inbox: block of pointers to the packets of rank 0.
        stride: packets from those of a rank to those of the next.
        mask: block of int1.
        epoch: of the round.
        slot: number for the error.
        ranks: number of ranks.
        group: ranks whose packets are loaded together, as registers allow.
    """
    total = tl.zeros(inbox.shape, tl.float32)
    fine = epoch == epoch
    for first in tl.static_range(0, ranks, group):
        began = tl.cast(0, tl.int64)
        polls = 0
        sums, missing = _sum(total, inbox, stride, mask, epoch, first, ranks, group)
        while (began >= 0) & (missing != 0):
            polls += 1
            if polls == POLLS:
                began = _expired(context, inbox, stride, mask, epoch, missing - 1, slot, began)
                polls = 0
            sums, missing = _sum(total, inbox, stride, mask, epoch, first, ranks, group)
        total = sums
        fine &= missing == 0
    return total, fine


@triton.jit
def receive_words(
    context,
    inbox,
    stride,
    own,
    rank,
    mask,
    epoch,
    slot,
    dtype: tl.constexpr,
    ranks: tl.constexpr,
    group: tl.constexpr,
):
    """Sum of payloads in rank order, and true once all have arrived; this rank sends none.

    Args:
        context: of the inbox.
        inbox: block of pointers to the packets of rank 0.
        stride: packets from those of a rank to those of the next.
        own: block of words: the payloads of this rank.
        rank: this rank.
        mask: block of int1.
        epoch: of the round.
        slot: number for the error.
        dtype: of the elements, see `parts_of`.
        ranks: number of ranks.
        group: ranks whose packets are loaded together.

    Returns:
        Sums of the low and of the high elements, float32, and int1.
    """
    low = tl.zeros(inbox.shape, tl.float32)
    high = tl.zeros(inbox.shape, tl.float32)
    fine = epoch == epoch
    for first in tl.static_range(0, ranks, group):
        began = tl.cast(0, tl.int64)
        polls = 0
        lows, highs, missing = _sum_words(
            low, high, inbox, stride, own, rank, mask, epoch, dtype, first, ranks, group
        )
        while (began >= 0) & (missing != 0):
            polls += 1
            if polls == POLLS:
                began = _expired(context, inbox, stride, mask, epoch, missing - 1, slot, began)
                polls = 0
            lows, highs, missing = _sum_words(
                low, high, inbox, stride, own, rank, mask, epoch, dtype, first, ranks, group
            )
        low, high = lows, highs
        fine &= missing == 0
    return low, high, fine


@triton.jit
def receive_halves(
    context,
    inbox,
    stride,
    mask,
    epoch,
    slot,
    dtype: tl.constexpr,
    ranks: tl.constexpr,
    group: tl.constexpr,
):
    """`receive_words` of payloads of all ranks: this rank has sent its own to itself."""
    none = tl.zeros(inbox.shape, tl.int32)
    rank = tl.cast(-1, tl.int32)
    return receive_words(context, inbox, stride, none, rank, mask, epoch, slot, dtype, ranks, group)


@triton.jit
def parts_of(words, dtype: tl.constexpr):
    """Low and high elements of words, as float32; of float32, both are the element."""
    if dtype == tl.float32:
        low = words.to(tl.float32, bitcast=True)
        high = low
    else:
        low, high = halves_of(words, dtype)
    return low, high


@triton.jit
def halves_of(words, dtype: tl.constexpr):
    """Low and high values of 16 bits in int32 words, as float32."""
    low = words.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    high = (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def words_of(low, high, dtype: tl.constexpr):
    """Words of values, rounded to the dtype; `high` is not used if that is float32."""
    if dtype == tl.float32:
        words = low
    else:
        below = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        above = high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
        words = below | (above << 16)
    return words


@triton.jit
def _sum(
    total,
    inbox,
    stride,
    mask,
    epoch,
    first: tl.constexpr,
    ranks: tl.constexpr,
    group: tl.constexpr,
):
    """`total` and what is there of a group, and its last rank that misses packets, plus 1, or 0."""
    late = tl.zeros(inbox.shape, tl.int32)
    for index in tl.static_range(group):
        if first + index < ranks:
            packets = tl.load(inbox + (first + index) * stride, mask=mask, other=0, volatile=True)
            # The first as it is: -0 remains -0.
            values = float_of(packets)
            total = values if first + index == 0 else total + values
            late = tl.where(_epochs(packets) != epoch, first + index + 1, late)
    return total, _most(tl.where(mask, late, 0))


@triton.jit
def _sum_words(
    low,
    high,
    inbox,
    stride,
    own,
    rank,
    mask,
    epoch,
    dtype: tl.constexpr,
    first: tl.constexpr,
    ranks: tl.constexpr,
    group: tl.constexpr,
):
    late = tl.zeros(inbox.shape, tl.int32)
    for index in tl.static_range(group):
        if first + index < ranks:
            is_own = rank == first + index
            packets = tl.load(
                inbox + (first + index) * stride,
                mask=mask & (rank != first + index),
                other=0,
                volatile=True,
            )
            words = tl.where(is_own, own.to(tl.int32, bitcast=True), packets.to(tl.int32))
            lows, highs = parts_of(words, dtype)
            low = lows if first + index == 0 else low + lows
            high = highs if first + index == 0 else high + highs
            is_late = (_epochs(packets) != epoch) & (rank != first + index)
            late = tl.where(is_late, first + index + 1, late)
    return low, high, _most(tl.where(mask, late, 0))


@triton.jit
def _epochs(packets):
    return (packets >> 32).to(tl.int32)


@triton.jit
def _most(values):
    """Largest value of a block: the same in all threads, by way of shared memory."""
    return tl.max(tl.ravel(values.to(tl.int32)), axis=0)


@triton.jit
def _expired(context, inbox, stride, mask, epoch, source, slot, began):
    """`expired` of a wait that misses packets of `source`."""
    packets = tl.load(inbox + source * stride, mask=mask, other=0, volatile=True)
    seen = _seen(packets, mask, epoch)
    return expired(context, source, slot, epoch, seen, began)


@triton.jit
def _seen(packets, mask, epoch):
    """The epoch of a packet that has not arrived, for the error."""
    distances = epoch.to(tl.int64) - (packets >> 32)
    farthest = tl.max(tl.ravel(tl.where(mask, distances & 0xFFFFFFFF, 0)), axis=0)
    return (epoch.to(tl.int64) - farthest).to(tl.int32)
