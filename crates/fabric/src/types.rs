//! Identities and units, a type for each.

use std::fmt;
use std::time::Duration;

/// Instant on the clock that a poll's caller supplies, in nanoseconds from an arbitrary origin.
///
/// Engines in a process use the host's monotonic clock ([`crate::clock::now`]), the simulator a virtual
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(pub u64);

impl Time {
    /// The largest instant: "no deadline" in arithmetic, never in a wait.
    pub const MAX: Time = Time(u64::MAX);

    /// This instant plus `duration`, saturating.
    pub fn after(self, duration: Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Duration since `earlier`; zero if `earlier` is later.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Group generation; 8 bits on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Generation(pub u8);

/// Lane number in the owner's table: 24 bits, issued by the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneId(u32);

impl LaneId {
    /// Number of lanes that 24 bits can name.
    pub const LIMIT: u32 = 1 << 24;

    /// Lane with this number, or `None` if it does not fit into 24 bits.
    pub fn new(number: u32) -> Option<LaneId> {
        (number < Self::LIMIT).then_some(LaneId(number))
    }

    /// The lane's number.
    pub fn get(self) -> u32 {
        self.0
    }
}

/// Lane on the wire: the owner's number and the generation in which it was issued.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lane(u32);

impl Lane {
    /// Lane with this number, issued in this generation.
    pub fn new(id: LaneId, generation: Generation) -> Lane {
        Lane(id.get() << 8 | u32::from(generation.0))
    }

    /// The owner's number.
    pub fn id(self) -> LaneId {
        LaneId(self.0 >> 8)
    }

    /// The generation it was issued in.
    pub fn generation(self) -> Generation {
        Generation(self.0 as u8)
    }

    /// Immediate data, 32 bits: the id in the high 24, the generation in the low 8. For example, lane 5
    /// of generation 2 is 0x0502.
    pub fn immediate(self) -> u32 {
        self.0
    }

    /// Lane that 32 bits of immediate data name.
    pub const fn from_immediate(immediate: u32) -> Lane {
        Lane(immediate)
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lane({} of generation {})", self.id().get(), self.generation().0)
    }
}

/// Region number in the owner's engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionKey(pub u32);

impl RegionKey {
    /// The first of the keys that engines do not assign; a wrapper's own regions have them.
    pub(crate) const HIGH: u32 = 1 << 31;
}

/// Counter in this engine: index in the low 24 bits, reuse count for that index in the high 8. Grants
/// link counters by position (see [`crate::Engine::import`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CounterId(u32);

impl CounterId {
    /// Counter limit in one engine.
    pub const LIMIT: u32 = 1 << 24;

    /// The counter at `index` after `reuse` releases, or `None` if the index needs more than 24 bits.
    pub fn new(index: u32, reuse: u8) -> Option<CounterId> {
        (index < Self::LIMIT).then_some(CounterId(u32::from(reuse) << 24 | index))
    }

    /// The counter with this number.
    pub fn from_number(number: u32) -> CounterId {
        CounterId(number)
    }

    /// Index and reuse count in one number.
    pub fn number(self) -> u32 {
        self.0
    }

    #[inline]
    pub(crate) fn index(self) -> usize {
        (self.0 & (Self::LIMIT - 1)) as usize
    }

    /// Next counter at the same index; `None` after 256 counters, when the index is retired.
    pub(crate) fn renewed(self) -> Option<CounterId> {
        let reuse = ((self.0 >> 24) as u8).checked_add(1)?;
        CounterId::new(self.index() as u32, reuse)
    }
}

/// Request id; `request.rs` describes the request states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId {
    pub(crate) index: u32,
    pub(crate) reuse: u32,
}

/// Slice in a local region and a destination in a peer's region, with equal length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// The local region that is read.
    pub source: RegionKey,
    /// First byte read.
    pub source_offset: u64,
    /// The peer's region that is written.
    pub destination: RegionKey,
    /// First byte written.
    pub destination_offset: u64,
    /// Bytes; may be zero.
    pub length: u64,
}

impl Page {
    /// True if `next` begins where this page ends, at the source and at the destination.
    #[inline]
    pub(crate) fn is_continued_by(&self, next: &Page) -> bool {
        self.source == next.source
            && self.destination == next.destination
            && self.source_offset.checked_add(self.length) == Some(next.source_offset)
            && self.destination_offset.checked_add(self.length) == Some(next.destination_offset)
    }
}

/// Total bytes in these pages.
pub(crate) fn bytes_of(pages: &[Page]) -> u64 {
    pages.iter().fold(0, |sum, page| sum.saturating_add(page.length))
}

/// Traffic class for a counter. Bulk transfers never delay latency-critical ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum TrafficClass {
    /// Small or urgent: queries, pages, counts, credits.
    #[default]
    Latency,
    /// Large transfers, such as KV caches, that may wait behind latency-critical ones.
    Bulk,
}

/// Provider kind, in the order in which a route prefers them. `registry.rs` describes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ProviderKind {
    /// Ranks in one process under virtual time.
    Sim = 0,
    /// Ranks on one host over shared mappings, and GPUs by copy engines.
    Copy = 1,
    /// Ranks on one host over shared mappings.
    Shm = 2,
    /// InfiniBand and RoCE by libibverbs.
    Verbs = 3,
    /// Libfabric networks, such as EFA.
    Ofi = 4,
    /// Any host over sockets.
    Tcp = 5,
}

impl ProviderKind {
    /// The kind with this number on the wire.
    pub fn from_wire(byte: u8) -> Option<ProviderKind> {
        use ProviderKind::{Copy, Ofi, Shm, Sim, Tcp, Verbs};
        [Sim, Copy, Shm, Verbs, Ofi, Tcp].into_iter().find(|kind| *kind as u8 == byte)
    }

    /// Name in configuration and records.
    pub fn name(self) -> &'static str {
        match self {
            ProviderKind::Sim => "sim",
            ProviderKind::Copy => "copy",
            ProviderKind::Shm => "shm",
            ProviderKind::Verbs => "verbs",
            ProviderKind::Ofi => "ofi",
            ProviderKind::Tcp => "tcp",
        }
    }
}

impl fmt::Display for ProviderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
