//! Connections between ranks on one host, among unknown connections from the same user, and interrupted
//! waits.

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use weft_fabric::bytes::Reader;
use weft_fabric::{DescriptorExchange, Error, Memory, Rank, Result, WaitLimit, clock};

/// Time limit for any expected event on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Connects to the socket in an address; `None` if the backlog is full or it is closed.
fn unknown_connection(address: &[u8]) -> Option<OwnedFd> {
    let mut reader = Reader::new(address);
    reader.bytes(16).unwrap();
    // Domain, user namespace and user.
    reader.block().unwrap();
    reader.block().unwrap();
    reader.u32().unwrap();
    let name = SocketAddrUnix::new_abstract_name(reader.block().unwrap()).unwrap();
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    net::connect(&socket, &name).ok().map(|()| socket)
}

/// True if the other end has closed this connection.
fn is_closed(unknown_connection: &OwnedFd) -> bool {
    match net::recv(unknown_connection, &mut [0; 64], net::RecvFlags::DONTWAIT) {
        Ok((got, _)) => got == 0,
        Err(error) => error != Errno::AGAIN,
    }
}

fn swap(exchange: DescriptorExchange, rank: u32, peer: &[u8]) -> Result<Vec<OwnedFd>> {
    let memory = Memory::shared(8).unwrap();
    let mut limit = WaitLimit { deadline: clock::now().after(PATIENCE), give_up: &mut || Ok(()) };
    let descriptor = memory.descriptor().unwrap();
    exchange.swap(Rank(rank), &[(Rank(1 - rank), peer)], descriptor, &mut limit)
}

#[test]
fn ranks_meet_among_silent_and_babbling_strangers() {
    let exchanges = [(); 2].map(|()| DescriptorExchange::open("this").unwrap());
    let addresses = [exchanges[0].address(), exchanges[1].address()];
    // Before the ranks: more connections than are kept, and they stay open.
    let silent: Vec<OwnedFd> = (0..300).filter_map(|_| unknown_connection(&addresses[1])).collect();
    assert_eq!(silent.len(), 300);
    let met = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // And while the ranks connect: silent and sending ones, continuously.
        scope.spawn(|| {
            let mut held = VecDeque::new();
            for number in 0.. {
                if met.load(Ordering::Relaxed) {
                    return;
                }
                let Some(unknown_connection) = unknown_connection(&addresses[1]) else { continue };
                if number % 2 == 0 {
                    let _ =
                        net::send(&unknown_connection, &[number as u8; 21], SendFlags::NOSIGNAL);
                }
                held.push_back(unknown_connection);
                if held.len() > 200 {
                    held.pop_front();
                }
            }
        });
        let [zero, one] = exchanges;
        let zero = scope.spawn(|| swap(zero, 0, &addresses[1]));
        let one = scope.spawn(|| swap(one, 1, &addresses[0]));
        let ended = [zero.join().unwrap(), one.join().unwrap()];
        met.store(true, Ordering::Relaxed);
        for taken in ended {
            assert_eq!(taken.unwrap().len(), 1);
        }
    });
    drop(silent);
}

/// The time limit for an unknown connection is 2 s; the awaited rank comes later.
#[test]
fn a_silent_stranger_is_closed_while_ranks_wait_for_a_peer() {
    closed_after(|address| vec![unknown_connection(address).unwrap()]);
}

/// [`unknown_connection`] by a thread of another user; `None` if this process may not become that user.
fn connection_of_another_user(address: &[u8]) -> Option<OwnedFd> {
    const OTHER: libc::c_long = 65_534;
    let connect = || {
        // SAFETY: the system call changes only the user of this thread, which ends with the connection.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, OTHER, OTHER, OTHER) } == 0;
        changed.then(|| unknown_connection(address).unwrap())
    };
    std::thread::scope(|scope| scope.spawn(connect).join().unwrap())
}

/// Time until rank 1, which waits for rank 0, closes the first of these connections.
fn closed_after(connect: impl FnOnce(&[u8]) -> Vec<OwnedFd>) -> Duration {
    let exchanges = [(); 2].map(|()| DescriptorExchange::open("this").unwrap());
    let addresses = [exchanges[0].address(), exchanges[1].address()];
    let begin = clock::now();
    let connections = connect(&addresses[1]);
    std::thread::scope(|scope| {
        let [zero, one] = exchanges;
        let one = scope.spawn(|| swap(one, 1, &addresses[0]));
        while !connections.first().is_none_or(is_closed) {
            assert!(clock::now().since(begin) < Duration::from_secs(10), "it is still connected");
            std::thread::sleep(Duration::from_millis(5));
        }
        let took = clock::now().since(begin);
        assert!(!one.is_finished());
        swap(zero, 0, &addresses[1]).unwrap();
        one.join().unwrap().unwrap();
        took
    })
}

/// Longest time that is not the 2 s of a silent connection. A busy machine may take longer for some of a few attempts.
const AT_ONCE: Duration = Duration::from_millis(1500);

#[test]
fn the_oldest_of_many_silent_strangers_is_closed_at_once() {
    let many = |address: &[u8]| (0..300).filter_map(|_| unknown_connection(address)).collect();
    let took = (0..3).map(|_| closed_after(many)).min().unwrap();
    assert!(took < AT_ONCE, "{took:?}");
}

#[test]
fn a_stranger_of_another_user_is_closed_at_once() {
    let mut others = 0;
    let mut attempt = || {
        closed_after(|address| {
            let other = connection_of_another_user(address);
            others += usize::from(other.is_some());
            other.into_iter().collect()
        })
    };
    let took = (0..3).map(|_| attempt()).min().unwrap();
    if others == 0 {
        return println!("skipped: it takes root to become another user");
    }
    assert!(took < AT_ONCE, "{took:?}");
}

#[test]
fn a_meeting_ends_when_it_is_given_up() {
    let (here, there) =
        (DescriptorExchange::open("this").unwrap(), DescriptorExchange::open("this").unwrap());
    let memory = Memory::shared(8).unwrap();
    let mut checks = 0;
    let mut give_up = || {
        checks += 1;
        if checks < 3 { Ok(()) } else { Err(Error::Interrupted) }
    };
    let deadline = clock::now().after(PATIENCE);
    let mut limit = WaitLimit { deadline, give_up: &mut give_up };
    let peers = [(Rank(1), &*there.address())];
    let swapped = here.swap(Rank(0), &peers, memory.descriptor().unwrap(), &mut limit);
    assert!(matches!(swapped, Err(Error::Interrupted)), "{swapped:?}");
    assert!(clock::now() < deadline);
}
