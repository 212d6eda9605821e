//! Every interleaving between the threads that store a command's quarters and the ring's reader, and between a word's
//! two ends.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p weft-gpu --release --test loom_proxy`
//!
//! Payloads and bytes are cells, so that an access without a happens-before edge fails the model, besides the
//! assertions.
#![cfg(loom)]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use loom::thread;
use std::sync::Arc as StdArc;
use weft_control::Rank;
use weft_gpu::proxy::{
    CommandFields, PAYLOAD_WORDS, QUARTERS, RingMemory, RingReader, RingWriter, WordMemory,
    WordUpdate, Words,
};

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

struct Quarter {
    payload: UnsafeCell<[u32; PAYLOAD_WORDS]>,
    number: AtomicU32,
}

struct Memory {
    slots: Vec<[Quarter; QUARTERS]>,
    released: AtomicU64,
}

/// Handle to one ring's memory.
#[derive(Clone)]
struct Ring(Arc<Memory>);

impl Ring {
    fn new(slots: usize) -> Ring {
        let quarter = |_| Quarter { payload: UnsafeCell::new([0; 3]), number: AtomicU32::new(0) };
        let slots = (0..slots).map(|_| std::array::from_fn(quarter)).collect();
        Ring(Arc::new(Memory { slots, released: AtomicU64::new(0) }))
    }
}

impl RingMemory for Ring {
    fn slots(&self) -> usize {
        self.0.slots.len()
    }
    fn use_number(&self, slot: usize, quarter: usize, order: Ordering) -> u32 {
        self.0.slots[slot][quarter].number.load(order)
    }
    fn payload(&self, slot: usize, quarter: usize) -> [u32; PAYLOAD_WORDS] {
        // SAFETY: loom fails the model if a store is concurrent.
        self.0.slots[slot][quarter].payload.with(|payload| unsafe { *payload })
    }
    fn set_payload(&self, slot: usize, quarter: usize, payload: [u32; PAYLOAD_WORDS]) {
        // SAFETY: loom fails the model if another access is concurrent.
        self.0.slots[slot][quarter].payload.with_mut(|to| unsafe { *to = payload });
    }
    fn set_use_number(&self, slot: usize, quarter: usize, number: u32, order: Ordering) {
        self.0.slots[slot][quarter].number.store(number, order);
    }
    fn released(&self, order: Ordering) -> u64 {
        self.0.released.load(order)
    }
    fn set_released(&self, tickets: u64, order: Ordering) {
        self.0.released.store(tickets, order);
    }
}

/// Fields that differ in each quarter and for each ticket.
fn command(ticket: u64) -> CommandFields {
    let number = ticket as u32 + 1;
    CommandFields {
        length: number.into(),
        word: 10 * number,
        count: 100 * number,
        list: 1000 * number,
        ..CommandFields::default()
    }
}

fn take_all(mut reader: RingReader<Ring>, tickets: u64) {
    while reader.taken() < tickets {
        let taken = reader.take(|ticket, fields| (ticket, *fields)).expect("a number in turn");
        match taken {
            Some((ticket, fields)) => assert_eq!(fields, command(ticket)),
            None => thread::yield_now(),
        }
    }
}

/// Two lanes of a warp store two quarters each, in opposite orders.
#[test]
fn a_command_is_whole_in_whatever_order_its_quarters_come() {
    check(|| {
        let ring = Ring::new(2);
        let lane = |quarters: [usize; 2]| {
            let writer = RingWriter::new(ring.clone());
            thread::spawn(move || {
                for quarter in quarters {
                    writer.store_quarter(0, &command(0), quarter);
                }
            })
        };
        let lanes = [lane([3, 0]), lane([1, 2])];
        take_all(RingReader::new(ring.clone()), 1);
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
    });
}

/// A writer that is a lap ahead stores to a slot only behind the reader's last load from it.
#[test]
fn a_slot_is_not_stored_to_while_it_is_read() {
    check(|| {
        let ring = Ring::new(1);
        let writer = RingWriter::new(ring.clone());
        let kernel = thread::spawn(move || {
            for ticket in 0..3 {
                while !writer.push(ticket, &command(ticket)) {
                    thread::yield_now();
                }
            }
        });
        take_all(RingReader::new(ring), 3);
        kernel.join().unwrap();
    });
}

#[test]
fn two_writers_share_the_ring() {
    check(|| {
        let ring = Ring::new(2);
        let write = |ticket: u64| {
            let writer = RingWriter::new(ring.clone());
            thread::spawn(move || assert!(writer.push(ticket, &command(ticket))))
        };
        let writers = [write(1), write(0)];
        take_all(RingReader::new(ring.clone()), 2);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
}

/// A SCATTER's lengths, which lie beside the ring, are reused once the ticket is released.
#[test]
fn a_list_is_read_before_its_ticket_is_released() {
    check(|| {
        let (ring, list) = (Ring::new(2), Arc::new(UnsafeCell::new(0u32)));
        let (writer, lengths) = (RingWriter::new(ring.clone()), list.clone());
        let kernel = thread::spawn(move || {
            for ticket in 0..2 {
                // A list of one length for all commands: it is free once no earlier command reads it.
                while !writer.has_room(ticket + 1) {
                    thread::yield_now();
                }
                // SAFETY: loom fails the model if another access is concurrent.
                lengths.with_mut(|to| unsafe { *to = ticket as u32 + 7 });
                assert!(writer.push(ticket, &command(ticket)));
            }
        });
        let mut reader = RingReader::new(ring);
        while reader.taken() < 2 {
            let taken = reader.take(|ticket, _| {
                // SAFETY: as above.
                assert_eq!(list.with(|from| unsafe { *from }), ticket as u32 + 7);
            });
            if taken.expect("a number in turn").is_none() {
                thread::yield_now();
            }
        }
        kernel.join().unwrap();
    });
}

/// Word memory with loom's atomics.
struct Raised(StdArc<Vec<AtomicU32>>);

impl WordMemory for Raised {
    fn set(&self, position: usize, value: u32, order: Ordering) -> weft_gpu::Result<()> {
        self.0[position].store(value, order);
        Ok(())
    }
}

/// A kernel that has acquired a word reads the bytes of all rounds that it counts.
#[test]
fn a_raised_word_shows_the_bytes_of_its_rounds() {
    check(|| {
        let memory = StdArc::new((0..4).map(|_| AtomicU32::new(0)).collect::<Vec<_>>());
        let bytes = Arc::new([UnsafeCell::new(0u8), UnsafeCell::new(0u8)]);
        let (words, landed) = (Words::new(Raised(memory.clone()), 2), bytes.clone());
        let proxy = thread::spawn(move || {
            for round in 0..2usize {
                // SAFETY: loom fails the model if another access is concurrent.
                landed[round].with_mut(|to| unsafe { *to = round as u8 + 1 });
                words
                    .raise(WordUpdate { source: Rank(1), index: 1, value: round as u32 + 1 })
                    .unwrap();
            }
        });
        let mut read = 0;
        while read < 2 {
            let seen = memory[3].load(Ordering::Acquire) as usize;
            for (round, byte) in bytes.iter().enumerate().take(seen).skip(read) {
                // SAFETY: as above.
                assert_eq!(byte.with(|from| unsafe { *from }), round as u8 + 1);
            }
            if seen == read {
                thread::yield_now();
            }
            read = seen;
        }
        proxy.join().unwrap();
    });
}
