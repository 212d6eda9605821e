//! Bounds: unconsumed arrivals, and void keys.

use crate::common::{bare_link, on_threads, soon, until};
use crate::{any_host, config, device, providers};
use std::sync::Arc;
use weft_fabric::link::{Introduction, PostStatus, Sink, WorkRequest};
use weft_fabric::providers::OfiConfig;
use weft_fabric::{Lane, LaneTable, Link, Memory, Page, Rank, RegionKey, TrafficClass, clock};

/// One end in a connected link pair without engines, over tcp.
struct End {
    link: Box<dyn Link>,
    lanes: Arc<LaneTable>,
    peer: Rank,
    sink: Sink,
}

impl End {
    fn connect(rank: Rank, config: OfiConfig, gather: &mut crate::common::AllGather<'_>) -> End {
        let peer = Rank(1 - rank.0);
        let device = device(config);
        let (mut link, lanes) = bare_link(&*device, rank, 64);
        let addresses = gather(link.address());
        let address = &addresses[peer.index()];
        let messages = gather(link.introduce(peer, address).unwrap());
        let peers = [Introduction { peer, address, message: &messages[peer.index()] }];
        until(soon(20), |limit| link.connect(&peers, limit)).unwrap();
        End { link, lanes, peer, sink: Sink::default() }
    }

    fn signal(&mut self, lane: Lane) -> PostStatus {
        let (token, peer, class) = (1, self.peer, TrafficClass::Latency);
        let work =
            WorkRequest { token, peer, lane, credits: None, piggyback: None, class, pages: &[] };
        self.link.post(&work, &mut self.sink).unwrap()
    }

    /// Signals until the link accepts no more, polling for completions; returns how many signals were
    /// accepted.
    fn signal_until_full(&mut self, lane: Lane) -> u32 {
        let mut taken = 0;
        let mut refused = 0;
        while refused < 2000 {
            match self.signal(lane) {
                PostStatus::Full => {
                    refused += 1;
                    std::thread::yield_now();
                }
                _ => (taken, refused) = (taken + 1, 0),
            }
            self.link.poll(clock::now(), &mut self.sink);
        }
        taken
    }
}

fn lane_of(bytes: &[u8]) -> Lane {
    Lane::from_immediate(u32::from_le_bytes(bytes.try_into().unwrap()))
}

/// Rank 0 sends; rank 1 counts on a lane that it releases in between, so that late arrivals on a free
/// lane count too.
#[test]
fn no_more_arrivals_than_agreed_lie_unconsumed() {
    if providers().is_empty() {
        return;
    }
    on_threads(2, |rank, gather| {
        let config = |max_unconsumed| OfiConfig { max_unconsumed, ..config(any_host()) };
        // Each end offers another bound; the smaller one holds.
        let mut end = End::connect(rank, config([32, 10][rank.index()]), gather);
        let lane = end.lanes.issue(end.peer, 2).unwrap();
        let lanes = gather(lane.immediate().to_le_bytes().to_vec());
        let theirs = lane_of(&lanes[end.peer.index()]);
        let mut sent = 0;
        for round in 0..6 {
            if rank == Rank(0) {
                let taken = end.signal_until_full(theirs);
                assert!(taken <= 10 && (round > 0 || taken == 10), "{taken} in round {round}");
                assert!(taken >= 5, "{taken} in round {round}");
                sent += taken;
            }
            gather(Vec::new());
            let seen = if round < 3 { end.lanes.value(lane.id()) } else { 0 };
            if rank == Rank(1) {
                while round < 3 && end.lanes.value(lane.id()) == seen {
                    end.link.poll(clock::now(), &mut end.sink);
                }
                // Arrivals that are still under way.
                for _ in 0..200 {
                    end.link.poll(clock::now(), &mut end.sink);
                    std::thread::sleep(std::time::Duration::from_micros(100));
                }
                if round == 2 {
                    end.lanes.release(lane, 2);
                }
            }
            gather(Vec::new());
        }
        if rank == Rank(0) {
            assert!(sent >= 6 * 5);
        } else {
            let refused = end.lanes.dropped().ungranted.load(std::sync::atomic::Ordering::Relaxed);
            assert!(refused >= 15, "{refused} arrivals on the lane that was taken back");
        }
        gather(Vec::new());
    });
}

/// Writes to a granted region arrive; once the owner has released the region, the memory is unchanged.
#[test]
fn a_released_region_is_no_longer_written() {
    if providers().is_empty() {
        return;
    }
    on_threads(2, |rank, gather| {
        let mut end = End::connect(rank, config(any_host()), gather);
        let memory = Arc::new(Memory::shared(4096).unwrap());
        memory.fill(0, 4096, 1 + rank.0 as u8);
        end.link.register(RegionKey(0), &memory).unwrap();
        let lane = end.lanes.issue(end.peer, 2).unwrap();
        let entries = gather(end.link.grant(RegionKey(0), end.peer, 0..4096).unwrap());
        let lanes = gather(lane.immediate().to_le_bytes().to_vec());
        let (peer, entry) = (end.peer, &entries[end.peer.index()]);
        until(soon(20), |limit| end.link.import(peer, RegionKey(0), 4096, entry, limit)).unwrap();
        gather(Vec::new());
        for round in 0..2 {
            if rank == Rank(1) && round == 1 {
                end.link.deregister(RegionKey(0));
                memory.fill(0, 4096, 9);
            }
            gather(Vec::new());
            if rank == Rank(0) {
                let page = Page {
                    source: RegionKey(0),
                    source_offset: 0,
                    destination: RegionKey(0),
                    destination_offset: 0,
                    length: 4096,
                };
                let work = WorkRequest {
                    token: 5,
                    peer,
                    lane: lane_of(&lanes[1]),
                    credits: None,
                    piggyback: None,
                    class: TrafficClass::Latency,
                    pages: &[page],
                };
                assert_eq!(end.link.post(&work, &mut end.sink), Ok(PostStatus::InFlight));
            }
            // Long enough for the write, and for it to fail.
            for _ in 0..2000 {
                end.link.poll(clock::now(), &mut end.sink);
                std::thread::sleep(std::time::Duration::from_micros(100));
            }
            gather(Vec::new());
            if rank == Rank(1) {
                let mut seen = vec![0; 4096];
                memory.copy_out(0, &mut seen);
                assert_eq!(seen, vec![[1, 9][round]; 4096], "round {round}");
                assert_eq!(end.lanes.value(lane.id()), 1);
            } else if round == 0 {
                assert_eq!(std::mem::take(&mut end.sink.completed), [5]);
            }
        }
        // Providers differ in the error at the writer. This one drops the connection without an error and
        // opens another for the next part.
        let mut is_sent = rank == Rank(1);
        for _ in 0..3000 {
            is_sent = is_sent || end.signal(lane_of(&lanes[1])) == PostStatus::InFlight;
            end.link.poll(clock::now(), &mut end.sink);
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
        let lost = gather(vec![end.sink.lost.len() as u8]);
        let arrived = end.lanes.value(lane.id()) == 2;
        assert!(rank == Rank(0) || arrived || lost[0] == [1], "the connection hangs");
    });
}
