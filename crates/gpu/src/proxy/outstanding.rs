//! Outstanding parts: parts that wait for a credit or whose source is still read, and the DRAINED commands behind them.
//!
//! Parts are in a pool, so that a part toward a slow peer holds up no others. A SCATTER's parts that leave together are one
//! request: their room is free once the last one has ended. All memory is allocated at construction.

use std::collections::VecDeque;
use weft_fabric::{Event, Page};

/// Number of a part in the pool.
pub(super) type PartId = u32;
/// No part.
const NONE: PartId = PartId::MAX;

/// Tag for parts under one number.
#[inline]
pub(super) fn event_of(namespace: u16, part: PartId) -> u64 {
    u64::from(namespace) << Event::NAMESPACE_SHIFT | u64::from(part)
}

/// Parts toward one end that wait for a credit, the oldest first.
#[derive(Debug)]
pub(super) struct Waiting {
    first: PartId,
    last: PartId,
}

impl Default for Waiting {
    fn default() -> Waiting {
        Waiting { first: NONE, last: NONE }
    }
}

impl Waiting {
    pub fn is_empty(&self) -> bool {
        self.first == NONE
    }
}

#[derive(Clone, Copy, Debug)]
struct Part {
    /// Next part that waits at the same end, or that is free.
    next: PartId,
    /// Stretch between two DRAINED commands; `None` for a signal, which has no source.
    stretch: Option<u64>,
    page: Option<Page>,
    /// Parts for which it stands: a SCATTER's that leave at once.
    count: u32,
}

/// Parts with a source between two DRAINED commands.
#[derive(Debug)]
struct Stretch {
    parts: u32,
    /// Word to raise once this stretch and all before it have no part left; `None` in the newest.
    word: Option<u32>,
}

#[derive(Debug)]
pub(super) struct Outstanding {
    parts: Vec<Part>,
    free: PartId,
    used: u32,
    /// Parts that wait at an end.
    waiting: u32,
    /// The last one is the newest, which has no DRAINED command yet.
    stretches: VecDeque<Stretch>,
    /// Number of the first stretch.
    first: u64,
}

impl Outstanding {
    /// Room for this many parts, and as many DRAINED commands.
    pub fn new(capacity: u32) -> Outstanding {
        let part = |next| Part { next, stretch: None, page: None, count: 1 };
        let mut parts: Vec<Part> = (1..=capacity).map(part).collect();
        if let Some(last) = parts.last_mut() {
            last.next = NONE;
        }
        let mut stretches = VecDeque::with_capacity(capacity as usize + 1);
        stretches.push_back(Stretch { parts: 0, word: None });
        let free = if parts.is_empty() { NONE } else { 0 };
        Outstanding { parts, free, used: 0, waiting: 0, stretches, first: 0 }
    }

    /// True if this many more parts fit, and a DRAINED command.
    pub fn has_room(&self, parts: u32) -> bool {
        let capacity = self.parts.len() as u32;
        capacity - self.used >= parts && self.stretches.len() <= self.parts.len()
    }

    /// True without parts and DRAINED commands.
    pub fn is_empty(&self) -> bool {
        self.used == 0 && self.stretches.len() == 1
    }

    /// Adds parts that leave at once under one number, with pages: they stay until [`Outstanding::complete`].
    ///
    /// # Panics
    /// Without room.
    #[inline]
    pub fn start(&mut self, count: u32) -> PartId {
        let id = self.free;
        let newest = self.stretches.len() - 1;
        let part = &mut self.parts[id as usize];
        self.free = part.next;
        *part = Part { next: NONE, stretch: Some(self.first + newest as u64), page: None, count };
        self.stretches[newest].parts += count;
        self.used += count;
        id
    }

    /// Adds a part to those that wait at an end. `page`: none for a signal.
    ///
    /// # Panics
    /// Without room.
    pub fn add(&mut self, waiting: &mut Waiting, page: Option<Page>) {
        let id = self.free;
        let newest = self.first + self.stretches.len() as u64 - 1;
        let part = &mut self.parts[id as usize];
        self.free = part.next;
        *part = Part { next: NONE, stretch: page.map(|_| newest), page, count: 1 };
        if page.is_some() {
            self.stretches[(newest - self.first) as usize].parts += 1;
        }
        self.used += 1;
        self.waiting += 1;
        match waiting.last {
            NONE => waiting.first = id,
            last => self.parts[last as usize].next = id,
        }
        waiting.last = id;
    }

    /// Takes the part that has waited longest at an end. A part with a page stays in the pool until
    /// [`Outstanding::complete`].
    pub fn take(&mut self, waiting: &mut Waiting) -> Option<(PartId, Option<Page>)> {
        let id = waiting.first;
        let Part { next, page, .. } = *self.parts.get(id as usize)?;
        waiting.first = next;
        if next == NONE {
            waiting.last = NONE;
        }
        self.waiting -= 1;
        if page.is_none() {
            self.release(id);
        }
        Some((id, page))
    }

    /// Parts that wait at an end, and parts whose source is read.
    pub fn counts(&self) -> (u32, u32) {
        (self.waiting, self.used - self.waiting)
    }

    /// A part's source may be reused. False if there is no such part.
    pub fn complete(&mut self, id: PartId) -> bool {
        let Some(part) = self.parts.get_mut(id as usize) else { return false };
        let Some(stretch) = part.stretch.take() else { return false };
        self.stretches[(stretch - self.first) as usize].parts -= part.count;
        self.release(id);
        true
    }

    /// A DRAINED command: `word` rises once all parts so far have completed.
    pub fn drain(&mut self, word: u32) {
        if let Some(newest) = self.stretches.back_mut() {
            newest.word = Some(word);
        }
        self.stretches.push_back(Stretch { parts: 0, word: None });
    }

    /// Word of the oldest DRAINED command, if all parts before it have completed.
    pub fn take_drained(&mut self) -> Option<u32> {
        let word = self.stretches.front().filter(|stretch| stretch.parts == 0)?.word?;
        self.stretches.pop_front();
        self.first += 1;
        Some(word)
    }

    fn release(&mut self, id: PartId) {
        let part = &mut self.parts[id as usize];
        part.next = self.free;
        self.free = id;
        self.used -= part.count;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use weft_fabric::RegionKey;

    fn page(number: u64) -> Option<Page> {
        let (source, destination) = (RegionKey(1), RegionKey(2));
        Some(Page { source, source_offset: number, destination, destination_offset: 0, length: 1 })
    }

    #[test]
    fn parts_leave_each_end_in_order() {
        let mut outstanding = Outstanding::new(4);
        let (mut one, mut two) = (Waiting::default(), Waiting::default());
        for lap in 0..5 {
            outstanding.add(&mut one, page(lap));
            outstanding.add(&mut two, None);
            outstanding.add(&mut one, page(lap + 10));
            assert!(outstanding.has_room(1) && !outstanding.has_room(2));
            assert_eq!(outstanding.counts(), (3, 0));
            assert_eq!(outstanding.take(&mut two).map(|(_, page)| page), Some(None));
            assert!(outstanding.take(&mut two).is_none() && two.is_empty());
            for number in [lap, lap + 10] {
                let (id, taken) = outstanding.take(&mut one).unwrap();
                assert_eq!(taken, page(number));
                assert_eq!(outstanding.counts().1, 1);
                assert!(outstanding.complete(id) && !outstanding.complete(id));
            }
            assert!(one.is_empty() && outstanding.is_empty());
        }
    }

    #[test]
    fn a_drained_command_waits_for_all_parts_before_it_and_for_no_later_one() {
        let mut outstanding = Outstanding::new(4);
        let mut end = Waiting::default();
        let mut sent = |outstanding: &mut Outstanding, number| {
            outstanding.add(&mut end, page(number));
            outstanding.take(&mut end).unwrap().0
        };
        let (a, b) = (sent(&mut outstanding, 0), sent(&mut outstanding, 1));
        outstanding.drain(7);
        let c = sent(&mut outstanding, 2);
        outstanding.drain(8);
        outstanding.drain(9);
        let d = sent(&mut outstanding, 3);
        outstanding.complete(c);
        outstanding.complete(b);
        assert_eq!(outstanding.take_drained(), None, "the first part is read");
        outstanding.complete(a);
        let drained = std::iter::from_fn(|| outstanding.take_drained());
        assert_eq!(drained.collect::<Vec<_>>(), [7, 8, 9]);
        assert!(!outstanding.is_empty());
        outstanding.complete(d);
        assert!(outstanding.is_empty() && outstanding.take_drained().is_none());
    }

    #[test]
    fn drained_commands_are_bounded_as_parts_are() {
        let mut outstanding = Outstanding::new(2);
        let mut end = Waiting::default();
        outstanding.add(&mut end, page(0));
        for _ in 0..2 {
            assert!(outstanding.has_room(1));
            outstanding.drain(0);
        }
        assert!(!outstanding.has_room(1));
    }

    #[test]
    fn parts_under_one_number_take_as_much_room_and_end_together() {
        let mut outstanding = Outstanding::new(4);
        let id = outstanding.start(3);
        assert!(outstanding.has_room(1) && !outstanding.has_room(2));
        assert_eq!(outstanding.counts(), (0, 3));
        outstanding.drain(7);
        assert_eq!(outstanding.take_drained(), None);
        assert!(outstanding.complete(id) && !outstanding.complete(id));
        assert_eq!(outstanding.take_drained(), Some(7));
        assert!(outstanding.is_empty() && outstanding.has_room(4));
    }

    #[test]
    fn a_number_from_elsewhere_completes_nothing() {
        let mut outstanding = Outstanding::new(1);
        assert!(!outstanding.complete(0) && !outstanding.complete(9));
        assert!(outstanding.is_empty());
    }
}
