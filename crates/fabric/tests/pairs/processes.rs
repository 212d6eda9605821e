//! Pairs between processes: the test binary, run as a dialer.

use crate::common::{End, LOSS, PATIENCE, accept, by, config, in_time, listen};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use weft_fabric::pair::{Listener, connect};
use weft_fabric::{Cause, Error, ProviderKind};

const ADDRESS: &str = "WEFT_TEST_PAIR_ADDRESS";
const PROVIDER: &str = "WEFT_TEST_PAIR_PROVIDER";
/// Copy is over a twin.
const WITHIN_A_HOST: [ProviderKind; 3] = [ProviderKind::Copy, ProviderKind::Shm, ProviderKind::Tcp];
/// Milliseconds.
const SILENCE: &str = "WEFT_TEST_PAIR_SILENCE";

/// Process that connects and echoes until the pair ends. As a test it returns at once unless the parent
/// sets an address.
#[test]
fn echoing_process() {
    let (Ok(address), Ok(provider)) = (std::env::var(ADDRESS), std::env::var(PROVIDER)) else {
        return;
    };
    let provider = weft_fabric::registry::named(&provider).unwrap().0;
    let mut config = config(&address, provider);
    if let Ok(silence) = std::env::var(SILENCE) {
        config.settings.silence_timeout = Duration::from_millis(silence.parse().unwrap());
    }
    let end = End::new(connect(&config, by(PATIENCE)).unwrap());
    while end.echo(1).is_ok() {}
}

fn start(address: &str, provider: ProviderKind) -> Child {
    command(address, provider).spawn().unwrap()
}

fn command(address: &str, provider: ProviderKind) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "processes::echoing_process"])
        .env(ADDRESS, address)
        .env(PROVIDER, provider.name())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

fn signal(child: &Child, signal: libc::c_int) {
    // SAFETY: a system call without pointers; the process is a child that was not waited for.
    assert_eq!(unsafe { libc::kill(child.id() as libc::pid_t, signal) }, 0);
}

#[test]
fn a_stopped_process_is_silent_and_one_that_makes_no_call_is_not() {
    const SHORT: Duration = Duration::from_millis(1500);
    for provider in WITHIN_A_HOST {
        let mut config = config("127.0.0.1:0", provider);
        config.settings.silence_timeout = SHORT;
        let listener = Listener::bind(config).unwrap();
        let address = listener.address().to_string();
        let mut children = [start(&address, provider), start(&address, provider)];
        let mut ends = [End::new(accept(&listener)), End::new(accept(&listener))];
        if ends[0].communicator.control().members()[1].pid != children[0].id() {
            ends.reverse();
        }
        // Neither this process nor the others make calls on a pair.
        std::thread::sleep(2 * SHORT);
        ends.iter().for_each(|end| end.ask(3).unwrap());
        signal(&children[0], libc::SIGSTOP);
        let since = Instant::now();
        let error = ends[0].wait(PATIENCE).unwrap_err();
        assert!(since.elapsed() < SHORT + LOSS, "{:?}", since.elapsed());
        let Error::Poisoned(poison) = &error else { panic!("{error}") };
        assert_eq!((poison.kind, poison.rank), (Cause::Silent, Some(ends[0].peer())), "{error}");
        ends[1].ask(3).unwrap();
        drop(ends);
        signal(&children[0], libc::SIGCONT);
        for child in &mut children {
            child.wait().unwrap();
        }
    }
}

#[test]
fn a_process_that_was_stopped_does_not_take_its_stop_for_the_silence_of_its_peer() {
    for provider in WITHIN_A_HOST {
        let listener = listen(provider);
        let mut child = command(&listener.address().to_string(), provider);
        // This end waits longer, and sends heartbeats at the rate that the other end's timeout needs.
        let mut child = child.env(SILENCE, "600").spawn().unwrap();
        let end = End::new(accept(&listener));
        for _ in 0..2 {
            end.ask(3).unwrap();
            signal(&child, libc::SIGSTOP);
            std::thread::sleep(Duration::from_millis(1500));
            signal(&child, libc::SIGCONT);
            std::thread::sleep(Duration::from_millis(300));
        }
        end.ask(3).unwrap();
        drop(end);
        child.wait().unwrap();
    }
}

#[test]
fn half_of_a_hundred_pairs_are_killed_and_the_other_half_goes_on() {
    for provider in WITHIN_A_HOST {
        let listener = listen(provider);
        let address = listener.address().to_string();
        let mut children: Vec<Child> = (0..100).map(|_| start(&address, provider)).collect();
        let mut ends: Vec<(u32, End)> = (0..100)
            .map(|_| {
                let pair = accept(&listener);
                let pid = pair.control().members()[1].pid;
                (pid, End::new(pair))
            })
            .collect();
        ends.iter().for_each(|(_, end)| end.ask(2).unwrap());
        let killed: Vec<u32> = children[..50].iter().map(Child::id).collect();
        children[..50].iter_mut().for_each(|child| child.kill().unwrap());
        let (lost, alive): (Vec<_>, Vec<_>) =
            ends.drain(..).partition(|(pid, _)| killed.contains(pid));
        assert_eq!((lost.len(), alive.len()), (50, 50));
        in_time(|| {
            for (_, end) in &lost {
                let error = end.wait(PATIENCE).unwrap_err();
                let Error::Poisoned(poison) = &error else { panic!("{error}") };
                assert_eq!((poison.kind, poison.rank), (Cause::Lost, Some(end.peer())), "{error}");
            }
        });
        alive.iter().for_each(|(_, end)| end.ask(3).unwrap());
        drop((alive, lost));
        for child in &mut children {
            child.wait().unwrap();
        }
    }
}

#[test]
fn diallers_killed_at_any_time_of_the_handshake_leave_the_listener_in_order() {
    for provider in WITHIN_A_HOST {
        let listener = listen(provider);
        let address = listener.address().to_string();
        for delay in 0..20 {
            let mut child = start(&address, provider);
            let end = by(std::time::Duration::from_millis(2 * delay));
            // Advances the handshake while the child lives.
            let early = match listener.accept(end, &mut || false) {
                Err(Error::Timeout { .. } | Error::NoDialer { .. }) => None,
                ended => Some(ended.unwrap()),
            };
            child.kill().unwrap();
            child.wait().unwrap();
            drop(early);
        }
        let mut child = start(&address, provider);
        loop {
            let pair = accept(&listener);
            // A dialler killed after the last message may be formed first.
            if pair.control().members()[1].pid == child.id() {
                End::new(pair).ask(3).unwrap();
                break;
            }
        }
        child.wait().unwrap();
    }
}

#[test]
fn a_forked_child_keeps_no_pair_open_and_is_refused() {
    let listener = listen(ProviderKind::Shm);
    let address = listener.address().to_string();
    let mut child = start(&address, ProviderKind::Shm);
    let end = End::new(accept(&listener));
    // SAFETY: the child makes calls that take no other thread's lock, and exits without unwinding.
    let forked = unsafe { libc::fork() };
    if forked == 0 {
        let errors = [
            end.communicator.control().check().map_err(Error::from).err(),
            listener.try_accept().map(drop).err(),
        ];
        let is_refused = |error: &Option<Error>| {
            matches!(error, Some(Error::Control(weft_control::Error::Forked)))
        };
        let refused = errors.iter().all(is_refused);
        // SAFETY: ends this process at once.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child above; `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(forked, &mut status, 0) }, forked);
    assert_eq!(status, 0);
    end.ask(3).unwrap();
    drop(end);
    child.wait().unwrap();
}
