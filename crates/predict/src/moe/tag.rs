//! Round events with their tags: event, round, source and destination in one number.

/// Round event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MoeEvent {
    /// Dispatch is called.
    Begin,
    /// Header ready to post.
    Planned,
    /// Rows ready to post.
    Packed,
    /// Offsets computed.
    Routed,
    /// Dispatch has ended.
    Dispatched,
    /// Combine is called.
    Combine,
    /// Replies ready to post.
    RepliesReady,
    /// Combine has ended.
    Combined,
    /// A header has arrived.
    Header,
    /// A part with rows has arrived.
    Rows,
    /// A part with replies has arrived.
    Replies,
}

/// All events in number order.
pub(crate) const EVENTS: [MoeEvent; 11] = [
    MoeEvent::Begin,
    MoeEvent::Planned,
    MoeEvent::Packed,
    MoeEvent::Routed,
    MoeEvent::Dispatched,
    MoeEvent::Combine,
    MoeEvent::RepliesReady,
    MoeEvent::Combined,
    MoeEvent::Header,
    MoeEvent::Rows,
    MoeEvent::Replies,
];

const SIDE_BITS: u32 = 16;
const ROUND_BITS: u32 = 8;

/// Tag for a write from one rank to another, or for a rank's own stage.
pub(crate) fn tag(kind: MoeEvent, round: u32, from: u32, to: u32) -> u64 {
    let sides = u64::from(from) << SIDE_BITS | u64::from(to);
    (u64::from(kind as u8) << ROUND_BITS | u64::from(round)) << (2 * SIDE_BITS) | sides
}

/// Event, round, source and destination in a tag.
pub(crate) fn read_tag(tag: u64) -> (MoeEvent, u32, u32, u32) {
    let side = |bits: u64| (bits & ((1 << SIDE_BITS) - 1)) as u32;
    let head = tag >> (2 * SIDE_BITS);
    let round = (head & ((1 << ROUND_BITS) - 1)) as u32;
    (EVENTS[(head >> ROUND_BITS) as usize], round, side(tag >> SIDE_BITS), side(tag))
}
