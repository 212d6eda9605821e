//! Configuration, and counters.

use super::super::copy::{CopyBackend, CopyEngine};
use super::mode::StagedMode;
use super::wire::HEADER_ROOM;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// [`super::StagedDevice`] configuration.
#[derive(Clone, Debug)]
pub struct StagedConfig {
    /// Condition for slots on a route.
    pub mode: StagedMode,
    /// Copy engines, opened with the first GPU region.
    pub engines: CopyBackend,
    /// Slots in each direction for each peer, 1 to 1024; a pair uses the smaller number.
    pub slots: u32,
    /// Bytes in a slot, header included, up to 1 GiB; a pair uses the smaller number. No part is longer.
    pub slot_bytes: u64,
    /// Time limit for copies in flight when a peer is fenced or the link is dropped.
    pub drain_timeout: Duration,
}

impl Default for StagedConfig {
    /// Four slots of 1 MiB and a header's room in each direction, on every route. The first grant registers
    /// them with the inner link: NICs lock them then.
    fn default() -> StagedConfig {
        StagedConfig {
            mode: StagedMode::Always,
            engines: CopyBackend::default(),
            slots: 4,
            slot_bytes: (1 << 20) + HEADER_ROOM,
            drain_timeout: Duration::from_secs(5),
        }
    }
}

/// Counts for all links on a device.
#[derive(Debug, Default)]
pub struct StagedCounters {
    /// Parts that were posted into slots.
    pub staged_parts: AtomicU64,
    /// Slots, headers and raises that violated the protocol; each cost the peer the connection.
    pub refused_slots: AtomicU64,
}

/// Constructor for copy engines. An error is the cause.
pub(super) type OpenEngine =
    dyn Fn() -> std::result::Result<Box<dyn CopyEngine>, String> + Send + Sync;
