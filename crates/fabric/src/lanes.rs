//! Lanes: the words that peers raise, dirty bits that mark raised lanes, and the doorbell that wakes the
//! owner.
//!
//! One table per engine, in memory that peers on the same host map. A lane has one raising agent, which
//! stores the lane word (no read-modify-write). After the word the agent sets the lane's dirty bit in a
//! leaf, then the doorbell bit that covers the leaf; the previous doorbell value includes the owner's
//! sleep bits, and the agent makes a system call only if one is set. The owner takes dirty bits in the
//! opposite order, doorbell first, so a raise is either seen now or sets the doorbell again.
//!
//! Lanes 2i and 2i+1 share a cache line. An engine issues both to one peer, as a counter's data and
//! credit lanes: a wait for data loads the credit too, and no two agents share a line.

use crate::atomics::{CacheLine, Word32, Word64};
use std::time::Duration;

/// Doorbell bits: 27 leaf groups, a mailbox message, a notification without a raise, and the owner's
/// three sleep modes.
pub const GROUPS: u32 = 27;
const MESSAGE: u32 = 1 << 27;
const NOTIFIED: u32 = 1 << 28;
const ARMED: u32 = 1 << 29;
const ASLEEP_ON_FD: u32 = 1 << 30;
const ASLEEP_ON_WORD: u32 = 1 << 31;
const DIRTY: u32 = ((1 << GROUPS) - 1) | MESSAGE | NOTIFIED;

/// Wake-up that a raising agent owes after a raise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Wake {
    /// The owner is awake.
    No,
    /// An owner thread sleeps on the doorbell word.
    Word,
    /// An owner thread, or the owner's event loop, sleeps on the event descriptor.
    Descriptor,
    /// Both.
    WordAndDescriptor,
}

/// The owner's sleep mode. At most one thread sleeps in each mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SleepMode {
    /// On the doorbell word.
    Word,
    /// On an epoll descriptor, together with the links' descriptors.
    Descriptor,
    /// In the program's event loop, on the same descriptor.
    EventLoop,
}

impl SleepMode {
    fn flag(self) -> u32 {
        match self {
            SleepMode::Word => ASLEEP_ON_WORD,
            SleepMode::Descriptor => ASLEEP_ON_FD,
            SleepMode::EventLoop => ARMED,
        }
    }
}

/// Lane table view, for both sides, over borrowed words.
#[derive(Debug)]
pub struct Lanes<'a, W32, W64> {
    /// The word that wakes the owner.
    pub doorbell: &'a CacheLine<W32>,
    /// Dirty bits, 64 lanes to a leaf.
    pub leaves: &'a [CacheLine<W64>],
    /// The lanes' words, two to a line.
    pub words: &'a [CacheLine<[W64; 2]>],
}

impl<W32, W64> Clone for Lanes<'_, W32, W64> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W32, W64> Copy for Lanes<'_, W32, W64> {}

impl<W32: Word32, W64: Word64> Lanes<'_, W32, W64> {
    /// Raises `lane` to `value`; only the lane's one agent may call it. Release store: the caller's
    /// earlier writes are visible to an owner that reads the value.
    pub fn raise(&self, lane: usize, value: u64) -> Wake {
        self.word(lane).store(value);
        self.set_dirty(lane)
    }

    /// [`Lanes::raise`] without a dirty bit: for an agent inside the owner's poll, which reports the lane
    /// itself, and for an agent that sets several lanes' bits afterwards ([`Lanes::set_all_dirty`]).
    #[inline(always)]
    pub fn raise_unmarked(&self, lane: usize, value: u64) {
        self.word(lane).store(value);
    }

    /// Sets dirty bits for raised lanes: one access for each leaf, and one to the doorbell for all.
    pub fn set_all_dirty(&self, leaves: impl IntoIterator<Item = (usize, u64)>) -> Wake {
        let mut groups = 0;
        for (leaf, lanes) in leaves {
            self.leaves[leaf].0.fetch_or(lanes);
            groups |= 1 << (leaf as u32 % GROUPS);
        }
        Self::wake_for(self.doorbell.0.fetch_or(groups))
    }

    /// Sets a raised lane's dirty bit.
    pub fn set_dirty(&self, lane: usize) -> Wake {
        self.set_dirty_in_leaf(lane / 64, 1 << (lane % 64))
    }

    /// Raises both lanes on a cache line in one transfer. A reader that sees `lane`'s value also sees the
    /// neighbour's.
    pub fn raise_both(&self, lane: usize, value: u64, beside: u64) -> Wake {
        self.word(lane ^ 1).store(beside);
        self.word(lane).store(value);
        self.set_dirty_in_leaf(lane / 64, 0b11 << ((lane & !1) % 64))
    }

    fn set_dirty_in_leaf(&self, leaf: usize, lanes: u64) -> Wake {
        self.leaves[leaf].0.fetch_or(lanes);
        Self::wake_for(self.doorbell.0.fetch_or(1 << (leaf as u32 % GROUPS)))
    }

    /// Wakes the owner without a raise, for changes outside the table.
    pub fn notify(&self) -> Wake {
        Self::wake_for(self.doorbell.0.fetch_or(NOTIFIED))
    }

    /// Wakes the owner for a mailbox message, outside the table.
    pub fn announce_message(&self) -> Wake {
        Self::wake_for(self.doorbell.0.fetch_or(MESSAGE))
    }

    /// Owner: takes a message announcement; true if there was one.
    pub fn take_message(&self) -> bool {
        self.doorbell.0.load() & MESSAGE != 0 && self.doorbell.0.fetch_and(!MESSAGE) & MESSAGE != 0
    }

    fn wake_for(before: u32) -> Wake {
        match (before & ASLEEP_ON_WORD != 0, before & (ASLEEP_ON_FD | ARMED) != 0) {
            (false, false) => Wake::No,
            (true, false) => Wake::Word,
            (false, true) => Wake::Descriptor,
            (true, true) => Wake::WordAndDescriptor,
        }
    }

    /// The lane's value (acquire load: the agent's earlier writes are visible).
    pub fn value(&self, lane: usize) -> u64 {
        self.word(lane).load()
    }

    /// Owner: resets a lane without an agent to zero before it is issued again.
    pub fn reset(&self, lane: usize) {
        if self.word(lane).load() != 0 {
            self.word(lane).store(0);
        }
    }

    fn word(&self, lane: usize) -> &W64 {
        &self.words[lane / 2].0[lane % 2]
    }

    /// Owner: true with dirty bits, an announced message or a notification to take.
    #[inline(always)]
    pub fn has_dirty(&self) -> bool {
        self.doorbell.0.load() & DIRTY != 0
    }

    /// Owner: takes the dirty bits and calls `rose` for each lane. Returns true if there was a dirty bit
    /// or a notification. [`Lanes::take_message`] takes message announcements. Sleep announcements stay,
    /// and so does a notification while a thread has announced sleep on the doorbell word, since that
    /// thread checks only the notification before it sleeps. The owner's threads call this,
    /// [`Lanes::prepare_sleep`] and [`Lanes::finish_sleep`] one at a time.
    pub fn take_dirty(&self, mut rose: impl FnMut(usize)) -> bool {
        let doorbell = self.doorbell.0.load();
        let takeable = DIRTY & !MESSAGE;
        if doorbell & takeable == 0 {
            return false;
        }
        let taken = if doorbell & ASLEEP_ON_WORD == 0 { takeable } else { takeable & !NOTIFIED };
        let dirty = self.doorbell.0.fetch_and(!taken) & takeable;
        let mut groups = dirty & !NOTIFIED;
        while groups != 0 {
            let group = groups.trailing_zeros();
            groups &= groups - 1;
            // The only leaf in a group has bits; a load before the swap would transfer the cache line
            // twice.
            let is_only = (group + GROUPS) as usize >= self.leaves.len();
            for leaf in (group as usize..self.leaves.len()).step_by(GROUPS as usize) {
                if !is_only && self.leaves[leaf].0.load() == 0 {
                    continue;
                }
                let mut bits = self.leaves[leaf].0.swap(0);
                while bits != 0 {
                    rose(leaf * 64 + bits.trailing_zeros() as usize);
                    bits &= bits - 1;
                }
            }
        }
        dirty != 0
    }

    /// Owner: announces sleep. Returns true without dirty bits or notification; otherwise the announcement
    /// is withdrawn.
    pub fn prepare_sleep(&self, mode: SleepMode) -> bool {
        let idle = self.doorbell.0.fetch_or(mode.flag()) & DIRTY == 0;
        if !idle {
            self.finish_sleep(mode);
        }
        idle
    }

    /// Owner: sleeps on the doorbell after [`Lanes::prepare_sleep`] with [`SleepMode::Word`] returned
    /// `true`.
    pub fn sleep_on_word(&self, timeout: Duration) {
        let doorbell = self.doorbell.0.load();
        if doorbell & DIRTY == 0 {
            self.doorbell.0.wait(doorbell, timeout);
        }
    }

    /// Owner: withdraws the announcement. Returns true if no other sleeper uses the descriptor, so that it
    /// may be cleared.
    pub fn finish_sleep(&self, mode: SleepMode) -> bool {
        let before = self.doorbell.0.fetch_and(!mode.flag());
        before & (ASLEEP_ON_FD | ARMED) & !mode.flag() == 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicU32, AtomicU64};

    struct Table {
        doorbell: CacheLine<AtomicU32>,
        leaves: Vec<CacheLine<AtomicU64>>,
        words: Vec<CacheLine<[AtomicU64; 2]>>,
    }

    impl Table {
        fn new(leaves: usize) -> Table {
            Table {
                doorbell: CacheLine::default(),
                leaves: (0..leaves).map(|_| CacheLine::default()).collect(),
                words: (0..32 * leaves).map(|_| CacheLine::default()).collect(),
            }
        }

        fn lanes(&self) -> Lanes<'_, AtomicU32, AtomicU64> {
            Lanes { doorbell: &self.doorbell, leaves: &self.leaves, words: &self.words }
        }
    }

    fn taken(table: &Table) -> Vec<usize> {
        let mut rose = Vec::new();
        table.lanes().take_dirty(|lane| rose.push(lane));
        rose.sort_unstable();
        rose
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 64 }))]
        #[test]
        fn each_raised_lane_is_reported_once(mut raised in prop::collection::btree_set(0usize..64 * 70, 0..40)) {
            let table = Table::new(70);
            for &lane in &raised {
                prop_assert_eq!(table.lanes().raise(lane, 5), Wake::No);
                prop_assert_eq!(table.lanes().raise(lane, 6), Wake::No);
            }
            let rose = taken(&table);
            prop_assert!(rose.iter().all(|&lane| table.lanes().value(lane) == 6));
            for lane in rose {
                prop_assert!(raised.remove(&lane));
            }
            prop_assert!(raised.is_empty());
            prop_assert!(taken(&table).is_empty());
        }
    }

    #[test]
    fn lanes_that_are_marked_together_are_each_reported() {
        let table = Table::new(70);
        let lanes = table.lanes();
        for lane in [3, 5, 64 * 28 + 1] {
            lanes.raise_unmarked(lane, 7);
        }
        assert!(!lanes.has_dirty());
        assert_eq!(lanes.set_all_dirty([(0, 1 << 3 | 1 << 5), (28, 2)]), Wake::No);
        assert_eq!(taken(&table), [3, 5, 64 * 28 + 1]);
        assert!(lanes.prepare_sleep(SleepMode::Word));
        assert_eq!(lanes.set_all_dirty([(1, 1), (2, 1)]), Wake::Word);
    }

    #[test]
    fn two_lanes_of_a_line_rise_together() {
        let table = Table::new(2);
        assert_eq!(table.lanes().raise_both(67, 2, 9), Wake::No);
        assert_eq!((table.lanes().value(66), table.lanes().value(67)), (9, 2));
        assert_eq!(table.lanes().raise_both(0, 3, 4), Wake::No);
        assert_eq!((table.lanes().value(0), table.lanes().value(1)), (3, 4));
        assert_eq!(taken(&table), [0, 1, 66, 67]);
    }

    #[test]
    fn each_sleeper_is_woken_in_its_mode_and_its_announcement_outlives_other_polls() {
        let table = Table::new(2);
        let lanes = table.lanes();
        assert_eq!(lanes.raise(3, 1), Wake::No);
        assert!(!lanes.prepare_sleep(SleepMode::Word), "a dirty bit is set");
        assert_eq!(lanes.raise(70, 1), Wake::No);
        assert_eq!(taken(&table), [3, 70]);
        assert!(lanes.prepare_sleep(SleepMode::Word));
        assert!(lanes.prepare_sleep(SleepMode::EventLoop));
        assert_eq!(lanes.raise(5, 1), Wake::WordAndDescriptor);
        assert_eq!(taken(&table), [5]);
        assert_eq!(
            lanes.raise(6, 1),
            Wake::WordAndDescriptor,
            "after another thread took the dirty bits"
        );
        assert!(!lanes.finish_sleep(SleepMode::Word), "the event loop still needs its descriptor");
        assert_eq!(lanes.notify(), Wake::Descriptor);
        assert!(lanes.finish_sleep(SleepMode::EventLoop));
        assert_eq!(taken(&table), [6]);
        assert!(!lanes.take_dirty(|_| panic!("no lane was raised")));
        assert_eq!(lanes.notify(), Wake::No);
        assert!(lanes.take_dirty(|_| panic!("a notification raises no lane")));
    }

    #[test]
    fn agents_and_an_owner_on_threads_agree() {
        let raises = if cfg!(miri) { 30 } else { 20_000 };
        let table = Table::new(2);
        std::thread::scope(|scope| {
            for lane in [0, 1, 64] {
                let lanes = table.lanes();
                scope.spawn(move || {
                    (1..=raises).for_each(|value| assert_eq!(lanes.raise(lane, value), Wake::No))
                });
            }
            let mut done = 0;
            let mut seen = [0; 65];
            while done < 3 {
                table.lanes().take_dirty(|lane| {
                    let value = table.lanes().value(lane);
                    assert!(value >= seen[lane]);
                    done += usize::from(value == raises && seen[lane] != raises);
                    seen[lane] = value;
                });
                std::thread::yield_now();
            }
        });
    }
}
