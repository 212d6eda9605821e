// Proxy commands. Generated from crates/gpu/src/proxy/command.rs; a test compares the two.
#pragma once
#include "weft/ptx.cuh"

namespace weft {

// Ring slot: four quarters, each stored at once.
struct CommandSlot {
    u32 head; // kind, flags << 8, peer or template << 16
    u32 length[2]; // bytes, low word first
    u32 use_0; // use number, which is ticket / slots + 1, modulo 2^32
    u32 windows; // source window, destination window << 16
    u32 word; // word that the command raises, credits or, at this rank, asks for
    u32 reserved; // 0
    u32 use_1; // use number
    u32 source[2]; // source offset in bytes, low word first
    u32 count; // peers in a SCATTER, rounds in a RELEASE
    u32 use_2; // use number
    u32 destination[2]; // destination offset in bytes, low word first
    u32 list; // index of a SCATTER's first length
    u32 use_3; // use number
};
static_assert(sizeof(CommandSlot) == 64, "as declared in Rust");

enum CommandKind : u32 { COMMAND_PUT = 1, COMMAND_SIGNAL = 2, COMMAND_SCATTER = 3, COMMAND_RELEASE = 4, COMMAND_DRAINED = 5 };
constexpr u32 COMMAND_HOLD = 1;

// Phases in records: expired waits for a word, and for a slot in the ring.
constexpr u32 PHASE_PROXY_WAIT = 66, PHASE_PROXY_PUSH = 67;

} // namespace weft
