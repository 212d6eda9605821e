//! Arrivals in slots: raises seen, and raises that completed writes account for.

use crate::error::{Error, Result};

/// Raise totals for one slot.
#[derive(Clone, Copy, Debug, Default)]
struct SlotArrivals {
    headers: u64,
    headers_taken: u64,
    payloads: u64,
    payloads_taken: u64,
}

/// Arrivals in all slots in one direction.
#[derive(Debug)]
pub(crate) struct Arrivals {
    slots: Box<[SlotArrivals]>,
    /// Parts in a header, and in a header with tensors where these are one write.
    header_parts: u64,
}

impl Arrivals {
    /// Arrivals in this many slots.
    pub fn new(slots: u32, header_parts: u64) -> Arrivals {
        Arrivals { slots: vec![SlotArrivals::default(); slots as usize].into(), header_parts }
    }

    /// Enters the header raise total. A total may be reported twice.
    #[inline]
    pub fn headers(&mut self, slot: u32, count: u64) {
        let slot = &mut self.slots[slot as usize];
        slot.headers = slot.headers.max(count);
    }

    /// Enters the raise total for tensors without a header.
    #[inline]
    pub fn payloads(&mut self, slot: u32, count: u64) {
        let slot = &mut self.slots[slot as usize];
        slot.payloads = slot.payloads.max(count);
    }

    /// True if a header has arrived that was not taken.
    ///
    /// # Errors
    /// [`Error::Malformed`] after more raises than one slot use makes.
    #[inline]
    pub fn has_header(&self, slot: u32) -> Result<bool> {
        let SlotArrivals { headers, headers_taken, .. } = self.slots[slot as usize];
        let (seen, expected) = (headers - headers_taken, self.header_parts);
        if seen > expected {
            let detail = format!("{seen} arrivals in slot {slot}: expected {expected}");
            return Err(Error::Malformed { what: "use of a slot", detail });
        }
        Ok(seen == expected)
    }

    /// Takes a header and this many tensor parts; false if these have not all arrived.
    #[inline]
    pub fn take(&mut self, slot: u32, payload_parts: u64) -> bool {
        let slot = &mut self.slots[slot as usize];
        if slot.payloads - slot.payloads_taken < payload_parts {
            return false;
        }
        slot.payloads_taken += payload_parts;
        slot.headers_taken += self.header_parts;
        true
    }
}
