// Argument for all kernels. Generated from crates/moe/src/device/abi/arguments.rs; a test compares the two.
#pragma once
#include "weft/ptx.cuh"

namespace weft::moe {

constexpr u32 RANKS = WEFT_RANKS;

struct Arguments {
    u64 peer[RANKS]; // channel 0 of every rank, as mapped on this rank
    u64 table; // this rank's domain table
    u64 record; // address of the device records
    u64 abort; // address of the abort word, with which the host ends all waits
    u64 tokens; // dispatch send: DispatchInputs in Rust
    u64 scales; // likewise
    u64 ids; // likewise
    u64 weights; // likewise
    u64 count; // likewise; combine receive too
    u64 out_tokens; // dispatch receive: DispatchOutputs in Rust
    u64 out_scales; // likewise
    u64 out_counts; // likewise
    u64 out_offsets; // likewise
    u64 out_rows; // likewise
    u64 out_weights; // likewise
    u64 out_experts; // likewise, or 0
    u64 out_load; // likewise, or 0
    u64 load_bytes; // per out_load element
    u64 outputs; // combine send: positions x hidden in the combine type
    u64 combined; // combine receive: CombineOutputs in Rust
    u64 added[3]; // likewise
    u64 map; // dispatch send: the layer's replica table, or 0
    u64 plan; // this round's plan: PlanLocation in Rust; 0: in the channel
    u32 rank; // this rank
    u32 channel; // the channel
    u32 given; // tokens in dispatch send, and in combine receive
    u32 release; // nonzero if combine only releases the rows
    u32 kept; // nonzero if an earlier round made the plan
    u32 number; // channel number among all channels in the domain
    u64 positions; // rows in this call's position arrays
};
static_assert(sizeof(Arguments) == 8 * RANKS + 224, "the size in Rust");

} // namespace weft::moe
