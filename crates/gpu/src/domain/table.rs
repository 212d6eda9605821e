//! The table of a domain, the ABI between host and kernels: declared here, and nowhere else.
//!
//! It is the first [`TABLE_BYTES`] of segment 0 of the symmetric heap, on every rank. CUDA reads it as
//! `weft::Table` (the header `weft/table.cuh`, which [`c_header`] generates), Triton and Python by the
//! offsets of [`FIELDS`], the twin by [`Word`].

use std::fmt::Write as _;

/// Bytes that the table takes.
pub const TABLE_BYTES: u64 = 1024;
/// The most ranks that it has room for.
pub const MOST_RANKS: usize = 64;
/// The version of the layout: another one after every change.
pub const VERSION: u32 = 1;

/// A field of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// First byte.
    pub offset: u64,
    /// Bytes of an element: 4 or 8, an unsigned integer.
    pub width: u64,
    /// Elements.
    pub count: u64,
    /// What it says.
    pub about: &'static str,
}

macro_rules! table {
    ($($name:ident: [$type:ident; $count:expr], $about:literal;)*) => {
        /// The table, as it lies in memory.
        #[repr(C)]
        #[derive(Clone, Debug)]
        pub struct Table {
            $(#[doc = $about] pub $name: [$type; $count],)*
        }

        impl Default for Table {
            fn default() -> Table {
                Table { $($name: [0; $count],)* }
            }
        }

        impl Table {
            /// Its bytes.
            pub fn bytes(&self) -> Vec<u8> {
                let mut bytes = Vec::new();
                $(self.$name.iter().for_each(|word| bytes.extend_from_slice(&word.to_ne_bytes()));)*
                bytes
            }
        }

        /// All fields, in the order in which they lie.
        pub const FIELDS: &[Field] = &[$(Field {
            name: stringify!($name),
            offset: std::mem::offset_of!(Table, $name) as u64,
            width: size_of::<$type>() as u64,
            count: $count as u64,
            about: $about,
        },)*];
    };
}

table! {
    dead: [u32; 1], "a code once the domain is dead, here only";
    flagged: [u32; 1], "not 0 while a notice is being written";
    limit_ns: [u64; 1], "how long a wait may take; read each time, so that a captured graph does not freeze it";
    looked_ns: [u64; 1], "when somebody last looked at the abort word: it lies in host memory, which is far";
    version: [u32; 1], "the version of this layout";
    rank: [u32; 1], "this rank";
    ranks: [u32; 1], "how many there are";
    flags_each: [u32; 1], "u32 words that each rank has in the flags area";
    record: [u64; 1], "address of the two records, of 64 bytes each: what killed the domain, and a notice";
    abort: [u64; 1], "address of the u32 word with which the host ends all waits";
    flags: [u64; 1], "offset of the flags area from the table: u32[ranks][flags_each], raised by that rank";
    peers: [u64; MOST_RANKS], "every rank's table, as it is mapped here";
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
    let mut text = String::from(
        "// The table of a domain. Generated from crates/gpu/src/domain/table.rs; a test compares the two.\n\
         #pragma once\n#include \"weft/ptx.cuh\"\n\nnamespace weft {\n\nstruct Table {\n",
    );
    for Field { name, width, count, about, .. } in FIELDS {
        let array = if *count > 1 { format!("[{count}]") } else { String::new() };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "    u{} {name}{array}; // {about}", width * 8);
    }
    let _ = writeln!(
        text,
        "}};\nstatic_assert(sizeof(Table) == {}, \"as it is declared in Rust\");\n\n\
         constexpr u32 TABLE_VERSION = {VERSION};\nconstexpr u64 TABLE_BYTES = {TABLE_BYTES};\n\n\
         }} // namespace weft",
        size_of::<Table>()
    );
    text
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
        for field in FIELDS {
            assert_eq!(field.offset, end, "{}", field.name);
            assert!(field.offset.is_multiple_of(field.width), "{}", field.name);
            end += field.width * field.count;
        }
        assert_eq!(end as usize, size_of::<Table>());
        assert!(end <= TABLE_BYTES);
        let table = Table { rank: [3], peers: [7; MOST_RANKS], ..Table::default() };
        let bytes = table.bytes();
        assert_eq!(bytes.len(), size_of::<Table>());
        let at = |name: &str| {
            FIELDS
                .iter()
                .find(|field| field.name == name)
                .map(|field| field.offset as usize)
                .unwrap()
        };
        assert_eq!(bytes[at("rank")], 3);
        assert_eq!(bytes[at("peers") + 8 * (MOST_RANKS - 1)], 7);
    }
}
