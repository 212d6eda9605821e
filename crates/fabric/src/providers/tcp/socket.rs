//! The system calls of the data path: one call sends from, or fills, many places of memory.
//!
//! Places are raw addresses, never references: a peer's other stream, or a careless owner, may write
//! to the same region at the same time, and a hostile frame may name the same bytes twice.

use crate::memory::Memory;
use rustix::fd::{AsRawFd, BorrowedFd};
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// The most places in one call.
const MAX_PLACES: usize = 128;

struct Places<'a> {
    /// The first `used` are set. Clearing the rest would cost more than sending a small frame.
    list: [MaybeUninit<libc::iovec>; MAX_PLACES],
    used: usize,
    bytes: usize,
    borrowed: PhantomData<&'a ()>,
}

impl Places<'_> {
    /// The place, if there is but one: the kernel takes a single one faster than a list.
    fn only(&self) -> Option<libc::iovec> {
        // SAFETY: the first `used` places are set.
        (self.used == 1).then(|| unsafe { self.list[0].assume_init() })
    }

    fn new() -> Self {
        let list = [const { MaybeUninit::uninit() }; MAX_PLACES];
        Places { list, used: 0, bytes: 0, borrowed: PhantomData }
    }

    fn push(&mut self, address: *mut u8, length: usize) -> bool {
        if length == 0 {
            return true;
        }
        let Some(place) = self.list.get_mut(self.used) else { return false };
        place.write(libc::iovec { iov_base: address.cast(), iov_len: length });
        self.used += 1;
        self.bytes += length;
        true
    }
}

/// Bytes to send, in order. Each push says whether there was room for one more place.
pub(super) struct Sources<'a>(Places<'a>);

impl<'a> Sources<'a> {
    pub fn new() -> Self {
        Sources(Places::new())
    }

    pub fn bytes(&mut self, bytes: &'a [u8]) -> bool {
        self.0.push(bytes.as_ptr().cast_mut(), bytes.len())
    }

    pub fn memory(&mut self, memory: &'a Memory, offset: usize, length: usize) -> bool {
        self.0.push(memory.at(offset, length), length)
    }

    pub fn len(&self) -> usize {
        self.0.bytes
    }

    /// Hands them to the kernel, as many as it takes now.
    pub fn send(&self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        if let Some(only) = self.0.only() {
            // SAFETY: the kernel only reads the place, which lies in memory borrowed for 'a.
            let sent = unsafe {
                libc::send(socket.as_raw_fd(), only.iov_base, only.iov_len, libc::MSG_NOSIGNAL)
            };
            return usize::try_from(sent).map_err(|_| io::Error::last_os_error());
        }
        // SAFETY: all zeroes is a valid `msghdr`: no name, no places, no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.0.list.as_ptr().cast_mut().cast();
        message.msg_iovlen = self.0.used as _;
        // SAFETY: the kernel only reads the first `used` places, each of which lies in memory
        // borrowed for 'a.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }
}

/// Room to receive into, in order. Each push says whether there was room for one more place.
pub(super) struct Room<'a>(Places<'a>);

impl<'a> Room<'a> {
    pub fn new() -> Self {
        Room(Places::new())
    }

    pub fn bytes(&mut self, bytes: &'a mut [u8]) -> bool {
        self.0.push(bytes.as_mut_ptr(), bytes.len())
    }

    pub fn memory(&mut self, memory: &'a Memory, offset: usize, length: usize) -> bool {
        self.0.push(memory.at(offset, length), length)
    }

    pub fn len(&self) -> usize {
        self.0.bytes
    }

    /// Fills it from the socket with what has come; zero means that nothing will come any more.
    pub fn receive(self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        if let Some(only) = self.0.only() {
            // SAFETY: the kernel only writes the place, which is borrowed as those below are.
            let got = unsafe { libc::recv(socket.as_raw_fd(), only.iov_base, only.iov_len, 0) };
            return usize::try_from(got).map_err(|_| io::Error::last_os_error());
        }
        // SAFETY: the kernel only writes the first `used` places. Each lies in memory borrowed for
        // 'a: a buffer borrowed exclusively, or a region that is only accessed by raw copies.
        let got = unsafe {
            libc::readv(socket.as_raw_fd(), self.0.list.as_ptr().cast(), self.0.used as libc::c_int)
        };
        usize::try_from(got).map_err(|_| io::Error::last_os_error())
    }
}

/// Bytes sent that the other end's kernel has not acknowledged yet.
pub(super) fn unacknowledged(socket: BorrowedFd<'_>) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: this request writes one int to the address given.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &mut bytes) };
    if result == 0 { usize::try_from(bytes).unwrap_or(0) } else { 0 }
}
