//! Fuzz targets for the wire format and for a receiving stream; see `crate::fuzz`.

use super::super::granted_ranges::GrantedRanges;
use super::regions::TcpRegions;
use super::stream::{GrantCheck, Stream};
use super::wire::{Head, Hello, MAX_PAGES, TcpAddress, TcpIntroduction, put_head};
use crate::lane_table::LaneTable;
use crate::memory::Memory;
use crate::parts::PartRule;
use crate::types::{Generation, Page, RegionKey};
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use weft_control::Rank;

const RULE: PartRule =
    PartRule { max_part_bytes: 1 << 20, max_pages_per_part: MAX_PAGES, ..PartRule::WHOLE };
const LENGTH: usize = 300;
const GRANTED: std::ops::Range<usize> = 100..200;

/// Parsed input encodes to the same bytes.
pub fn wire(data: &[u8]) {
    if let Some(address) = TcpAddress::decode(data) {
        assert_eq!(TcpAddress::decode(&address.encode()), Some(address));
    }
    if let Some(introduction) = TcpIntroduction::decode(data) {
        assert_eq!(introduction.encode(), data);
    }
    if let Some(Ok(hello)) = data.first_chunk().map(Hello::decode) {
        assert_eq!(hello.encode()[..], data[..super::wire::HELLO]);
    }
    if let Ok(Some(head)) = Head::parse(data, RULE) {
        let page = |to: super::wire::Destination| Page {
            source: RegionKey(0),
            source_offset: 0,
            destination: RegionKey(to.key),
            destination_offset: to.offset,
            length: to.length.into(),
        };
        let pages: Vec<Page> = head.pages().map(page).collect();
        let mut again = Vec::new();
        put_head(&mut again, head.lane, &pages);
        assert_eq!(again, data[..head.len()]);
    }
}

/// A peer that is granted a third of a region sends any bytes, in chunks as long as the first byte
/// selects. Only granted bytes are written, and only the peer's lane is raised.
pub fn stream(data: &[u8]) {
    let Some((step, bytes)) = data.split_first() else { return };
    let (Ok((here, mut there)), Ok(lanes)) = (UnixStream::pair(), LaneTable::new(4, Generation(3)))
    else {
        return;
    };
    let (Ok(()), Ok(lane)) = (here.set_nonblocking(true), lanes.issue(Rank(1), 2)) else { return };
    let Ok(foreign) = lanes.issue(Rank(2), 2) else { return };
    let memory = Arc::new(Memory::from_bytes(vec![0; LENGTH]));
    let mut granted = GrantedRanges::default();
    granted.add(0, GRANTED.start as u64..GRANTED.end as u64);
    let mut regions = TcpRegions::default();
    regions.insert(RegionKey(0), memory.clone());
    let check = GrantCheck {
        peer: Rank(1),
        rule: RULE,
        granted: &granted,
        regions: &regions,
        lanes: &lanes,
    };
    let mut stream = Stream::new(OwnedFd::from(here).into());
    for piece in bytes.chunks(1 + 16 * usize::from(*step)) {
        if there.write_all(piece).is_err() || stream.receive(&check).is_err() {
            break;
        }
    }
    let mut seen = [0; LENGTH];
    memory.copy_out(0, &mut seen);
    let outside = seen[..GRANTED.start].iter().chain(&seen[GRANTED.end..]);
    assert!(outside.into_iter().all(|byte| *byte == 0), "bytes outside of the grant were written");
    assert_eq!(lanes.value(foreign.id()), 0, "another peer's lane rose");
    // A frame has at least twelve bytes.
    assert!(lanes.value(lane.id()) <= bytes.len() as u64 / 12, "a lane rose without a frame");
}
