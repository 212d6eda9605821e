// Replies equal to expert outputs (dense layout): a warp copies them from the experts' array to the sources by bulk
// loads into a stage ring and bulk stores from it, without passing through registers.
//
// Memory order between reply and flag: the lane that issues a store waits for its full completion
// (cp.async.bulk.wait_group, not .read); after __syncwarp, a lane posts the flag with a release at block scope; the
// flag warp acquires it, passes a fence at system scope, and stores the flag. Earlier kernels wrote the outputs.
#pragma once
#include "moe/combine_bandwidth.cuh"

namespace weft::moe::bandwidth {

constexpr u32 TICKET_ROWS = 4; // rows per ticket, to amortise the atomic's latency
constexpr u32 STORES = 4;      // in flight per warp

// Rows to copy, by ticket. Used by all lanes in a warp; the first ticket covers the signals.
struct CopyTickets {
    const Arguments &a;
    const u32 *rows;
    u32 which, item = 0, step = 0;

    WEFT_DEVICE CopyTickets(const Arguments &a, const Round &round, const Owed &owed, u32 first) : a(a), rows(owed.rows), which(first) {
        if (which == 0) {
            send_signals(a, round, owed.needed);
            draw();
            take();
        }
        draw();
    }

    // The next row, as source * MAX_TOKENS + slot, or NO_ROW.
    WEFT_DEVICE u32 next() {
        if (step == TICKET_ROWS) take(), draw(), step = 0;
        u32 source, slot;
        return locate(rows, (which - 1) * TICKET_ROWS + step++, a.rank, source, slot) ? source * MAX_TOKENS + slot : NO_ROW;
    }

  private:
    WEFT_DEVICE void draw() {
        if (lane_of_thread() == 0) item = atomicAdd(&channel(a, a.rank).state()->combine_ticket, 1);
    }
    WEFT_DEVICE void take() { which = __shfl_sync(~0u, item, 0); }
};

// Copies all remaining replies through a ring with STAGES stages. One warp. False if a wait failed.
template <u32 STAGES> WEFT_DEVICE bool copy_replies(const Arguments &a, const Round &round, AddBlock &block, u8 *ring, u64 *full, u32 first) {
    constexpr u32 AHEAD = STAGES / 2, BYTES = PIECE_ELEMENTS * bytes_of(WEFT_REPLY_TYPE);
    static_assert(AHEAD >= 1 && AHEAD + STORES < WARP, "each piece in flight has a lane");
    const u32 lane = lane_of_thread();
    CopyTickets tickets(a, round, block.owed, first);
    // Chunks are numbered across rows; lane i holds the state for chunks i, i + 32, ...
    u64 to = 0;
    u32 bytes = 0, flag = NO_ROW; // NO_ROW: no flag, since more of the row follows
    u32 row = 0, piece = 0, loaded = 0;
    const auto load = [&] {
        if (row == NO_ROW || (piece == 0 && (row = tickets.next()) == NO_ROW)) return;
        const u32 source = row / MAX_TOKENS, slot = row % MAX_TOKENS, begin = piece * BYTES, stage = loaded % STAGES;
        const u32 size = REPLY_BYTES - begin < BYTES ? REPLY_BYTES - begin : BYTES;
        const u8 *from = reinterpret_cast<const u8 *>(a.outputs) + static_cast<u64>(block.owed.before[source] + slot) * OUTPUT_BYTES + begin;
        ptx::bulk_wait_read<STAGES - AHEAD - 1>(); // the previous store from this stage has read it
        if (lane == 0) {
            ptx::mbarrier_expect(full + stage, size);
            ptx::bulk_load(ring + stage * PIECE_BYTES, from, size, full + stage);
        }
        if (lane == loaded % WARP) {
            to = reinterpret_cast<u64>(channel(a, source).reply(a.rank, slot)) + begin;
            bytes = size, flag = piece + 1 == PIECES ? row : NO_ROW;
        }
        ++loaded;
        piece = piece + 1 == PIECES ? 0 : piece + 1;
    };
    const auto post = [&](u32 begin, u32 end) { // flags for the complete chunks [begin, end)
        __syncwarp();
        const u32 mine = begin + (lane - begin) % WARP;
        block.flags.post(mine < end && flag != NO_ROW, flag);
    };
    for (u32 i = 0; i < AHEAD; ++i) load();
    u32 stored = 0;
    for (; stored < loaded; ++stored) {
        const u32 stage = stored % STAGES;
        load();
        if (!__all_sync(~0u, wait_phase(full + stage, stored / STAGES % 2))) break;
        const u64 target = __shfl_sync(~0u, to, stored % WARP);
        const u32 size = __shfl_sync(~0u, bytes, stored % WARP);
        if (lane == 0) ptx::bulk_store(reinterpret_cast<void *>(target), ring + stage * PIECE_BYTES, size);
        ptx::bulk_commit();
        ptx::bulk_wait<STORES - 1>();
        if (stored >= STORES - 1) post(stored - (STORES - 1), stored - (STORES - 1) + 1);
    }
    ptx::bulk_wait<0>();
    post(stored < STORES - 1 ? 0 : stored - (STORES - 1), stored);
    block.flags.close();
    return stored == loaded;
}

// A block's copy warp.
WEFT_DEVICE bool copy_beside(const Arguments &a, const Round &round, AddBlock &block, u8 *shared) {
    u8 *ring = shared + GROUPS * DEPTH * PIECE_BYTES;
    const bool fine = copy_replies<COPY_STAGES>(a, round, block, ring, block.copied, block.item[GROUPS]);
    if (!fine) phase_failed(watch(a, COMBINE_SEND), 0);
    return fine;
}

// Warp in a send-only launch: the groups' fetch warps copy as well. False if a wait failed.
WEFT_DEVICE bool copy_rows(const Arguments &a, const Round &round, AddBlock &block, u8 *shared) {
    const u32 warp = warp_of_thread();
    if (warp == ADD_WARPS) raise_reply_flags(a, round, block);
    if (warp > ADD_WARPS) return copy_beside(a, round, block, shared);
    if (warp >= GROUPS) return true;
    const bool fine = copy_replies<DEPTH>(a, round, block, shared + warp * DEPTH * PIECE_BYTES, block.full[warp], block.item[warp]);
    if (!fine) phase_failed(watch(a, COMBINE_SEND), 0);
    return fine;
}

} // namespace weft::moe::bandwidth
