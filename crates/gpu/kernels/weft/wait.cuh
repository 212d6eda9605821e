// Bounded waits for a flag, a packet, an mbarrier in shared memory.
//
// A wait that exceeds the limit, or that the host aborts, marks the communicator dead, writes a record into pinned
// memory and returns false. It does not trap, which would destroy the CUDA context. The host raises the error at
// the next call.
#pragma once
#include "weft/order.cuh"
#include "weft/table.cuh"

namespace weft {

enum Code : u32 { TIMEOUT = 1, ABORTED = 2, CONCURRENT = 3, ORDER = 4, EXPERT = 5, CAPACITY = 6, RELEASED = 7, PLACEMENT = 8, OTHER_PLAN = 9 };

// Watch: a team's phase and channel, with the table and records for failed waits.
struct Watch {
    Table *table;
    Record *records; // [0] the fatal one, [1] a notice
    const u32 *abort;
    u32 rank, channel, phase;

    WEFT_DEVICE bool dead() const { return *reinterpret_cast<volatile u32 *>(&table->dead) != 0; }

    // Marks the communicator dead; the first caller writes the record.
    WEFT_DEVICE void fail(u32 code, u32 peer, u32 slot, u64 expected, u64 seen) const;

    // Writes a notice for the host, unless one is pending; the communicator continues.
    WEFT_DEVICE void notice(u32 code, u32 peer, u32 slot, u64 expected, u64 seen) const;
};

// Rarely called functions: not inlined, so that they stay out of the hot code, with arguments in registers.
namespace cold {

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

// Checks a wait that began at `began` (0: now); returns the start time, or EXPIRED.
constexpr u64 EXPIRED = ~0ull;
__device__ __noinline__ u64 check(Table *table, Record *records, const u32 *abort, u32 rank, u32 phase, u32 channel, u32 peer, u32 slot, u32 expected, u32 seen, u64 began) {
    constexpr u64 ABORT_CHECK_NS = 50'000;
    const u64 now = ptx::globaltimer();
    if (began == 0) began = now;
    if (*reinterpret_cast<volatile u32 *>(&table->dead) != 0) return EXPIRED;
    // One GPU thread reads the abort word for all: thousands of concurrent reads take milliseconds.
    const u64 last = *reinterpret_cast<volatile u64 *>(&table->looked_ns);
    u32 code = 0;
    if (now - last >= ABORT_CHECK_NS && atomicCAS(&table->looked_ns, last, now) == last && ptx::load_relaxed_sys(abort) != 0) code = ABORTED;
    else if (now - began > *reinterpret_cast<volatile u64 *>(&table->limit_ns)) code = TIMEOUT;
    if (code == 0) return began;
    fail(table, records, code, rank, phase, channel, peer, slot, expected, seen);
    return EXPIRED;
}

} // namespace cold

WEFT_DEVICE void Watch::fail(u32 code, u32 peer, u32 slot, u64 expected, u64 seen) const {
    cold::fail(table, records, code, rank, phase, channel, peer, slot, expected, seen);
}

WEFT_DEVICE void Watch::notice(u32 code, u32 peer, u32 slot, u64 expected, u64 seen) const {
    cold::notice(table, records, code, rank, phase, channel, peer, slot, expected, seen);
}

// Wait limit, checked every 64 polls.
class PollBudget {
    u64 began_ = 0;
    u32 polls_ = 0;

  public:
    // False once the wait has expired, with `seen` in place of `expected` from `peer`.
    WEFT_DEVICE bool more(const Watch &watch, u32 peer, u32 slot, u32 expected, u32 seen) {
        if (++polls_ % 64 != 0) return true;
        began_ = cold::check(watch.table, watch.records, watch.abort, watch.rank, watch.phase, watch.channel, peer, slot, expected, seen, began_);
        return began_ != cold::EXPIRED;
    }
};

// Waits until `word` equals `epoch`; false on timeout. Acquire, only in this thread.
//
// Equality, since a word that is raised in few rounds may lag by more than half the epoch range.
WEFT_DEVICE bool wait(const Watch &watch, const u32 *word, u32 epoch, u32 peer, u32 slot) {
    PollBudget budget;
    for (;;) {
        const u32 seen = ptx::load_acquire_sys(word);
        if (seen == epoch) return true;
        if (!budget.more(watch, peer, slot, epoch, seen)) return false;
    }
}

// True if a counter that each round raises has reached `epoch`; counters wrap around.
WEFT_DEVICE bool reached(u32 seen, u32 epoch) { return static_cast<i32>(seen - epoch) >= 0; }

// Waits until such a counter has reached `epoch`; the writer may be rounds ahead. Acquire, only in this thread.
WEFT_DEVICE bool wait_at_least(const Watch &watch, const u32 *word, u32 epoch, u32 peer, u32 slot) {
    PollBudget budget;
    for (;;) {
        const u32 seen = ptx::load_acquire_sys(word);
        if (reached(seen, epoch)) return true;
        if (!budget.more(watch, peer, slot, epoch, seen)) return false;
    }
}

// Waits for an mbarrier phase in shared memory; false after 2^26 polls, a bound that takes no registers. A caller
// whose producer waits for a peer repeats it.
WEFT_DEVICE bool wait_phase(u64 *barrier, u32 parity) {
    constexpr u32 MAX_POLLS = 1u << 26;
    for (u32 polls = 0; polls < MAX_POLLS; ++polls)
        if (ptx::mbarrier_try_wait(barrier, parity)) return true;
    return false;
}

// Ends the communicator after a failed wait_phase.
WEFT_DEVICE void phase_failed(const Watch &watch, u32 parity) { watch.fail(TIMEOUT, watch.rank, 0, parity, parity ^ 1); }

// A value and an epoch in one word, written atomically, so that no flag follows it.
WEFT_DEVICE u64 packet(u32 epoch, u32 value) { return static_cast<u64>(epoch) << 32 | value; }

// Waits for a packet with `epoch` and returns the value. Acquire, only in this thread.
WEFT_DEVICE bool wait_packet(const Watch &watch, const u64 *word, u32 epoch, u32 peer, u32 slot, u32 &value) {
    PollBudget budget;
    for (;;) {
        const u64 seen = ptx::load_acquire_sys(word);
        value = static_cast<u32>(seen);
        if (seen >> 32 == epoch) return true;
        if (!budget.more(watch, peer, slot, epoch, seen >> 32)) return false;
    }
}

} // namespace weft
