//! Region segments that a socket sends or fills.

use crate::memory::Memory;
use std::sync::Arc;

/// Segments in transfer order. They keep the memory alive.
#[derive(Default)]
pub(super) struct Segments {
    list: Vec<Segment>,
    next: usize,
}

struct Segment {
    memory: Arc<Memory>,
    offset: usize,
    length: usize,
}

impl Segments {
    pub fn push(&mut self, memory: Arc<Memory>, offset: usize, length: usize) {
        if length > 0 {
            self.list.push(Segment { memory, offset, length });
        }
    }

    pub fn clear(&mut self) {
        self.list.clear();
        self.next = 0;
    }

    pub fn is_done(&self) -> bool {
        self.next == self.list.len()
    }

    /// Passes the remaining segments to `show` until it returns false; true if it took all.
    pub fn each<'a>(&'a self, mut show: impl FnMut(&'a Memory, usize, usize) -> bool) -> bool {
        self.list[self.next..].iter().all(|p| show(&p.memory, p.offset, p.length))
    }

    /// Advances by at most `count` bytes; returns by how many.
    pub fn advance(&mut self, count: usize) -> usize {
        let mut left = count;
        while let Some(segment) = self.list.get_mut(self.next) {
            let step = left.min(segment.length);
            segment.offset += step;
            segment.length -= step;
            left -= step;
            if segment.length > 0 {
                break;
            }
            self.next += 1;
        }
        count - left
    }

    /// Copies as much of `bytes` as fits; returns how many bytes it copied.
    pub fn copy_in(&mut self, bytes: &[u8]) -> usize {
        let mut rest = bytes;
        self.each(|memory, offset, length| {
            let (now, later) = rest.split_at(length.min(rest.len()));
            memory.copy_in(offset, now);
            rest = later;
            !rest.is_empty()
        });
        let copied = bytes.len() - rest.len();
        self.advance(copied)
    }
}
