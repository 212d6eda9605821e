// The argument of all kernels. Generated from crates/moe/src/device/arguments.rs; a test compares the two.
#pragma once
#include "weft/ptx.cuh"

namespace weft::moe {

constexpr u32 RANKS = WEFT_RANKS;

struct Arguments {
    u64 peer[RANKS]; // channel 0 of every rank, as mapped here
    u64 table; // the table of this rank's domain
    u64 record; // where records are written
    u64 abort; // the word with which the host ends all waits
    u64 tokens; // of dispatch send, as DispatchInputs in Rust says
    u64 scales; // likewise
    u64 ids; // likewise
    u64 weights; // likewise
    u64 count; // likewise; of combine receive too
    u64 out_tokens; // of dispatch receive, as DispatchOutputs in Rust says
    u64 out_scales; // likewise
    u64 out_counts; // likewise
    u64 out_offsets; // likewise
    u64 out_rows; // likewise
    u64 out_weights; // likewise
    u64 outputs; // of combine send: positions x hidden in the combine type
    u64 combined; // of combine receive: given x hidden in the output type
    u32 rank; // this rank
    u32 channel; // the channel
    u32 given; // tokens of dispatch send, and of combine receive
    u32 release; // whether combine only gives the rows back
};
static_assert(sizeof(Arguments) == 8 * RANKS + 144, "as it is declared in Rust");

} // namespace weft::moe
