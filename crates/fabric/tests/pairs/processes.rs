//! Pairs between processes: the test's own program, run as a dialler.

use crate::common::{End, PATIENCE, accept, by, config, listen, within_two_seconds};
use std::process::{Child, Command, Stdio};
use weft_fabric::pair::connect;
use weft_fabric::{Cause, Error, Poison, ProviderKind};

const ADDRESS: &str = "WEFT_TEST_PAIR_ADDRESS";
const PROVIDER: &str = "WEFT_TEST_PAIR_PROVIDER";

/// A process that connects and echoes until its pair ends. It is a test of no effect unless the parent
/// names an address.
#[test]
fn echoing_process() {
    let (Ok(address), Ok(provider)) = (std::env::var(ADDRESS), std::env::var(PROVIDER)) else {
        return;
    };
    let provider = if provider == "shm" { ProviderKind::Shm } else { ProviderKind::Tcp };
    let pair = connect(&config(&address, provider), by(PATIENCE)).unwrap();
    let end = End::new(pair);
    while end.echo(1).is_ok() {}
}

fn start(address: &str, provider: ProviderKind) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::echoing_process"])
        .env(ADDRESS, address)
        .env(PROVIDER, provider.name())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn half_of_a_hundred_pairs_are_killed_and_the_other_half_goes_on() {
    for provider in [ProviderKind::Shm, ProviderKind::Tcp] {
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
        within_two_seconds(|| {
            for (_, end) in &lost {
                let error = end.wait(PATIENCE).unwrap_err();
                assert!(
                    matches!(&error, Error::Poisoned(Poison { kind: Cause::Lost, .. })),
                    "{error}"
                );
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
    for provider in [ProviderKind::Shm, ProviderKind::Tcp] {
        let listener = listen(provider);
        let address = listener.address().to_string();
        for delay in 0..20 {
            let mut child = start(&address, provider);
            let end = by(std::time::Duration::from_millis(2 * delay));
            // Moves the handshake on for as long as the child lives.
            let early = listener.accept(end, &mut || false).ok();
            child.kill().unwrap();
            child.wait().unwrap();
            drop(early);
        }
        let mut child = start(&address, provider);
        loop {
            let pair = accept(&listener);
            // One that was killed after its last message may be formed first.
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
    // SAFETY: the child makes calls that take no lock of another thread, and exits without unwinding.
    let forked = unsafe { libc::fork() };
    if forked == 0 {
        let refused =
            end.communicator.control().check().is_err() && listener.try_accept().map(drop).is_err();
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
