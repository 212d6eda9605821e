//! Bare shared memory operations: a copy into the peer's mapping and a flag, or only the flag.

use super::{Pattern, Side};
use crate::Outcome;
use crate::group::PATIENCE;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use weft_control::Control;
use weft_fabric::{Memory, Region};

/// Flag bytes on one rank: one for messages, one for acknowledgements, a cache line each.
const FLAGS: usize = 256;
const ACKNOWLEDGED: usize = 128;

/// Implementations over mappings of the memory that Weft also writes.
pub fn open(control: &Control, source: &Region, inbox: &Region) -> Outcome<Vec<Box<dyn Side>>> {
    let mut sides: Vec<Box<dyn Side>> = Vec::new();
    for bytes in [true, false] {
        let flags = Memory::shared(FLAGS)?;
        let (peer_flags, peer_inbox) = exchange(control, &flags, inbox.memory())?;
        sides.push(Box::new(Bare {
            bytes,
            source: source.memory().clone(),
            peer_inbox,
            flags,
            peer_flags,
            sent: 0,
            received: 0,
            windows_sent: 0,
            windows_received: 0,
        }));
    }
    Ok(sides)
}

/// Maps the peer's flags and inbox by that process's descriptors.
fn exchange(control: &Control, flags: &Memory, inbox: &Memory) -> Outcome<(Memory, Memory)> {
    let number = |memory: &Memory| -> Outcome<i32> {
        Ok(memory.descriptor().ok_or("the memory has no descriptor")?.as_raw_fd())
    };
    let mine = (std::process::id(), number(flags)?, number(inbox)?);
    let all = control.all_gather(&serde_json::to_vec(&mine)?, PATIENCE)?;
    let theirs = &all[1 - control.rank().index()];
    let (process, flags_number, inbox_number): (u32, i32, i32) = serde_json::from_slice(theirs)?;
    let map = |number: i32, length| -> Outcome<Memory> {
        let path = format!("/proc/{process}/fd/{number}");
        let file = File::options().read(true).write(true).open(path)?;
        Ok(Memory::map(&file, length)?)
    };
    let mapped = (map(flags_number, FLAGS)?, map(inbox_number, inbox.len())?);
    control.barrier(PATIENCE)?;
    Ok(mapped)
}

struct Bare {
    /// True if a message has bytes besides the flag.
    bytes: bool,
    source: Arc<Memory>,
    peer_inbox: Memory,
    flags: Memory,
    peer_flags: Memory,
    /// Raised flags, for messages, windows and barriers.
    sent: u64,
    received: u64,
    windows_sent: u64,
    windows_received: u64,
}

impl Bare {
    fn copy(&self, offset: usize, length: usize) {
        if self.bytes {
            self.source.copy_to(offset, &self.peer_inbox, offset, length);
        }
    }
}

impl Side for Bare {
    fn name(&self) -> &'static str {
        if self.bytes { "memcpy + flag" } else { "flag alone" }
    }

    fn moves(&self, pattern: Pattern, size: usize) -> bool {
        self.bytes || (pattern == Pattern::PingPong && size == 8)
    }

    fn carries_bytes(&self) -> bool {
        self.bytes
    }

    fn barrier(&mut self) -> Outcome<()> {
        // An empty message in each direction.
        self.sent += 1;
        raise(&self.peer_flags, 0, self.sent);
        self.received += 1;
        await_flag(&self.flags, 0, self.received);
        Ok(())
    }

    fn send(&mut self, offset: usize, length: usize) -> Outcome<()> {
        self.copy(offset, length);
        self.sent += 1;
        raise(&self.peer_flags, 0, self.sent);
        Ok(())
    }

    fn receive(&mut self, _offset: usize, _length: usize) -> Outcome<()> {
        self.received += 1;
        await_flag(&self.flags, 0, self.received);
        Ok(())
    }

    fn send_window(&mut self, offsets: &[usize], length: usize) -> Outcome<()> {
        await_flag(&self.flags, ACKNOWLEDGED, self.windows_sent.saturating_sub(1));
        for &offset in offsets {
            self.copy(offset, length);
        }
        self.windows_sent += 1;
        self.sent += 1;
        raise(&self.peer_flags, 0, self.sent);
        Ok(())
    }

    fn receive_window(&mut self, _offsets: &[usize], _length: usize) -> Outcome<()> {
        self.received += 1;
        await_flag(&self.flags, 0, self.received);
        self.windows_received += 1;
        raise(&self.peer_flags, ACKNOWLEDGED, self.windows_received);
        Ok(())
    }

    fn finish_windows(&mut self) -> Outcome<()> {
        await_flag(&self.flags, ACKNOWLEDGED, self.windows_sent);
        Ok(())
    }
}

fn word(flags: &Memory, offset: usize) -> &AtomicU64 {
    let base = flags.host().expect("shared memory is the host's").as_ptr();
    // SAFETY: the mapping has FLAGS bytes, begins at a page, and both offsets in use are multiples of 8
    // inside it; the words are only ever accessed atomically, and live as long as `flags`.
    unsafe { &*base.add(offset).cast::<AtomicU64>() }
}

fn raise(flags: &Memory, offset: usize, value: u64) {
    word(flags, offset).store(value, Ordering::Release);
}

fn await_flag(flags: &Memory, offset: usize, value: u64) {
    while word(flags, offset).load(Ordering::Acquire) < value {
        std::hint::spin_loop();
    }
}
