//! Traffic on formed pairs, and closing them.

use crate::common::End;
use crate::common::{
    LOSS, PATIENCE, accept, by, config, ends, in_time, listen, pair, pair_on, providers,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::time::Instant;
use weft_fabric::pair::connect;
use weft_fabric::{Cause, Error, Poison, ProviderKind, Rank};

const BOTH: [ProviderKind; 2] = [ProviderKind::Shm, ProviderKind::Tcp];

#[test]
fn messages_are_echoed_over_every_provider() {
    for provider in providers() {
        let (one, other) = ends(pair(provider));
        assert_eq!((one.communicator.rank(), other.communicator.rank()), (Rank(0), Rank(1)));
        let route = one.communicator.engine().route(Rank(1)).unwrap();
        assert_eq!(route.provider, provider);
        // Over verbs, only with one NIC.
        if provider != ProviderKind::Verbs {
            let is_unordered = [ProviderKind::Copy, ProviderKind::Ofi].contains(&provider);
            assert_eq!(route.ordered, !is_unordered);
        }
        std::thread::scope(|scope| {
            scope.spawn(|| one.echo(100).unwrap());
            other.ask(100).unwrap();
        });
        std::thread::scope(|scope| {
            scope.spawn(|| one.barrier().unwrap());
            other.barrier().unwrap();
        });
    }
}

#[test]
fn the_better_provider_is_used_where_both_ends_have_two() {
    let mut both = config("127.0.0.1:0", ProviderKind::Shm);
    both.providers = BOTH.to_vec();
    let listener = weft_fabric::pair::Listener::bind(both.clone()).unwrap();
    both.settings.address = listener.address().to_string();
    let dialer = std::thread::spawn({
        let both = both.clone();
        move || connect(&both, by(PATIENCE)).unwrap()
    });
    let accepted = accept(&listener);
    let connected = dialer.join().unwrap();
    assert_eq!(accepted.engine().route(Rank(1)).unwrap().provider, ProviderKind::Shm);
    assert_eq!(connected.engine().route(Rank(0)).unwrap().provider, ProviderKind::Shm);
    // Another host name: tcp.
    both.settings.host_id = "another host".into();
    let dialer = std::thread::spawn(move || connect(&both, by(PATIENCE)).unwrap());
    let accepted = accept(&listener);
    drop(dialer.join().unwrap());
    assert_eq!(accepted.engine().route(Rank(1)).unwrap().provider, ProviderKind::Tcp);
}

/// Copy is preferred to shm, and an end without it is reached over shm.
#[test]
fn copy_is_used_where_both_ends_have_it() {
    use ProviderKind::{Copy, Shm};
    let mut here = config("127.0.0.1:0", Copy);
    here.providers = vec![Shm, Copy];
    let listener = weft_fabric::pair::Listener::bind(here).unwrap();
    for (offered, expected) in [(vec![Shm, Copy], Copy), (vec![Copy], Copy), (vec![Shm], Shm)] {
        let mut there = config(&listener.address().to_string(), Shm);
        there.providers = offered;
        let dialer = std::thread::spawn(move || connect(&there, by(PATIENCE)).unwrap());
        let (one, other) = ends((accept(&listener), dialer.join().unwrap()));
        assert_eq!(one.communicator.engine().route(Rank(1)).unwrap().provider, expected);
        std::thread::scope(|scope| {
            scope.spawn(|| one.echo(10).unwrap());
            other.ask(10).unwrap();
        });
    }
}

#[test]
fn a_connection_that_ends_without_a_goodbye_poisons_its_pair_alone() {
    for provider in providers() {
        let listener = listen(provider);
        let (one, other) = ends(pair_on(&listener, provider));
        let (third, fourth) = ends(pair_on(&listener, provider));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| in_time(|| one.wait(PATIENCE)));
            other.communicator.control().abandon();
            let error = waiting.join().unwrap().unwrap_err();
            assert!(
                matches!(
                    &error,
                    Error::Poisoned(Poison { kind: Cause::Lost, rank: Some(Rank(1)), .. })
                ),
                "{error}"
            );
        });
        std::thread::scope(|scope| {
            scope.spawn(|| third.echo(10).unwrap());
            fourth.ask(10).unwrap();
        });
    }
}

#[test]
fn a_goodbye_ends_a_pair_in_peace_and_what_was_written_before_counts() {
    for provider in providers() {
        let (one, other) = ends(pair(provider));
        other.send(7).unwrap();
        other.communicator.leave();
        drop(other);
        assert_eq!(one.receive().unwrap(), 7);
        let error = in_time(|| one.wait(PATIENCE)).unwrap_err();
        assert!(matches!(&error, Error::Poisoned(Poison { kind: Cause::Left, .. })), "{error}");
    }
}

#[test]
fn a_poison_reaches_the_other_end_with_its_cause() {
    for provider in providers() {
        let (one, other) = ends(pair(provider));
        let cause = Poison { kind: Cause::User, rank: Some(Rank(1)), detail: "stop".into() };
        other.communicator.poison(cause.clone());
        let error = in_time(|| one.wait(PATIENCE)).unwrap_err();
        assert!(matches!(&error, Error::Poisoned(poison) if *poison == cause), "{error}");
    }
}

#[test]
fn a_pair_is_not_formed_anew() {
    let (one, _other) = pair(ProviderKind::Shm);
    let error = one.reform(LOSS).map(drop).unwrap_err();
    assert!(error.to_string().contains("connect a new pair"), "{error}");
}

#[test]
fn an_event_loop_wakes_for_messages_and_for_a_loss_and_sleeps_after_it() {
    for provider in providers() {
        let (one, other) = ends(pair(provider));
        let sleeps = |end: &End, milliseconds: i64| {
            let engine = end.communicator.engine();
            let descriptor = engine.descriptor().try_clone_to_owned().unwrap();
            drop(engine);
            let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
            let timeout = Timespec {
                tv_sec: milliseconds / 1000,
                tv_nsec: (milliseconds % 1000) * 1_000_000,
            };
            poll(&mut polled, Some(&timeout)).unwrap() == 0
        };
        // Sleeps until the event loop has raised `lanes` lanes or found the pair lost. A wake may be for
        // less: a timer, or part of what the other end did.
        let wakes_for = |end: &End, lanes: usize| {
            let mut raised = 0;
            while raised < lanes && end.communicator.engine().check().is_ok() {
                let is_idle = end.communicator.engine().arm();
                assert!(!is_idle || !sleeps(end, 60_000), "an event did not wake the event loop");
                end.communicator.engine().disarm();
                raised += end.communicator.engine().raised().len();
            }
            raised
        };
        other.send(1).unwrap();
        assert_eq!(wakes_for(&one, 1), 1);
        other.communicator.control().abandon();
        assert_eq!(wakes_for(&one, 1), 0);
        assert!(one.communicator.engine().check().is_err());
        // What the other end closes, it closes step by step: each step may wake once.
        let until = Instant::now() + PATIENCE;
        loop {
            one.communicator.engine().disarm();
            one.communicator.engine().raised();
            one.communicator.engine().arm();
            if sleeps(&one, 20) {
                break;
            }
            assert!(Instant::now() < until, "a pair that has ended keeps its event loop awake");
        }
    }
}
