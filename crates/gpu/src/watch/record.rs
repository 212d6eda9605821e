//! Kernel record for the host.

/// Peer field value without a peer.
pub(super) const NO_PEER: u32 = u32::MAX;

/// A record. Phases, and codes not common to all families, are numbers in a [`Family`](super::Family).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Event code.
    pub code: Code,
    /// Rank that recorded it.
    pub rank: u32,
    /// Kernel phase.
    pub phase: u32,
    /// Peer concerned, if any: awaited, or without capacity.
    pub peer: Option<u32>,
    /// Channel (in-flight slot).
    pub channel: u32,
    /// Row or token concerned.
    pub slot: u32,
    /// Expected value: an epoch, or as the family defines.
    pub expected: u64,
    /// Observed value.
    pub seen: u64,
}

/// Record code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// A wait on the device expired.
    Timeout,
    /// The host set the abort word.
    Aborted,
    /// Two launches were in flight on one channel.
    Overlap,
    /// A round's phases were launched out of order.
    OutOfOrder,
    /// A family's code.
    Family(u32),
}

impl Code {
    /// Number in memory.
    pub fn number(self) -> u32 {
        match self {
            Code::Timeout => 1,
            Code::Aborted => 2,
            Code::Overlap => 3,
            Code::OutOfOrder => 4,
            Code::Family(number) => number,
        }
    }

    fn from_number(number: u32) -> Code {
        match number {
            1 => Code::Timeout,
            2 => Code::Aborted,
            3 => Code::Overlap,
            4 => Code::OutOfOrder,
            number => Code::Family(number),
        }
    }
}

impl Record {
    /// The first six words in memory, which [`RecordLayout`](crate::table::RecordLayout) names.
    pub fn words(&self) -> [u32; 6] {
        let peer = self.peer.unwrap_or(NO_PEER);
        [self.code.number(), self.rank, self.phase, peer, self.channel, self.slot]
    }

    /// Record from arbitrary words, as a device wrote them.
    pub fn from_words(words: [u32; 6], expected: u64, seen: u64) -> Record {
        let [code, rank, phase, peer, channel, slot] = words;
        let (code, peer) = (Code::from_number(code), (peer != NO_PEER).then_some(peer));
        Record { code, rank, phase, peer, channel, slot, expected, seen }
    }
}
