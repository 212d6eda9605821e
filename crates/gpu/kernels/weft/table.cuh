// The table of a domain. Generated from crates/gpu/src/domain/table.rs; a test compares the two.
#pragma once
#include "weft/ptx.cuh"

namespace weft {

struct Table {
    u32 dead; // a code once the domain is dead, here only
    u32 flagged; // not 0 while a notice is being written
    u64 limit_ns; // how long a wait may take; read each time, so that a captured graph does not freeze it
    u64 looked_ns; // when somebody last looked at the abort word: it lies in host memory, which is far
    u32 version; // the version of this layout
    u32 rank; // this rank
    u32 ranks; // how many there are
    u32 flags_each; // u32 words that each rank has in the flags area
    u64 record; // address of the two records, of 64 bytes each: what killed the domain, and a notice
    u64 abort; // address of the u32 word with which the host ends all waits
    u64 flags; // offset of the flags area from the table: u32[ranks][flags_each], raised by that rank
    u64 peers[64]; // every rank's table, as it is mapped here
};
static_assert(sizeof(Table) == 576, "as it is declared in Rust");

constexpr u32 TABLE_VERSION = 1;
constexpr u64 TABLE_BYTES = 1024;

} // namespace weft
