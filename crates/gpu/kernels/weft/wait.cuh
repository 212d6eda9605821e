// Bounded waits: for a flag, a packet, a barrier in shared memory.
//
// A wait that takes longer than the limit, or that the host aborts, marks the communicator dead, leaves a
// record in pinned memory and returns false: it never traps, which would take the whole context with it.
// The host raises at its next call.
#pragma once
#include "weft/order.cuh"
#include "weft/table.cuh"

namespace weft {

enum Code : u32 { TIMEOUT = 1, ABORTED = 2, CONCURRENT = 3, ORDER = 4, EXPERT = 5, CAPACITY = 6, RELEASED = 7 };

// Watch: phase and channel of a team, and the table and records of a failed wait.
struct Watch {
    Table *table;
    Record *records; // [0] what killed the communicator, [1] a notice
    const u32 *abort;
    u32 rank, channel, phase;

    WEFT_DEVICE bool dead() const { return *reinterpret_cast<volatile u32 *>(&table->dead) != 0; }

    // Marks the communicator dead; the first to do so leaves the record.
    WEFT_DEVICE void fail(u32 code, u32 peer, u32 slot, u64 expected, u64 seen) const;

    // Leaves a notice for the host, unless one is there already; the communicator lives on.
    WEFT_DEVICE void notice(u32 code, u32 peer, u32 slot, u64 expected, u64 seen) const;
};

// What follows is seldom called, so it is kept out of the way of the instructions that are, and takes its
// arguments in registers.
namespace seldom {

__device__ __noinline__ void write(Record *to, u32 code, u32 rank, u32 phase, u32 channel, u32 peer, u32 slot, u64 expected, u64 seen) {
    to->rank = rank, to->phase = phase, to->peer = peer, to->channel = channel, to->slot = slot;
    to->expected = expected, to->seen = seen;
    ptx::store_release_sys(&to->code, code);
}

__device__ __noinline__ void fail(Table *table, Record *records, u32 code, u32 rank, u32 phase, u32 channel, u32 peer, u32 slot, u64 expected, u64 seen) {
    if (atomicCAS(&table->dead, 0u, code) == 0) write(records, code, rank, phase, channel, peer, slot, expected, seen);
}

__device__ __noinline__ void notice(Table *table, Record *records, u32 code, u32 rank, u32 phase, u32 channel, u32 peer, u32 slot, u64 expected, u64 seen) {
    if (ptx::load_relaxed_sys(&records[1].code) != 0 || atomicCAS(&table->flagged, 0u, code) != 0) return;
    write(records + 1, code, rank, phase, channel, peer, slot, expected, seen);
    atomicExch(&table->flagged, 0u);
}

// Looks whether a wait that began at `began` (0: now) may go on; when it began, or OVER.
constexpr u64 OVER = ~0ull;
__device__ __noinline__ u64 look(Table *table, Record *records, const u32 *abort, u32 rank, u32 phase, u32 channel, u32 peer, u32 slot, u32 expected, u32 seen, u64 began) {
    constexpr u64 LOOK_NS = 50'000;
    const u64 now = ptx::globaltimer();
    if (began == 0) began = now;
    if (*reinterpret_cast<volatile u32 *>(&table->dead) != 0) return OVER;
    // One thread of the GPU looks for all: thousands at once would wait for each other for milliseconds.
    const u64 last = *reinterpret_cast<volatile u64 *>(&table->looked_ns);
    u32 code = 0;
    if (now - last >= LOOK_NS && atomicCAS(&table->looked_ns, last, now) == last && ptx::load_relaxed_sys(abort) != 0) code = ABORTED;
    else if (now - began > *reinterpret_cast<volatile u64 *>(&table->limit_ns)) code = TIMEOUT;
    if (code == 0) return began;
    fail(table, records, code, rank, phase, channel, peer, slot, expected, seen);
    return OVER;
}

} // namespace seldom

WEFT_DEVICE void Watch::fail(u32 code, u32 peer, u32 slot, u64 expected, u64 seen) const {
    seldom::fail(table, records, code, rank, phase, channel, peer, slot, expected, seen);
}

WEFT_DEVICE void Watch::notice(u32 code, u32 peer, u32 slot, u64 expected, u64 seen) const {
    seldom::notice(table, records, code, rank, phase, channel, peer, slot, expected, seen);
}

// Looks between two polls, seldom, whether to go on waiting.
class Patience {
    u64 began_ = 0;
    u32 polls_ = 0;

  public:
    // False once the wait is over: `seen` in place of `expected` from `peer`.
    WEFT_DEVICE bool more(const Watch &watch, u32 peer, u32 slot, u32 expected, u32 seen) {
        if (++polls_ % 64 != 0) return true;
        began_ = seldom::look(watch.table, watch.records, watch.abort, watch.rank, watch.phase, watch.channel, peer, slot, expected, seen, began_);
        return began_ != seldom::OVER;
    }
};

// Waits until `word` is `epoch`; false if that took too long. Acquire, in this thread alone.
//
// Equality, since words that one round in many raises may be older than half of all epochs.
WEFT_DEVICE bool wait(const Watch &watch, const u32 *word, u32 epoch, u32 peer, u32 slot) {
    Patience patience;
    for (;;) {
        const u32 seen = ptx::load_acquire_sys(word);
        if (seen == epoch) return true;
        if (!patience.more(watch, peer, slot, epoch, seen)) return false;
    }
}

// Whether a counter that every round raises has come to `epoch`; counters wrap around.
WEFT_DEVICE bool reached(u32 seen, u32 epoch) { return static_cast<i32>(seen - epoch) >= 0; }

// The same for such a counter, whose writer may be rounds ahead.
WEFT_DEVICE bool wait_at_least(const Watch &watch, const u32 *word, u32 epoch, u32 peer, u32 slot) {
    Patience patience;
    for (;;) {
        const u32 seen = ptx::load_acquire_sys(word);
        if (reached(seen, epoch)) return true;
        if (!patience.more(watch, peer, slot, epoch, seen)) return false;
    }
}

// Phase of an mbarrier in shared memory. Bounded by 2^26 polls, which takes no registers where these are scarce; false
// beyond them. A caller whose producer waits for a peer repeats it.
WEFT_DEVICE bool wait_phase(u64 *barrier, u32 parity) {
    constexpr u32 MOST_POLLS = 1u << 26;
    for (u32 polls = 0; polls < MOST_POLLS; ++polls)
        if (ptx::mbarrier_try_wait(barrier, parity)) return true;
    return false;
}

// Such a wait failed: ends the communicator.
WEFT_DEVICE void phase_failed(const Watch &watch, u32 parity) { watch.fail(TIMEOUT, watch.rank, 0, parity, parity ^ 1); }

// A value and its epoch in one word: whole or not there, so it needs no flag after it.
WEFT_DEVICE u64 packet(u32 epoch, u32 value) { return static_cast<u64>(epoch) << 32 | value; }

// Waits for a packet of `epoch` and takes its value. Acquire, in this thread alone.
WEFT_DEVICE bool wait_packet(const Watch &watch, const u64 *word, u32 epoch, u32 peer, u32 slot, u32 &value) {
    Patience patience;
    for (;;) {
        const u64 seen = ptx::load_acquire_sys(word);
        value = static_cast<u32>(seen);
        if (seen >> 32 == epoch) return true;
        if (!patience.more(watch, peer, slot, epoch, seen >> 32)) return false;
    }
}

} // namespace weft
