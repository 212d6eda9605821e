//! Parts: how a long or scattered write is divided, a pure function of the rule agreed at connect.
//!
//! Sender and receiver apply the same function to the same page lengths, so the receiver can compute by
//! how much a write raises the lane. Planners call [`PartRule::count`] and need not know how many NICs
//! there are.

use crate::types::Page;

/// Rule by which a route divides writes into parts; equal at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartRule {
    /// Maximum bytes in one part; at least 1.
    pub max_part_bytes: u64,
    /// Maximum pages in one part; at least 1. A page is one destination range and one gather entry, so
    /// this is the smaller limit (1 where each work request is one range).
    pub max_pages_per_part: u32,
    /// Paths over which a large write is striped; at least 1.
    pub stripes: u32,
    /// Shortest write, in bytes, that is striped.
    pub stripe_from: u64,
}

/// Stripes are cut at multiples of this size, so that no two stripes share a memory page.
const STRIPE_ALIGNMENT: u64 = 4096;

impl PartRule {
    /// Rule for a route where each write is one part.
    pub const WHOLE: PartRule = PartRule {
        max_part_bytes: u64::MAX,
        max_pages_per_part: u32::MAX,
        stripes: 1,
        stripe_from: u64::MAX,
    };

    /// Longest part in a write with `total` bytes: all parts in a striped write have equal length.
    fn longest(&self, total: u64) -> u64 {
        if self.stripes <= 1 || total < self.stripe_from {
            return self.max_part_bytes;
        }
        let stripe = total.div_ceil(u64::from(self.stripes));
        let aligned = stripe.checked_next_multiple_of(STRIPE_ALIGNMENT).unwrap_or(stripe);
        aligned.clamp(1, self.max_part_bytes)
    }

    /// Parts, and so raises, in a write whose pages have these lengths.
    ///
    /// A write without pages or without bytes is a one-part signal.
    pub fn count(&self, lengths: impl IntoIterator<Item = u64, IntoIter: Clone>) -> u64 {
        if *self == PartRule::WHOLE {
            return 1;
        }
        let lengths = lengths.into_iter();
        let mut cutter = Cutter::new(*self, lengths.clone().fold(0, u64::saturating_add));
        for length in lengths {
            cutter.page(length, |_, _, _| {});
        }
        cutter.parts()
    }

    /// Pages and bytes up to which a write is certainly one part.
    pub(crate) fn single(&self) -> (usize, u64) {
        let striped = if self.stripes <= 1 { u64::MAX } else { self.stripe_from.saturating_sub(1) };
        (self.max_pages_per_part as usize, self.max_part_bytes.min(striped))
    }

    /// Parts in a contiguous write with `length` bytes. For example, 5 under a rule with 1 MiB parts for
    /// 4.5 MiB.
    pub fn count_contiguous(&self, length: u64) -> u64 {
        length.div_ceil(self.longest(length)).max(1)
    }
}

/// Iteration over pages that ends each part; shared by [`PartRule::count`] and [`Parts`], so that they
/// agree.
struct Cutter {
    max_bytes: u64,
    max_pages: u32,
    closed: u64,
    bytes: u64,
    pages: u32,
}

impl Cutter {
    fn new(rule: PartRule, total: u64) -> Self {
        let (max_bytes, max_pages) = (rule.longest(total), rule.max_pages_per_part);
        Cutter { max_bytes, max_pages, closed: 0, bytes: 0, pages: 0 }
    }

    /// Divides one page; calls `piece(part, offset in page, length)` for each segment.
    fn page(&mut self, length: u64, mut piece: impl FnMut(u64, u64, u64)) {
        let mut offset = 0;
        while offset < length {
            if self.pages == self.max_pages || self.bytes == self.max_bytes {
                self.closed += 1;
                self.bytes = 0;
                self.pages = 0;
            }
            let take = (length - offset).min(self.max_bytes - self.bytes);
            // A page that fits into a separate part is not split over two.
            if offset == 0 && take < length && length <= self.max_bytes {
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
        // The open part, or a signal's single empty part.
        self.closed + 1
    }
}

/// Parts of one write, each a run of pages.
#[derive(Debug, Default)]
pub struct Parts {
    pages: Vec<Page>,
    ends: Vec<u32>,
}

impl Parts {
    /// Divides `pages` by `rule`, reusing this value's memory.
    pub fn cut(&mut self, rule: PartRule, pages: &[Page]) {
        self.pages.clear();
        self.ends.clear();
        let mut cutter = Cutter::new(rule, crate::types::bytes_of(pages));
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

    /// Part count; at least 1 after [`Parts::cut`].
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Pages in part `index`.
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
        let rule = PartRule { max_part_bytes: 10, max_pages_per_part: 2, ..PartRule::WHOLE };
        assert_eq!(rule.count([]), 1);
        assert_eq!(rule.count([0]), 1);
        let mut parts = Parts::default();
        parts.cut(rule, &[]);
        assert_eq!((parts.len(), parts.part(0).len()), (1, 0));
    }

    #[test]
    fn a_large_write_is_spread_over_all_stripes() {
        let rule = PartRule { stripes: 4, stripe_from: 1 << 20, ..PartRule::WHOLE };
        assert_eq!(rule.count_contiguous((1 << 20) - 1), 1);
        assert_eq!(rule.count_contiguous(1 << 20), 4);
        let bounded = PartRule { max_part_bytes: 1 << 20, ..rule };
        assert_eq!(bounded.count_contiguous(1 << 20), 4);
        assert_eq!(bounded.count_contiguous(64 << 20), 64);
    }

    proptest! {
        #[test]
        fn parts_cover_every_byte_once_within_the_rule(
            lengths in prop::collection::vec(0u64..50, 0..20),
            max_part_bytes in 1u64..40,
            max_pages_per_part in 1u32..5,
            stripes in 1u32..4,
            stripe_from in 0u64..200,
        ) {
            let rule = PartRule { max_part_bytes, max_pages_per_part, stripes, stripe_from };
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
            let (most_pages, most_bytes) = rule.single();
            let bytes_in_all = lengths.iter().sum::<u64>();
            if pages.len() <= most_pages && bytes_in_all <= most_bytes {
                prop_assert_eq!(parts.len(), 1);
            }
            let expected: Vec<_> = pages
                .iter()
                .flat_map(|p| (0..p.length).map(|b| (p.source_offset + b, p.destination_offset + b)))
                .collect();
            prop_assert_eq!(bytes, expected);
        }

        #[test]
        fn a_contiguous_write_is_a_write_of_one_page(
            length in 0u64..500_000,
            max_part_bytes in 1u64..60_000,
            stripes in 1u32..9,
            stripe_from in 0u64..200_000,
        ) {
            let rule = PartRule { max_part_bytes, max_pages_per_part: 3, stripes, stripe_from };
            prop_assert_eq!(rule.count_contiguous(length), rule.count([length]));
        }
    }
}
