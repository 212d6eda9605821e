//! Random writes between all memory kinds, byte for byte.

use crate::common::{MemberDevices, PATIENCE, on_threads, put, region, take, waiting};
use crate::ends::join;
use std::time::Duration;
use weft_fabric::{Page, Rank, clock};

/// Devices for sources and inboxes.
const PLACES: [MemberDevices; 4] = [
    MemberDevices { source: Some(0), inbox: Some(1) },
    MemberDevices { source: Some(2), inbox: None },
    MemberDevices { source: None, inbox: Some(0) },
    MemberDevices { source: None, inbox: None },
];

#[test]
fn threads_write_random_pages_between_all_kinds_of_memory() {
    for shift in 0..4 {
        on_threads(4, |rank, gather| {
            let places = PLACES[(rank.0 as usize + shift) % 4];
            let mut member = join(places, rank, 4, gather);
            for round in 0..40 {
                member.round(shift as u64, round).unwrap();
            }
            gather(Vec::new());
        });
    }
}

/// Four page kinds under one lane, from sources on two devices.
#[test]
fn one_write_may_mix_devices_and_host_memory() {
    const EACH: usize = 3000;
    on_threads(2, |rank, gather| {
        let mut member = join(MemberDevices::default(), rank, 2, gather);
        let (engine, peer) = (&mut member.engine, Rank(1 - rank.0));
        let sources = [None, Some(0), Some(3)].map(|place| region(engine, place, EACH));
        let inboxes = [None, Some(1)].map(|place| region(engine, place, 3 * EACH));
        let ranges = inboxes.each_ref().map(|inbox| (inbox, 0..3 * EACH as u64));
        let said = gather(engine.grant(peer, &ranges, &[]).unwrap().encode());
        let theirs = weft_fabric::Grant::decode(&said[peer.0 as usize]).unwrap();
        let remotes = engine.import(peer, &theirs, &[], clock::now().after(PATIENCE)).unwrap();
        for round in 0..20 {
            for (value, source) in (1..).zip(&sources) {
                put(source, 0, &[10 * round as u8 + value; EACH]);
            }
            let mut pages = Vec::new();
            for remote in &remotes {
                for (index, source) in sources.iter().enumerate() {
                    for at in [0, 1000, 2000] {
                        pages.push(Page {
                            source: source.key(),
                            source_offset: at,
                            destination: remote.key,
                            destination_offset: (index * EACH) as u64 + at,
                            length: 1000,
                        });
                    }
                    pages.push(Page { length: 0, ..pages[0] });
                }
            }
            waiting(PATIENCE, Duration::ZERO, |waiter| {
                engine.wait_for_credit(member.counter, peer, round, waiter).unwrap();
                let request = engine.write(peer, member.counter, round, &pages).unwrap();
                engine.wait(member.counter, &[(peer, 1)], waiter).unwrap();
                for inbox in &inboxes {
                    for value in 0..3 {
                        let seen = take(inbox, value * EACH, EACH);
                        assert_eq!(seen, [10 * round as u8 + 1 + value as u8; EACH]);
                    }
                }
                engine.wait_for_request(request, waiter).unwrap();
                engine.credit(peer, member.counter).unwrap();
            });
        }
        engine.flush();
        gather(Vec::new());
    });
}
