//! Message limits.

use super::header::Header;
use crate::run_error::RunError;
use weft_fabric::{CounterConfig, PartRule};

/// Limits for [`Messages`](super::Messages). `slots` and `slot_bytes` are equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessagesConfig {
    /// Slots per ring; a rank has two rings for each peer, one for its sends.
    pub slots: u32,
    /// Bytes per slot. A route with shorter parts uses less in each.
    pub slot_bytes: u64,
    /// Bytes that a rank moves to buffers for messages without a receive. Each message counts
    /// [`MessagesConfig::BUFFER_OVERHEAD`] bytes in addition to its own.
    pub max_unexpected_bytes: u64,
}

impl Default for MessagesConfig {
    fn default() -> MessagesConfig {
        MessagesConfig { slots: 8, slot_bytes: 64 << 10, max_unexpected_bytes: 64 << 20 }
    }
}

impl MessagesConfig {
    /// Bytes that a buffered message counts in addition to the message bytes.
    pub const BUFFER_OVERHEAD: u64 = 128;
    /// Shortest slot, in bytes.
    pub const MIN_SLOT_BYTES: u64 = 2 * Header::BYTES;
    /// Slot alignment in bytes: a cache line.
    const ALIGNMENT: u64 = 64;

    /// Bytes from one slot to the next.
    pub(super) fn stride(&self) -> u64 {
        self.slot_bytes.next_multiple_of(Self::ALIGNMENT)
    }

    /// Bytes per ring.
    pub(super) fn ring_bytes(&self) -> u64 {
        u64::from(self.slots) * self.stride()
    }

    /// Shortest message that is written from user memory, in bytes; a shorter one is copied to the staging ring, which
    /// costs less than a registration.
    pub(super) fn direct_bytes(&self) -> u64 {
        self.ring_bytes()
    }

    /// Bytes copied for one peer before the writes or credits are submitted, so that the peer works on them meanwhile.
    /// The slot that reaches this limit is still part of the batch.
    pub(super) fn batch_bytes(&self) -> u64 {
        (self.ring_bytes() / 8).min(64 << 10)
    }

    /// Slot bytes that a route uses: a write into a slot is one part.
    ///
    /// # Errors
    /// [`RunError::TooLarge`] if the route's parts are too short.
    pub(super) fn room(&self, parts: PartRule) -> Result<u64, RunError> {
        let unstriped = match parts.stripes {
            0 | 1 => u64::MAX,
            _ => parts.stripe_from.saturating_sub(1),
        };
        let room = self.slot_bytes.min(parts.max_part_bytes).min(unstriped);
        if room < Self::MIN_SLOT_BYTES {
            let (what, wanted) = ("shortest slot in one part, in bytes", Self::MIN_SLOT_BYTES);
            return Err(RunError::TooLarge { what, wanted, limit: room });
        }
        Ok(room)
    }

    /// Rejects limits out of range, and rings for all `ranks` beyond the address space.
    pub(super) fn check(&self, ranks: u32) -> Result<(), RunError> {
        let invalid = |what, value: u64, expected: String| {
            Err(RunError::Invalid { what, detail: format!("{value}: expected {expected}") })
        };
        let most = CounterConfig::MAX_WINDOW;
        if !(1..=most).contains(&self.slots) {
            return invalid("slots", self.slots.into(), format!("1 to {most}"));
        }
        if self.slot_bytes < Self::MIN_SLOT_BYTES {
            let least = Self::MIN_SLOT_BYTES;
            return invalid("slot_bytes", self.slot_bytes, format!("at least {least}"));
        }
        let limit = isize::MAX as u64;
        let ring = u128::from(self.slot_bytes) + u128::from(Self::ALIGNMENT);
        let all = ring * u128::from(self.slots) * u128::from(ranks);
        if all > u128::from(limit) {
            let wanted = u64::try_from(all).unwrap_or(u64::MAX);
            return Err(RunError::TooLarge { what: "ring bytes for all ranks", wanted, limit });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_one_part_of_its_route() {
        let config = MessagesConfig::default();
        assert_eq!(config.room(PartRule::WHOLE).unwrap(), 64 << 10);
        for (rule, expected) in [
            (PartRule { max_part_bytes: 100, ..PartRule::WHOLE }, 100),
            (PartRule { stripes: 2, stripe_from: 9000, ..PartRule::WHOLE }, 8999),
        ] {
            assert_eq!(config.room(rule).unwrap(), expected);
            assert_eq!(rule.count_contiguous(expected), 1);
            assert_eq!(rule.count_contiguous(expected + 1), 2);
        }
        let short = PartRule { max_part_bytes: 63, ..PartRule::WHOLE };
        assert!(matches!(config.room(short), Err(RunError::TooLarge { limit: 63, .. })));
    }

    #[test]
    fn limits_out_of_range_are_rejected() {
        let well = MessagesConfig::default();
        assert!(well.check(4).is_ok());
        for wrong in [
            MessagesConfig { slots: 0, ..well },
            MessagesConfig { slots: CounterConfig::MAX_WINDOW + 1, ..well },
            MessagesConfig { slot_bytes: 63, ..well },
            MessagesConfig { slot_bytes: u64::MAX, ..well },
        ] {
            assert!(wrong.check(4).is_err(), "{wrong:?}");
        }
    }
}
