//! Batcher: queries that wait for a batch, by bucket, and which batch starts next.
//!
//! A policy without clock and memory: it holds items and times. A batch has items from one bucket, in arrival order. It
//! is due when it is full, or when the first item has waited for the window; if several are due, the one with the
//! oldest first item starts first. For example, with window 1 ms and at most 8 items, 3 items start 1 ms after the
//! first arrived.

use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::time::Duration;
use weft_fabric::Time;

/// Buckets by an input's variable dimension, so that sequences with similar lengths run together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buckets {
    input: u8,
    count: u8,
    bounds: [u64; Buckets::MAX],
}

impl Buckets {
    /// Most bounds.
    pub const MAX: usize = 16;

    /// Buckets for input `input`: sizes up to the first bound, from there up to the second, ..., beyond the last.
    /// Bounds 128 and 512, for example, make three buckets.
    ///
    /// # Errors
    /// [`Error::Invalid`] for bounds that do not rise, and for none or more than [`Buckets::MAX`].
    pub fn new(input: usize, bounds: &[u64]) -> Result<Buckets> {
        let count = bounds.len();
        if count == 0 || count > Buckets::MAX {
            let expected = format!("1 to {}", Buckets::MAX);
            return Err(Error::Invalid {
                what: "bounds of buckets",
                value: count as u64,
                expected,
            });
        }
        if let Some(pair) = bounds.windows(2).find(|pair| pair[0] >= pair[1]) {
            let expected = format!("more than the bound before, {}", pair[0]);
            return Err(Error::Invalid { what: "bound of a bucket", value: pair[1], expected });
        }
        let input = u8::try_from(input).map_err(|_| Error::Invalid {
            what: "input of buckets",
            value: input as u64,
            expected: "an input of the schema".into(),
        })?;
        let mut all = [0; Buckets::MAX];
        all[..count].copy_from_slice(bounds);
        Ok(Buckets { input, count: count as u8, bounds: all })
    }

    /// Input whose size selects the bucket.
    pub fn input(&self) -> usize {
        self.input.into()
    }

    /// Bucket count.
    pub fn len(&self) -> usize {
        usize::from(self.count) + 1
    }

    /// False: there are at least two.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Bucket for a size: with bounds 128 and 512, for example, 128 is in the first and 129 in the second.
    pub fn of(&self, size: u64) -> usize {
        self.bounds[..self.count.into()].partition_point(|bound| *bound < size)
    }
}

/// Item that waits for a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Waiting<T> {
    item: T,
    since: Time,
}

/// Items that wait for a batch. See the module's page.
#[derive(Clone, Debug)]
pub struct Batcher<T> {
    queues: Box<[VecDeque<Waiting<T>>]>,
    max_batch: usize,
    window: Duration,
}

impl<T: Copy + PartialEq> Batcher<T> {
    /// Empty batcher with this many buckets, at least 1, for batches up to `max_batch` items, at least 1.
    pub fn new(buckets: usize, max_batch: usize, window: Duration) -> Batcher<T> {
        let queues = (0..buckets.max(1)).map(|_| VecDeque::new()).collect();
        Batcher { queues, max_batch: max_batch.max(1), window }
    }

    /// Makes room for this many items in each bucket.
    pub fn reserve(&mut self, items: usize) {
        for queue in &mut self.queues {
            queue.reserve(items.saturating_sub(queue.len()));
        }
    }

    /// Adds an item that arrives now.
    #[inline]
    pub fn push(&mut self, bucket: usize, item: T, now: Time) {
        self.queues[bucket].push_back(Waiting { item, since: now });
    }

    /// Removes an item; false if none waits.
    pub fn remove(&mut self, item: T) -> bool {
        self.queues.iter_mut().any(|queue| {
            let position = queue.iter().position(|waiting| waiting.item == item);
            position.is_some_and(|position| queue.remove(position).is_some())
        })
    }

    /// Keeps the items for which `keep` returns true.
    pub fn retain(&mut self, mut keep: impl FnMut(T) -> bool) {
        for queue in &mut self.queues {
            queue.retain(|waiting| keep(waiting.item));
        }
    }

    /// Time at which the next batch is due without further items.
    pub fn next_deadline(&self) -> Option<Time> {
        let firsts = self.queues.iter().filter_map(VecDeque::front);
        firsts.map(|first| first.since.after(self.window)).min()
    }

    /// Bucket whose batch starts now.
    #[inline]
    pub fn due(&self, now: Time) -> Option<usize> {
        let due = |(bucket, queue): (usize, &VecDeque<Waiting<T>>)| {
            let first = queue.front()?;
            let is_due = queue.len() >= self.max_batch || first.since.after(self.window) <= now;
            is_due.then_some((first.since, bucket))
        };
        self.queues.iter().enumerate().filter_map(due).min().map(|(_, bucket)| bucket)
    }

    /// Takes the items for a bucket's next batch, in arrival order.
    pub fn take(&mut self, bucket: usize) -> impl Iterator<Item = T> + '_ {
        let queue = &mut self.queues[bucket];
        let size = queue.len().min(self.max_batch);
        queue.drain(..size).map(|waiting| waiting.item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Batches have items from one bucket in arrival order, are due only by size or time, and lose no item.
        #[test]
        fn each_item_is_in_one_batch_or_removed(
            (buckets, max_batch, window) in (1usize..4, 1usize..5, 0u64..6),
            steps in prop::collection::vec((0u8..4, any::<prop::sample::Index>()), 0..200),
        ) {
            let mut batcher = Batcher::new(buckets, max_batch, Duration::from_nanos(window));
            let mut model: Vec<(usize, u32, u64)> = Vec::new();
            let (mut now, mut next) = (0, 0u32);
            for (step, index) in steps {
                match step {
                    0 | 1 => {
                        let bucket = index.index(buckets);
                        batcher.push(bucket, next, Time(now));
                        model.push((bucket, next, now));
                        next += 1;
                    }
                    2 if !model.is_empty() => {
                        let (_, item, _) = model.remove(index.index(model.len()));
                        prop_assert!(batcher.remove(item));
                        prop_assert!(!batcher.remove(item));
                    }
                    _ => now += index.index(5) as u64,
                }
                let oldest = model.iter().map(|(_, _, since)| since + window).min();
                prop_assert_eq!(batcher.next_deadline(), oldest.map(Time));
                let of = |bucket| model.iter().filter(move |(of, ..)| *of == bucket);
                let is_due = |bucket: &usize| {
                    of(*bucket).count() >= max_batch
                        || of(*bucket).next().is_some_and(|(.., since)| since + window <= now)
                };
                let expected =
                    (0..buckets).filter(is_due).min_by_key(|bucket| of(*bucket).next().unwrap().2);
                prop_assert_eq!(batcher.due(Time(now)), expected);
                if step == 3 && let Some(bucket) = expected {
                    let wanted: Vec<u32> =
                        of(bucket).take(max_batch).map(|(_, item, _)| *item).collect();
                    let taken: Vec<u32> = batcher.take(bucket).collect();
                    prop_assert_eq!(&taken, &wanted);
                    model.retain(|(_, item, _)| !taken.contains(item));
                }
            }
            batcher.retain(|item| item % 2 == 0);
            model.retain(|(_, item, _)| item % 2 == 0);
            let mut left: Vec<u32> = Vec::new();
            while let Some(bucket) = batcher.due(Time(u64::MAX)) {
                left.extend(batcher.take(bucket));
            }
            left.sort_unstable();
            let mut expected: Vec<u32> = model.iter().map(|(_, item, _)| *item).collect();
            expected.sort_unstable();
            prop_assert_eq!(left, expected);
        }

        #[test]
        fn a_bucket_holds_the_sizes_between_two_bounds(
            bounds in prop::collection::btree_set(0u64..1000, 1..=Buckets::MAX),
            size in 0u64..1100,
        ) {
            let bounds: Vec<u64> = bounds.into_iter().collect();
            let buckets = Buckets::new(0, &bounds).unwrap();
            let bucket = buckets.of(size);
            prop_assert!(bucket < buckets.len());
            prop_assert!(bounds.get(bucket).is_none_or(|bound| size <= *bound));
            prop_assert!(bucket == 0 || bounds[bucket - 1] < size);
        }
    }

    #[test]
    fn bounds_that_do_not_rise_are_refused() {
        let refusal = |bounds: &[u64]| Buckets::new(0, bounds).unwrap_err().to_string();
        assert!(refusal(&[]).contains("bounds of buckets 0: expected 1 to 16"));
        assert!(refusal(&[0; 17]).contains("bounds of buckets 17"));
        assert!(
            refusal(&[8, 8])
                .contains("bound of a bucket 8: expected more than the bound before, 8")
        );
    }
}
