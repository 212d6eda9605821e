//! Data path system calls: scatter/gather send and receive.
//!
//! Ranges are raw addresses, not references: another stream from the peer, or the owner, may write to the
//! same region at the same time, and a malicious frame may name the same bytes twice.

use crate::memory::{Memory, copy_bytes};
use rustix::fd::{AsRawFd, BorrowedFd};
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Maximum ranges in one call.
const MAX_VECTORS: usize = 128;

struct IoVectors<'a> {
    /// The first `used` are initialised. Initialising the rest would cost more than sending a small frame.
    list: [MaybeUninit<libc::iovec>; MAX_VECTORS],
    used: usize,
    bytes: usize,
    borrowed: PhantomData<&'a ()>,
}

impl IoVectors<'_> {
    /// The only range, if there is one: the kernel handles it faster than a list.
    fn only(&self) -> Option<libc::iovec> {
        // SAFETY: the first `used` entries are initialised.
        (self.used == 1).then(|| unsafe { self.list[0].assume_init() })
    }

    /// All ranges.
    fn ranges(&self) -> impl Iterator<Item = libc::iovec> {
        // SAFETY: the first `used` entries are initialised.
        self.list[..self.used].iter().map(|range| unsafe { range.assume_init() })
    }

    fn new() -> Self {
        let list = [const { MaybeUninit::uninit() }; MAX_VECTORS];
        IoVectors { list, used: 0, bytes: 0, borrowed: PhantomData }
    }

    fn push(&mut self, address: *mut u8, length: usize) -> bool {
        if length == 0 {
            return true;
        }
        let Some(slot) = self.list.get_mut(self.used) else { return false };
        slot.write(libc::iovec { iov_base: address.cast(), iov_len: length });
        self.used += 1;
        self.bytes += length;
        true
    }
}

/// Ranges to send, in order. Each push returns false if the list is full.
pub(super) struct SendVectors<'a>(IoVectors<'a>);

impl<'a> SendVectors<'a> {
    pub fn new() -> Self {
        SendVectors(IoVectors::new())
    }

    pub fn bytes(&mut self, bytes: &'a [u8]) -> bool {
        self.0.push(bytes.as_ptr().cast_mut(), bytes.len())
    }

    pub fn memory(&mut self, memory: &'a Memory, offset: usize, length: usize) -> bool {
        self.0.push(memory.pointer(offset, length), length)
    }

    pub fn len(&self) -> usize {
        self.0.bytes
    }

    /// Copies as many bytes as `buffer` holds; returns how many.
    pub fn copy_to(&self, buffer: &mut [u8]) -> usize {
        let mut copied = 0;
        for range in self.0.ranges() {
            let length = range.iov_len.min(buffer.len() - copied);
            let target = buffer[copied..].as_mut_ptr();
            // SAFETY: the range lies in memory borrowed for 'a; `buffer` is borrowed exclusively and has room.
            unsafe { copy_bytes(range.iov_base.cast_const().cast(), target, length) };
            copied += length;
        }
        copied
    }

    /// Sends as many bytes as the kernel accepts now.
    pub fn send(&self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        if let Some(only) = self.0.only() {
            // SAFETY: the kernel only reads the range, which lies in memory borrowed for 'a.
            let sent = unsafe {
                libc::send(socket.as_raw_fd(), only.iov_base, only.iov_len, libc::MSG_NOSIGNAL)
            };
            return usize::try_from(sent).map_err(|_| io::Error::last_os_error());
        }
        // SAFETY: all zeroes is a valid `msghdr`: no name, no ranges, no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.0.list.as_ptr().cast_mut().cast();
        message.msg_iovlen = self.0.used as _;
        // SAFETY: the kernel only reads the first `used` ranges, each in memory borrowed for 'a.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }
}

/// Ranges to receive into, in order. Each push returns false if the list is full.
pub(super) struct ReceiveVectors<'a>(IoVectors<'a>);

impl<'a> ReceiveVectors<'a> {
    pub fn new() -> Self {
        ReceiveVectors(IoVectors::new())
    }

    pub fn bytes(&mut self, bytes: &'a mut [u8]) -> bool {
        self.0.push(bytes.as_mut_ptr(), bytes.len())
    }

    pub fn memory(&mut self, memory: &'a Memory, offset: usize, length: usize) -> bool {
        self.0.push(memory.pointer(offset, length), length)
    }

    pub fn len(&self) -> usize {
        self.0.bytes
    }

    /// Copies bytes into the ranges, which have room for them.
    pub fn copy_from(self, bytes: &[u8]) {
        let mut copied = 0;
        for range in self.0.ranges() {
            let length = range.iov_len.min(bytes.len() - copied);
            let source = bytes[copied..].as_ptr();
            // SAFETY: the range lies in memory borrowed for 'a, as in `receive`; `bytes` has as many more.
            unsafe { copy_bytes(source, range.iov_base.cast(), length) };
            copied += length;
        }
    }

    /// Receives available bytes; zero at the stream's end.
    pub fn receive(self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        if let Some(only) = self.0.only() {
            // SAFETY: the kernel only writes the range, which is borrowed as those below are.
            let got = unsafe { libc::recv(socket.as_raw_fd(), only.iov_base, only.iov_len, 0) };
            return usize::try_from(got).map_err(|_| io::Error::last_os_error());
        }
        // SAFETY: the kernel only writes the first `used` ranges. Each lies in memory borrowed for 'a: a
        // buffer borrowed exclusively, or a region that is only accessed by raw copies.
        let got = unsafe {
            libc::readv(socket.as_raw_fd(), self.0.list.as_ptr().cast(), self.0.used as libc::c_int)
        };
        usize::try_from(got).map_err(|_| io::Error::last_os_error())
    }
}

/// Bytes sent that the other end's kernel has not acknowledged.
pub(super) fn unacknowledged(socket: BorrowedFd<'_>) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: this request writes one int to the address given.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &mut bytes) };
    if result == 0 { usize::try_from(bytes).unwrap_or(0) } else { 0 }
}
