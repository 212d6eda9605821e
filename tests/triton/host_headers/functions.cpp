// Device functions of crates/gpu/kernels/weft as host functions, for comparison with weft.triton.
#include "weft/barrier.cuh"
#include "weft/command.cuh"
#include "weft/proxy.cuh"
#include "weft/put.cuh"
#include "weft/table.cuh"
#include "weft/wait.cuh"
#include <stddef.h>

static const weft::Team ALONE = {0, 0, 1};

static weft::Watch watch(weft::Table *table, u32 phase) {
    return {table, reinterpret_cast<weft::Record *>(table->record), reinterpret_cast<const u32 *>(table->abort), table->rank, 0, phase};
}

struct Constant { const char *name; u64 value; };

#define TABLE(field) {"TABLE_" #field, offsetof(weft::Table, field)}
#define RECORD(field) {"RECORD_" #field, offsetof(weft::Record, field)}

extern "C" {

// Header constants, up to one without a name.
extern const Constant CONSTANTS[] = {
    TABLE(dead), TABLE(flagged), TABLE(limit_ns), TABLE(looked_ns), TABLE(version), TABLE(rank), TABLE(ranks),
    TABLE(flags_each), TABLE(record), TABLE(abort), TABLE(flags), TABLE(peers),
    TABLE(ring), TABLE(ticket), TABLE(released), TABLE(seen_released), TABLE(list), TABLE(words), TABLE(alive),
    TABLE(slots), TABLE(words_each), TABLE(proxy_rank), TABLE(proxy_ranks),
    TABLE(poller), TABLE(lengths), TABLE(readers),
    RECORD(code), RECORD(rank), RECORD(phase), RECORD(peer), RECORD(channel), RECORD(slot), RECORD(claim),
    RECORD(reserved), RECORD(expected), RECORD(seen), RECORD(more),
    {"LAYOUT_VERSION", weft::TABLE_VERSION}, {"TABLE_BYTES", weft::TABLE_BYTES},
    {"MAX_RANKS", sizeof(weft::Table::peers) / sizeof(u64)},
    {"CODE_TIMEOUT", weft::TIMEOUT}, {"CODE_ABORTED", weft::ABORTED},
    {"PHASE_PROXY_WAIT", weft::PHASE_PROXY_WAIT}, {"PHASE_PROXY_PUSH", weft::PHASE_PROXY_PUSH},
    {"_READS", weft::WORD_HAS_READER},
    {"_PUT", weft::COMMAND_PUT}, {"_SIGNAL", weft::COMMAND_SIGNAL}, {"_SCATTER", weft::COMMAND_SCATTER}, {"_RELEASE", weft::COMMAND_RELEASE},
    {"_DRAINED", weft::COMMAND_DRAINED}, {"_HOLD", weft::COMMAND_HOLD}, {"_SLOT_BYTES", sizeof(weft::CommandSlot)},
    {nullptr, 0},
};

bool reached(u32 seen, u32 epoch) { return weft::reached(seen, epoch); }

void put_signal(void *to, const void *from, u64 bytes, u32 *word, u32 epoch) { weft::put_signal(ALONE, to, from, bytes, word, epoch); }

void signal_word(u32 *word, u32 epoch) { weft::signal(word, epoch); }

bool wait_at_least(weft::Table *table, const u32 *word, u32 epoch, u32 peer, u32 slot, u32 phase) { return weft::wait_at_least(watch(table, phase), word, epoch, peer, slot); }

bool wait_for_room(weft::Table *table, u64 ticket) { return weft::wait_for_room(watch(table, weft::PHASE_PROXY_PUSH), ticket); }

void set_system_fence(void (*fence)()) { on_system_fence = fence; }

// A warp releases what its block has stored, and then pushes a put.
bool release_and_put(weft::Table *table, u32 peer, u32 word, u64 source, u64 destination, u64 length) {
    bool pushed = true;
    weft_each_lane(weft::WARP, [](u32) { weft::release_commands(); });
    weft_each_lane(weft::WARP, [&](u32) { pushed &= weft::push(watch(table, 0), weft::command_put(peer, word, 0, 0, source, 0, destination, length)); });
    return pushed;
}

bool wait_rounds(weft::Table *table, u32 source, u32 word, u32 rounds) { return weft::wait_rounds(watch(table, 0), source, word, rounds); }

bool barrier(weft::Table *table, u32 *const *words, u32 epoch, u32 phase) { return weft::barrier(watch(table, phase), ALONE, words, table->ranks, epoch); }

} // extern "C"
