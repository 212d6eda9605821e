//! Errors of the fabric, one variant per cause, each with its remedy.

use crate::types::{CounterId, ProviderKind, RegionKey, Time};
use std::time::Duration;
use weft_control::{Poison, Rank};

/// The result of a fabric call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Raises that a wait lacked from one peer at its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingPeer {
    /// The peer that has not raised its lane far enough.
    pub rank: Rank,
    /// Raises expected in this round.
    pub expected: u64,
    /// Raises seen.
    pub seen: u64,
}

/// An error of the fabric.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Shareable memory could not be allocated.
    #[error("cannot allocate {length} bytes of shareable memory: {source}")]
    Allocate {
        /// Bytes requested.
        length: usize,
        /// The system's error.
        source: std::io::Error,
    },
    /// A NUMA node without memory on this machine.
    #[error(
        "NUMA node {node}: expected a node that has memory (here: {}); pass one of these, or leave numa_node out",
        numbers(.nodes)
    )]
    NoNumaNode {
        /// The node requested.
        node: u32,
        /// The nodes that have memory.
        nodes: Vec<u32>,
    },
    /// The system refused to bind pages to a NUMA node.
    #[error(
        "memory of NUMA node {node}: the system refused to bind pages to it ({source}); {remedy}"
    )]
    NumaBind {
        /// The node.
        node: u32,
        /// The system's error.
        source: std::io::Error,
        /// The remedy.
        remedy: &'static str,
    },
    /// Huge pages could not be allocated.
    #[error("{length} bytes in huge pages of 2 MiB: {detail}")]
    HugePages {
        /// Bytes requested.
        length: usize,
        /// Pages needed and free, and the remedy.
        detail: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// Memory of a device could not be exported as a dma-buf.
    #[error("memory of device {device} as a dma-buf: {source}")]
    DmaBuf {
        /// The device's ordinal.
        device: u32,
        /// The driver's error, with its remedy.
        source: Box<weft_cuda::Error>,
    },
    /// No common provider reaches the peer.
    #[error(
        "no provider reaches {peer}: this rank has {here}, the peer has {there}; enable one that both have (WEFT_PROVIDERS; for ofi WEFT_OFI_PROVIDER)"
    )]
    NoRoute {
        /// The peer.
        peer: Rank,
        /// Kinds of provider here.
        here: String,
        /// Kinds of provider there.
        there: String,
    },
    /// A peer's address, descriptor or frame is malformed.
    #[error("{peer} sent {what} that is malformed: {detail}")]
    Malformed {
        /// The peer.
        peer: Rank,
        /// The malformed item.
        what: &'static str,
        /// The cause.
        detail: String,
    },
    /// Connecting to a peer failed.
    #[error("cannot connect to {peer} over {provider}: {detail}")]
    Connect {
        /// The peer.
        peer: Rank,
        /// The provider of the attempt.
        provider: ProviderKind,
        /// The cause.
        detail: String,
    },
    /// `reform` of a pair.
    #[error(
        "reform at {rank} of a pair: expected a group that was formed by a rendezvous; connect a new pair \
         (weft.connect) in place of this one"
    )]
    ReformOfPair {
        /// The rank of the call.
        rank: Rank,
    },
    /// A provider cannot be opened on this machine.
    #[error("the {provider} provider cannot be used here: {detail}")]
    Provider {
        /// The provider.
        provider: ProviderKind,
        /// The cause, and the remedy.
        detail: String,
    },
    /// Device memory was requested without a provider that has any.
    #[error(
        "no provider has memory of device {device}: add copy to the providers (WEFT_PROVIDERS=copy,tcp)"
    )]
    NoDevices {
        /// The device's ordinal.
        device: u32,
    },
    /// A wait passed its deadline. The write stays in flight, and the wait may be repeated.
    #[error("{what} did not finish within {waited:?}: {}", missing_text(.missing))]
    Timeout {
        /// The operation.
        what: &'static str,
        /// Duration of the wait.
        waited: Duration,
        /// Peers that the wait lacks, as far as the engine can name them.
        missing: Vec<MissingPeer>,
    },
    /// The group is poisoned: each of its operations fails.
    #[error("{0}")]
    Poisoned(Poison),
    /// A write in a round without credit.
    #[error("round {round} of counter {} at {peer} is not open, {credits} credits have come: wait until the peer has released the bytes of an earlier round", .counter.number())]
    NoCredit {
        /// The peer.
        peer: Rank,
        /// The counter.
        counter: CounterId,
        /// The round of the write.
        round: u64,
        /// Credits received.
        credits: u64,
    },
    /// An operation in a round that is over.
    #[error("round {round} of counter {} at {peer} is over; the current one is {current}", .counter.number())]
    OldRound {
        /// The peer.
        peer: Rank,
        /// The counter.
        counter: CounterId,
        /// The round named.
        round: u64,
        /// The current round.
        current: u64,
    },
    /// A counter was used before its grants were exchanged.
    #[error("counter {} is not shared: share it with the peers first", .counter.number())]
    NotLinked {
        /// The counter.
        counter: CounterId,
    },
    /// A second share of a counter.
    #[error("counter {} is shared already: share each counter once", .counter.number())]
    AlreadyLinked {
        /// The counter.
        counter: CounterId,
    },
    /// A credit for a round without arrivals.
    #[error("round {round} of counter {} by {peer} has no arrivals: credit a round once, after it is complete", .counter.number())]
    NothingToCredit {
        /// The peer.
        peer: Rank,
        /// The counter.
        counter: CounterId,
        /// The oldest round without a credit.
        round: u64,
    },
    /// A slice outside of its region.
    #[error("bytes {offset}..{end} are outside of {side} region {}, which has {length}", .key.0, end = .offset.saturating_add(*.wanted))]
    OutOfRange {
        /// `local` or `remote`.
        side: &'static str,
        /// The region.
        key: RegionKey,
        /// First byte.
        offset: u64,
        /// Length of the slice.
        wanted: u64,
        /// Length of the region.
        length: u64,
    },
    /// An id of a region, counter or rank that this engine lacks.
    #[error("{what} {number}: not part of this engine")]
    Unknown {
        /// `region`, `counter`, `rank`, `request`.
        what: &'static str,
        /// Its number.
        number: u64,
    },
    /// A limit of the configuration or the protocol was reached.
    #[error("{what}: {wanted} wanted, the limit is {limit}")]
    Limit {
        /// The limited quantity.
        what: &'static str,
        /// The number requested.
        wanted: u64,
        /// The limit.
        limit: u64,
    },
    /// A collective call while the same call is in progress, in another thread or below a signal handler.
    #[error(
        "{call}: expected one call of this process at a time, and one is in progress; call it after that \
         has returned"
    )]
    InProgress {
        /// The call.
        call: &'static str,
    },
    /// A peer rejected its own arguments of a collective call.
    #[error("{call}: {peer} rejected its arguments: {detail}; no rank has granted anything")]
    PeerRefused {
        /// The call.
        call: &'static str,
        /// The rank that refused.
        peer: Rank,
        /// Its error.
        detail: String,
    },
    /// A provider cannot use memory of this kind.
    #[error("{provider} cannot use region {}: {detail}", .key.0)]
    Unusable {
        /// The provider.
        provider: ProviderKind,
        /// The region.
        key: RegionKey,
        /// The cause, and the alternative.
        detail: String,
    },
    /// A wait was interrupted by a signal.
    #[error("interrupted")]
    Interrupted,
    /// The control plane failed.
    #[error(transparent)]
    Control(#[from] weft_control::Error),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The operation that failed.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
}

impl Error {
    /// Error of a failed system call.
    pub fn system(what: &'static str, source: impl Into<std::io::Error>) -> Error {
        Error::System { what, source: source.into() }
    }

    /// Timeout of an operation that lacked `missing` at `now`, after a wait since `since`.
    pub fn timeout(what: &'static str, since: Time, now: Time, missing: Vec<MissingPeer>) -> Error {
        Error::Timeout { what, waited: now.since(since), missing }
    }
}

/// Comma-separated numbers.
fn numbers(list: &[u32]) -> String {
    let list: Vec<String> = list.iter().map(u32::to_string).collect();
    list.join(", ")
}

/// Text of the peers that a wait lacks.
pub fn missing_text(missing: &[MissingPeer]) -> String {
    if missing.is_empty() {
        return "the missing peers are unknown".into();
    }
    let list: Vec<String> =
        missing.iter().map(|m| format!("{} raised {} of {}", m.rank, m.seen, m.expected)).collect();
    list.join(", ")
}
