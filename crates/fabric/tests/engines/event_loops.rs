//! Program event loops: armed and asleep on the engine's descriptor, while other calls make progress.

use crate::common::{AllGather, PATIENCE, soon, waiting};
use crate::{KINDS, peer_of, shared, two};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::time::{Duration, Instant};
use weft_fabric::{
    Cause, CounterId, Engine, EngineConfig, Error, Event, Grant, Page, ProviderKind, RaisedCounter,
    WaitOptions, clock,
};

/// True if the descriptor becomes readable within a time.
fn becomes_readable(engine: &Engine, within: Duration) -> bool {
    let timeout =
        Timespec { tv_sec: within.as_secs() as i64, tv_nsec: within.subsec_nanos().into() };
    let descriptor = engine.descriptor();
    poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&timeout)).unwrap() > 0
}

/// Call that makes progress, and so takes events.
type ProgressCall = fn(&mut Engine, CounterId);

fn wait_until_timeout(engine: &mut Engine, other: CounterId) {
    let peer = peer_of(engine);
    let mut never = || false;
    let deadline = clock::now().after(Duration::from_millis(1));
    let mut waiter = WaitOptions { deadline, spin: Duration::ZERO, interrupted: &mut never };
    let late = engine.wait(other, &[(peer, 1)], &mut waiter);
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
}

const PROGRESS_CALLS: [(&str, ProgressCall); 3] = [
    ("progress", |engine, _| engine.progress()),
    ("is_drained", |engine, other| {
        let peer = peer_of(engine);
        let request = engine.signal(peer, other, 0).unwrap();
        while !engine.is_drained(request) {
            engine.progress();
        }
        engine.progress();
    }),
    ("another counter's wait", wait_until_timeout),
];

#[test]
fn events_that_other_calls_take_still_make_the_descriptor_readable() {
    for kind in KINDS {
        for (what, other) in PROGRESS_CALLS {
            two(kind, &EngineConfig::default(), |engine, gather| {
                take_events(engine, gather, &format!("{kind}, {what}"), other);
            });
        }
    }
}

fn take_events(mut engine: Engine, gather: &mut AllGather<'_>, what: &str, other: ProgressCall) {
    let peer = peer_of(&engine);
    let (counter, another) = (shared(&mut engine, gather), shared(&mut engine, gather));
    if engine.rank().0 == 0 {
        // Events left by connecting.
        while !engine.arm() {
            engine.disarm();
            engine.raised();
        }
        assert!(
            !becomes_readable(&engine, Duration::from_millis(5)),
            "{what}: the descriptor is readable without an event"
        );
        gather(Vec::new());
        gather(Vec::new());
        // The signal was sent; other calls take it, as another thread in the program would.
        let begin = Instant::now();
        while engine.count(counter, peer).unwrap() == 0 {
            assert!(begin.elapsed() < PATIENCE);
            other(&mut engine, another);
        }
        other(&mut engine, another);
        assert!(becomes_readable(&engine, PATIENCE), "{what}: the loop sleeps on");
        engine.disarm();
        assert_eq!(engine.raised(), [RaisedCounter { counter, peer, count: 1 }], "{what}");
        assert!(engine.arm(), "{what}: an event is left");
        assert!(!becomes_readable(&engine, Duration::from_millis(5)), "{what}: it is asleep again");
        engine.disarm();
        // Taken before the loop arms, which then reports work.
        gather(Vec::new());
        gather(Vec::new());
        while engine.count(counter, peer).unwrap() == 1 {
            assert!(begin.elapsed() < PATIENCE);
            other(&mut engine, another);
        }
        other(&mut engine, another);
        assert!(!engine.arm(), "{what}: the second signal was dropped");
        assert_eq!(engine.raised(), [RaisedCounter { counter, peer, count: 2 }], "{what}");
    } else {
        for _ in 0..2 {
            gather(Vec::new());
            engine.signal(peer, counter, 0).unwrap();
            gather(Vec::new());
        }
    }
    gather(Vec::new());
}

/// Time after which a loop without wake-up counts as asleep permanently.
const ASLEEP: Duration = Duration::from_secs(5);

/// Breaks a peer's connections while the loop is armed. `first` runs while it still is.
fn loses_its_peer(first: fn(&mut Engine)) {
    let config = EngineConfig { loss_grace: Duration::from_millis(200), ..EngineConfig::default() };
    two(ProviderKind::Tcp, &config, |mut engine, gather| {
        let counter = shared(&mut engine, gather);
        if engine.rank().0 == 1 {
            gather(Vec::new());
            drop(engine);
            gather(Vec::new());
            return;
        }
        while !engine.arm() {
            engine.disarm();
            engine.raised();
        }
        gather(Vec::new());
        gather(Vec::new());
        first(&mut engine);
        let begin = Instant::now();
        'sleeps: loop {
            assert!(becomes_readable(&engine, ASLEEP), "the loop sleeps past the loss of its peer");
            loop {
                engine.disarm();
                engine.raised();
                if let Err(Error::Poisoned(cause)) = engine.check() {
                    assert_eq!((cause.kind, cause.rank), (Cause::Lost, Some(peer_of(&engine))));
                    break 'sleeps;
                }
                if engine.arm() {
                    break;
                }
            }
        }
        assert!(begin.elapsed() < ASLEEP);
        assert!(engine.signal(peer_of(&engine), counter, 0).is_err());
    });
}

#[test]
fn a_loop_that_sleeps_finds_its_peer_lost_when_the_grace_is_over() {
    loses_its_peer(|_| {});
}

/// Another call takes the broken connection, so that only the timer wakes the loop.
#[test]
fn a_loop_finds_its_peer_lost_although_another_call_took_the_break() {
    loses_its_peer(|engine| {
        let begin = Instant::now();
        while engine.next_deadline().is_none() {
            assert!(begin.elapsed() < PATIENCE);
            engine.progress();
        }
    });
}

#[test]
fn a_poison_of_another_thread_wakes_a_loop() {
    for kind in KINDS {
        two(kind, &EngineConfig::default(), |mut engine, gather| {
            shared(&mut engine, gather);
            while !engine.arm() {
                engine.disarm();
                engine.raised();
            }
            let flag = engine.poison_flag().clone();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let (kind, detail) = (Cause::User, "enough".into());
                    flag.poison(weft_fabric::Poison { kind, rank: None, detail });
                });
                assert!(becomes_readable(&engine, ASLEEP), "{kind}");
            });
            let mut events = Vec::new();
            engine.disarm();
            engine.poll(clock::now(), &mut events);
            assert!(matches!(events[..], [Event::Poisoned(_)]), "{kind}: {events:?}");
            gather(Vec::new());
        });
    }
}

/// Calls by the engine's owner until `done`, which take the descriptor's events.
fn until(engine: &mut Engine, mut done: impl FnMut(&mut Engine) -> bool) {
    let begin = Instant::now();
    while !done(engine) {
        assert!(begin.elapsed() < PATIENCE);
        engine.progress();
    }
    // Over shm a count is visible before the dirty bit.
    let settled = Instant::now();
    while settled.elapsed() < Duration::from_millis(20) {
        engine.progress();
    }
}

fn arms_eventually(engine: &mut Engine) {
    let begin = Instant::now();
    while !engine.arm() {
        assert!(begin.elapsed() < PATIENCE, "the loop never sleeps");
        engine.disarm();
        engine.raised();
    }
}

/// A wait removes the lane from the list of raised lanes; a credit that arrived with it stays there.
#[test]
fn a_credit_stays_reported_although_a_wait_took_its_lane() {
    for kind in KINDS {
        two(kind, &EngineConfig::default(), |mut engine, gather| {
            let peer = peer_of(&engine);
            let (data, credited) = (shared(&mut engine, gather), shared(&mut engine, gather));
            if engine.rank().0 == 1 {
                until(&mut engine, |engine| engine.count(credited, peer).unwrap() == 1);
                engine.credit(peer, credited).unwrap();
                engine.signal(peer, data, 0).unwrap();
                gather(Vec::new());
                return;
            }
            engine.signal(peer, credited, 0).unwrap();
            until(&mut engine, |engine| {
                let (raised, credits) = (engine.count(data, peer), engine.credits(credited, peer));
                raised.unwrap() == 1 && credits.unwrap() == 1
            });
            // Only the credit and the raise are left: the signal's completion was taken.
            waiting(PATIENCE, Duration::ZERO, |waiter| engine.wait(data, &[(peer, 1)], waiter))
                .unwrap();
            assert!(!engine.arm(), "{kind}: the credit was dropped");
            arms_eventually(&mut engine);
            engine.disarm();
            gather(Vec::new());
        });
    }
}

/// A request without a callback completes in another call while the loop sleeps.
#[test]
fn the_end_of_a_request_wakes_a_loop_although_another_call_took_it() {
    two(ProviderKind::Tcp, &EngineConfig::default(), |mut engine, gather| {
        let peer = peer_of(&engine);
        let counter = engine.counter().unwrap();
        const LENGTH: usize = 8 << 20;
        let (inbox, outbox) = (engine.alloc(LENGTH).unwrap(), engine.alloc(LENGTH).unwrap());
        let regions = [(&inbox, 0..LENGTH as u64)];
        let grants = gather(engine.grant(peer, &regions, &[counter]).unwrap().encode());
        let grant = Grant::decode(&grants[peer.0 as usize]).unwrap();
        let destination = engine.import(peer, &grant, &[counter], soon(20)).unwrap()[0].key;
        if engine.rank().0 == 1 {
            gather(Vec::new());
            let parts = engine.route(peer).unwrap().parts.count([LENGTH as u64]);
            until(&mut engine, |engine| engine.count(counter, peer).unwrap() == parts);
            gather(Vec::new());
            return;
        }
        let (source, length) = (outbox.key(), LENGTH as u64);
        let page = Page { source, source_offset: 0, destination, destination_offset: 0, length };
        let request = engine.write(peer, counter, 0, &[page]).unwrap();
        assert!(!engine.is_drained(request), "the peer does not read yet");
        arms_eventually(&mut engine);
        gather(Vec::new());
        until(&mut engine, |engine| engine.is_drained(request));
        assert!(becomes_readable(&engine, PATIENCE), "the loop sleeps on");
        engine.disarm();
        arms_eventually(&mut engine);
        engine.disarm();
        gather(Vec::new());
    });
}

/// Another call takes a poison's wake-up before the loop arms.
#[test]
fn a_loop_does_not_sleep_on_a_poison_that_another_call_took() {
    for kind in KINDS {
        two(kind, &EngineConfig::default(), |mut engine, gather| {
            shared(&mut engine, gather);
            engine.raised();
            let (cause, detail) = (Cause::User, "enough".into());
            engine.poison(weft_fabric::Poison { kind: cause, rank: None, detail });
            engine.progress();
            assert!(!engine.arm(), "{kind}");
            assert!(matches!(engine.check(), Err(Error::Poisoned(_))), "{kind}");
            gather(Vec::new());
        });
    }
}
