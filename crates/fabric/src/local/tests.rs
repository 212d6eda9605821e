//! Tests for waits that are not reachable from outside the crate.

use super::{LocalPeers, WaitLimit};
use crate::clock;
use crate::error::Error;
use crate::lane_table::LaneTable;
use crate::link::{Introduction, Membership};
use crate::types::{Generation, ProviderKind, RegionKey};
use std::sync::Arc;
use std::time::Duration;
use weft_control::Rank;

/// Rank 0's peers and a grantless rank 1's peers, connected.
fn connected() -> [LocalPeers; 2] {
    let open = || LocalPeers::open(ProviderKind::Shm, "this", &[]).unwrap();
    let mut ends = [open(), open()];
    let addresses = [ends[0].address(), ends[1].address()];
    let deadline = clock::now().after(Duration::from_secs(30));
    std::thread::scope(|scope| {
        for (rank, end) in (0..).zip(&mut ends) {
            let (peer, generation) = (1 - rank, Generation(0));
            let address = addresses[peer as usize].as_slice();
            scope.spawn(move || {
                let lanes = Arc::new(LaneTable::new(4, generation).unwrap());
                let peers = &[Introduction { peer: Rank(peer), address, message: &[] }];
                let group = Membership { rank: Rank(rank), size: 2, generation, lanes };
                let mut limit = WaitLimit { deadline, give_up: &mut || Ok(()) };
                end.connect(&group, peers, &mut limit).unwrap();
            });
        }
    });
    ends
}

#[test]
#[cfg_attr(miri, ignore = "miri has neither memory files nor abstract sockets")]
fn an_import_ends_with_the_error_of_its_check() {
    let [mut zero, _one] = connected();
    let deadline = clock::now().after(Duration::from_secs(30));
    let mut checks = 0;
    let mut give_up = || {
        checks += 1;
        if checks < 3 { Ok(()) } else { Err(Error::Interrupted) }
    };
    let mut limit = WaitLimit { deadline, give_up: &mut give_up };
    let entry = 7u64.to_le_bytes();
    let imported = zero.import(Rank(1), RegionKey(0), 8, &entry, &mut limit);
    assert!(matches!(imported, Err(Error::Interrupted)), "{imported:?}");
    assert!(clock::now() < deadline);
}

#[test]
#[cfg_attr(miri, ignore = "miri has neither memory files nor abstract sockets")]
fn an_import_whose_descriptor_does_not_come_names_its_peer_at_the_deadline() {
    let [mut zero, _one] = connected();
    let deadline = clock::now().after(Duration::from_millis(20));
    let mut limit = WaitLimit { deadline, give_up: &mut || Ok(()) };
    let entry = 7u64.to_le_bytes();
    let imported = zero.import(Rank(1), RegionKey(3), 8, &entry, &mut limit);
    assert!(matches!(imported, Err(Error::Connect { peer: Rank(1), .. })), "{imported:?}");
}
