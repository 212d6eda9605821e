//! Commands: 64-byte slots that kernels fill, and the values that the host reads from them.
//!
//! A slot has four quarters with 16 bytes. Each quarter is stored at once by one thread and carries the slot's use
//! number, so a command needs no further fence and no flag. [`CommandFields`] are all other bits; [`Command`] is a
//! command that the agreed limits admit. For example, a 4096-byte put to rank 3 has kind 1, peer 3 and length 4096.

use crate::layout;
use crate::layout::c_struct;
use crate::phase::{PROXY_PUSH, PROXY_WAIT};
use std::fmt;
use weft_control::Rank;

/// Quarters in a slot.
pub const QUARTERS: usize = 4;
/// Words in a quarter before the use number.
pub const PAYLOAD_WORDS: usize = 3;
/// The payloads in one slot, by quarter.
pub type Payloads = [[u32; PAYLOAD_WORDS]; QUARTERS];

layout! {
    /// Ring slot in memory layout.
    pub struct SlotLayout {
        head: u32, "kind, flags << 8, peer or template << 16";
        length: [u32; 2], "bytes, low word first";
        use_0: u32, "use number, which is ticket / slots + 1, modulo 2^32";
        windows: u32, "source window, destination window << 16";
        word: u32, "word that the command raises, credits or, at this rank, asks for";
        reserved: u32, "0";
        use_1: u32, "use number";
        source: [u32; 2], "source offset in bytes, low word first";
        count: u32, "peers in a SCATTER, rounds in a RELEASE";
        use_2: u32, "use number";
        destination: [u32; 2], "destination offset in bytes, low word first";
        list: u32, "index of a SCATTER's first length";
        use_3: u32, "use number";
    }
}

/// Command kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Writes bytes to a peer and raises a word there.
    Put = 1,
    /// Raises a word at a peer.
    Signal = 2,
    /// Writes to the peers in a template, with a length for each, and raises a word at each.
    Scatter = 3,
    /// Credits rounds that a peer has put with [`HOLD`].
    Release = 4,
    /// Raises a word at this rank once the sources of all earlier commands may be reused.
    Drained = 5,
}

/// Flag: the rounds of this word are credited by [`Kind::Release`], not when the word rises.
pub const HOLD: u8 = 1;

impl Kind {
    /// All kinds, with the names that kernels use.
    pub const ALL: [(Kind, &'static str); 5] = [
        (Kind::Put, "PUT"),
        (Kind::Signal, "SIGNAL"),
        (Kind::Scatter, "SCATTER"),
        (Kind::Release, "RELEASE"),
        (Kind::Drained, "DRAINED"),
    ];

    /// The kind with this number.
    pub fn from_number(number: u8) -> Option<Kind> {
        let (kind, _) = Kind::ALL.get(usize::from(number).checked_sub(1)?)?;
        Some(*kind)
    }

    /// Name that kernels use.
    pub fn name(self) -> &'static str {
        Kind::ALL[self as usize - 1].1
    }
}

/// All fields in a slot except the use numbers. Every value is possible: kernels are trusted no further.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommandFields {
    /// [`Kind`] number.
    pub kind: u8,
    /// [`HOLD`], or 0.
    pub flags: u8,
    /// Peer rank, or a SCATTER's template.
    pub peer: u16,
    /// Bytes.
    pub length: u64,
    /// Window that is read.
    pub source_window: u16,
    /// Window that is written.
    pub destination_window: u16,
    /// Word index.
    pub word: u32,
    /// 0.
    pub reserved: u32,
    /// First byte read.
    pub source_offset: u64,
    /// Peers or rounds.
    pub count: u32,
    /// First byte written.
    pub destination_offset: u64,
    /// Index of the first length.
    pub list: u32,
}

impl CommandFields {
    /// Fields in a slot's payloads.
    pub fn from_payloads(payloads: &Payloads) -> CommandFields {
        let [[head, low, high], [windows, word, reserved], source, destination] = *payloads;
        let wide = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        CommandFields {
            kind: head as u8,
            flags: (head >> 8) as u8,
            peer: (head >> 16) as u16,
            length: wide(low, high),
            source_window: windows as u16,
            destination_window: (windows >> 16) as u16,
            word,
            reserved,
            source_offset: wide(source[0], source[1]),
            count: source[2],
            destination_offset: wide(destination[0], destination[1]),
            list: destination[2],
        }
    }

    /// Payloads for a slot.
    pub fn payloads(&self) -> Payloads {
        let pair = |low: u16, high: u16| u32::from(high) << 16 | u32::from(low);
        let (low, high) = (|wide: u64| wide as u32, |wide: u64| (wide >> 32) as u32);
        let head = pair(u16::from_le_bytes([self.kind, self.flags]), self.peer);
        let windows = pair(self.source_window, self.destination_window);
        let (source, destination) = (self.source_offset, self.destination_offset);
        [
            [head, low(self.length), high(self.length)],
            [windows, self.word, self.reserved],
            [low(source), high(source), self.count],
            [low(destination), high(destination), self.list],
        ]
    }
}

impl fmt::Display for CommandFields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Kind::from_number(self.kind) {
            Some(kind) => f.write_str(kind.name())?,
            None => write!(f, "kind {}", self.kind)?,
        }
        let CommandFields { flags, peer, length, word, reserved, count, list, .. } = self;
        let (from, to) = (self.source_window, self.destination_window);
        let (source, destination) = (self.source_offset, self.destination_offset);
        write!(
            f,
            " with flags {flags}, peer {peer}, {length} bytes from window {from} at {source} to window {to} at \
             {destination}, word {word}, count {count}, list {list}, reserved {reserved}"
        )
    }
}

/// Bytes in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Window number.
    pub window: u16,
    /// First byte.
    pub offset: u64,
}

/// Word at a peer, and who credits the rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Word index.
    pub word: u32,
    /// True if the destination's kernel credits the rounds.
    pub hold: bool,
}

/// Command within the agreed limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// [`Kind::Put`].
    Put {
        /// Destination.
        peer: Rank,
        /// Word there.
        target: Target,
        /// Bytes read.
        source: Place,
        /// Bytes written.
        destination: Place,
        /// Length; at least 1.
        length: u64,
    },
    /// [`Kind::Signal`].
    Signal {
        /// Destination.
        peer: Rank,
        /// Word there.
        target: Target,
    },
    /// [`Kind::Scatter`].
    Scatter {
        /// Template number.
        template: u16,
        /// Word at each peer.
        target: Target,
        /// Place to which the template's source offsets are added.
        source: Place,
        /// Place to which the template's destination offsets are added.
        destination: Place,
        /// Peers, from the template's first on; at least 1.
        count: u32,
        /// Index of the first peer's length.
        list: u32,
    },
    /// [`Kind::Release`].
    Release {
        /// Rank that has put.
        peer: Rank,
        /// Word here.
        word: u32,
        /// Rounds; at least 1.
        count: u32,
    },
    /// [`Kind::Drained`].
    Drained {
        /// Word at this rank, of this rank.
        word: u32,
    },
}

impl Command {
    /// Fields for a slot; those that the kind does not use are 0.
    pub fn fields(&self) -> CommandFields {
        let flags = |target: Target| if target.hold { HOLD } else { 0 };
        let with = |kind: Kind| CommandFields { kind: kind as u8, ..CommandFields::default() };
        match *self {
            Command::Put { peer, target, source, destination, length } => CommandFields {
                flags: flags(target),
                peer: peer.0 as u16,
                length,
                word: target.word,
                source_window: source.window,
                destination_window: destination.window,
                source_offset: source.offset,
                destination_offset: destination.offset,
                ..with(Kind::Put)
            },
            Command::Signal { peer, target } => CommandFields {
                flags: flags(target),
                peer: peer.0 as u16,
                word: target.word,
                ..with(Kind::Signal)
            },
            Command::Scatter { template, target, source, destination, count, list } => {
                CommandFields {
                    flags: flags(target),
                    peer: template,
                    word: target.word,
                    source_window: source.window,
                    destination_window: destination.window,
                    source_offset: source.offset,
                    destination_offset: destination.offset,
                    count,
                    list,
                    ..with(Kind::Scatter)
                }
            }
            Command::Release { peer, word, count } => {
                CommandFields { peer: peer.0 as u16, word, count, ..with(Kind::Release) }
            }
            Command::Drained { word } => CommandFields { word, ..with(Kind::Drained) },
        }
    }
}

/// Refused command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("command {ticket} ({fields}): {problem}; correct the kernel that pushed it")]
pub struct CommandError {
    /// Ticket.
    pub ticket: u64,
    /// All fields.
    pub fields: CommandFields,
    /// Field out of range.
    pub problem: Problem,
}

/// Field value out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Field name.
    pub field: &'static str,
    /// Value.
    pub value: u64,
    /// Smallest value that is admitted.
    pub least: u64,
    /// Largest value that is admitted.
    pub most: u64,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Problem { field, value, least, most } = self;
        match least.cmp(most) {
            std::cmp::Ordering::Less => write!(f, "{field} {value}: expected {least} to {most}"),
            std::cmp::Ordering::Equal => write!(f, "{field} {value}: expected {least}"),
            std::cmp::Ordering::Greater => write!(f, "{field} {value}: expected none"),
        }
    }
}

/// Header text for `weft/command.cuh`.
pub fn c_header() -> String {
    let kinds: Vec<String> =
        Kind::ALL.iter().map(|(kind, name)| format!("COMMAND_{name} = {}", *kind as u8)).collect();
    format!(
        "// Proxy commands. Generated from crates/gpu/src/proxy/command.rs; a test compares the two.\n\
         #pragma once\n#include \"weft/ptx.cuh\"\n\nnamespace weft {{\n\n\
         // Ring slot: four quarters, each stored at once.\n{}static_assert(sizeof(CommandSlot) == {}, \"as declared in \
         Rust\");\n\nenum CommandKind : u32 {{ {} }};\nconstexpr u32 COMMAND_HOLD = {HOLD};\n\n\
         // Phases in records: expired waits for a word, and for a slot in the ring.\nconstexpr u32 PHASE_PROXY_WAIT = \
         {PROXY_WAIT}, PHASE_PROXY_PUSH = {PROXY_PUSH};\n\n}} // namespace weft\n",
        c_struct("CommandSlot", "", SlotLayout::FIELDS),
        SlotLayout::SIZE,
        kinds.join(", "),
    )
}

#[cfg(test)]
#[path = "command_tests.rs"]
mod tests;
