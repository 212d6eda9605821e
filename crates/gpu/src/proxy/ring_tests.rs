//! Ring tests: laps, order, damage, and random bytes.

use super::*;
use crate::proxy::command::Kind;
use proptest::prelude::*;

struct Memory {
    slots: Vec<[AtomicU32; SLOT_WORDS]>,
    released: AtomicU64,
}

impl Memory {
    fn new(slots: usize) -> Memory {
        let slot = |_| std::array::from_fn(|_| AtomicU32::new(0));
        Memory { slots: (0..slots).map(slot).collect(), released: AtomicU64::new(0) }
    }

    fn ring(&self) -> MappedRing<'_> {
        MappedRing { slots: &self.slots, released: &self.released }
    }
}

fn command(number: u64) -> CommandFields {
    CommandFields {
        kind: Kind::Put as u8,
        length: !number,
        word: number as u32,
        source_offset: number,
        count: !number as u32,
        destination_offset: number << 32,
        ..CommandFields::default()
    }
}

#[test]
fn a_slot_has_the_layout_that_kernels_store() {
    assert_eq!((SlotLayout::SIZE, SLOT_WORDS), (64, 16));
    let uses = SlotLayout::FIELDS.iter().filter(|field| field.name.starts_with("use_"));
    assert_eq!(uses.map(|field| field.offset).collect::<Vec<_>>(), [12, 28, 44, 60]);
    let slot = SlotLayout {
        head: 0x0003_0201,
        length: [4, 5],
        use_0: 1,
        windows: 0x0007_0006,
        word: 8,
        reserved: 9,
        use_1: 1,
        source: [10, 11],
        count: 12,
        use_2: 1,
        destination: [13, 14],
        list: 15,
        use_3: 1,
    };
    let (memory, bytes) = (Memory::new(2), slot.bytes());
    let words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word));
    memory.slots[0].iter().zip(words).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
    let mut reader = RingReader::new(memory.ring());
    let fields = reader.take(|_, fields| *fields).unwrap().unwrap();
    let expected = CommandFields {
        kind: 1,
        flags: 2,
        peer: 3,
        length: 5 << 32 | 4,
        source_window: 6,
        destination_window: 7,
        word: 8,
        reserved: 9,
        source_offset: 11 << 32 | 10,
        count: 12,
        destination_offset: 14 << 32 | 13,
        list: 15,
    };
    assert_eq!(fields, expected);
}

#[test]
fn commands_are_taken_in_order_over_many_laps() {
    let memory = Memory::new(4);
    let (mut reader, writer) = (RingReader::new(memory.ring()), RingWriter::new(memory.ring()));
    let mut ticket = 0;
    for _ in 0..10 {
        let first = ticket;
        while writer.push(ticket, &command(ticket)) {
            ticket += 1;
        }
        assert_eq!(ticket - first, 4, "a full ring refuses the next ticket");
        for expected in first..ticket {
            let taken = reader.take(|ticket, fields| (ticket, *fields)).unwrap();
            assert_eq!(taken, Some((expected, command(expected))));
        }
        assert_eq!(reader.take(|_, _| ()).unwrap(), None);
        assert_eq!(reader.taken(), ticket);
    }
}

#[test]
fn a_command_is_taken_once_its_last_quarter_is_there() {
    let memory = Memory::new(2);
    let (mut reader, writer) = (RingReader::new(memory.ring()), RingWriter::new(memory.ring()));
    for (ticket, missing) in (0..8).zip([0, 1, 2, 3, 3, 2, 1, 0]) {
        assert!(writer.has_room(ticket));
        for quarter in (0..QUARTERS).filter(|quarter| *quarter != missing) {
            writer.store_quarter(ticket, &command(ticket), quarter);
            assert_eq!(reader.take(|_, _| ()).unwrap(), None);
        }
        writer.store_quarter(ticket, &command(ticket), missing);
        assert_eq!(reader.take(|_, fields| *fields).unwrap(), Some(command(ticket)));
    }
}

#[test]
fn a_slot_is_released_only_after_it_was_accepted() {
    let memory = Memory::new(2);
    let (mut reader, writer) = (RingReader::new(memory.ring()), RingWriter::new(memory.ring()));
    assert!(writer.push(0, &command(0)) && writer.push(1, &command(1)));
    let room = reader.take(|_, _| writer.has_room(2)).unwrap();
    assert_eq!(room, Some(false));
    assert!(writer.has_room(2) && !writer.has_room(3));
}

/// A ring that has used each slot 2^32 - 1 times.
#[test]
fn use_numbers_wrap_around() {
    assert_eq!((place_of(1030, 1024), place_of(0, 1024)), ((6, 2), (0, 1)));
    let first = u64::from(u32::MAX) * 2;
    assert_eq!((place_of(first, 2), place_of(first + 2, 2)), ((0, 0), (0, 1)));
    let memory = Memory::new(2);
    for (slot, quarter) in (0..2).flat_map(|slot| (0..QUARTERS).map(move |each| (slot, each))) {
        memory.ring().set_use_number(slot, quarter, u32::MAX, Ordering::Relaxed);
    }
    memory.ring().set_released(first, Ordering::Relaxed);
    let writer = RingWriter::new(memory.ring());
    let mut reader = RingReader { memory: memory.ring(), next: first };
    for ticket in first..first + 6 {
        assert_eq!(reader.take(|_, _| ()).unwrap(), None);
        assert!(writer.push(ticket, &command(ticket)));
        assert_eq!(reader.take(|_, fields| *fields).unwrap(), Some(command(ticket)));
    }
}

#[test]
fn a_use_number_out_of_turn_is_an_error() {
    for (quarter, seen) in [(0, 2), (1, 3), (2, u32::MAX), (3, 1 << 31)] {
        let memory = Memory::new(2);
        let (mut reader, writer) = (RingReader::new(memory.ring()), RingWriter::new(memory.ring()));
        assert!(writer.push(0, &command(0)));
        memory.ring().set_use_number(0, quarter, seen, Ordering::Release);
        let error = reader.take(|_, _| ()).unwrap_err();
        assert_eq!(error, RingError { ticket: 0, quarter, expected: 1, seen });
        let text =
            format!("quarter {quarter} of command 0 has use number {seen}: expected 0 or 1;");
        assert!(error.to_string().starts_with(&text), "{error}");
        assert_eq!(reader.taken(), 0);
    }
}

/// Two writers with tickets in turn, quarters in any order, one reader.
#[test]
fn every_command_is_whole_while_threads_write() {
    let many: u64 = if cfg!(miri) { 24 } else { 50_000 };
    let memory = Memory::new(8);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let writer = RingWriter::new(memory.ring());
            scope.spawn(move || {
                for ticket in (thread..many).step_by(2) {
                    while !writer.has_room(ticket) {
                        std::thread::yield_now();
                    }
                    for quarter in 0..QUARTERS {
                        let quarter = (quarter + ticket as usize) % QUARTERS;
                        writer.store_quarter(ticket, &command(ticket), quarter);
                    }
                }
            });
        }
        let mut reader = RingReader::new(memory.ring());
        while reader.taken() < many {
            let next = reader.taken();
            match reader.take(|ticket, fields| (ticket, *fields)).unwrap() {
                Some(taken) => assert_eq!(taken, (next, command(next))),
                None => std::thread::yield_now(),
            }
        }
    });
}

proptest! {
    /// Whatever bytes a slot has, the reader returns, and what it takes is what the slot has.
    #[test]
    fn random_bytes_end_no_reader(words in any::<[u32; SLOT_WORDS]>(), uses in any::<[u8; QUARTERS]>()) {
        let memory = Memory::new(2);
        memory.slots[0].iter().zip(words).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
        for (quarter, number) in uses.into_iter().enumerate() {
            // Mostly the numbers that are in turn.
            let number = match number { 0..200 => 1, 200..250 => 0, _ => words[4 * quarter + 3] };
            memory.ring().set_use_number(0, quarter, number, Ordering::Relaxed);
        }
        let number = |quarter| memory.ring().use_number(0, quarter, Ordering::Relaxed);
        let mut reader = RingReader::new(memory.ring());
        match reader.take(|_, fields| fields.payloads()) {
            Ok(Some(payloads)) => {
                prop_assert!((0..QUARTERS).all(|quarter| number(quarter) == 1));
                for (quarter, payload) in payloads.iter().enumerate() {
                    prop_assert_eq!(&payload[..], &words[4 * quarter..][..PAYLOAD_WORDS]);
                }
            }
            Ok(None) => prop_assert!((0..QUARTERS).any(|quarter| number(quarter) == 0)),
            Err(error) => prop_assert!(error.seen > 1 && number(error.quarter) == error.seen),
        }
    }
}
