//! Happens-before order: vector clocks over ranks, joined when a wait counts a write.

use std::collections::HashMap;
use std::rc::Rc;

/// Posted write.
#[derive(Clone, Copy)]
pub(super) struct PostedWrite {
    pub(super) from: u32,
    pub(super) index: u32,
    pub(super) to: u32,
    pub(super) step: u32,
    /// Wait on `to` that counted it.
    pub(super) waited: Option<u32>,
}

/// Block use; conflicting uses must wait until it ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockUse {
    /// Local operation by the owner, by index.
    Local(u32),
    /// Source for this write.
    Source(u32),
    /// Target for this write.
    Target(u32),
}

/// Vector clock: for each rank, how many operations have ended.
pub(super) type Clock = Rc<Vec<u32>>;

/// Start of operation `index` on `rank`.
pub(super) struct OpStart<'a> {
    pub(super) rank: u32,
    pub(super) index: u32,
    pub(super) clock: &'a [u32],
}

impl OpStart<'_> {
    /// True if that operation has ended before this start in every event order.
    pub(super) fn after(&self, rank: u32, index: u32) -> bool {
        if rank == self.rank { index < self.index } else { index < self.clock[rank as usize] }
    }
}

/// Writes and drains so far.
#[derive(Default)]
pub(super) struct HappensBefore {
    pub(super) writes: Vec<PostedWrite>,
    /// A rank's drain indices for a peer.
    drains: HashMap<(u32, u32), Vec<u32>>,
}

impl HappensBefore {
    pub(super) fn drain(&mut self, rank: u32, to: u32, index: u32) {
        self.drains.entry((rank, to)).or_default().push(index);
    }

    /// True if a block use at `owner` has ended before `start` in every event order.
    pub(super) fn ended(&self, used: BlockUse, owner: u32, start: &OpStart<'_>) -> bool {
        let waited =
            |write: &PostedWrite| write.waited.is_some_and(|waited| start.after(write.to, waited));
        match used {
            BlockUse::Local(index) => start.after(owner, index),
            BlockUse::Target(write) => waited(&self.writes[write as usize]),
            BlockUse::Source(write) => {
                let write = &self.writes[write as usize];
                waited(write) || self.drained(write, start)
            }
        }
    }

    fn drained(&self, write: &PostedWrite, start: &OpStart<'_>) -> bool {
        let Some(drains) = self.drains.get(&(write.from, write.to)) else { return false };
        let first = drains.partition_point(|&drain| drain < write.index);
        drains.get(first).is_some_and(|&drain| start.after(write.from, drain))
    }
}

/// Joins a sender's clock at its post, operation `index`, into `clock`.
pub(super) fn join(clock: &mut Clock, sender: &Clock, from: u32, index: u32) {
    if clock[from as usize] > index {
        return;
    }
    let clock = Rc::make_mut(clock);
    for (mine, &theirs) in clock.iter_mut().zip(sender.iter()) {
        *mine = (*mine).max(theirs);
    }
    clock[from as usize] = index + 1;
}
