//! Peers that read late or never, deadlines that pass, queues that stay full.

use crate::common::{MemberConfig, MemberDevices, fill, region, take, waiting};
use crate::is_long;
use crate::provider::{Provider, Shape, credit, waited};
use std::sync::Arc;
use std::time::Duration;
use weft_fabric::providers::{HostileConfig, HostileDevice};
use weft_fabric::{Cause, Device, Error, Generation, Page, PeerWrite, Poison, Rank, clock};

use crate::common::Member;

/// Rank 1 sleeps with more parts in flight toward it than queues take; ranks 0 and 2 continue with each
/// other.
pub fn a_peer_that_does_not_poll_delays_no_other(provider: &Provider) {
    const LARGE: usize = 4 << 20;
    let shape = if provider.has(Shape::Queue(16)) { Shape::Queue(16) } else { Shape::Default };
    let joining = MemberConfig { slot: LARGE, source: LARGE, ..MemberConfig::default() };
    provider.group(shape, joining, 3, |member, gather| {
        let (me, counter) = (member.engine.rank(), member.counter);
        let (slow, other) = (Rank(1), Rank(2 - me.0.min(2)));
        fill(&member.source, 0, LARGE, 1 + me.0 as u8);
        let mut requests = Vec::new();
        if me != slow {
            let page = member.page(slow, 0, 0, LARGE);
            requests.push(member.engine.write(slow, counter, 0, &[page]).unwrap());
            for turn in 0..50 {
                let soon = Duration::from_secs(10);
                let wait = |w: &mut weft_fabric::WaitOptions<'_>| {
                    member.engine.wait_for_credit(counter, other, turn, w)?;
                    let page = member.page(other, 0, 0, 100);
                    let request = member.engine.write(other, counter, turn, &[page])?;
                    member.engine.wait(counter, &[(other, 1)], w)?;
                    member.engine.wait_for_request(request, w)?;
                    let credit = member.engine.credit_now(other, counter)?;
                    member.engine.wait_for_request(credit, w)
                };
                waiting(soon, Duration::ZERO, wait).expect("rank 1 holds up the others");
            }
            waited(|w| member.engine.wait_for_credit(counter, other, 50, w)).unwrap();
        }
        gather(Vec::new());
        if me == slow {
            for peer in [0, 2].map(Rank) {
                let raises = member.raises(peer, [LARGE]);
                waited(|w| member.engine.wait(counter, &[(peer, raises)], w)).unwrap();
                assert!(member.slot_of(peer).iter().all(|seen| *seen == 1 + peer.0 as u8));
                let answer = member.engine.signal(peer, counter, 0).unwrap();
                waited(|w| member.engine.wait_for_request(answer, w)).unwrap();
                credit(member, peer);
            }
            for peer in [0, 2].map(Rank) {
                waited(|w| member.engine.wait_for_credit(counter, peer, 1, w)).unwrap();
            }
        } else {
            waited(|w| member.engine.wait(counter, &[(slow, 1)], w)).unwrap();
            credit(member, slow);
            waited(|w| member.engine.wait_for_credit(counter, slow, 1, w)).unwrap();
        }
        for request in requests {
            waited(|w| member.engine.wait_for_request(request, w)).unwrap();
        }
    });
}

/// Seven ranks write to one that sleeps, as much as the window permits.
pub fn nothing_is_lost_while_an_owner_does_not_poll(provider: &Provider) {
    const RANKS: u32 = 8;
    const WINDOW: usize = 16;
    const CELL: usize = 8 << 10;
    let asleep = Duration::from_secs(if is_long() { 20 } else { 2 });
    let slot = WINDOW * CELL;
    let joining =
        MemberConfig { slot, source: slot, window: WINDOW as u32, ..MemberConfig::default() };
    let value = |from: Rank, round: usize| 1 + (from.0 as usize * WINDOW + round) as u8;
    provider.group(Shape::Default, joining, RANKS, |member, gather| {
        let (me, counter, owner) = (member.engine.rank(), member.counter, Rank(0));
        gather(Vec::new());
        if me == owner {
            std::thread::sleep(asleep);
            for peer in (1..RANKS).map(Rank) {
                for round in 0..WINDOW {
                    let raises = member.raises(peer, [CELL]);
                    waited(|w| member.engine.wait(counter, &[(peer, raises)], w)).unwrap();
                    let at = peer.0 as usize * slot + round * CELL;
                    let seen = take(&member.inbox, at, CELL);
                    assert!(seen.iter().all(|seen| *seen == value(peer, round)), "{peer}, {round}");
                    credit(member, peer);
                }
            }
        } else {
            let mut requests = Vec::new();
            for round in 0..WINDOW {
                let at = round * CELL;
                fill(&member.source, at, CELL, value(me, round));
                let page = member.page(owner, at, at, CELL);
                requests.push(member.engine.write(owner, counter, round as u64, &[page]).unwrap());
            }
            for request in requests {
                waited(|w| member.engine.wait_for_request(request, w)).unwrap();
            }
            let all = 2 * WINDOW as u64 - 1;
            waited(|w| member.engine.wait_for_credit(counter, owner, all, w)).unwrap();
        }
    });
}

/// A 64 MiB write toward a peer that does not poll, and a wait whose deadline has passed.
pub fn a_deadline_that_passes_leaves_the_request_until_it_drains(provider: &Provider) {
    const LARGE: usize = 64 << 20;
    provider.group(Shape::Default, MemberConfig::default(), 2, |member, gather| {
        let (me, counter) = (member.engine.rank(), member.counter);
        let peer = Rank(1 - me.0);
        let inbox =
            region(&mut member.engine, provider.places.inbox, if me.0 == 0 { 1 } else { LARGE });
        let remote = member.exchange_regions(peer, &inbox, gather);
        if me == Rank(0) {
            let source = region(&mut member.engine, provider.places.source, LARGE);
            fill(&source, 0, LARGE, 7);
            let page = Page {
                source: source.key(),
                source_offset: 0,
                destination: remote.key,
                destination_offset: 0,
                length: LARGE as u64,
            };
            let request = member.engine.write(peer, counter, 0, &[page]).unwrap();
            let late = waiting(Duration::ZERO, Duration::ZERO, |w| {
                member.engine.wait_for_request(request, w)
            });
            let memory = source.memory().clone();
            member.engine.release(&source);
            drop(source);
            match late {
                Ok(()) => assert!(provider.may_be_done_at_once, "64 MiB were done at once"),
                Err(error) => {
                    let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
                    assert!(missing.iter().any(|missing| missing.rank == peer), "{error}");
                    assert!(!member.engine.is_drained(request));
                    assert!(Arc::strong_count(&memory) > 1, "its source was given back");
                }
            }
            gather(Vec::new());
            waited(|w| member.engine.wait_for_request(request, w)).unwrap();
            assert_eq!(Arc::strong_count(&memory), 1, "its source is still borrowed");
        } else {
            gather(Vec::new());
            let raises = member.raises(peer, [LARGE]);
            waited(|w| member.engine.wait(counter, &[(peer, raises)], w)).unwrap();
            assert!(take(&inbox, 0, LARGE).iter().all(|seen| *seen == 7));
            credit(member, peer);
            // Both counter ends are in the same round.
            let answer = member.engine.signal(peer, counter, 0).unwrap();
            waited(|w| member.engine.wait_for_request(answer, w)).unwrap();
        }
        if me == Rank(0) {
            waited(|w| member.engine.wait(counter, &[(peer, 1)], w)).unwrap();
            credit(member, peer);
        }
        waited(|w| member.engine.wait_for_credit(counter, peer, 1, w)).unwrap();
    });
}

/// Over a device whose queue is always full, waits for a write and for a scatter end at the deadline and
/// name the peers; a fence drains both.
pub fn a_queue_that_stays_full_ends_the_wait_and_names_the_peer(provider: &Provider) {
    if !provider.has(Shape::Default) {
        return;
    }
    provider.on_ranks(3, |rank, gather| {
        let inner = (provider.device)(rank, Shape::Default).unwrap();
        let config = HostileConfig { full_one_in: 1, ..HostileConfig::new(1) };
        let device: [Arc<dyn Device>; 1] = [Arc::new(HostileDevice::over(inner, config))];
        let joining = MemberConfig {
            places: MemberDevices { ..provider.places },
            generation: Generation(9),
            window: 2,
            ..MemberConfig::default()
        };
        let mut member = Member::join_as(joining, rank, 3, &device, gather);
        if rank == Rank(0) {
            let pages = [1, 2].map(|peer| [member.page(Rank(peer), 0, 0, 100)]);
            let engine = &mut member.engine;
            let write = engine.write(Rank(2), member.counter, 0, &pages[1]).unwrap();
            let writes = [1, 2]
                .map(|peer: u32| PeerWrite { peer: Rank(peer), pages: &pages[peer as usize - 1] });
            let scatter = engine.scatter(&writes, member.counter, 1, None).unwrap();
            for (request, expected) in [(write, &[2][..]), (scatter, &[1, 2])] {
                let patience = Duration::from_millis(100);
                let late =
                    waiting(patience, Duration::ZERO, |w| engine.wait_for_request(request, w));
                let error = late.unwrap_err();
                let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
                let mut named: Vec<u32> = missing.iter().map(|missing| missing.rank.0).collect();
                named.sort_unstable();
                assert_eq!(named, expected, "{error}");
                assert!(!engine.is_drained(request));
            }
            let (kind, detail) = (Cause::User, "enough".into());
            engine.poison(Poison { kind, rank: None, detail });
            engine.poll(clock::now(), &mut Vec::new());
            assert!(engine.is_drained(write) && engine.is_drained(scatter));
        }
        gather(Vec::new());
    });
}
