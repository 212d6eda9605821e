//! Answers in parts: a part is written once the front end has confirmed the one before; tokens that are appended
//! meanwhile go into the next one. An answer follows after its last part is confirmed.

use super::link::Link;
use crate::error::{Error, Result};
use crate::wire::{Checksum, Header};
use weft_fabric::Requests;

impl Link {
    /// Enters how many token bytes the answer in a slot has so far.
    pub fn append(&mut self, slot: u32, bytes: u64) {
        let entry = &mut self.slots[slot as usize];
        if !entry.open {
            return;
        }
        let stream = &mut entry.stream;
        stream.appended = stream.appended.max(bytes);
        if stream.parts == stream.confirmed && !std::mem::replace(&mut stream.listed, true) {
            self.parts.push(slot);
        }
    }

    /// Enters a slot's confirmed part total. A total may be reported twice.
    ///
    /// # Errors
    /// [`Error::Malformed`] for more than were written.
    pub fn confirmed(&mut self, slot: u32, total: u64) -> Result<()> {
        let entry = &mut self.slots[slot as usize];
        let stream = &mut entry.stream;
        if total > stream.parts {
            let detail = format!("{total} parts in slot {slot}: expected {}", stream.parts);
            return Err(Error::Malformed { what: "confirmation", detail });
        }
        stream.confirmed = stream.confirmed.max(total);
        if stream.confirmed < stream.parts {
            return Ok(());
        }
        if std::mem::take(&mut entry.held) {
            self.answers.push(slot);
        } else if stream.appended > stream.sent && !std::mem::replace(&mut stream.listed, true) {
            self.parts.push(slot);
        }
        Ok(())
    }

    /// Writes the next answer part in a slot, unless the answer was entered meanwhile.
    pub(super) fn emit_part(&mut self, slot: u32, requests: &mut Requests) {
        let entry = &mut self.slots[slot as usize];
        let stream = &mut entry.stream;
        stream.listed = false;
        if !entry.open || stream.appended == stream.sent {
            return;
        }
        let streamed = std::mem::replace(&mut stream.sent, stream.appended);
        stream.parts += 1;
        let mut header = Header::part(entry.turn, stream.sent);
        let connection = &mut self.connection;
        if connection.agreement().checksum
            && let Some(tensor) = connection.outgoing_layout.stream()
        {
            let offset = connection.outgoing_layout.offset(tensor) + streamed;
            let mut sum = Checksum::default();
            sum.add(connection.outgoing.read(slot, offset, stream.sent - streamed));
            header.checksum = sum.value();
        }
        let source = connection.outgoing_source(slot);
        connection.send(slot, &header.fields(), source, streamed, requests);
    }
}
