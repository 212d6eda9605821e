//! Identities and units: what a number means is its type.

use std::fmt;
use std::time::Duration;

/// A point on the clock that the caller of a poll supplies, in nanoseconds from an arbitrary origin.
///
/// Real engines use the monotonic clock of the host ([`crate::clock::now`]); the simulator its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(pub u64);

impl Time {
    /// The last instant that can be named: "no deadline" in arithmetic, never in a wait.
    pub const MAX: Time = Time(u64::MAX);

    /// This instant plus `duration`, saturating.
    pub fn after(self, duration: Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// How long after `earlier` this is; zero if it is not.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Which incarnation of a group a lane or a connection belongs to; 8 bits travel on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Generation(pub u8);

/// A lane's number in its owner's table: 24 bits, issued by the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneId(u32);

impl LaneId {
    /// The number of lanes that 24 bits can name.
    pub const LIMIT: u32 = 1 << 24;

    /// The lane of this number, or `None` if it does not fit into 24 bits.
    pub fn new(number: u32) -> Option<LaneId> {
        (number < Self::LIMIT).then_some(LaneId(number))
    }

    /// The lane's number.
    pub fn get(self) -> u32 {
        self.0
    }
}

/// A lane as it is named on the wire: the owner's number for it and the generation it was issued in.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lane(u32);

impl Lane {
    /// The lane of this number, issued in this generation.
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

    /// The 32 bits of immediate data: the id in the high 24, the generation in the low 8.
    pub fn immediate(self) -> u32 {
        self.0
    }

    /// The lane that 32 bits of immediate data name.
    pub fn from_immediate(immediate: u32) -> Lane {
        Lane(immediate)
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lane({} of generation {})", self.id().get(), self.generation().0)
    }
}

/// A region's number in its owner's engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionKey(pub u32);

/// A counter's number in this engine. Ranks that create their counters in the same order link
/// those of equal position (see [`crate::Engine::import`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CounterId(pub u32);

/// A request in the life that `request.rs` describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId {
    pub(crate) index: u32,
    pub(crate) reuse: u32,
}

/// A slice of a local region that goes to a slice of equal length of a peer's region.
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

/// The kinds of provider, in the order in which a route prefers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ProviderKind {
    /// Many ranks in one process under virtual time.
    Sim = 0,
    /// Ranks of one host over shared mappings, and their devices by copy engines.
    Copy = 1,
    /// Ranks of one host over shared mappings.
    Shm = 2,
    /// Any host over sockets.
    Tcp = 5,
}

impl ProviderKind {
    /// The kind that a peer's byte names.
    pub fn from_wire(byte: u8) -> Option<ProviderKind> {
        [ProviderKind::Sim, ProviderKind::Copy, ProviderKind::Shm, ProviderKind::Tcp]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }

    /// The name that users write and read.
    pub fn name(self) -> &'static str {
        match self {
            ProviderKind::Sim => "sim",
            ProviderKind::Copy => "copy",
            ProviderKind::Shm => "shm",
            ProviderKind::Tcp => "tcp",
        }
    }
}

impl fmt::Display for ProviderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
