//! Parts: how a long or scattered write is cut, as a pure function of what was agreed at connect.
//!
//! Sender and receiver call the same function on the same page lengths, so the receiver knows by how
//! much a write will raise its lane. Planners ask [`PartRule::count`]; they never know a number of NICs.

use crate::types::Page;

/// How a route cuts writes. Part of the route, equal at both of its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartRule {
    /// The most bytes that one part carries; at least 1.
    pub max_part_bytes: u64,
    /// The most pages that one part carries; at least 1 (1 where each work request is one page).
    pub max_pages_per_part: u32,
}

impl PartRule {
    /// The rule of a route that takes any write in one part.
    pub const WHOLE: PartRule = PartRule { max_part_bytes: u64::MAX, max_pages_per_part: u32::MAX };

    /// The number of parts, and so of raises, of a write of pages of these lengths.
    ///
    /// A write of no pages, or of no bytes, is a signal and has one part.
    pub fn count(&self, lengths: impl IntoIterator<Item = u64>) -> u64 {
        if *self == PartRule::WHOLE {
            return 1;
        }
        let mut cutter = Cutter::new(*self);
        for length in lengths {
            cutter.page(length, |_, _, _| {});
        }
        cutter.parts()
    }

    /// The number of parts of a contiguous write of `length` bytes.
    pub fn count_contiguous(&self, length: u64) -> u64 {
        length.div_ceil(self.max_part_bytes).max(1)
    }
}

/// Walks pages and says where each part ends. Both [`PartRule::count`] and [`Parts`] use it, so that
/// they cannot disagree.
struct Cutter {
    rule: PartRule,
    closed: u64,
    bytes: u64,
    pages: u32,
}

impl Cutter {
    fn new(rule: PartRule) -> Self {
        Cutter { rule, closed: 0, bytes: 0, pages: 0 }
    }

    /// Cuts one page; calls `piece(part, offset in page, length)` for each piece of it.
    fn page(&mut self, length: u64, mut piece: impl FnMut(u64, u64, u64)) {
        let mut offset = 0;
        while offset < length {
            if self.pages == self.rule.max_pages_per_part || self.bytes == self.rule.max_part_bytes
            {
                self.closed += 1;
                self.bytes = 0;
                self.pages = 0;
            }
            let take = (length - offset).min(self.rule.max_part_bytes - self.bytes);
            // A page that fits into a part of its own is not split over two.
            if offset == 0 && take < length && length <= self.rule.max_part_bytes {
                self.closed += 1;
                self.bytes = 0;
                self.pages = 0;
                continue;
            }
            piece(self.closed, offset, take);
            self.bytes += take;
            self.pages += 1;
            offset += take;
        }
    }

    fn parts(&self) -> u64 {
        // The part that is open, or the single empty one of a signal.
        self.closed + 1
    }
}

/// The parts of one write, each a run of pages in a caller's buffer.
#[derive(Debug, Default)]
pub struct Parts {
    pages: Vec<Page>,
    ends: Vec<u32>,
}

impl Parts {
    /// Cuts `pages` by `rule`, reusing this value's memory.
    pub fn cut(&mut self, rule: PartRule, pages: &[Page]) {
        self.pages.clear();
        self.ends.clear();
        let mut cutter = Cutter::new(rule);
        for page in pages {
            let (list, ends) = (&mut self.pages, &mut self.ends);
            cutter.page(page.length, |part, offset, length| {
                while (ends.len() as u64) < part {
                    ends.push(list.len() as u32);
                }
                list.push(Page {
                    source_offset: page.source_offset + offset,
                    destination_offset: page.destination_offset + offset,
                    length,
                    ..*page
                });
            });
        }
        self.ends.push(self.pages.len() as u32);
    }

    /// The number of parts; at least 1 after a cut.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether nothing was cut yet.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The pages of part `index`.
    pub fn part(&self, index: usize) -> &[Page] {
        let begin = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        &self.pages[begin..self.ends[index] as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::RegionKey;
    use proptest::prelude::*;

    fn page(length: u64, at: u64) -> Page {
        Page {
            source: RegionKey(1),
            source_offset: at,
            destination: RegionKey(2),
            destination_offset: 7 * at,
            length,
        }
    }

    #[test]
    fn a_signal_is_one_part() {
        let rule = PartRule { max_part_bytes: 10, max_pages_per_part: 2 };
        assert_eq!(rule.count([]), 1);
        assert_eq!(rule.count([0]), 1);
        let mut parts = Parts::default();
        parts.cut(rule, &[]);
        assert_eq!((parts.len(), parts.part(0).len()), (1, 0));
    }

    proptest! {
        #[test]
        fn parts_cover_every_byte_once_within_the_rule(
            lengths in prop::collection::vec(0u64..50, 0..20),
            max_part_bytes in 1u64..40,
            max_pages_per_part in 1u32..5,
        ) {
            let rule = PartRule { max_part_bytes, max_pages_per_part };
            let pages: Vec<Page> =
                lengths.iter().enumerate().map(|(i, &l)| page(l, 1000 * i as u64)).collect();
            let mut parts = Parts::default();
            parts.cut(rule, &pages);
            prop_assert_eq!(parts.len() as u64, rule.count(lengths.iter().copied()));
            let mut bytes = Vec::new();
            for index in 0..parts.len() {
                let part = parts.part(index);
                prop_assert!(part.len() as u32 <= max_pages_per_part);
                prop_assert!(part.iter().map(|p| p.length).sum::<u64>() <= max_part_bytes);
                prop_assert!(!part.is_empty() || parts.len() == 1);
                for p in part {
                    bytes.extend((0..p.length).map(|b| (p.source_offset + b, p.destination_offset + b)));
                }
            }
            let expected: Vec<_> = pages
                .iter()
                .flat_map(|p| (0..p.length).map(|b| (p.source_offset + b, p.destination_offset + b)))
                .collect();
            prop_assert_eq!(bytes, expected);
        }

        #[test]
        fn a_contiguous_write_is_a_write_of_one_page(length in 0u64..500, max_part_bytes in 1u64..60) {
            let rule = PartRule { max_part_bytes, max_pages_per_part: 3 };
            prop_assert_eq!(rule.count_contiguous(length), rule.count([length]));
        }
    }
}
