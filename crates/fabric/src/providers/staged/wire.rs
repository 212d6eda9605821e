//! Bytes that both ends exchange, and the shape that they agree on: addresses, introductions, grants, headers.

use super::mode::StagedMode;
use crate::bytes::{Reader, put_block};
use crate::link::{RouteRule, STAGED_ADDRESS};
use crate::parts::PartRule;
use crate::types::{Lane, LaneId, Page, RegionKey};
use std::ops::Range;

/// Version in a wrapped link's address, behind [`STAGED_ADDRESS`].
const ADDRESS_VERSION: &[u8] = b"2 ";
/// Maximum pages in a slot.
const MAX_PAGES: u32 = 256;
/// Fixed header fields, and the bytes for each page.
const FIXED: usize = 16;
const PAGE: usize = 16;
/// Payload alignment in a slot.
const ALIGNMENT: usize = 64;
/// Longest parts are cut at this size where they are larger.
const PART_ALIGNMENT: u64 = 4096;
/// Slot bytes for the longest header, in whole memory pages.
pub const HEADER_ROOM: u64 = (MAX_HEADER as u64).next_multiple_of(PART_ALIGNMENT);
/// Flags in an address: the link has slots; it may register GPU memory.
const STAGES: u8 = 1;
const HAS_GPUS: u8 = 2;
/// Maximum slots that a configuration may have.
pub const MAX_SLOTS: u32 = 1 << 10;
/// Maximum bytes in a slot.
pub const MAX_SLOT_BYTES: u64 = 1 << 30;

/// Longest header.
pub const MAX_HEADER: usize = header_bytes(MAX_PAGES as usize);

/// Header bytes before the payload in a slot with this many pages.
pub const fn header_bytes(pages: usize) -> usize {
    (FIXED + PAGE * pages).next_multiple_of(ALIGNMENT)
}

/// A wrapped link's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagedAddress<'a> {
    /// Mode, as far as addresses show it.
    pub mode: StagedMode,
    /// Slots that one end has for each peer.
    pub slots: u32,
    /// Bytes in a slot, header included.
    pub slot_bytes: u64,
    /// The inner link's address.
    pub inner: &'a [u8],
}

impl<'a> StagedAddress<'a> {
    pub fn encode(&self) -> Vec<u8> {
        let (slots, bytes) = (self.slots.to_le_bytes(), self.slot_bytes.to_le_bytes());
        let stages = if self.mode.stages() { STAGES } else { 0 };
        let flags = stages | if self.mode.has_gpus() { HAS_GPUS } else { 0 };
        [STAGED_ADDRESS, ADDRESS_VERSION, &[flags], &slots, &bytes, self.inner].concat()
    }

    /// Decodes an address; `None` for another link's, or for slots that no configuration has.
    pub fn decode(bytes: &'a [u8]) -> Option<StagedAddress<'a>> {
        let mut reader =
            Reader::new(bytes.strip_prefix(STAGED_ADDRESS)?.strip_prefix(ADDRESS_VERSION)?);
        let mode = match reader.u8()? {
            0 => StagedMode::Never,
            STAGES => StagedMode::Automatic { has_gpus: false },
            3 => StagedMode::Automatic { has_gpus: true },
            _ => return None,
        };
        let (slots, slot_bytes) = (reader.u32()?, reader.u64()?);
        let valid = (1..=MAX_SLOTS).contains(&slots) && (1..=MAX_SLOT_BYTES).contains(&slot_bytes);
        valid.then_some(StagedAddress { mode, slots, slot_bytes, inner: reader.rest() })
    }

    /// True if parts between these two ends may take slots: both have some, and one has GPUs.
    pub fn is_staged(&self, other: &StagedAddress<'_>) -> bool {
        let both_stage = self.mode.stages() && other.mode.stages();
        both_stage && (self.mode.has_gpus() || other.mode.has_gpus())
    }

    /// Shape that two ends agree on, over an inner route with this rule. `None` if a slot, or a part over the
    /// inner route, is too short for a header and a byte.
    pub fn pair(&self, other: &StagedAddress<'_>, inner: PartRule) -> Option<PairShape> {
        let slots = self.slots.min(other.slots);
        let slot_bytes = self.slot_bytes.min(other.slot_bytes);
        let room = slot_bytes.min(inner.max_part_bytes);
        // Half a slot is left to the payload.
        let fit = usize::try_from(room / 2).ok()?.saturating_sub(FIXED) / PAGE;
        let pages = (fit as u32).clamp(1, MAX_PAGES).min(inner.max_pages_per_part);
        let payload = room.checked_sub(header_bytes(pages as usize) as u64)?;
        let rest = if payload > PART_ALIGNMENT { payload % PART_ALIGNMENT } else { 0 };
        let payload = payload - rest;
        let parts = PartRule { max_part_bytes: payload, max_pages_per_part: pages, ..inner };
        (payload > 0).then_some(PairShape { slots, slot_bytes, parts })
    }
}

/// Shape that two ends agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairShape {
    /// Slots in each direction.
    pub slots: u32,
    /// Bytes in a slot.
    pub slot_bytes: u64,
    /// Rule that divides writes into parts, host memory included: a part fits into a slot.
    pub parts: PartRule,
}

impl PairShape {
    /// Bytes in all slots for one direction.
    pub fn bytes(&self) -> u64 {
        u64::from(self.slots) * self.slot_bytes
    }

    /// The slot for a turn, and the first byte.
    pub fn slot(&self, turn: u64) -> (usize, u64) {
        let slot = turn % u64::from(self.slots);
        (slot as usize, slot * self.slot_bytes)
    }

    /// The rule that divides writes in host memory on a route without slots: no part is longer than with them.
    pub fn host_parts(&self, inner: PartRule) -> PartRule {
        PartRule { max_part_bytes: self.parts.max_part_bytes, ..inner }
    }

    /// The rule for the route, given the inner one. Neither order nor inline posts, and no piggybacked
    /// credits: a part in a slot arrives later than the inner write.
    pub fn rule(&self, inner: RouteRule) -> RouteRule {
        let parts = self.parts;
        RouteRule { parts, ordered: false, inline: false, max_piggyback: 0, mapped: false, ..inner }
    }
}

/// Lanes that a link issues to a peer, adjacent: one for each slot, raised when it is filled; one raised
/// for each slot that the peer has freed; one raised when the peer leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotLanes {
    pub first: Lane,
    pub slots: u32,
}

impl SlotLanes {
    /// Lanes to issue; even, as the table wants.
    pub fn count(slots: u32) -> u32 {
        (slots + 2).next_multiple_of(2)
    }

    /// True if all lanes have numbers.
    fn is_valid(&self) -> bool {
        LaneId::new(self.first.id().get().saturating_add(SlotLanes::count(self.slots))).is_some()
    }

    fn at(&self, offset: u32) -> Lane {
        let id = LaneId::new(self.first.id().get() + offset);
        Lane::new(id.unwrap_or(self.first.id()), self.first.generation())
    }

    /// Raised when this slot is filled.
    pub fn filled(&self, slot: usize) -> Lane {
        self.at(slot as u32)
    }

    /// Raised for each slot that is freed.
    pub fn freed(&self) -> Lane {
        self.at(self.slots)
    }

    /// Raised when the peer leaves.
    pub fn left(&self) -> Lane {
        self.at(self.slots + 1)
    }
}

/// Introduction on a route with slots: the inner introduction, then the slots' lanes.
pub fn put_introduction(lanes: SlotLanes, inner: &[u8]) -> Vec<u8> {
    [inner, &lanes.first.immediate().to_le_bytes()].concat()
}

/// The peer's lanes for these slots, and the inner introduction; `None` if it is malformed.
pub fn take_introduction(bytes: &[u8], slots: u32) -> Option<(SlotLanes, &[u8])> {
    let (inner, lane) = bytes.split_last_chunk()?;
    let lanes = SlotLanes { first: Lane::from_immediate(u32::from_le_bytes(*lane)), slots };
    lanes.is_valid().then_some((lanes, inner))
}

/// Region grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagedGrant<'a> {
    /// The inner link's entry; `None` for a region in a GPU, which that link does not reach.
    pub inner: Option<&'a [u8]>,
    /// Granted bytes.
    pub range: Range<u64>,
    /// The inner link's entry for the slots.
    pub slots: &'a [u8],
}

impl<'a> StagedGrant<'a> {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![u8::from(self.inner.is_none())];
        bytes.extend(self.range.start.to_le_bytes());
        bytes.extend(self.range.end.to_le_bytes());
        put_block(&mut bytes, self.slots);
        bytes.extend(self.inner.unwrap_or_default());
        bytes
    }

    /// Decodes a grant; `None` for malformed bytes.
    pub fn decode(bytes: &'a [u8]) -> Option<StagedGrant<'a>> {
        let mut reader = Reader::new(bytes);
        let kind = reader.u8()?;
        let range = reader.u64()?..reader.u64()?;
        let slots = reader.block()?;
        let inner = match (kind, reader.rest()) {
            (0, inner) => Some(inner),
            (1, []) => None,
            _ => return None,
        };
        (range.start <= range.end).then_some(StagedGrant { inner, range, slots })
    }
}

/// A page's destination in a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    pub key: RegionKey,
    pub offset: u64,
    pub length: u32,
}

/// A turn in a header, modulo 2^32; zeroed memory is not the first.
pub fn turn_word(turn: u64) -> u32 {
    (turn as u32).wrapping_add(1)
}

/// Header in a slot.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    /// The receiver's lane that rises once all pages are copied.
    pub lane: Lane,
    /// [`turn_word`]: a slot that was raised but not filled has another.
    pub turn: u32,
    pages: &'a [u8],
}

impl<'a> Header<'a> {
    /// Parses a header within a pair's limits. `bytes` may be longer.
    ///
    /// # Errors
    /// Reason why it is none.
    pub fn parse(bytes: &'a [u8], rule: PartRule) -> Result<Header<'a>, String> {
        let mut reader = Reader::new(bytes);
        let mut fixed = || Some((reader.u32()?, reader.u32()?, reader.u32()?, reader.u32()?));
        let (lane, turn, pages, zero) = fixed().ok_or("a header is cut short")?;
        if pages > rule.max_pages_per_part.min(MAX_PAGES) || zero != 0 {
            return Err(format!("a header has {pages} pages: at most {}", rule.max_pages_per_part));
        }
        let pages = reader.bytes(PAGE * pages as usize).ok_or("a header is cut short")?;
        let header = Header { lane: Lane::from_immediate(lane), turn, pages };
        let payload: u64 = header.pages().map(|page| u64::from(page.length)).sum();
        if payload > rule.max_part_bytes {
            return Err(format!("a part has {payload} bytes: at most {}", rule.max_part_bytes));
        }
        Ok(header)
    }

    /// First payload byte in the slot.
    pub fn len(&self) -> usize {
        header_bytes(self.pages.len() / PAGE)
    }

    /// Destinations, in payload order.
    pub fn pages(&self) -> impl Iterator<Item = Destination> + use<'a> {
        self.pages.chunks_exact(PAGE).filter_map(|page| {
            let mut reader = Reader::new(page);
            let (key, length) = (RegionKey(reader.u32()?), reader.u32()?);
            Some(Destination { key, length, offset: reader.u64()? })
        })
    }

    /// Replaces `out` by a header.
    pub fn put(out: &mut Vec<u8>, lane: Lane, turn: u32, pages: &[Page]) {
        out.clear();
        for field in [lane.immediate(), turn, pages.len() as u32, 0] {
            out.extend(field.to_le_bytes());
        }
        for page in pages {
            out.extend(page.destination.0.to_le_bytes());
            out.extend((page.length as u32).to_le_bytes());
            out.extend(page.destination_offset.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Generation;
    use proptest::prelude::*;

    const INNER: PartRule = PartRule { stripes: 2, stripe_from: 1 << 17, ..PartRule::WHOLE };

    fn address(slots: u32, slot_bytes: u64) -> StagedAddress<'static> {
        let mode = StagedMode::Automatic { has_gpus: true };
        StagedAddress { mode, slots, slot_bytes, inner: b"inner" }
    }

    #[test]
    fn both_ends_derive_one_shape_whose_parts_fit_a_slot_with_their_header() {
        for (ours, theirs, inner) in [
            (1 << 20, 1 << 20, u64::MAX),
            (1 << 20, 700, 1 << 20),
            (4096, 9000, 1400),
            (200, 200, 90),
        ] {
            let (ours, theirs) = (address(4, ours), address(7, theirs));
            let inner = PartRule { max_part_bytes: inner, max_pages_per_part: 256, ..INNER };
            let shape = ours.pair(&theirs, inner).unwrap();
            assert_eq!(theirs.pair(&ours, inner), Some(shape));
            assert_eq!((shape.slots, shape.parts.stripes), (4, 2));
            let PartRule { max_part_bytes, max_pages_per_part, .. } = shape.parts;
            let most = header_bytes(max_pages_per_part as usize) as u64 + max_part_bytes;
            assert!(most <= shape.slot_bytes.min(inner.max_part_bytes), "{shape:?}");
        }
        let short = PartRule { max_part_bytes: 64, ..PartRule::WHOLE };
        assert_eq!(address(1, 1 << 20).pair(&address(1, 1 << 20), short), None);
        let whole = address(4, 1 << 20).pair(&address(4, 1 << 20), PartRule::WHOLE).unwrap();
        assert_eq!(whole.parts.max_part_bytes, (1 << 20) - 8192);
        let roomy = address(4, (1 << 20) + HEADER_ROOM);
        assert_eq!(roomy.pair(&roomy, PartRule::WHOLE).unwrap().parts.max_part_bytes, 1 << 20);
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let bytes = address(4, 1 << 20).encode();
        assert_eq!(StagedAddress::decode(&bytes), Some(address(4, 1 << 20)));
        for (slots, slot_bytes) in [(0, 1), (MAX_SLOTS + 1, 1), (1, 0), (1, MAX_SLOT_BYTES + 1)] {
            assert_eq!(StagedAddress::decode(&address(slots, slot_bytes).encode()), None);
        }
        assert_eq!(StagedAddress::decode(b"hostile "), None);
        for inner in [Some(&b"entry"[..]), None] {
            let grant = StagedGrant { inner, range: 3..9, slots: b"slots" };
            assert_eq!(StagedGrant::decode(&grant.encode()), Some(grant));
        }
        let first = Lane::new(LaneId::new(6).unwrap(), Generation(3));
        let lanes = SlotLanes { first, slots: 4 };
        assert_eq!(SlotLanes::count(4), 6);
        let bytes = put_introduction(lanes, b"inner");
        assert_eq!(take_introduction(&bytes, 4), Some((lanes, &b"inner"[..])));
        let ids = [lanes.filled(3), lanes.freed(), lanes.left()].map(|lane| lane.id().get());
        assert_eq!(ids, [9, 10, 11]);
        let last = Lane::new(LaneId::new(LaneId::LIMIT - 1).unwrap(), Generation(0));
        let beyond = put_introduction(SlotLanes { first: last, slots: 4 }, b"");
        assert_eq!(take_introduction(&beyond, 4), None);
    }

    proptest! {
        #[test]
        fn headers_round_trip(
            pages in prop::collection::vec((any::<u32>(), any::<u64>(), 0u32..4000), 0..12),
            lane: u32,
            turn: u32,
        ) {
            let pages: Vec<Page> = pages.into_iter().map(|(key, offset, length)| Page {
                source: RegionKey(0),
                source_offset: 0,
                destination: RegionKey(key),
                destination_offset: offset,
                length: length.into(),
            }).collect();
            let mut bytes = Vec::new();
            Header::put(&mut bytes, Lane::from_immediate(lane), turn, &pages);
            let rule = PartRule { max_part_bytes: 100_000, max_pages_per_part: 12, ..INNER };
            let header = Header::parse(&bytes, rule).unwrap();
            prop_assert!(bytes.len() <= header.len() && header.len() <= bytes.len() + ALIGNMENT);
            prop_assert_eq!((header.lane.immediate(), header.turn), (lane, turn));
            let seen = header.pages().map(|page| (page.key, page.offset, u64::from(page.length)));
            let sent = pages.iter().map(|page| (page.destination, page.destination_offset, page.length));
            prop_assert!(seen.eq(sent));
        }

        #[test]
        fn garbage_is_rejected_or_within_the_limits(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = StagedAddress::decode(&bytes);
            let _ = StagedGrant::decode(&bytes);
            let _ = take_introduction(&bytes, 4);
            let rule = PartRule { max_part_bytes: 1000, max_pages_per_part: 4, ..INNER };
            if let Ok(header) = Header::parse(&bytes, rule) {
                prop_assert!(header.pages().count() <= 4);
                prop_assert!(header.pages().map(|page| u64::from(page.length)).sum::<u64>() <= 1000);
            }
        }
    }
}
