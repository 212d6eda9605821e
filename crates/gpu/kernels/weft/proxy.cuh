// Proxy: commands to the host thread that puts for kernels, and waits for the words that proxies raise.
//
// Memory order. All threads store the source; a bulk store's issuer waits for full completion; a block barrier follows;
// then one warp calls release_commands once, and pushes its commands, which are relaxed. The host acquires each quarter
// before it reads the command. At the destination one thread acquires the word, or what another block's thread has
// acquired and published; a block barrier follows, and fence_global_for_bulk before bulk loads.
#pragma once
#include "weft/command.cuh"
#include "weft/team.cuh"
#include "weft/wait.cuh"

namespace weft {

constexpr u32 QUARTERS = 4;

// Command before it has a slot: the fields in CommandSlot, equal in all lanes that push it.
struct Command {
    u32 head, source_window, destination_window, word, count, list;
    u64 length, source, destination;
};

WEFT_DEVICE Command command(CommandKind kind, u32 flags, u32 peer, u32 word) { return {kind | flags << 8 | peer << 16, 0, 0, word, 0, 0, 0, 0, 0}; }

// Writes `length` bytes into a peer's window and raises the word there. `flags`: COMMAND_HOLD, if the word is held.
WEFT_DEVICE Command command_put(u32 peer, u32 word, u32 flags, u32 source_window, u64 source, u32 destination_window, u64 destination, u64 length) {
    Command put = command(COMMAND_PUT, flags, peer, word);
    put.source_window = source_window, put.destination_window = destination_window;
    put.source = source, put.destination = destination, put.length = length;
    return put;
}

// Raises the word at a peer.
WEFT_DEVICE Command command_signal(u32 peer, u32 word, u32 flags) { return command(COMMAND_SIGNAL, flags, peer, word); }

// Writes to a template's first `count` peers, with the lengths from `list` on, and raises the word at each. The lengths
// are stored before release_commands.
WEFT_DEVICE Command command_scatter(u32 template_number, u32 word, u32 flags, u32 source_window, u64 source, u32 destination_window, u64 destination, u32 count, u32 list) {
    Command scatter = command(COMMAND_SCATTER, flags, template_number, word);
    scatter.source_window = source_window, scatter.destination_window = destination_window;
    scatter.source = source, scatter.destination = destination, scatter.count = count, scatter.list = list;
    return scatter;
}

// Gives `rounds` held rounds back to their source, after all threads that read them have met at a barrier.
WEFT_DEVICE Command command_release(u32 source, u32 word, u32 rounds) {
    Command release = command(COMMAND_RELEASE, 0, source, word);
    release.count = rounds;
    return release;
}

// Raises this rank's own word once the sources of all commands with earlier tickets may be reused.
WEFT_DEVICE Command command_drained(u32 word) { return command(COMMAND_DRAINED, 0, 0, word); }

// Release: stores that this warp has observed complete, such as a block's before a barrier, are visible to the host and
// to NICs before the commands that it pushes next. All lanes call it; the lanes that store commands fence.
WEFT_DEVICE void release_commands() {
    if (lane_of_thread() < QUARTERS) ptx::fence_acq_rel_sys();
    __syncwarp();
}

// The watch for records about the proxy, which number ranks as its group does.
WEFT_DEVICE Watch proxy_watch(const Watch &watch, u32 phase) {
    Watch own = watch;
    own.rank = watch.table->proxy_rank, own.phase = phase, own.channel = 0;
    return own;
}

// Waits until a ticket's slot is free; false on timeout. Acquire, only in this thread.
//
// One waiting thread at a time reads the host's count and publishes it in GPU memory for the others: reads of hundreds
// of threads over PCIe hold up the copies for which they wait. It publishes every count, since threads with earlier
// tickets wait too. A published count is relaxed: the host had loaded the slot before it published the count, and no
// store is issued before the branch on it.
WEFT_DEVICE bool wait_for_room(const Watch &watch, u64 ticket) {
    Table *table = watch.table;
    const u64 slots = table->slots;
    u64 seen = ptx::load_relaxed_gpu(&table->seen_released);
    if (ticket - seen < slots) return true;
    const u64 *released = reinterpret_cast<const u64 *>(table->released);
    const u64 needed = ticket - slots + 1;
    const Watch own = proxy_watch(watch, PHASE_PROXY_PUSH);
    PollBudget budget;
    bool polls = false;
    do {
        if (!polls) polls = atomicCAS(&table->poller, 0u, 1u) == 0;
        if (polls) {
            seen = ptx::load_acquire_sys(released);
            ptx::max_relaxed_gpu(&table->seen_released, seen);
        } else {
            seen = ptx::load_relaxed_gpu(&table->seen_released);
        }
    } while (ticket - seen >= slots && budget.more(own, own.rank, static_cast<u32>(ticket & (slots - 1)), static_cast<u32>(needed), static_cast<u32>(seen)));
    if (polls) atomicExch(&table->poller, 0u);
    return ticket - seen < slots;
}

// Pushes a command. All lanes of a warp call it with equal arguments; four of them store a quarter each, 16 bytes at
// once. False on timeout, and without a proxy. Relaxed: release_commands precedes it.
WEFT_DEVICE bool push(const Watch &watch, const Command &command) {
    const u32 lane = lane_of_thread();
    Table *table = watch.table;
    u64 ticket = 0;
    bool room = false;
    if (lane == 0 && table->ring != 0 && !watch.dead()) {
        ticket = atomicAdd(&table->ticket, 1ull);
        room = wait_for_room(watch, ticket);
    }
    room = __shfl_sync(~0u, static_cast<u32>(room), 0) != 0;
    ticket = __shfl_sync(~0u, ticket, 0);
    // The first lane's acquire precedes the other lanes' stores.
    __syncwarp();
    if (room && lane < QUARTERS) {
        const u32 mask = table->slots - 1;
        const u32 use = static_cast<u32>(ticket >> __popc(mask)) + 1;
        u64 first = command.head | command.length << 32, last = command.length >> 32;
        if (lane == 1) first = command.source_window | command.destination_window << 16 | static_cast<u64>(command.word) << 32, last = 0;
        if (lane == 2) first = command.source, last = command.count;
        if (lane == 3) first = command.destination, last = command.list;
        const u64 slot = table->ring + (ticket & mask) * sizeof(CommandSlot);
        ptx::store_relaxed_sys_pair(reinterpret_cast<void *>(slot + lane * (sizeof(CommandSlot) / QUARTERS)), first, last | static_cast<u64>(use) << 32);
    }
    return room;
}

// Word that counts the leading whole rounds from `source`; from this rank itself, completed DRAINED commands.
WEFT_DEVICE const u32 *proxy_word(const Watch &watch, u32 source, u32 word) {
    return reinterpret_cast<const u32 *>(watch.table->words) + source * watch.table->words_each + word;
}

// Set beside the value that a word's reader has seen, in one u64 for each word, while the reader is in its wait.
constexpr u64 WORD_HAS_READER = 1ull << 32;

// Waits until a word in host memory has reached `rounds`, as wait_at_least does, with one reader for each word: reads of
// hundreds of threads over PCIe hold up the copies for which they wait. The others read what it publishes at `reader`, in
// GPU memory. Acquire, only in this thread: the reader acquires the word and publishes it with release, at GPU scope.
//
// Each wait reads the word itself once. A value without a reader may be from a wait long ago, from which the word may
// have moved on by more than half its range, so it counts only if it was published during this wait.
WEFT_DEVICE bool wait_with_reader(const Watch &watch, const u32 *word, u64 *reader, u32 rounds, u32 source, u32 index) {
    u32 seen = ptx::load_acquire_sys(word);
    bool reads = false, recent = false;
    PollBudget budget;
    while (!reached(seen, rounds) && budget.more(watch, source, index, rounds, seen)) {
        if (reads) {
            const u32 next = ptx::load_acquire_sys(word);
            if (next != seen) ptx::store_release_gpu(reader, WORD_HAS_READER | next);
            seen = next;
            continue;
        }
        const u64 published = ptx::load_acquire_gpu(reader);
        recent |= published >= WORD_HAS_READER;
        if (recent) seen = static_cast<u32>(published);
        if (published >= WORD_HAS_READER || reached(seen, rounds)) continue;
        reads = ptx::compare_swap_release_gpu(reader, published, WORD_HAS_READER | seen) == published;
        recent = true;
    }
    if (reads) ptx::store_release_gpu(reader, seen);
    return reached(seen, rounds);
}

// Waits until `rounds` rounds from `source` have arrived, modulo 2^32; false on timeout, and without a proxy. Acquire,
// only in this thread.
WEFT_DEVICE bool wait_rounds(const Watch &watch, u32 source, u32 word, u32 rounds) {
    const Table *table = watch.table;
    if (table->ring == 0) return false;
    const u32 *address = proxy_word(watch, source, word);
    const Watch own = proxy_watch(watch, PHASE_PROXY_WAIT);
    if (table->readers == 0) return wait_at_least(own, address, rounds, source, word);
    u64 *reader = reinterpret_cast<u64 *>(table->readers) + (address - reinterpret_cast<const u32 *>(table->words));
    return wait_with_reader(own, address, reader, rounds, source, word);
}

} // namespace weft
