//! Fuzz target for the wrapper's bytes; see `crate::fuzz`.

use super::wire::{
    Header, StagedAddress, StagedGrant, header_bytes, put_introduction, take_introduction,
};
use crate::parts::PartRule;
use crate::types::{Page, RegionKey};

const RULE: PartRule =
    PartRule { max_part_bytes: 1 << 13, max_pages_per_part: 16, ..PartRule::WHOLE };
const SLOTS: u32 = 4;

/// Parsed input encodes to the same bytes, and a header is within the limits.
pub fn wire(data: &[u8]) {
    if let Some(address) = StagedAddress::decode(data) {
        assert_eq!(address.encode(), data);
        if let Some(shape) = address.pair(&address, RULE) {
            let PartRule { max_part_bytes, max_pages_per_part, .. } = shape.parts;
            let longest = header_bytes(max_pages_per_part as usize) as u64 + max_part_bytes;
            assert!(max_part_bytes > 0 && longest <= shape.slot_bytes.min(RULE.max_part_bytes));
        }
    }
    if let Some((lanes, inner)) = take_introduction(data, SLOTS) {
        assert_eq!(put_introduction(lanes, inner), data);
    }
    if let Some(grant) = StagedGrant::decode(data) {
        assert_eq!(grant.encode(), data);
    }
    if let Ok(header) = Header::parse(data, RULE) {
        let page = |to: super::wire::Destination| Page {
            source: RegionKey(0),
            source_offset: 0,
            destination: to.key,
            destination_offset: to.offset,
            length: to.length.into(),
        };
        let pages: Vec<Page> = header.pages().map(page).collect();
        assert!(pages.len() <= RULE.max_pages_per_part as usize);
        assert!(pages.iter().map(|page| page.length).sum::<u64>() <= RULE.max_part_bytes);
        let mut bytes = Vec::new();
        Header::put(&mut bytes, header.lane, header.turn, &pages);
        assert_eq!(bytes, data[..bytes.len()]);
    }
}
