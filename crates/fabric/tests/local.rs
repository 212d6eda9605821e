//! Connections between ranks of one host, among unknown connections of the same user, and interrupted
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

/// Connects to the socket in an address; `None` if its backlog is full or it is closed.
fn unknown_connection(address: &[u8]) -> Option<OwnedFd> {
    let mut reader = Reader::new(address);
    reader.bytes(16).unwrap();
    reader.block().unwrap();
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

/// The time limit of an unknown connection is 2 s; the awaited rank comes later.
#[test]
fn a_silent_stranger_is_closed_while_ranks_wait_for_a_peer() {
    let exchanges = [(); 2].map(|()| DescriptorExchange::open("this").unwrap());
    let addresses = [exchanges[0].address(), exchanges[1].address()];
    let silent = unknown_connection(&addresses[1]).unwrap();
    std::thread::scope(|scope| {
        let [zero, one] = exchanges;
        let one = scope.spawn(|| swap(one, 1, &addresses[0]));
        let begin = clock::now();
        while !is_closed(&silent) {
            assert!(clock::now().since(begin) < Duration::from_secs(10), "it is still connected");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(!one.is_finished());
        swap(zero, 0, &addresses[1]).unwrap();
        one.join().unwrap().unwrap();
    });
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
