//! Eight threads on each rank write and wait at once, each with a separate counter and slot.

use crate::{KINDS, PATIENCE, SPINS, counters, promptly, soon, two, waiting};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::mpsc;
use std::time::Duration;
use weft_fabric::{Communicator, CounterId, Page, Progress, Rank, Region, RemoteRegion};

const THREADS: usize = 8;
const ROUNDS: u64 = 500;
const SLOT: usize = 600;

/// One rank's memory and counters.
struct Side<'a> {
    communicator: &'a Communicator,
    peer: Rank,
    counters: Vec<CounterId>,
    outbox: Region,
    inbox: Region,
    remote: RemoteRegion,
}

impl Side<'_> {
    fn new(communicator: &Communicator, peer: Rank) -> Side<'_> {
        let mut engine = communicator.engine();
        let counters: Vec<_> = (0..THREADS).map(|_| engine.counter().unwrap()).collect();
        let [outbox, inbox] = [(); 2].map(|()| engine.alloc(THREADS * SLOT).unwrap());
        drop(engine);
        let all = 0..(THREADS * SLOT) as u64;
        let granted = communicator.share(&[(&inbox, all)], &counters, soon()).unwrap();
        let remote = granted[peer.index()][0];
        Side { communicator, peer, counters, outbox, inbox, remote }
    }

    /// One thread's rounds.
    fn rounds(&self, thread: usize) {
        let Side { communicator, peer, .. } = *self;
        let (counter, at) = (self.counters[thread], thread * SLOT);
        let byte =
            |rank: Rank, round: u64| (round as usize * 7 + thread + 100 * rank.index()) as u8;
        for round in 0..ROUNDS {
            waiting(communicator, |waiter| {
                communicator.wait_for_credit(counter, peer, round, waiter)
            })
            .unwrap();
            let length = 8 + (round as usize * 37 + thread) % (SLOT - 8);
            self.outbox.memory().copy_in(at, &vec![byte(communicator.rank(), round); length]);
            let page = Page {
                source: self.outbox.key(),
                source_offset: at as u64,
                destination: self.remote.key,
                destination_offset: at as u64,
                length: length as u64,
            };
            let request = communicator.engine().write(peer, counter, round, &[page]).unwrap();
            waiting(communicator, |waiter| communicator.wait_for_request(request, waiter)).unwrap();
            waiting(communicator, |waiter| communicator.wait(counter, &[(peer, 1)], waiter))
                .unwrap();
            let mut seen = vec![0; length];
            self.inbox.memory().copy_out(at, &mut seen);
            assert!(seen.iter().all(|&seen| seen == byte(peer, round)), "round {round} is wrong");
            let mut engine = communicator.engine();
            engine.credit(peer, counter).unwrap();
            engine.flush();
        }
    }

    /// Rounds for all threads, equally many each.
    fn all(&self) {
        let (sender, receiver) = mpsc::channel();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let sender = sender.clone();
                scope.spawn(move || {
                    self.rounds(thread);
                    sender.send(()).unwrap();
                });
            }
            drop(sender);
            assert_eq!(receiver.iter().count(), THREADS, "a thread stopped before its last round");
        });
    }
}

#[test]
fn threads_that_write_and_wait_at_once_all_come_through() {
    for (kind, spin) in KINDS.into_iter().flat_map(|kind| SPINS.map(|spin| (kind, spin))) {
        two(kind, Progress::Caller, spin, |communicator, peer| {
            Side::new(communicator, peer).all();
        });
    }
}

/// Event loop that sleeps only on the descriptor; `count` signals from the peer reach it.
fn event_loop(communicator: &Communicator, peer: Rank, counter: CounterId, count: u64) {
    let mut seen = 0;
    while seen < count {
        let rose = communicator.engine().raised();
        if rose.iter().any(|raised| raised.counter == counter) {
            communicator.engine().credit(peer, counter).unwrap();
            communicator.engine().flush();
            seen += 1;
            continue;
        }
        let descriptor = {
            let mut engine = communicator.engine();
            if !engine.arm() {
                continue;
            }
            engine.descriptor().try_clone_to_owned().unwrap()
        };
        let timeout = Timespec { tv_sec: PATIENCE.as_secs() as i64 / 3, tv_nsec: 0 };
        let woken = poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&timeout));
        assert_ne!(woken, Ok(0), "the loop sleeps on after {seen} of {count} signals");
        communicator.engine().disarm();
    }
}

/// The loop and the threads take each other's arrivals; each is woken for events that the other takes.
#[test]
fn an_event_loop_and_a_progress_thread_beside_them_miss_nothing() {
    const SIGNALS: u64 = 200;
    for (kind, progress) in
        KINDS.into_iter().flat_map(|kind| [(kind, Progress::Caller), (kind, Progress::Thread)])
    {
        two(kind, progress, Duration::ZERO, |communicator, peer| {
            let [looped] = counters(communicator);
            let side = Side::new(communicator, peer);
            let (sender, receiver) = mpsc::channel();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    event_loop(communicator, peer, looped, SIGNALS);
                    sender.send(()).unwrap();
                });
                scope.spawn(move || {
                    for round in 0..SIGNALS {
                        waiting(communicator, |waiter| {
                            communicator.wait_for_credit(looped, peer, round, waiter)
                        })
                        .unwrap();
                        communicator.engine().signal(peer, looped, round).unwrap();
                    }
                });
                side.all();
                promptly(&receiver, "the end of the event loop");
            });
        });
    }
}
