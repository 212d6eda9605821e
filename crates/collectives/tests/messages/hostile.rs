//! A peer that violates the protocol, over tcp: each violation poisons the group with the peer's rank and the
//! field.

use crate::{Member, PATIENCE, SMALL, communicators, soon};
use weft_collectives::RunError;
use weft_collectives::messages::header::Header;
use weft_fabric::{
    Cause, Communicator, CounterConfig, CounterId, Error, Grant, Page, ProviderKind, Rank, Region,
    RemoteRegion, Requests, WaitOptions, clock,
};

/// Rank 1 without messages: it writes into rank 0's ring what a test passes.
struct Hostile {
    communicator: Communicator,
    counter: CounterId,
    source: Region,
    ring: RemoteRegion,
}

impl Hostile {
    /// This rank's part in `Messages::connect`.
    fn new(communicator: Communicator) -> Hostile {
        let mut offer = SMALL.slots.to_le_bytes().to_vec();
        offer.extend(SMALL.slot_bytes.to_le_bytes());
        communicator.exchange(&vec![offer; 2], soon()).unwrap();
        let rings = 2 * u64::from(SMALL.slots) * SMALL.slot_bytes;
        let mut engine = communicator.engine();
        let source = engine.alloc(rings as usize).unwrap();
        let config = CounterConfig { window: SMALL.slots, ..CounterConfig::default() };
        let counter = engine.counter_with(config).unwrap();
        let grant = engine.grant(Rank(0), &[(&source, 0..rings)], &[counter]).unwrap();
        drop(engine);
        let grants = communicator.exchange(&[grant.encode(), Vec::new()], soon()).unwrap();
        let grant = Grant::decode(&grants[0]).unwrap();
        let import = communicator.engine().import(Rank(0), &grant, &[counter], soon());
        let ring = import.unwrap()[0];
        Hostile { communicator, counter, source, ring }
    }

    /// Writes into a round's slot.
    fn write(&self, round: u64, bytes: &[u8]) {
        self.source.memory().copy_in(0, bytes);
        let slot = u64::from(SMALL.slots) + round % u64::from(SMALL.slots);
        let page = Page {
            source: self.source.key(),
            source_offset: 0,
            destination: self.ring.key,
            destination_offset: slot * SMALL.slot_bytes,
            length: bytes.len() as u64,
        };
        let request = self.communicator.engine().write(Rank(0), self.counter, round, &[page]);
        let (deadline, spin) = (clock::now().after(PATIENCE), std::time::Duration::ZERO);
        let mut options = WaitOptions { deadline, spin, interrupted: &mut || false };
        let written =
            request.and_then(|request| self.communicator.wait_for_request(request, &mut options));
        // Rank 0 may have poisoned the group after an earlier write.
        assert!(matches!(written, Ok(()) | Err(Error::Poisoned(_))), "{written:?}");
    }

    fn credit(&self) {
        let mut requests = Requests::default();
        requests.credit(Rank(0), self.counter);
        self.communicator.engine().submit(&mut requests).unwrap();
    }
}

/// Violation that rank 0 reports when rank 1 runs `violate`.
fn violation(violate: impl Fn(&Hostile) + Sync) -> (&'static str, u64, u64) {
    let found = std::sync::Mutex::new(None);
    communicators(2, ProviderKind::Tcp, None, |communicator| {
        if communicator.rank() == Rank(1) {
            let hostile = Hostile::new(communicator);
            violate(&hostile);
            // Until rank 0 has poisoned the group.
            let _ = hostile.communicator.control().all_gather(&[], PATIENCE);
            return;
        }
        let member = Member::new(communicator, SMALL);
        let mut bytes = [0; 200];
        let error = loop {
            match member.receive(Some(Rank(1)), 1, &mut bytes) {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(error.offender(), Some(Rank(1)), "{error}");
        let RunError::Violation { what, expected, seen, .. } = error else { panic!("{error}") };
        *found.lock().unwrap() = Some((what, expected, seen));
        let error = member.receive(Some(Rank(1)), 1, &mut bytes).unwrap_err();
        let RunError::Fabric(Error::Poisoned(poison)) = error else { panic!("{error}") };
        assert_eq!((poison.kind, poison.rank), (Cause::Protocol, Some(Rank(1))));
        assert!(poison.detail.contains(what), "{}", poison.detail);
    });
    found.into_inner().unwrap().unwrap()
}

fn header(sequence: u64, length: u64) -> [u8; Header::BYTES as usize] {
    Header { sequence, tag: 1, length }.encode()
}

#[test]
fn a_message_out_of_sequence_is_a_violation() {
    let found = violation(|peer| {
        peer.write(0, &header(0, 0));
        peer.write(1, &header(2, 0));
    });
    assert_eq!(found, ("the sequence number of a message", 1, 2));
}

#[test]
fn a_message_longer_than_memory_is_a_violation() {
    let found = violation(|peer| peer.write(0, &header(0, u64::MAX)));
    assert_eq!(found, ("the length of a message", Header::MAX_LENGTH, u64::MAX));
}

#[test]
fn a_header_with_reserved_bits_is_a_violation() {
    let found = violation(|peer| {
        let mut bytes = header(0, 0);
        bytes[31] = 1;
        peer.write(0, &bytes);
    });
    assert_eq!(found, ("the reserved field of a message", 0, 1 << 56));
}

#[test]
fn a_slot_written_twice_is_a_violation() {
    let found = violation(|peer| {
        // The second slot, so that both writes precede the first credit.
        peer.write(1, &header(1, 0));
        peer.write(1, &header(1, 0));
        peer.write(0, &header(0, 0));
    });
    assert_eq!(found, ("the number of writes into a slot", 1, 2));
}

#[test]
fn a_credit_without_a_message_is_a_violation() {
    let found = violation(Hostile::credit);
    assert_eq!(found, ("the number of credits", 0, 1));
}
