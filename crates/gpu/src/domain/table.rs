//! The table of a domain, the ABI between host and kernels: declared here, and nowhere else.
//!
//! It is the first [`TABLE_BYTES`] of segment 0 of the symmetric heap, on every rank. CUDA reads it as
//! `weft::Table` (the header `weft/table.cuh`, which [`c_header`] generates), Triton and Python by the
//! offsets of [`Table::FIELDS`], the twin by [`Word`].

use crate::layout;
use crate::layout::c_struct;

/// Bytes that the table takes.
pub const TABLE_BYTES: u64 = 1024;
/// The most ranks that it has room for.
pub const MOST_RANKS: usize = 64;
/// The version of the layout: another one after every change.
pub const VERSION: u32 = 1;

layout! {
    /// The table, as it lies in memory.
    pub struct Table {
        dead: u32, "a code once the domain is dead, here only";
        flagged: u32, "not 0 while a notice is being written";
        limit_ns: u64, "how long a wait may take; read each time, so that a captured graph does not freeze it";
        looked_ns: u64, "when somebody last looked at the abort word: it lies in host memory, which is far";
        version: u32, "the version of this layout";
        rank: u32, "this rank";
        ranks: u32, "how many there are";
        flags_each: u32, "u32 words that each rank has in the flags area";
        record: u64, "address of the two records, of 64 bytes each: what killed the domain, and a notice";
        abort: u64, "address of the u32 word with which the host ends all waits";
        flags: u64, "offset of the flags area from the table: flags_each words for each rank, which it raises";
        peers: [u64; MOST_RANKS], "every rank's table, as it is mapped here";
    }
}

layout! {
    /// A record, as it lies in memory: see [`Record`](crate::Record), which is what it says.
    pub struct RecordLayout {
        code: u32, "what happened; written last, with release";
        rank: u32, "who wrote it";
        phase: u32, "where it stood";
        peer: u32, "the other rank, or all ones";
        channel: u32, "the channel";
        slot: u32, "the row or token";
        claim: u32, "taken by the one of several writers on the CPU that may write";
        reserved: u32, "0";
        expected: u64, "what should have been there";
        seen: u64, "what was there";
        more: [u64; 2], "0";
    }
}

/// Words that the CPU twin reads and writes, by their offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Word {
    /// [`Table::dead`].
    Dead = std::mem::offset_of!(Table, dead) as u64,
    /// [`Table::flagged`].
    Flagged = std::mem::offset_of!(Table, flagged) as u64,
    /// [`Table::limit_ns`].
    Limit = std::mem::offset_of!(Table, limit_ns) as u64,
}

/// The header `weft/table.cuh`.
pub fn c_header() -> String {
    format!(
        "// The table of a domain and its records. Generated from crates/gpu/src/domain/table.rs; a test\n\
         // compares the two.\n#pragma once\n#include \"weft/ptx.cuh\"\n\nnamespace weft {{\n\n{}\n\
         // What the host reads of a failure.\n{}static_assert(sizeof(Table) == {} && sizeof(Record) == {}, \
         \"as they are declared in Rust\");\n\nconstexpr u32 TABLE_VERSION = {VERSION};\n\
         constexpr u64 TABLE_BYTES = {TABLE_BYTES};\n\n}} // namespace weft\n",
        c_struct("Table", "", Table::FIELDS),
        c_struct("Record", "", RecordLayout::FIELDS),
        Table::SIZE,
        RecordLayout::SIZE,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_the_one_that_kernels_include() {
        let listed = crate::kernels::HEADERS.iter().find(|(path, _)| *path == "weft/table.cuh");
        let expected = c_header();
        assert_eq!(
            listed.map(|(_, text)| *text),
            Some(expected.as_str()),
            "write this to crates/gpu/kernels/weft/table.cuh:\n{expected}"
        );
    }

    #[test]
    fn fields_follow_each_other_without_gaps_and_fit() {
        let mut end = 0;
        for field in Table::FIELDS {
            assert_eq!(field.offset, end, "{}", field.name);
            assert!(field.offset.is_multiple_of(field.width), "{}", field.name);
            end += field.width * field.count();
        }
        assert_eq!(end as usize, Table::SIZE);
        assert!(end <= TABLE_BYTES);
        let table = Table { rank: 3, peers: [7; MOST_RANKS], ..Table::default() };
        let bytes = table.bytes();
        let at = |name: &str| {
            Table::FIELDS
                .iter()
                .find(|field| field.name == name)
                .map(|field| field.offset as usize)
                .unwrap()
        };
        assert_eq!(bytes[at("rank")], 3);
        assert_eq!(bytes[at("peers") + 8 * (MOST_RANKS - 1)], 7);
    }
}
