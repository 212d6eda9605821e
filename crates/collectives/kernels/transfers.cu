// Batched sends and receives, all at the same time in one kernel.
//
// Each ordered rank pair has LANES lanes, each with a ring that holds LANE_CHUNKS chunks in the receiver's memory.
// Chunk c in a message belongs to lane c % lanes, and the lane count follows from the message bytes: both ends divide
// it equally, whatever else is in their batches. A *flow* is a batch's transfers for one direction and peer, in batch
// order, in one lane; a block has one or several.
//
// # Credits
// A sender stores chunk j in a lane once the receiver has consumed chunk j - LANE_CHUNKS, as the credit reports, which
// the receiver writes to the sender's memory. Lane chunks are counted from the construction on, with wrap-around.
//
// # Progress
// A block never waits for one flow: it polls all flows in turn, and moves chunks for one that is ready. Only flags for
// a flow's own pair and lane make it ready. So while the kernels at both ends run, the receiver consumes what has
// arrived and the sender stores what has a credit, and one side is always ready until the message is through: no batch
// can block another one, or itself, by order, by length or by the blocks that flows share. All blocks in a launch are
// resident, as in every call.
#include "collectives/channel.cuh"
#include "collectives/transfer_arguments.cuh"

namespace weft::collectives {

enum TransferPhase : u32 { SEND = EXIT + 1, RECEIVE };
constexpr u32 OTHER_LENGTH = WEFT_FIRST_CODE + 1; // the message has another length than the receive

constexpr u32 LANES = WEFT_LANES;
constexpr u32 LANE_CHUNKS = WEFT_LANE_CHUNKS;
constexpr u32 BURST = LANE_CHUNKS / 2; // maximum chunks that a flow moves before it raises the flag
constexpr u32 FLOWS = 2 * RANKS;       // maximum flows per block: there are no more lanes than blocks
constexpr u32 UNITS = CHUNK_CAPACITY / UNIT;

// Lane memory.
struct Lanes {
    const TransferArguments &args;

    WEFT_DEVICE u8 *at(u32 rank, u64 offset) const { return reinterpret_cast<u8 *>(args.peer[rank]) + offset; }
    // Chunks that this rank has sent to a peer (or received from it).
    WEFT_DEVICE volatile u32 *transferred(bool receives, u32 lane, u32 peer) const {
        return reinterpret_cast<volatile u32 *>(at(args.rank, WEFT_AT_TRANSFERRED)) + (receives * LANES + lane) * RANKS + peer;
    }
    // Flag at `rank`: chunks from `source` that have arrived there.
    WEFT_DEVICE u32 *arrival(u32 rank, u32 lane, u32 source) const {
        return reinterpret_cast<u32 *>(at(rank, WEFT_AT_ARRIVALS)) + lane * WEFT_FLAG_WORDS + source;
    }
    // Credit at `rank`: chunks that `peer` has consumed.
    WEFT_DEVICE u32 *credit(u32 rank, u32 lane, u32 peer) const {
        return reinterpret_cast<u32 *>(at(rank, WEFT_AT_CREDITS)) + lane * WEFT_FLAG_WORDS + peer;
    }
    WEFT_DEVICE u64 place(u32 lane, u32 source, u32 sequence) const {
        return static_cast<u64>(lane * RANKS + source) * LANE_CHUNKS + sequence % LANE_CHUNKS;
    }
    // Header at `rank`: bytes in the message to which a chunk belongs.
    WEFT_DEVICE u64 *header(u32 rank, u32 lane, u32 source, u32 sequence) const {
        return reinterpret_cast<u64 *>(at(rank, WEFT_AT_HEADERS)) + place(lane, source, sequence);
    }
    WEFT_DEVICE u8 *chunk(u32 rank, u32 lane, u32 source, u32 sequence) const {
        return at(rank, WEFT_AT_LANE_RINGS) + place(lane, source, sequence) * CHUNK_CAPACITY;
    }
};

// Chunks in a message; one without bytes has one empty chunk.
WEFT_DEVICE u32 chunks_of(u64 bytes) { return bytes == 0 ? 1 : static_cast<u32>((bytes - 1) / CHUNK_CAPACITY + 1); }
WEFT_DEVICE u32 lanes_of(u64 bytes) { return min(LANES, chunks_of(bytes)); }
// Chunks in a message for one lane.
WEFT_DEVICE u32 chunks_in(u64 bytes, u32 lane) {
    const u32 all = chunks_of(bytes), lanes = min(LANES, all);
    return lane >= lanes ? 0 : (all - lane - 1) / lanes + 1;
}

// Transfer tensor, read and written by the longest elements that its place and length allow.
WEFT_DEVICE UserBytes tensor_of(const Transfer &transfer) {
    const u32 ends = static_cast<u32>(transfer.at | transfer.bytes) | 8;
    return UserBytes{reinterpret_cast<u8 *>(transfer.at), transfer.bytes, ends & (0u - ends), transfer.at % UNIT == 0};
}

// A block's flow. In shared memory.
struct Flow {
    u32 transfer; // the one in progress
    u32 end;      // behind the last one
    u32 lane;
    u32 chunk;    // next transfer chunk, among those in the lane
    u32 sequence; // next lane chunk, from the construction on

    // Continues with the next transfer behind the last chunk in one; false if there is none.
    WEFT_DEVICE bool settle(const TransferArguments &args) {
        while (transfer < end && chunk == chunks_in(args.transfer[transfer].bytes, lane)) ++transfer, chunk = 0;
        return transfer < end;
    }
};

// Calls `visit(first, end, lane)` for each flow in this block.
template <class Visit> WEFT_DEVICE void for_each_flow(const TransferArguments &args, Visit visit) {
    u32 flow = 0;
    for (u32 first = 0, end; first < args.count; first = end) {
        u32 lanes = 0;
        for (end = first; end < args.count && args.transfer[end].peer == args.transfer[first].peer && args.transfer[end].receives == args.transfer[first].receives; ++end)
            lanes = max(lanes, lanes_of(args.transfer[end].bytes));
        for (u32 lane = 0; lane < lanes; ++lane, ++flow)
            if (flow % gridDim.x == blockIdx.x) visit(first, end, lane);
    }
}

// A block's flows, and the chunks that it moves next. In shared memory; one thread changes them between barriers.
struct Batch {
    Flow flows[FLOWS];
    u32 count;  // flows that have chunks left
    u32 next;   // flow whose chunks move
    u32 chunks; // how many; 0 at the end
    u32 failed; // nonzero once a wait has failed

    WEFT_DEVICE void begin(const Lanes &lanes) {
        const TransferArguments &args = lanes.args;
        count = next = chunks = 0;
        for_each_flow(args, [&](u32 first, u32 end, u32 lane) {
            const Transfer &transfer = args.transfer[first];
            Flow flow{first, end, lane, 0, *lanes.transferred(transfer.receives != 0, lane, transfer.peer)};
            if (flow.settle(args)) flows[count++] = flow;
        });
    }

    // Chunks that the flow may move because they have a credit or have arrived. Acquire, in this thread only.
    WEFT_DEVICE u32 ready(const Lanes &lanes, const Flow &flow, const Transfer &transfer, u32 &expected, u32 &seen) const {
        u32 most;
        if (transfer.receives != 0) {
            seen = ptx::load_acquire_sys(lanes.arrival(lanes.args.rank, flow.lane, transfer.peer));
            expected = flow.sequence + 1, most = seen - flow.sequence;
        } else {
            seen = ptx::load_acquire_sys(lanes.credit(lanes.args.rank, flow.lane, transfer.peer));
            expected = flow.sequence - LANE_CHUNKS + 1, most = seen + LANE_CHUNKS - flow.sequence;
        }
        return min(most, min(BURST, chunks_in(transfer.bytes, flow.lane) - flow.chunk));
    }

    // Selects the chunks that move next, and waits until there are some. A timeout names the peer that was polled last.
    // The limit applies to a wait without progress in any flow in the block.
    WEFT_DEVICE void select(const Lanes &lanes, Watch watch) {
        PollBudget budget;
        chunks = 0;
        while (count != 0) {
            if (++next >= count) next = 0;
            const Flow &flow = flows[next];
            const Transfer &transfer = lanes.args.transfer[flow.transfer];
            u32 expected, seen;
            const u32 found = ready(lanes, flow, transfer, expected, seen);
            watch.phase = transfer.receives != 0 ? RECEIVE : SEND;
            if (found != 0) {
                if (transfer.receives == 0 || has_length(lanes, watch, flow, transfer, found)) chunks = found;
                return;
            }
            if (!budget.more(watch, transfer.peer, flow.lane, expected, seen)) {
                failed = 1;
                return;
            }
        }
    }

    // Compares the message length with the receive length.
    WEFT_DEVICE bool has_length(const Lanes &lanes, const Watch &watch, const Flow &flow, const Transfer &transfer, u32 found) {
        for (u32 i = 0; i < found; ++i) {
            const u64 sent = ptx::load_relaxed_sys(lanes.header(lanes.args.rank, flow.lane, transfer.peer, flow.sequence + i));
            if (sent == transfer.bytes) continue;
            watch.fail(OTHER_LENGTH, transfer.peer, flow.lane, transfer.bytes, sent);
            failed = 1;
            return false;
        }
        return true;
    }

    // Raises the flag for chunks that have moved, or returns the credits. One thread calls this behind a block barrier;
    // release at system scope.
    WEFT_DEVICE void advance(const Lanes &lanes) {
        const TransferArguments &args = lanes.args;
        Flow &flow = flows[next];
        const Transfer &transfer = args.transfer[flow.transfer];
        const bool receives = transfer.receives != 0;
        if (!receives)
            for (u32 i = 0; i < chunks; ++i) ptx::store_relaxed_sys(lanes.header(transfer.peer, flow.lane, args.rank, flow.sequence + i), transfer.bytes);
        flow.chunk += chunks, flow.sequence += chunks;
        signal(receives ? lanes.credit(transfer.peer, flow.lane, args.rank) : lanes.arrival(transfer.peer, flow.lane, args.rank), flow.sequence);
        if (flow.settle(args)) return;
        *lanes.transferred(receives, flow.lane, transfer.peer) = flow.sequence;
        flow = flows[--count];
    }
};

// Moves the selected chunks between the tensor and the ring. All threads in the block call this.
WEFT_DEVICE void move_chunks(const Lanes &lanes, const Flow &flow, u32 chunks) {
    constexpr u32 UNROLL = 4; // loads in flight
    const Transfer &transfer = lanes.args.transfer[flow.transfer];
    const UserBytes user = tensor_of(transfer);
    const bool receives = transfer.receives != 0;
    const u32 width = lanes_of(user.bytes), owner = receives ? lanes.args.rank : transfer.peer, source = receives ? transfer.peer : lanes.args.rank;
    // Chunk unit u in the message and in the ring.
    const auto in_message = [&](u32 u) { return (flow.lane + static_cast<u64>(flow.chunk + u / UNITS) * width) * CHUNK_CAPACITY + u % UNITS * UNIT; };
    const auto in_ring = [&](u32 u) { return lanes.chunk(owner, flow.lane, source, flow.sequence + u / UNITS) + u % UNITS * UNIT; };
    const u32 all = chunks * UNITS, step = blockDim.x;
    if (user.aligned) {
        for (u32 u = threadIdx.x; u < all; u += UNROLL * step) {
            uint4 value[UNROLL];
#pragma unroll
            for (u32 k = 0; k < UNROLL; ++k)
                if (u + k * step < all && in_message(u + k * step) + UNIT <= user.bytes)
                    value[k] = ptx::load_stream(receives ? in_ring(u + k * step) : user.begin + in_message(u + k * step));
#pragma unroll
            for (u32 k = 0; k < UNROLL; ++k)
                if (u + k * step < all && in_message(u + k * step) + UNIT <= user.bytes)
                    ptx::store_stream(receives ? user.begin + in_message(u + k * step) : in_ring(u + k * step), value[k]);
        }
    }
    // Partial units: in an aligned tensor only the last one.
    for (u32 u = threadIdx.x; u < all; u += step) {
        const u64 at = in_message(u);
        if (at >= user.bytes || user.whole(at)) continue;
        if (receives) user.store(at, ptx::load_stream(in_ring(u)));
        else ptx::store_stream(in_ring(u), user.load(at));
    }
}

// Fills this block's chunks in all receives with 0xFF bytes. All threads call this.
WEFT_DEVICE void poison_receives(const TransferArguments &args) {
    for_each_flow(args, [&](u32 first, u32 end, u32 lane) {
        for (u32 i = first; i < end && args.transfer[i].receives != 0; ++i) {
            const UserBytes user = tensor_of(args.transfer[i]);
            const u32 width = lanes_of(user.bytes);
            for (u32 chunk = 0; chunk < chunks_in(user.bytes, lane); ++chunk) {
                const u64 begin = (lane + static_cast<u64>(chunk) * width) * CHUNK_CAPACITY;
                for (u64 at = begin + threadIdx.x * UNIT; at < min(begin + CHUNK_CAPACITY, user.bytes); at += blockDim.x * UNIT) user.poison(at);
            }
        }
    });
}

WEFT_DEVICE void run_transfers(const TransferArguments &args) {
    __shared__ Batch batch;
    const Lanes lanes{args};
    const Watch watch{reinterpret_cast<Table *>(args.table), reinterpret_cast<Record *>(args.record),
                      reinterpret_cast<const u32 *>(args.abort), args.rank, blockIdx.x, SEND};
    wait_for_previous_kernel();
    if (threadIdx.x == 0) {
        batch.failed = *reinterpret_cast<const volatile u32 *>(lanes.at(args.rank, WEFT_AT_CLOSED)) != 0 || watch.dead();
        batch.chunks = 0;
        if (batch.failed == 0) batch.begin(lanes);
    }
    for (;;) {
        if (threadIdx.x == 0 && batch.failed == 0) batch.select(lanes, watch);
        __syncthreads(); // orders the acquire before the accesses by all threads
        const u32 chunks = batch.chunks;
        if (chunks == 0) break;
        move_chunks(lanes, batch.flows[batch.next], chunks);
        __syncthreads(); // orders the accesses by all threads before the release
        if (threadIdx.x == 0) batch.advance(lanes);
    }
    if (threadIdx.x == 0) start_next_kernel();
    if (batch.failed != 0) poison_receives(args);
}

} // namespace weft::collectives

extern "C" __global__ void __launch_bounds__(512) collective_transfers(const __grid_constant__ weft::collectives::TransferArguments args) { weft::collectives::run_transfers(args); }
