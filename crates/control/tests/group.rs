//! Ranks as threads in one process, over real sockets.

use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};
use weft_control::{Cause, Control, Error, Operation, PeerStatus, Poison, Rank, local_world};

const LONG: Duration = Duration::from_secs(20);
/// Loss detection bound at every rank, on a busy machine; shorter than the silence timeout.
const DETECTION: Duration = Duration::from_secs(10);

/// Runs `work` on every rank at once and returns the results in rank order.
fn each<T: Send>(world: &[Control], work: impl Fn(&Control) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let running: Vec<_> = world.iter().map(|c| scope.spawn(|| work(c))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn world(size: u32) -> Vec<Control> {
    local_world(size, |_| {}).unwrap()
}

fn poison_of(control: &Control) -> Poison {
    let (sender, poisons) = mpsc::channel();
    control.on_poison(Box::new(move |poison| sender.send(poison.clone()).unwrap()));
    poisons.recv_timeout(DETECTION).expect("the poison comes in time")
}

/// The process may end in a callback: by then, peers must have the cause, not only a closed connection.
#[test]
fn peers_receive_the_poison_while_a_callback_of_the_sender_runs() {
    let world = world(3);
    let (poison_known, known) = mpsc::channel();
    let (came, in_time) = mpsc::channel();
    let known = Mutex::new(known);
    world[0].on_poison(Box::new(move |_| {
        came.send(known.lock().unwrap().recv_timeout(DETECTION)).unwrap();
    }));
    let cause = Poison { kind: Cause::User, rank: Some(Rank(0)), detail: "as a test".into() };
    world[0].poison(&cause);
    assert_eq!(poison_of(&world[2]), cause);
    poison_known.send(()).unwrap();
    in_time.recv_timeout(LONG).unwrap().expect("the callback still runs");
}

#[test]
fn a_world_of_one_needs_no_peer() {
    let world = world(1);
    assert_eq!(world[0].all_gather(b"me", LONG).unwrap(), [b"me"]);
    world[0].barrier(LONG).unwrap();
    let next = world[0].reform(LONG).unwrap();
    assert_eq!((next.rank(), next.world_size(), next.generation()), (Rank(0), 1, 1));
    next.barrier(LONG).unwrap();
}

#[test]
fn unbounded_timeouts_are_accepted() {
    let world = local_world(2, |config| {
        config.connect_timeout = Duration::MAX;
        config.silence_timeout = Duration::MAX;
    })
    .unwrap();
    each(&world, |c| c.barrier(Duration::MAX).unwrap());
    world[0].send(Rank(1), 0, b"one").unwrap();
    assert_eq!(world[1].receive(Rank(0), 0, Duration::MAX).unwrap(), b"one");
    let next = each(&world, |c| c.reform(Duration::MAX).unwrap());
    each(&next, |c| c.barrier(Duration::MAX).unwrap());
}

/// Ranks 1 and 2 send heartbeats by rank 0's timeout; the ranks' own would permit one a second.
#[test]
fn ranks_of_different_silence_timeouts_blame_no_sound_rank() {
    let world = local_world(3, |config| {
        let seconds = if config.rank == Rank(0) { 0.5 } else { 60.0 };
        config.silence_timeout = Duration::from_secs_f64(seconds);
    })
    .unwrap();
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(each(&world, Control::poisoned), [None, None, None]);
    each(&world, |c| c.barrier(LONG).unwrap());
}

#[test]
fn every_rank_has_all_members() {
    let world = local_world(5, |config| {
        config.host_id = format!("host {}", config.rank.0 % 2);
    })
    .unwrap();
    for control in &world {
        assert_eq!(control.members(), world[0].members());
        let indices: Vec<u32> = control.members().iter().map(|m| m.local_index).collect();
        assert_eq!(indices, [0, 0, 1, 1, 2]);
        assert!(control.members().iter().all(|m| m.address.is_loopback()));
        assert_eq!(control.derive_key("tcp"), world[0].derive_key("tcp"));
        assert_ne!(control.derive_key("tcp"), control.derive_key("shm"));
    }
}

#[test]
fn an_all_gather_takes_parts_of_any_size_in_rank_order() {
    let world = world(4);
    let part =
        |rank: Rank, round: usize| vec![rank.0 as u8; (rank.index() * 700_001) / (round + 1)];
    for round in 0..3 {
        for parts in each(&world, |c| c.all_gather(&part(c.rank(), round), LONG).unwrap()) {
            let expected: Vec<Vec<u8>> = (0..4).map(|rank| part(Rank(rank), round)).collect();
            assert!(parts == expected);
        }
    }
}

#[test]
fn an_exchange_gives_each_rank_its_own_bytes() {
    let world = world(4);
    let part = |from: Rank, to: u32| vec![from.0 as u8; (to as usize + 1) * 100_000];
    for parts in each(&world, |c| {
        let to_each: Vec<Vec<u8>> = (0..4).map(|to| part(c.rank(), to)).collect();
        (c.rank(), c.exchange(&to_each, LONG).unwrap())
    }) {
        let expected: Vec<Vec<u8>> = (0..4).map(|from| part(Rank(from), parts.0.0)).collect();
        assert!(parts.1 == expected);
    }
    let refused = world[0].exchange(&[Vec::new()], LONG).unwrap_err();
    assert!(matches!(refused, Error::WrongCount { given: 1, world_size: 4, .. }), "{refused}");
    let large = vec![vec![0; weft_control::MAX_PAYLOAD + 1]; 4];
    assert!(matches!(world[0].exchange(&large, LONG), Err(Error::TooLarge { .. })));
}

#[test]
fn mismatched_calls_are_named_with_both_ranks() {
    let world = world(3);
    for (rank, result) in each(&world, |c| {
        let shares = c.rank() == Rank(1);
        (
            c.rank(),
            if shares {
                c.exchange_as(Operation::Share, &vec![b"internal".to_vec(); 3], LONG)
            } else {
                c.all_gather(b"data", LONG)
            },
        )
    }) {
        let error = result.unwrap_err();
        let Error::CallMismatch { peer, theirs, ours } = &error else { panic!("{error:?}") };
        let (share, gather) = (Operation::Share, Operation::AllGather);
        if rank == Rank(1) {
            assert_eq!((*theirs, *ours), (gather, share));
        } else {
            assert_eq!((*peer, *theirs, *ours), (Rank(1), share, gather));
        }
        let text = error.to_string();
        assert!(text.contains("share") && text.contains("all_gather"), "{text}");
    }
    // Later calls match again.
    each(&world, |c| c.barrier(LONG).unwrap());
}

#[test]
fn messages_go_to_one_rank_in_the_order_of_sending() {
    let world = world(3);
    each(&world, |c| {
        let next = Rank((c.rank().0 + 1) % 3);
        let before = Rank((c.rank().0 + 2) % 3);
        for number in 0u32..500 {
            c.send(next, number % 2, &number.to_le_bytes()).unwrap();
            c.send(c.rank(), 9, &number.to_le_bytes()).unwrap();
        }
        for channel in [1, 0] {
            for number in (0u32..500).filter(|number| number % 2 == channel) {
                assert_eq!(c.receive(before, channel, LONG).unwrap(), number.to_le_bytes());
            }
        }
        for number in 0u32..500 {
            assert_eq!(c.try_receive(c.rank(), 9).unwrap().unwrap(), number.to_le_bytes());
        }
        assert_eq!(c.try_receive(before, 0).unwrap(), None);
    });
    let late = world[0].receive(Rank(2), 5, Duration::from_millis(20)).unwrap_err();
    assert!(matches!(&late, Error::Timeout { missing, .. } if missing == &[Rank(2)]), "{late}");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| world[0].receive(Rank(2), 5, LONG));
        world[2].abandon();
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Poisoned(_)), "{error}");
    });
}

#[test]
fn many_rounds_are_not_confused() {
    let world = world(3);
    each(&world, |control| {
        for round in 0u32..500 {
            let mine = [round.to_le_bytes(), control.rank().0.to_le_bytes()].concat();
            for (rank, part) in (0u32..).zip(control.all_gather(&mine, LONG).unwrap()) {
                assert_eq!(part, [round.to_le_bytes(), rank.to_le_bytes()].concat());
            }
        }
    });
}

#[test]
fn a_payload_beyond_the_limit_is_refused() {
    let world = world(1);
    let size = weft_control::MAX_PAYLOAD + 1;
    assert!(matches!(world[0].all_gather(&vec![0; size], LONG), Err(Error::TooLarge { .. })));
}

#[test]
fn a_timeout_names_the_missing_ranks() {
    let world = world(4);
    let results: Vec<_> = each(&world[..2], |c| c.barrier(Duration::from_millis(50)));
    for result in results {
        let Err(Error::Timeout { missing, .. }) = result else { panic!("{result:?}") };
        assert_eq!(missing, [Rank(2), Rank(3)]);
    }
    assert_eq!(world[0].poisoned(), None, "a deadline fails the wait, not the group");
}

#[test]
fn a_call_that_timed_out_is_continued_by_the_same_call() {
    let world = world(3);
    let part = |c: &Control, round: u8| vec![round, c.rank().0 as u8];
    let short = Duration::from_millis(30);
    for control in &world[..2] {
        let late = control.all_gather(&part(control, 0), short).unwrap_err();
        assert!(matches!(&late, Error::Timeout { missing, .. } if missing.contains(&Rank(2))));
        let other = control.all_gather(b"other", short).unwrap_err();
        assert!(
            matches!(other, Error::PayloadMismatch { operation: Operation::AllGather }),
            "{other}"
        );
    }
    for round in 0..3 {
        for parts in each(&world, |c| c.all_gather(&part(c, round), LONG).unwrap()) {
            assert_eq!(parts, [[round, 0], [round, 1], [round, 2]]);
        }
    }
}

#[test]
fn another_call_abandons_an_unfinished_one() {
    let world = world(2);
    world[0].barrier(Duration::from_millis(30)).unwrap_err();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| world[0].all_gather(b"0", LONG).unwrap());
        world[1].barrier(LONG).unwrap();
        assert_eq!(world[1].all_gather(b"1", LONG).unwrap(), [b"0", b"1"]);
        assert_eq!(zero.join().unwrap(), [b"0", b"1"]);
    });
}

#[test]
fn a_lost_rank_fails_all_ranks_at_once() {
    let world = world(4);
    std::thread::scope(|scope| {
        let waits: Vec<_> = world[..3].iter().map(|c| scope.spawn(|| c.barrier(LONG))).collect();
        let start = Instant::now();
        world[3].abandon();
        for wait in waits {
            let error = wait.join().unwrap().unwrap_err();
            let Error::Poisoned(poison) = error else { panic!("{error:?}") };
            assert_eq!((poison.kind, poison.rank), (Cause::Lost, Some(Rank(3))));
        }
        assert!(start.elapsed() < DETECTION);
    });
    assert_eq!(world[0].peer_status(Rank(3)), PeerStatus::Lost);
    assert!(matches!(world[0].barrier(LONG), Err(Error::Poisoned(_))));
}

#[test]
fn poison_reaches_all_ranks_and_the_first_cause_wins() {
    let world = world(3);
    let first = Poison { kind: Cause::Failed, rank: Some(Rank(2)), detail: "lane 7".into() };
    world[1].poison(&first);
    world[1].poison(&Poison { kind: Cause::User, rank: None, detail: "later".into() });
    for control in &world {
        assert_eq!(poison_of(control), first);
        assert_eq!(control.poisoned(), Some(first.clone()));
    }
}

#[test]
fn a_rank_that_leaves_is_no_loss_until_it_is_needed() {
    let world = world(3);
    let (sender, left) = mpsc::channel();
    world[0].on_peer_left(Box::new(move |rank| sender.send(rank).unwrap()));
    world[2].leave();
    assert_eq!(left.recv_timeout(DETECTION), Ok(Rank(2)));
    assert_eq!(world[0].peer_status(Rank(2)), PeerStatus::Left);
    assert_eq!(world[0].poisoned(), None);
    for result in each(&world[..2], |c| c.barrier(LONG)) {
        assert!(matches!(result, Err(Error::Left { rank: Rank(2), .. })), "{result:?}");
    }
    assert!(matches!(world[2].barrier(LONG), Err(Error::Closed)));
}

#[test]
fn a_barrier_and_leave_lose_no_message() {
    for _ in 0..20 {
        for result in each(&world(4), |control| {
            let result = control.barrier(LONG);
            control.leave();
            (result, control.poisoned())
        }) {
            assert!(matches!(result, (Ok(()), None)), "{result:?}");
        }
    }
}

#[test]
fn survivors_continue_from_four_to_three_to_two() {
    let world = world(4);
    world[1].abandon();
    let three = each(&[world[0].clone(), world[2].clone(), world[3].clone()], |old| {
        poison_of(old);
        old.reform(LONG).unwrap()
    });
    for (rank, control) in (0..).map(Rank).zip(&three) {
        assert_eq!((control.rank(), control.world_size(), control.generation()), (rank, 3, 1));
        let originals: Vec<u32> = control.members().iter().map(|m| m.original_rank.0).collect();
        assert_eq!(originals, [0, 2, 3]);
        assert_eq!(control.poisoned(), None);
    }
    each(&three, |c| c.barrier(LONG).unwrap());
    assert!(matches!(world[0].barrier(LONG), Err(Error::Superseded)));

    three[0].abandon();
    let two = each(&three[1..], |old| {
        let poison = poison_of(old);
        assert_eq!((poison.kind, poison.rank), (Cause::Lost, Some(Rank(0))));
        old.reform(LONG).unwrap()
    });
    for parts in each(&two, |c| c.all_gather(&c.rank().0.to_le_bytes(), LONG).unwrap()) {
        assert_eq!(parts, [0u32.to_le_bytes(), 1u32.to_le_bytes()]);
    }
    assert!(two.iter().all(|control| control.generation() == 2));
}

/// Reforms until a barrier in the new group succeeds; after a failure, only the old handle is left.
fn reform_with_barrier(old: &Control) -> Control {
    loop {
        let next = old.reform(LONG).unwrap();
        match next.barrier(LONG) {
            Ok(()) => return next,
            Err(Error::Poisoned(_)) => drop(next),
            Err(error) => panic!("{error:?}"),
        }
    }
}

#[test]
fn a_second_loss_during_reform_leads_to_a_group_of_the_survivors() {
    let mut took: Vec<Duration> = Vec::new();
    for round in 0..30 {
        let world = world(5);
        world[4].abandon();
        std::thread::scope(|scope| {
            let dying = scope.spawn(|| world[3].reform(LONG));
            let survivors: Vec<_> =
                world[..3].iter().map(|old| scope.spawn(|| reform_with_barrier(old))).collect();
            // Over the rounds it dies before, during and after the others' view change.
            std::thread::sleep(Duration::from_micros(100 * round));
            world[3].abandon();
            let since = Instant::now();
            let next: Vec<Control> = survivors.into_iter().map(|t| t.join().unwrap()).collect();
            took.push(since.elapsed());
            drop(dying.join().unwrap());
            for (rank, control) in (0..).map(Rank).zip(&next) {
                assert_eq!((control.rank(), control.world_size()), (rank, 3), "round {round}");
                assert_eq!(control.generation(), next[0].generation(), "round {round}");
            }
        });
    }
    took.sort();
    assert!(took[15] < Duration::from_secs(2), "{took:?}");
}

#[test]
fn an_old_handle_is_superseded_while_there_is_a_newer_one() {
    let world = world(2);
    let next = each(&world, |old| old.reform(LONG).unwrap());
    assert!(matches!(world[0].reform(LONG), Err(Error::Superseded)));
    assert_eq!(next[0].poisoned(), None);
    drop(next);
    let after = each(&world, |old| old.reform(LONG).unwrap());
    each(&after, |control| control.barrier(LONG).unwrap());
}

#[test]
fn reform_names_the_missing_ranks_and_a_repeat_continues() {
    let world = world(3);
    world[2].abandon();
    let error = world[0].reform(Duration::from_millis(300)).unwrap_err();
    let Error::Timeout { missing, .. } = error else { panic!("{error:?}") };
    assert!(missing.contains(&Rank(1)), "{missing:?}");
    let pair = each(&world[..2], |control| control.reform(LONG).unwrap());
    assert_eq!(pair[0].generation(), pair[1].generation());
    each(&pair, |control| control.barrier(LONG).unwrap());
}

#[test]
fn clocks_of_one_machine_agree_within_the_bound() {
    let world =
        local_world(3, |config| config.host_id = format!("host {}", config.rank.0)).unwrap();
    for control in &world {
        for rank in (0..3).map(Rank) {
            let error = control.clock_error(rank);
            assert!(control.clock_offset(rank).unsigned_abs() <= error, "{rank}");
            assert!(error < 1_000_000_000);
        }
    }
}

#[test]
fn a_check_finds_what_ends_a_group() {
    let world = world(3);
    each(&world, |c| c.check().unwrap());
    world[2].leave();
    let left = loop {
        match world[0].check() {
            Ok(()) => std::thread::yield_now(),
            Err(error) => break error,
        }
    };
    assert!(matches!(left, Error::Left { rank: Rank(2), .. }), "{left}");
    assert!(matches!(world[2].check(), Err(Error::Closed)));
    world[1].poison(&Poison { kind: Cause::User, rank: None, detail: String::new() });
    poison_of(&world[0]);
    assert!(matches!(world[0].check(), Err(Error::Poisoned(_))));
    let next = each(&world[..2], |c| c.reform(LONG).unwrap());
    each(&next, |c| c.check().unwrap());
    assert!(matches!(world[0].check(), Err(Error::Superseded)));
}

#[test]
fn one_deadline_covers_all_of_connecting() {
    let before = Instant::now();
    let world = local_world(2, |config| config.connect_timeout = LONG).unwrap();
    let after = Instant::now();
    for control in &world {
        let deadline = control.connect_deadline().unwrap();
        assert!(deadline >= before + LONG && deadline <= after + LONG);
        assert!(control.connect_time_left() <= LONG);
    }
    let next = each(&world, |c| c.reform(Duration::MAX).unwrap());
    assert_eq!(next[0].connect_deadline(), None);
}

#[test]
fn an_interrupt_ends_a_wait_and_a_check() {
    let world = local_world(2, |config| {
        let since = Instant::now();
        config.interrupt =
            Some(std::sync::Arc::new(move || since.elapsed() > Duration::from_secs(1)));
    })
    .unwrap();
    assert!(matches!(world[0].barrier(LONG), Err(Error::Interrupted { .. })));
    assert!(matches!(world[0].check(), Err(Error::Interrupted { .. })));
}
