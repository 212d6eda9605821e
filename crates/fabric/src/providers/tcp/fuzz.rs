//! Any bytes on a connection, and as what is parsed off it; see `crate::fuzz`.

use super::granted::Granted;
use super::stream::{Gate, Stream};
use super::wire::{Address, Head, Hello, MAX_PAGES, put_head};
use crate::lane_table::LaneTable;
use crate::memory::Memory;
use crate::parts::PartRule;
use crate::types::{Generation, Page, RegionKey};
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use weft_control::Rank;

const RULE: PartRule =
    PartRule { max_part_bytes: 1 << 20, max_pages_per_part: MAX_PAGES, ..PartRule::WHOLE };
const LENGTH: usize = 300;
const GRANTED: std::ops::Range<usize> = 100..200;

/// What parses means one thing: it survives being said again.
pub fn wire(data: &[u8]) {
    if let Some(address) = Address::decode(data) {
        assert_eq!(Address::decode(&address.encode()), Some(address));
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

/// A peer that was granted a third of a region says anything, in pieces as long as its first byte
/// says. It may write there and raise its lane, and nothing else.
pub fn stream(data: &[u8]) {
    let Some((step, bytes)) = data.split_first() else { return };
    let (Ok((here, mut there)), Ok(lanes)) = (UnixStream::pair(), LaneTable::new(4, Generation(3)))
    else {
        return;
    };
    let (Ok(()), Ok(lane)) = (here.set_nonblocking(true), lanes.issue(Rank(1), 2)) else { return };
    let Ok(foreign) = lanes.issue(Rank(2), 2) else { return };
    let memory = Arc::new(Memory::from_bytes(vec![0; LENGTH]));
    let mut granted = Granted::default();
    granted.add(0, GRANTED.start as u64..GRANTED.end as u64);
    let regions = [Some(memory.clone())];
    let gate =
        Gate { peer: Rank(1), rule: RULE, granted: &granted, regions: &regions, lanes: &lanes };
    let mut stream = Stream::new(here.into());
    for piece in bytes.chunks(1 + 16 * usize::from(*step)) {
        if there.write_all(piece).is_err() || stream.receive(&gate).is_err() {
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
