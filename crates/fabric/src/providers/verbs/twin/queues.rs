//! Twin queues: completions, shared receives, asynchronous events, and descriptors for them.

use super::super::sys;
use std::collections::VecDeque;
use std::ffi::{c_int, c_uint};

/// Completion queue entry, with the work request whose send queue slot it frees.
pub struct Entry {
    pub completion: sys::Completion,
    /// Requests on the queue pair up to this one, in post order.
    pub reclaims: Option<u64>,
}

/// Completion queue.
pub struct CompletionEntries {
    pub context: u32,
    /// Handle address, for channel events.
    pub handle: usize,
    pub channel: Option<c_int>,
    pub entries: VecDeque<Entry>,
    pub capacity: usize,
    /// Most entries so far.
    pub peak: usize,
    pub armed: bool,
    /// An entry was lost.
    pub has_overflowed: bool,
}

impl CompletionEntries {
    /// Adds an entry. Returns the channel to notify, or an error if the queue is full.
    pub fn push(&mut self, entry: Entry) -> Result<Option<c_int>, ()> {
        if self.entries.len() == self.capacity {
            self.has_overflowed = true;
            return Err(());
        }
        self.entries.push_back(entry);
        self.peak = self.peak.max(self.entries.len());
        Ok(if std::mem::take(&mut self.armed) { self.channel } else { None })
    }
}

/// Shared receive queue.
pub struct Receives {
    pub context: u32,
    pub domain: u32,
    /// Identities of the receives without buffers.
    pub posted: VecDeque<u64>,
    pub capacity: usize,
    /// Queue pairs whose next write waits for a receive.
    pub waiting: Vec<u32>,
}

/// Open device.
pub struct OpenContext {
    /// NIC number.
    pub nic: u32,
    pub descriptor: c_int,
    /// Event kind, and queue pair address or port number.
    pub events: VecDeque<(c_uint, usize)>,
}

impl OpenContext {
    pub fn raise(&mut self, kind: c_uint, element: usize) {
        self.events.push_back((kind, element));
        notify(self.descriptor);
    }
}

/// New descriptor that [`notify`] makes readable.
pub fn new_descriptor() -> c_int {
    // SAFETY: no pointers.
    unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }
}

/// Makes a descriptor readable.
pub fn notify(descriptor: c_int) {
    let one = 1u64;
    // SAFETY: eight bytes, which an event descriptor takes.
    unsafe { libc::write(descriptor, (&raw const one).cast(), 8) };
}

/// Makes a descriptor unreadable.
pub fn clear(descriptor: c_int) {
    let mut count = 0u64;
    // SAFETY: eight bytes, which an event descriptor fills in.
    unsafe { libc::read(descriptor, (&raw mut count).cast(), 8) };
}

pub fn close(descriptor: c_int) {
    // SAFETY: the owner closes it once.
    unsafe { libc::close(descriptor) };
}
