//! Call board: each rank's last call, in host memory that all ranks map, for errors.
//!
//! A kernel that waits too long records the peer that did not come, but not which call the peer is in. So each rank
//! writes down each call as it starts, and a rank that fails reads the lines from all ranks, stopped and lost processes
//! too. Graph replays are not written down.

use super::message::DeviceOperation;
use super::transfers::Transfer;
use crate::reduction::Element;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};
use std::time::Duration;
use weft_fabric::{Communicator, Rank, Time, clock};
use weft_gpu::table::MAX_RANKS;
use weft_gpu::{Heap, MemoryLocation};

/// Words in a rank's line: a version, odd during a write; the call count; operation and element, by number; element
/// count in a message; call time in ns, on the clock that all processes on the host share.
const WORDS: usize = 6;
/// Words behind them, which only rise: the collective count, then for each rank the messages sent to it and received
/// from it.
const COLLECTIVES: usize = WORDS;
const MESSAGES: usize = WORDS + 1;
const LINE: u64 = 8 * (MESSAGES + 2 * MAX_RANKS) as u64;
/// Read attempts for a line that its rank changes meanwhile.
const ATTEMPTS: u32 = 1000;

/// Call names, by number.
fn names() -> impl Iterator<Item = &'static str> {
    DeviceOperation::NAMES.into_iter().chain(["send", "recv", "batch"])
}

/// Last calls on all ranks.
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
    /// Makes a communicator's board; every rank calls this. `None` on all ranks if they cannot share host memory, for
    /// example in different network namespaces.
    pub fn create(communicator: &Communicator, deadline: Time) -> Option<CallBoard> {
        let heap = Heap::create(communicator, MemoryLocation::Twin, LINE, deadline);
        let unshared = |error: &weft_gpu::Error| log::debug!("errors lack the last calls: {error}");
        heap.inspect_err(unshared).ok().map(CallBoard::of)
    }

    /// Boards for a group in this process, by rank.
    pub fn local_group(ranks: usize) -> Vec<Option<CallBoard>> {
        let Ok(heaps) = Heap::local_group(&vec![MemoryLocation::Twin; ranks], LINE) else {
            return (0..ranks).map(|_| None).collect();
        };
        heaps.into_iter().map(|heap| Some(CallBoard::of(heap))).collect()
    }

    fn of(heap: Heap) -> CallBoard {
        CallBoard { heap, calls: AtomicU64::new(0) }
    }

    /// Words in a rank's line.
    fn line(&self, rank: u32) -> Option<[&AtomicU64; WORDS]> {
        let view = self.heap.host_view(rank)?;
        Some(std::array::from_fn(|word| view.word64(8 * word)))
    }

    /// A rank's count that only rises.
    fn count(&self, rank: u32, word: usize) -> Option<&AtomicU64> {
        Some(self.heap.host_view(rank)?.word64(8 * word))
    }

    /// Writes down a call by this rank, before the launch. Calls come one at a time.
    pub fn write(&self, operation: &DeviceOperation, element: Element) {
        if let Some(count) = self.count(self.heap.rank(), COLLECTIVES) {
            count.fetch_add(1, Release);
        }
        self.write_line(operation.name(), element, operation.count());
    }

    /// Writes down a batch with sends and receives, before the launch.
    pub fn write_transfers(&self, batch: &[Transfer]) {
        for transfer in batch {
            let word = MESSAGES + 2 * transfer.peer as usize + usize::from(transfer.receives);
            if let Some(count) = self.count(self.heap.rank(), word) {
                count.fetch_add(1, Release);
            }
        }
        let name = match batch {
            [Transfer { receives: false, .. }] => "send",
            [_] => "recv",
            _ => "batch",
        };
        self.write_line(name, Element::U8, batch.iter().map(|transfer| transfer.bytes).sum());
    }

    fn write_line(&self, name: &str, element: Element, count: u64) {
        let number = self.calls.fetch_add(1, Relaxed) + 1;
        let name = names().position(|each| each == name).unwrap_or(0) as u64;
        let element = Element::ALL.iter().position(|each| *each == element).unwrap_or(0);
        let values = [number, name, element as u64, count, clock::now().0];
        let Some([version, words @ ..]) = self.line(self.heap.rank()) else { return };
        let before = version.load(Relaxed);
        version.store(before | 1, Relaxed);
        fence(Release);
        words.iter().zip(values).for_each(|(word, value)| word.store(value, Relaxed));
        version.store((before | 1) + 1, Release);
    }

    /// A rank's last call; `None` before the first, or if the process stopped during a write.
    fn read(&self, rank: u32) -> Option<LastCall> {
        let [version, words @ ..] = self.line(rank)?;
        for _ in 0..ATTEMPTS {
            let before = version.load(Acquire);
            let [number, operation, element, count, at] = words.map(|word| word.load(Relaxed));
            fence(Acquire);
            if before % 2 == 0 && version.load(Relaxed) == before {
                return (number > 0).then_some(LastCall {
                    number,
                    operation: names().nth(operation as usize)?,
                    element: *Element::ALL.get(element as usize)?,
                    count,
                    at: Time(at),
                });
            }
            std::hint::spin_loop();
        }
        None
    }

    /// True if this rank has made more collectives than `rank`, which makes no calls any more, or has more sends to it
    /// or receives from it than `rank` has made at the other end.
    pub fn is_ahead_of(&self, rank: Rank) -> bool {
        let count = |rank, word| self.count(rank, word).map_or(0, |count| count.load(Acquire));
        let ours = self.heap.rank();
        let messages = |at: u32, peer: u32, receives: bool| {
            count(at, MESSAGES + 2 * peer as usize + usize::from(receives))
        };
        count(ours, COLLECTIVES) > count(rank.0, COLLECTIVES)
            || messages(ours, rank.0, false) > messages(rank.0, ours, true)
            || messages(ours, rank.0, true) > messages(rank.0, ours, false)
    }

    /// Last calls on all ranks, by rank, as seen at `now`.
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
    fn messages_are_compared_by_pairs() {
        let boards: Vec<CallBoard> = CallBoard::local_group(3).into_iter().flatten().collect();
        let to = |peer, receives| Transfer { peer, receives, address: 0, bytes: 40 };
        boards[0].write_transfers(&[to(1, false)]);
        assert!(boards[0].is_ahead_of(Rank(1)) && !boards[0].is_ahead_of(Rank(2)));
        boards[1].write_transfers(&[to(0, true), to(2, true)]);
        assert!(!boards[0].is_ahead_of(Rank(1)) && boards[1].is_ahead_of(Rank(2)));
        let text = boards[2].describe(clock::now());
        assert!(text.starts_with("rank 0 send number 1 of 40 uint8, "), "{text}");
        assert!(text.contains("; rank 1 batch number 1 of 80 uint8, "), "{text}");
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
