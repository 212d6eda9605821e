//! What happens before what: vector clocks over ranks, joined where a wait counts a write.

use std::collections::HashMap;
use std::rc::Rc;

/// A write that was posted.
#[derive(Clone, Copy)]
pub(super) struct Posted {
    pub(super) from: u32,
    pub(super) index: u32,
    pub(super) to: u32,
    pub(super) step: u32,
    /// The operation of `to` that waited for it.
    pub(super) waited: Option<u32>,
}

/// A use of a block, as far as others have to wait for its end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// By the owner's operation of this index.
    Local(u32),
    /// As the source of this write.
    Source(u32),
    /// As the target of this write.
    Target(u32),
}

/// How much each rank knows: for each rank, how many of its operations are over.
pub(super) type Clock = Rc<Vec<u32>>;

/// The moment at which `rank` starts its operation `index`.
pub(super) struct Moment<'a> {
    pub(super) rank: u32,
    pub(super) index: u32,
    pub(super) clock: &'a [u32],
}

impl Moment<'_> {
    /// True when that operation has ended before this moment in every order of events.
    pub(super) fn after(&self, rank: u32, index: u32) -> bool {
        if rank == self.rank { index < self.index } else { index < self.clock[rank as usize] }
    }
}

/// All writes and drains so far.
#[derive(Default)]
pub(super) struct Order {
    pub(super) writes: Vec<Posted>,
    /// The indices of the drains of a rank for a peer.
    drains: HashMap<(u32, u32), Vec<u32>>,
}

impl Order {
    pub(super) fn drain(&mut self, rank: u32, to: u32, index: u32) {
        self.drains.entry((rank, to)).or_default().push(index);
    }

    /// True when a use of `owner`'s memory has ended before `moment` in every order of events.
    pub(super) fn ended(&self, used: Use, owner: u32, moment: &Moment<'_>) -> bool {
        let waited =
            |write: &Posted| write.waited.is_some_and(|waited| moment.after(write.to, waited));
        match used {
            Use::Local(index) => moment.after(owner, index),
            Use::Target(write) => waited(&self.writes[write as usize]),
            Use::Source(write) => {
                let write = &self.writes[write as usize];
                waited(write) || self.drained(write, moment)
            }
        }
    }

    fn drained(&self, write: &Posted, moment: &Moment<'_>) -> bool {
        let Some(drains) = self.drains.get(&(write.from, write.to)) else { return false };
        let first = drains.partition_point(|&drain| drain < write.index);
        drains.get(first).is_some_and(|&drain| moment.after(write.from, drain))
    }
}

/// Lets `clock` know what the sender of a write knew when it posted it as its operation `index`.
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
