"""Device functions for packets, which need no fence or flag, and rounds that programs count.

**Packets.** A packet is an int64 in an inbox: a 32-bit payload in the low half, the round's epoch
in the high half. A 64-bit store arrives whole, so a packet with this round's epoch has the payload
too, as in NCCL's LL protocol (see https://arxiv.org/abs/2507.04786). Stores and loads handle two
packets at a time where they lie side by side; each packet is whole.

**Inboxes.** A round's packets lie in the inbox half that the epoch's parity selects. A kernel ends
only after it has received what depends on packets from all ranks. So when a rank sends in round e +
2, its round e + 1 has ended, all ranks have sent in round e + 1, and hence their kernels for round
e have ended: all have read the half, whatever the shapes in these rounds were. Packets that an
earlier round with another shape has left there have earlier epochs; they would pass for new ones
only if they stayed for 2^32 rounds.

**Rounds.** Each program has the epoch of its last round in a separate word, so none waits for
others to begin or to end a round. Program 0 sets the words for programs that a smaller grid lacks.
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

#: Words of int32 where a state begins: each program's last round as an epoch.
MAX_PROGRAMS = 1024
_PROGRAMS = tl.constexpr(MAX_PROGRAMS)


@triton.jit
def last_round(state):
    """Last round's epoch, int32. If a kernel loads it first, it is there when needed."""
    return tl.load(state + tl.program_id(0))


@triton.jit
def keep_round(state, epoch):
    """Stores this round's epoch; all programs call it once, after they have sent.

    The block barrier stands between the last packet sent and the first poll, and between all
    threads' loads in `last_round` and the store.
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

    These are loaded ahead, as in `last_round`. Programs start with different ranks, in an order
    that depends on no load, since all that follows would wait for it.
    """
    found = ()
    for step in tl.static_range(ranks):
        found += (distance(context, (tl.program_id(0) + step) % ranks),)  # type: ignore[assignment]
    return found


@triton.jit
def send(inboxes, distances, offsets, packets, mask, ranks: tl.constexpr, but=None):
    """Stores packets at the same offsets in all ranks' inboxes, except at rank `but`."""
    for step in tl.static_range(ranks):
        peer = (inboxes.to(tl.pointer_type(tl.int8)) + distances[step]).to(inboxes.dtype)
        if but is None:
            tl.store(peer + offsets, packets, mask=mask)
        else:
            wanted = mask & ((tl.program_id(0) + step) % ranks != but)
            tl.store(peer + offsets, packets, mask=wanted)


@triton.jit
def half_of(epoch, half_by_16):
    """Offset of the inbox half that a round uses; `half_by_16`: packets in it, divided by 16."""
    return (epoch & 1).to(tl.int64) * half_by_16 * 16


@triton.jit
def pack(payload, epoch):
    """Packets with int32 or float32 payloads."""
    low = payload.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return low | (epoch.to(tl.int64) << 32)


@triton.jit
def float_of(packets):
    """Payloads as float32."""
    return packets.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def receive(context, inbox, mask, epoch, source, slot):
    """Packets from one source, and true once all have arrived; false on failure.

    Here and below, the block has at least as many elements as the program has threads: no two
    threads then read the same packet, and all threads see the same arrival count.

    Args:
        context: the inbox's context.
        inbox: block of int64 pointers.
        mask: int1 block; packets without it are 0.
        epoch: this round's epoch.
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
    """Sum of float32 payloads from all ranks, in rank order; true once all have arrived.

    Args:
        context: the inbox's context.
        inbox: block of pointers to rank 0's packets.
        stride: packets between one rank's and the next rank's.
        mask: int1 block.
        epoch: this round's epoch.
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
        context: the inbox's context.
        inbox: block of pointers to rank 0's packets.
        stride: packets between one rank's and the next rank's.
        own: word block: this rank's payloads.
        rank: this rank.
        mask: int1 block.
        epoch: this round's epoch.
        slot: number for the error.
        dtype: element dtype, see `parts_of`.
        ranks: number of ranks.
        group: ranks whose packets are loaded together.

    Returns:
        Sums over the low and the high elements, float32, and int1.
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
    """`receive_words` for payloads from all ranks: this rank has sent its own to itself."""
    none = tl.zeros(inbox.shape, tl.int32)
    rank = tl.cast(-1, tl.int32)
    return receive_words(context, inbox, stride, none, rank, mask, epoch, slot, dtype, ranks, group)


@triton.jit
def parts_of(words, dtype: tl.constexpr):
    """Low and high elements in words, as float32; for float32, both are the element."""
    if dtype == tl.float32:
        low = words.to(tl.float32, bitcast=True)
        high = low
    else:
        low, high = halves_of(words, dtype)
    return low, high


@triton.jit
def halves_of(words, dtype: tl.constexpr):
    """Low and high 16-bit values in int32 words, as float32."""
    low = words.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    high = (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def words_of(low, high, dtype: tl.constexpr):
    """Words from values, rounded to the dtype; `high` is unused for float32."""
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
    """`total` plus a group's arrived payloads; its last rank that misses packets, plus 1, or 0."""
    late = tl.zeros(inbox.shape, tl.int32)
    for index in tl.static_range(group):
        if first + index < ranks:
            packets = tl.load(inbox + (first + index) * stride, mask=mask, other=0, volatile=True)
            # The first is taken unchanged: -0 remains -0.
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
    """Block maximum: the same in all threads, through shared memory."""
    return tl.max(tl.ravel(values.to(tl.int32)), axis=0)


@triton.jit
def _expired(context, inbox, stride, mask, epoch, source, slot, began):
    """`expired` for a wait that misses packets from `source`."""
    packets = tl.load(inbox + source * stride, mask=mask, other=0, volatile=True)
    seen = _seen(packets, mask, epoch)
    return expired(context, source, slot, epoch, seen, began)


@triton.jit
def _seen(packets, mask, epoch):
    """Epoch of a packet that has not arrived, for the error."""
    distances = epoch.to(tl.int64) - (packets >> 32)
    farthest = tl.max(tl.ravel(tl.where(mask, distances & 0xFFFFFFFF, 0)), axis=0)
    return (epoch.to(tl.int64) - farthest).to(tl.int32)
