// What kernels that talk to peers are written with: put, put_signal, signal, wait, barrier.
//
// Memory order, once for all of them. Payload is stored by all threads of a team; a barrier of the team
// follows; then one thread releases an epoch at system scope. The waiter acquires the epoch in one
// thread; a barrier of its team follows; then all of them read. Bulk copies are not covered by a
// barrier of threads: the thread that issued them waits for their full completion, and then releases.
// A reader that uses bulk loads acquires, passes a proxy fence, and then loads.
//
// No wait is unbounded. One that takes longer than the limit, or that the host aborts, marks the
// communicator dead, leaves a record in pinned memory and returns false: it never traps, which would
// take the whole context with it. The host raises at its next call.
#pragma once
#include "weft/ptx.cuh"
#include "weft/table.cuh"

namespace weft {

enum Code : u32 { TIMEOUT = 1, ABORTED = 2, CONCURRENT = 3, ORDER = 4, EXPERT = 5, CAPACITY = 6, RELEASED = 7 };

using Global = Table;

// Where a team of threads is, and whom it tells when a wait takes too long.
struct Watch {
    Global *global;
    Record *records; // [0] what killed the communicator, [1] a notice
    const u32 *abort;
    u32 rank, channel, phase;

    WEFT_DEVICE bool dead() const { return *reinterpret_cast<volatile u32 *>(&global->dead) != 0; }

    // Marks the communicator dead; the first to do so leaves the record.
    WEFT_DEVICE void fail(u32 code, u32 peer, u32 slot, u64 expected, u64 seen) const;

    // Tells the host of something that the communicator survives, unless it has one notice already.
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

__device__ __noinline__ void fail(Global *global, Record *records, u32 code, u32 rank, u32 phase, u32 channel, u32 peer, u32 slot, u64 expected, u64 seen) {
    if (atomicCAS(&global->dead, 0u, code) == 0) write(records, code, rank, phase, channel, peer, slot, expected, seen);
}

__device__ __noinline__ void notice(Global *global, Record *records, u32 code, u32 rank, u32 phase, u32 channel, u32 peer, u32 slot, u64 expected, u64 seen) {
    if (ptx::load_relaxed_sys(&records[1].code) != 0 || atomicCAS(&global->flagged, 0u, code) != 0) return;
    write(records + 1, code, rank, phase, channel, peer, slot, expected, seen);
    atomicExch(&global->flagged, 0u);
}

// Looks whether a wait that began at `began` (0: now) may go on; when it began, or OVER.
constexpr u64 OVER = ~0ull;
__device__ __noinline__ u64 look(Global *global, Record *records, const u32 *abort, u32 rank, u32 phase, u32 channel, u32 peer, u32 slot, u32 expected, u32 seen, u64 began) {
    constexpr u64 LOOK_NS = 50'000;
    const u64 now = ptx::globaltimer();
    if (began == 0) began = now;
    if (*reinterpret_cast<volatile u32 *>(&global->dead) != 0) return OVER;
    // One thread of the GPU looks for all: thousands at once would wait for each other for milliseconds.
    const u64 last = *reinterpret_cast<volatile u64 *>(&global->looked_ns);
    u32 code = 0;
    if (now - last >= LOOK_NS && atomicCAS(&global->looked_ns, last, now) == last && ptx::load_relaxed_sys(abort) != 0) code = ABORTED;
    else if (now - began > *reinterpret_cast<volatile u64 *>(&global->limit_ns)) code = TIMEOUT;
    if (code == 0) return began;
    fail(global, records, code, rank, phase, channel, peer, slot, expected, seen);
    return OVER;
}

} // namespace seldom

WEFT_DEVICE void Watch::fail(u32 code, u32 peer, u32 slot, u64 expected, u64 seen) const {
    seldom::fail(global, records, code, rank, phase, channel, peer, slot, expected, seen);
}

WEFT_DEVICE void Watch::notice(u32 code, u32 peer, u32 slot, u64 expected, u64 seen) const {
    seldom::notice(global, records, code, rank, phase, channel, peer, slot, expected, seen);
}

// Looks between two polls, seldom, whether to go on waiting.
class Patience {
    u64 began_ = 0;
    u32 polls_ = 0;

  public:
    // False once the wait is over: `seen` in place of `expected` from `peer`.
    WEFT_DEVICE bool more(const Watch &watch, u32 peer, u32 slot, u32 expected, u32 seen) {
        if (++polls_ % 64 != 0) return true;
        began_ = seldom::look(watch.global, watch.records, watch.abort, watch.rank, watch.phase, watch.channel, peer, slot, expected, seen, began_);
        return began_ != seldom::OVER;
    }
};

// Raises a peer's word to `epoch`. Release: what this thread has seen complete is visible before it.
WEFT_DEVICE void signal(u32 *word, u32 epoch) { ptx::store_release_sys(word, epoch); }

// Waits until `word` is `epoch`; false if that took too long. Acquire, in this thread alone.
WEFT_DEVICE bool wait(const Watch &watch, const u32 *word, u32 epoch, u32 peer, u32 slot) {
    Patience patience;
    for (;;) {
        const u32 seen = ptx::load_acquire_sys(word);
        if (seen == epoch) return true;
        if (!patience.more(watch, peer, slot, epoch, seen)) return false;
    }
}

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

// A team: some warps of a block that share a named barrier.
struct Team {
    u32 name, thread, threads;
    WEFT_DEVICE void sync() const { ptx::named_barrier(name, threads); }
};

// Copies `bytes` (a multiple of 16, as both addresses are) to a peer. Relaxed: see put_signal.
WEFT_DEVICE void put(const Team &team, void *to, const void *from, u64 bytes) {
    for (u64 at = 16ull * team.thread; at < bytes; at += 16ull * team.threads)
        ptx::store_stream(static_cast<u8 *>(to) + at, ptx::load_stream(static_cast<const u8 *>(from) + at));
}

// put, and then signal: who has waited for `epoch` sees the bytes.
WEFT_DEVICE void put_signal(const Team &team, void *to, const void *from, u64 bytes, u32 *word, u32 epoch) {
    put(team, to, from, bytes);
    team.sync();
    if (team.thread == 0) signal(word, epoch);
}

// All ranks have come before any leaves: `words[r]` here is raised by rank r. Releases what the team
// stored before it, acquires what the others' teams did. One team of each rank calls it.
WEFT_DEVICE bool barrier(const Watch &watch, const Team &team, u32 *const *peer_words, u32 ranks, u32 epoch) {
    bool all = true;
    team.sync();
    for (u32 r = team.thread; r < ranks; r += team.threads) signal(peer_words[r] + watch.rank, epoch);
    for (u32 r = team.thread; r < ranks; r += team.threads)
        all &= wait(watch, peer_words[watch.rank] + r, epoch, r, 0);
    team.sync();
    return all;
}

} // namespace weft
