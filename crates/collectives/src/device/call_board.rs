//! Call board: the last call of each rank, in host memory that all ranks map, for errors.
//!
//! A kernel that waits too long records the peer that did not come, not the call that the peer is in. So each rank writes
//! its calls down as it makes them, and a rank that fails reads the lines of all ranks, those of stopped and of lost
//! processes too. Replays of graphs are not written down.

use super::message::DeviceOperation;
use crate::reduction::Element;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};
use std::time::Duration;
use weft_fabric::{Communicator, Rank, Time, clock};
use weft_gpu::{Heap, MemoryLocation};

/// Words of a rank's line: a version, odd during a write; the number of its calls; operation and element, by number;
/// elements of a message; time of the call in ns, on the clock that all processes of the host share.
const WORDS: usize = 6;
const LINE: u64 = 8 * WORDS as u64;
/// Reads of a line that its rank changes meanwhile.
const ATTEMPTS: u32 = 1000;

/// Last calls of all ranks.
pub(super) struct CallBoard {
    heap: Heap,
    calls: AtomicU64,
}

/// Call in a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LastCall {
    number: u64,
    operation: &'static str,
    element: Element,
    count: u64,
    at: Time,
}

impl CallBoard {
    /// Makes the board of a communicator; every rank calls this. `None` on all ranks if they cannot share host memory, as
    /// those in other network namespaces.
    pub fn create(communicator: &Communicator, deadline: Time) -> Option<CallBoard> {
        let heap = Heap::create(communicator, MemoryLocation::Twin, LINE, deadline);
        let unshared = |error: &weft_gpu::Error| log::debug!("errors lack the last calls: {error}");
        heap.inspect_err(unshared).ok().map(CallBoard::of)
    }

    /// Boards of a group in this process, by rank.
    pub fn local_group(ranks: usize) -> Vec<Option<CallBoard>> {
        let Ok(heaps) = Heap::local_group(&vec![MemoryLocation::Twin; ranks], LINE) else {
            return (0..ranks).map(|_| None).collect();
        };
        heaps.into_iter().map(|heap| Some(CallBoard::of(heap))).collect()
    }

    fn of(heap: Heap) -> CallBoard {
        CallBoard { heap, calls: AtomicU64::new(0) }
    }

    /// Words of a rank's line.
    fn line(&self, rank: u32) -> Option<[&AtomicU64; WORDS]> {
        let view = self.heap.host_view(rank)?;
        Some(std::array::from_fn(|word| view.word64(8 * word)))
    }

    /// Writes a call of this rank down, before its launch. Calls come one at a time.
    pub fn write(&self, operation: &DeviceOperation, element: Element) {
        let number = self.calls.fetch_add(1, Relaxed) + 1;
        let place = |known: &[&str], name| known.iter().position(|each| *each == name).unwrap_or(0);
        let name = place(&DeviceOperation::NAMES, operation.name()) as u64;
        let element = Element::ALL.iter().position(|each| *each == element).unwrap_or(0);
        let values = [number, name, element as u64, operation.count(), clock::now().0];
        let Some([version, words @ ..]) = self.line(self.heap.rank()) else { return };
        let before = version.load(Relaxed);
        version.store(before | 1, Relaxed);
        fence(Release);
        words.iter().zip(values).for_each(|(word, value)| word.store(value, Relaxed));
        version.store((before | 1) + 1, Release);
    }

    /// Last call of a rank; `None` before its first, or if its process stopped during a write.
    fn read(&self, rank: u32) -> Option<LastCall> {
        let [version, words @ ..] = self.line(rank)?;
        for _ in 0..ATTEMPTS {
            let before = version.load(Acquire);
            let [number, operation, element, count, at] = words.map(|word| word.load(Relaxed));
            fence(Acquire);
            if before % 2 == 0 && version.load(Relaxed) == before {
                return (number > 0).then_some(LastCall {
                    number,
                    operation: DeviceOperation::NAMES.get(operation as usize).copied()?,
                    element: *Element::ALL.get(element as usize)?,
                    count,
                    at: Time(at),
                });
            }
            std::hint::spin_loop();
        }
        None
    }

    /// True if this rank has made more calls than `rank`, which makes none any more.
    pub fn is_ahead_of(&self, rank: Rank) -> bool {
        let theirs = self.line(rank.0).map_or(0, |[_, number, ..]| number.load(Acquire));
        self.calls.load(Relaxed) > theirs
    }

    /// Last calls of all ranks, by rank, as seen at `now`.
    pub fn describe(&self, now: Time) -> String {
        let one = |rank: u32| match self.read(rank) {
            Some(LastCall { number, operation, element, count, at }) => {
                let ago = Duration::as_secs_f64(&now.since(at));
                let size = match operation {
                    "barrier" => String::new(),
                    _ => format!(" of {count} {element}"),
                };
                format!("{} {operation} number {number}{size}, {ago:.1} s ago", Rank(rank))
            }
            None => format!("{} none", Rank(rank)),
        };
        (0..self.heap.size()).map(one).collect::<Vec<_>>().join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_calls_of_all_ranks_are_described_at_each() {
        let boards: Vec<CallBoard> = CallBoard::local_group(3).into_iter().flatten().collect();
        boards[0].write(&DeviceOperation::Barrier, Element::U8);
        boards[0].write(&DeviceOperation::AllReduce { count: 4096 }, Element::Bf16);
        let (sent, received) = (vec![1, 2, 4], vec![1, 1, 1]);
        boards[2].write(&DeviceOperation::AllToAllUneven { sent, received }, Element::F32);
        let now = clock::now().after(Duration::from_secs(40));
        for board in &boards {
            let text = board.describe(now);
            let parts: Vec<&str> = text.split("; ").collect();
            let begin = "rank 0 all_reduce number 2 of 4096 bfloat16, 4";
            assert!(parts[0].starts_with(begin) && parts[0].ends_with(" s ago"), "{text}");
            assert_eq!(parts[1], "rank 1 none");
            assert!(parts[2].starts_with("rank 2 all_to_all number 1 of 7 float32"), "{text}");
        }
        assert!(boards[0].is_ahead_of(Rank(1)) && boards[0].is_ahead_of(Rank(2)));
        boards[2].write(&DeviceOperation::Barrier, Element::U8);
        assert!(!boards[0].is_ahead_of(Rank(2)) && !boards[1].is_ahead_of(Rank(0)));
        assert!(boards[0].describe(now).contains("rank 2 barrier number 2, 4"));
    }

    #[test]
    fn a_line_that_is_written_now_or_has_garbage_is_none() {
        let boards: Vec<CallBoard> = CallBoard::local_group(2).into_iter().flatten().collect();
        boards[1].write(&DeviceOperation::Barrier, Element::U8);
        let [version, _, operation, ..] = boards[0].line(1).unwrap();
        operation.store(99, Relaxed);
        assert!(boards[0].describe(clock::now()).ends_with("rank 1 none"));
        operation.store(0, Relaxed);
        version.fetch_add(1, Relaxed);
        assert!(boards[0].describe(clock::now()).ends_with("rank 1 none"));
    }

    #[test]
    fn lines_are_read_whole_while_their_rank_writes() {
        let boards: Vec<CallBoard> = CallBoard::local_group(2).into_iter().flatten().collect();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for count in 1..2000 {
                    boards[0].write(&DeviceOperation::AllGather { count }, Element::U8);
                }
            });
            while boards[1].read(0).is_none_or(|last| last.number < 1999) {
                let last = boards[1].read(0);
                assert!(last.is_none_or(|last| last.number == last.count), "{last:?}");
            }
        });
    }
}
