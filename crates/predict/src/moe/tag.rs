//! What an event stands for: kind, round, source and destination in one number.

/// What a tag stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The rank calls dispatch.
    Begin,
    /// Its header can be posted.
    Planned,
    /// Its rows can be posted.
    Packed,
    /// It knows all offsets.
    Routed,
    /// Its experts may begin.
    Dispatched,
    /// It calls combine.
    Combine,
    /// Its answers can be posted.
    Answered,
    /// Its sums are there.
    Combined,
    /// A header has arrived.
    Header,
    /// A part of rows has arrived.
    Rows,
    /// A part of answers has arrived.
    Answers,
}

/// All of them, in their order.
pub(crate) const KINDS: [Kind; 11] = [
    Kind::Begin,
    Kind::Planned,
    Kind::Packed,
    Kind::Routed,
    Kind::Dispatched,
    Kind::Combine,
    Kind::Answered,
    Kind::Combined,
    Kind::Header,
    Kind::Rows,
    Kind::Answers,
];

const SIDE_BITS: u32 = 16;
const ROUND_BITS: u32 = 8;

/// The tag of what goes from one rank to another, or of what a rank does itself.
pub(crate) fn tag(kind: Kind, round: u32, from: u32, to: u32) -> u64 {
    let sides = u64::from(from) << SIDE_BITS | u64::from(to);
    (u64::from(kind as u8) << ROUND_BITS | u64::from(round)) << (2 * SIDE_BITS) | sides
}

/// Kind, round, source and destination.
pub(crate) fn read_tag(tag: u64) -> (Kind, u32, u32, u32) {
    let side = |bits: u64| (bits & ((1 << SIDE_BITS) - 1)) as u32;
    let head = tag >> (2 * SIDE_BITS);
    let round = (head & ((1 << ROUND_BITS) - 1)) as u32;
    (KINDS[(head >> ROUND_BITS) as usize], round, side(tag >> SIDE_BITS), side(tag))
}
