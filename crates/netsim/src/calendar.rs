//! Event calendar: a 4-ary min-heap of time buckets. Jobs due at the same instant share a bucket.
//!
//! In a schedule whose ranks run in step, thousands of jobs end at one instant. They share one bucket, looked up by the
//! exact time, and so one heap entry. A job is in at most one bucket. An empty bucket is dropped when it reaches the
//! top, or when most heap entries are empty buckets.

use crate::types::NONE;

/// Relative tolerance within which times are one instant: summing the same durations in different orders gives times
/// that differ by a few units in the last place, and would drift apart.
pub(crate) const SAME_INSTANT: f64 = 1e-13;

/// Slot count in the direct-mapped bucket cache by time.
const RECENT: usize = 64;

#[derive(Clone, Copy, Debug)]
struct Node {
    previous: u32,
    next: u32,
    bucket: u32,
}

const UNLINKED: Node = Node { previous: NONE, next: NONE, bucket: NONE };

#[derive(Clone, Copy, Debug)]
struct Bucket {
    time: f64,
    /// First and last job; `NONE` if empty.
    head: u32,
    tail: u32,
}

/// Heap entry, ordered by time, then by sequence number.
#[derive(Clone, Copy, Debug)]
struct Entry {
    time: f64,
    sequence: u64,
    bucket: u32,
}

impl Entry {
    fn before(&self, other: &Entry) -> bool {
        self.time < other.time || (self.time == other.time && self.sequence < other.sequence)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Calendar {
    /// List nodes by job.
    nodes: Vec<Node>,
    buckets: Vec<Bucket>,
    unused: Vec<u32>,
    /// 4-ary min-heap.
    heap: Vec<Entry>,
    sequence: u64,
    /// Number of heap entries with an empty bucket.
    empty: usize,
    recent: [u32; RECENT],
}

impl Calendar {
    pub(crate) fn new() -> Calendar {
        Calendar {
            nodes: Vec::new(),
            buckets: Vec::new(),
            unused: Vec::new(),
            heap: Vec::new(),
            sequence: 0,
            empty: 0,
            recent: [NONE; RECENT],
        }
    }

    /// Schedules a job, which must not be scheduled already.
    #[inline]
    pub(crate) fn insert(&mut self, job: u32, time: f64) {
        let index = job as usize;
        if index >= self.nodes.len() {
            self.nodes.resize(index + 1, UNLINKED);
        }
        debug_assert_eq!(self.nodes[index].bucket, NONE);
        let place = recent_slot(time);
        let mut bucket = self.recent[place];
        if bucket == NONE || self.buckets[bucket as usize].time != time {
            bucket = self.open(time);
            self.recent[place] = bucket;
        }
        let found = &mut self.buckets[bucket as usize];
        let last = found.tail;
        found.tail = job;
        if last == NONE {
            // The bucket is new or was emptied.
            self.empty -= 1;
            found.head = job;
        } else {
            self.nodes[last as usize].next = job;
        }
        self.nodes[index] = Node { previous: last, next: NONE, bucket };
    }

    /// Removes a job, if scheduled.
    #[inline]
    pub(crate) fn remove(&mut self, job: u32) {
        let Some(node) = self.nodes.get_mut(job as usize) else { return };
        let Node { previous, next, bucket } = std::mem::replace(node, UNLINKED);
        if bucket == NONE {
            return;
        }
        let bucket = &mut self.buckets[bucket as usize];
        match previous {
            NONE => bucket.head = next,
            _ => self.nodes[previous as usize].next = next,
        }
        match next {
            NONE => bucket.tail = previous,
            _ => self.nodes[next as usize].previous = previous,
        }
        if bucket.head == NONE {
            self.empty += 1;
            if self.empty > 64 && self.empty * 2 > self.heap.len() {
                self.drop_empty();
            }
        }
    }

    /// Time of the next job.
    #[inline]
    pub(crate) fn next_time(&mut self) -> Option<f64> {
        loop {
            let first = self.heap.first()?;
            if self.buckets[first.bucket as usize].head != NONE {
                return Some(first.time);
            }
            let bucket = self.pop();
            self.empty -= 1;
            self.close(bucket);
        }
    }

    /// Removes all jobs at the next instant, by time and then by insertion order.
    pub(crate) fn take_instant(&mut self, jobs: &mut Vec<u32>) -> Option<f64> {
        let time = self.next_time()?;
        let latest = time + time * SAME_INSTANT;
        while self.heap.first().is_some_and(|entry| entry.time <= latest) {
            let bucket = self.pop();
            let mut job = self.buckets[bucket as usize].head;
            if job == NONE {
                self.empty -= 1;
            }
            while job != NONE {
                jobs.push(job);
                job = std::mem::replace(&mut self.nodes[job as usize], UNLINKED).next;
            }
            self.close(bucket);
        }
        Some(time)
    }

    /// Adds a bucket for a time; it counts as empty until it has a job.
    fn open(&mut self, time: f64) -> u32 {
        let new = Bucket { time, head: NONE, tail: NONE };
        let bucket = match self.unused.pop() {
            Some(bucket) => {
                self.buckets[bucket as usize] = new;
                bucket
            }
            None => {
                self.buckets.push(new);
                (self.buckets.len() - 1) as u32
            }
        };
        self.empty += 1;
        self.sequence += 1;
        self.heap.push(Entry { time, sequence: self.sequence, bucket });
        self.sift_up(self.heap.len() - 1);
        bucket
    }

    fn close(&mut self, bucket: u32) {
        // NaN equals no time, so `recent` cannot match it.
        self.buckets[bucket as usize].time = f64::NAN;
        self.unused.push(bucket);
    }

    fn drop_empty(&mut self) {
        let mut heap = std::mem::take(&mut self.heap);
        heap.retain(|entry| {
            let keep = self.buckets[entry.bucket as usize].head != NONE;
            if !keep {
                self.close(entry.bucket);
            }
            keep
        });
        self.heap = heap;
        self.empty = 0;
        for index in (0..self.heap.len().div_ceil(4)).rev() {
            self.sift_down(index);
        }
    }

    fn pop(&mut self) -> u32 {
        let first = self.heap.swap_remove(0);
        if !self.heap.is_empty() {
            self.sift_down(0);
        }
        first.bucket
    }

    fn sift_up(&mut self, mut index: usize) {
        let entry = self.heap[index];
        while index > 0 {
            let parent = (index - 1) / 4;
            if !entry.before(&self.heap[parent]) {
                break;
            }
            self.heap[index] = self.heap[parent];
            index = parent;
        }
        self.heap[index] = entry;
    }

    fn sift_down(&mut self, mut index: usize) {
        let entry = self.heap[index];
        loop {
            let children = index * 4 + 1..(index * 4 + 5).min(self.heap.len());
            let Some(mut least) = (!children.is_empty()).then_some(children.start) else { break };
            for child in children {
                if self.heap[child].before(&self.heap[least]) {
                    least = child;
                }
            }
            if !self.heap[least].before(&entry) {
                break;
            }
            self.heap[index] = self.heap[least];
            index = least;
        }
        self.heap[index] = entry;
    }
}

fn recent_slot(time: f64) -> usize {
    (time.to_bits().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(calendar: &mut Calendar) -> Option<(f64, Vec<u32>)> {
        let mut jobs = Vec::new();
        calendar.take_instant(&mut jobs).map(|time| (time, jobs))
    }

    #[test]
    fn jobs_come_out_by_time_and_then_in_the_order_of_insertion() {
        let mut calendar = Calendar::new();
        for (job, time) in [(7, 2.0), (3, 1.0), (5, 2.0), (1, 1.0), (0, 3.0)] {
            calendar.insert(job, time);
        }
        assert_eq!(take(&mut calendar), Some((1.0, vec![3, 1])));
        calendar.insert(3, 2.0);
        assert_eq!(take(&mut calendar), Some((2.0, vec![7, 5, 3])));
        assert_eq!(take(&mut calendar), Some((3.0, vec![0])));
        assert_eq!(take(&mut calendar), None);
    }

    #[test]
    fn times_that_differ_by_rounding_are_one_instant() {
        let mut calendar = Calendar::new();
        calendar.insert(0, 0.1 + 0.2);
        calendar.insert(1, 0.3);
        calendar.insert(2, 0.3 * (1.0 + 1e-12));
        assert_eq!(take(&mut calendar), Some((0.3, vec![1, 0])));
        assert_eq!(take(&mut calendar).unwrap().1, [2]);
    }

    #[test]
    fn removed_jobs_do_not_end_and_leave_no_entries() {
        let mut calendar = Calendar::new();
        for round in 0..10_000 {
            for job in 0..4 {
                calendar.insert(job, f64::from(round * 4 + job));
            }
            for job in [1, 0, 3, 2] {
                calendar.remove(job);
                calendar.remove(job);
            }
        }
        assert!(calendar.heap.len() < 200, "{} entries", calendar.heap.len());
        assert!(calendar.buckets.len() < 200);
        calendar.insert(2, 5.0);
        assert_eq!(take(&mut calendar), Some((5.0, vec![2])));
        assert_eq!(calendar.next_time(), None);
        assert!(calendar.heap.is_empty() && calendar.empty == 0);
    }
}
