//! Pieces of regions on their way to or from a socket.

use crate::memory::Memory;
use std::sync::Arc;

/// Pieces that are sent or filled one after another. They keep their memory alive.
#[derive(Default)]
pub(super) struct Pieces {
    list: Vec<Piece>,
    next: usize,
}

struct Piece {
    memory: Arc<Memory>,
    offset: usize,
    length: usize,
}

impl Pieces {
    pub fn push(&mut self, memory: Arc<Memory>, offset: usize, length: usize) {
        if length > 0 {
            self.list.push(Piece { memory, offset, length });
        }
    }

    pub fn clear(&mut self) {
        self.list.clear();
        self.next = 0;
    }

    pub fn is_done(&self) -> bool {
        self.next == self.list.len()
    }

    /// Shows what is left, as long as `show` takes it; whether it took all.
    pub fn each<'a>(&'a self, mut show: impl FnMut(&'a Memory, usize, usize) -> bool) -> bool {
        self.list[self.next..].iter().all(|p| show(&p.memory, p.offset, p.length))
    }

    /// At most `count` more bytes are done; returns how many there were.
    pub fn advance(&mut self, count: usize) -> usize {
        let mut left = count;
        while let Some(piece) = self.list.get_mut(self.next) {
            let step = left.min(piece.length);
            piece.offset += step;
            piece.length -= step;
            left -= step;
            if piece.length > 0 {
                break;
            }
            self.next += 1;
        }
        count - left
    }

    /// Copies as much of `bytes` as there is room for; returns how much.
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
