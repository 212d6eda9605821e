//! Lanes: the words that rise, the marks that say which rose, and the bell that wakes the owner.
//!
//! One table per engine, in memory that peers of the same host map. A lane has one raising agent, so
//! its word is stored, never added to. After the word the agent marks the lane (a bit in a leaf, then a
//! bit of the bell that covers the leaf); the mark on the bell returns whether the owner sleeps, so the
//! agent makes a system call only then. The owner takes marks in the opposite order, bell first, so a
//! raise is seen now or marks the bell again.
//!
//! Lanes 2i and 2i+1 share a cache line. An engine gives both to one peer, as a counter's data and credit
//! lanes, so whoever waits for data has the credit beside it at hand, and no two agents share a line.

use crate::atomics::{Line, Word32, Word64};
use std::time::Duration;

/// The bell's bits: 28 groups of leaves, a nudge from within the process, and how its owners sleep.
pub const GROUPS: u32 = 28;
const NUDGE: u32 = 1 << 28;
const ARMED: u32 = 1 << 29;
const ASLEEP_ON_FD: u32 = 1 << 30;
const ASLEEP_ON_WORD: u32 = 1 << 31;
const MARKS: u32 = ((1 << GROUPS) - 1) | NUDGE;

/// What a raising agent must do after a raise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Wake {
    /// The owner is awake.
    No,
    /// A thread of the owner sleeps on the bell word itself.
    Word,
    /// A thread of the owner, or its event loop, sleeps on the event descriptor.
    Descriptor,
    /// Both.
    WordAndDescriptor,
}

/// How the owner is about to sleep. At most one thread sleeps in each way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sleep {
    /// On the bell word.
    Word,
    /// On a descriptor, together with others.
    Descriptor,
    /// In an event loop of the program, on the same descriptor.
    EventLoop,
}

impl Sleep {
    fn flag(self) -> u32 {
        match self {
            Sleep::Word => ASLEEP_ON_WORD,
            Sleep::Descriptor => ASLEEP_ON_FD,
            Sleep::EventLoop => ARMED,
        }
    }
}

/// A lane table as both sides see it, over borrowed words.
#[derive(Debug)]
pub struct Lanes<'a, W32, W64> {
    /// Wakes the owner.
    pub bell: &'a Line<W32>,
    /// One bit a lane, 64 to a leaf.
    pub leaves: &'a [Line<W64>],
    /// The lanes' words, two to a line.
    pub words: &'a [Line<[W64; 2]>],
}

impl<W32, W64> Clone for Lanes<'_, W32, W64> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W32, W64> Copy for Lanes<'_, W32, W64> {}

impl<W32: Word32, W64: Word64> Lanes<'_, W32, W64> {
    /// Raises `lane` to `value`. Only its one agent calls this. All that the caller wrote before is
    /// visible to the owner once it sees the value.
    pub fn raise(&self, lane: usize, value: u64) -> Wake {
        self.word(lane).store(value);
        self.mark(lane)
    }

    /// [`Lanes::raise`] without a mark, for an agent within the owner's poll, which reports the lane itself.
    #[inline(always)]
    pub fn raise_unmarked(&self, lane: usize, value: u64) {
        self.word(lane).store(value);
    }

    /// Marks a lane that has been raised.
    pub fn mark(&self, lane: usize) -> Wake {
        self.mark_leaf(lane / 64, 1 << (lane % 64))
    }

    /// Raises both lanes of a cache line, which then travels once. Whoever sees `lane`'s value sees that of
    /// the one beside it, too.
    pub fn raise_both(&self, lane: usize, value: u64, beside: u64) -> Wake {
        self.word(lane ^ 1).store(beside);
        self.word(lane).store(value);
        self.mark_leaf(lane / 64, 0b11 << ((lane & !1) % 64))
    }

    fn mark_leaf(&self, leaf: usize, lanes: u64) -> Wake {
        self.leaves[leaf].0.fetch_or(lanes);
        Self::wake_for(self.bell.0.fetch_or(1 << (leaf as u32 % GROUPS)))
    }

    /// Wakes the owner without a raise: something outside the table changed.
    pub fn nudge(&self) -> Wake {
        Self::wake_for(self.bell.0.fetch_or(NUDGE))
    }

    fn wake_for(before: u32) -> Wake {
        match (before & ASLEEP_ON_WORD != 0, before & (ASLEEP_ON_FD | ARMED) != 0) {
            (false, false) => Wake::No,
            (true, false) => Wake::Word,
            (false, true) => Wake::Descriptor,
            (true, true) => Wake::WordAndDescriptor,
        }
    }

    /// The lane's value, with all that its agent wrote before it.
    pub fn value(&self, lane: usize) -> u64 {
        self.word(lane).load()
    }

    /// Owner: sets a lane back to zero that no agent raises: it is about to be issued anew.
    pub fn reset(&self, lane: usize) {
        if self.word(lane).load() != 0 {
            self.word(lane).store(0);
        }
    }

    fn word(&self, lane: usize) -> &W64 {
        &self.words[lane / 2].0[lane % 2]
    }

    /// Owner: whether there are marks to take, a nudge included.
    #[inline(always)]
    pub fn has_raised(&self) -> bool {
        self.bell.0.load() & MARKS != 0
    }

    /// Owner: takes the marks and calls `rose` for each lane marked since the last call. Returns
    /// whether there was anything, a nudge included. Announcements of sleep stay, as does the nudge of a
    /// thread that announced sleep on the bell: on its way there it finds nothing else. Threads of one
    /// owner call this, [`Lanes::prepare_sleep`] and [`Lanes::finish_sleep`] one at a time.
    pub fn take_raised(&self, mut rose: impl FnMut(usize)) -> bool {
        let bell = self.bell.0.load();
        if bell & MARKS == 0 {
            return false;
        }
        let taken = if bell & ASLEEP_ON_WORD == 0 { MARKS } else { MARKS & !NUDGE };
        let marks = self.bell.0.fetch_and(!taken) & MARKS;
        let mut groups = marks & !NUDGE;
        while groups != 0 {
            let group = groups.trailing_zeros();
            groups &= groups - 1;
            for leaf in (group as usize..self.leaves.len()).step_by(GROUPS as usize) {
                if self.leaves[leaf].0.load() == 0 {
                    continue;
                }
                let mut bits = self.leaves[leaf].0.swap(0);
                while bits != 0 {
                    rose(leaf * 64 + bits.trailing_zeros() as usize);
                    bits &= bits - 1;
                }
            }
        }
        marks != 0
    }

    /// Owner: announces sleep. Returns whether sleeping is right, that is, whether no mark was there;
    /// the announcement stands only then.
    pub fn prepare_sleep(&self, how: Sleep) -> bool {
        let idle = self.bell.0.fetch_or(how.flag()) & MARKS == 0;
        if !idle {
            self.finish_sleep(how);
        }
        idle
    }

    /// Owner: sleeps on the bell after [`Lanes::prepare_sleep`] with [`Sleep::Word`] returned `true`.
    pub fn sleep_on_word(&self, timeout: Duration) {
        let bell = self.bell.0.load();
        if bell & MARKS == 0 {
            self.bell.0.wait(bell, timeout);
        }
    }

    /// Owner: withdraws the announcement. Returns whether the descriptor is of no further use to any
    /// sleeper, so that it may be cleared.
    pub fn finish_sleep(&self, how: Sleep) -> bool {
        let before = self.bell.0.fetch_and(!how.flag());
        before & (ASLEEP_ON_FD | ARMED) & !how.flag() == 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicU32, AtomicU64};

    struct Table {
        bell: Line<AtomicU32>,
        leaves: Vec<Line<AtomicU64>>,
        words: Vec<Line<[AtomicU64; 2]>>,
    }

    impl Table {
        fn new(leaves: usize) -> Table {
            Table {
                bell: Line::default(),
                leaves: (0..leaves).map(|_| Line::default()).collect(),
                words: (0..32 * leaves).map(|_| Line::default()).collect(),
            }
        }

        fn lanes(&self) -> Lanes<'_, AtomicU32, AtomicU64> {
            Lanes { bell: &self.bell, leaves: &self.leaves, words: &self.words }
        }
    }

    fn taken(table: &Table) -> Vec<usize> {
        let mut rose = Vec::new();
        table.lanes().take_raised(|lane| rose.push(lane));
        rose.sort_unstable();
        rose
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 64 }))]
        #[test]
        fn what_rose_is_told_once(mut raised in prop::collection::btree_set(0usize..64 * 70, 0..40)) {
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
    fn two_lanes_of_a_line_rise_together() {
        let table = Table::new(2);
        assert_eq!(table.lanes().raise_both(67, 2, 9), Wake::No);
        assert_eq!((table.lanes().value(66), table.lanes().value(67)), (9, 2));
        assert_eq!(table.lanes().raise_both(0, 3, 4), Wake::No);
        assert_eq!((table.lanes().value(0), table.lanes().value(1)), (3, 4));
        assert_eq!(taken(&table), [0, 1, 66, 67]);
    }

    #[test]
    fn each_sleeper_is_woken_the_way_it_sleeps_and_its_announcement_outlives_other_looks() {
        let table = Table::new(2);
        let lanes = table.lanes();
        assert_eq!(lanes.raise(3, 1), Wake::No);
        assert!(!lanes.prepare_sleep(Sleep::Word), "a mark is there");
        assert_eq!(lanes.raise(70, 1), Wake::No);
        assert_eq!(taken(&table), [3, 70]);
        assert!(lanes.prepare_sleep(Sleep::Word));
        assert!(lanes.prepare_sleep(Sleep::EventLoop));
        assert_eq!(lanes.raise(5, 1), Wake::WordAndDescriptor);
        assert_eq!(taken(&table), [5]);
        assert_eq!(lanes.raise(6, 1), Wake::WordAndDescriptor, "a look by another thread");
        assert!(!lanes.finish_sleep(Sleep::Word), "the event loop still needs its descriptor");
        assert_eq!(lanes.nudge(), Wake::Descriptor);
        assert!(lanes.finish_sleep(Sleep::EventLoop));
        assert_eq!(taken(&table), [6]);
        assert!(!lanes.take_raised(|_| panic!("nothing rose")));
        assert_eq!(lanes.nudge(), Wake::No);
        assert!(lanes.take_raised(|_| panic!("a nudge raises nothing")));
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
                table.lanes().take_raised(|lane| {
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
