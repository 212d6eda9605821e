//! Fabric errors, one variant per cause, each with a remedy.

use crate::types::{CounterId, ProviderKind, RegionKey, Time};
use std::net::SocketAddr;
use std::time::Duration;
use weft_control::{Poison, Rank, Rounded, limits};

/// Result from a fabric call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Raises that a wait lacked from one peer at the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingPeer {
    /// Peer that has not raised the lane far enough.
    pub rank: Rank,
    /// Raises expected in this round.
    pub expected: u64,
    /// Raises seen.
    pub seen: u64,
}

/// Fabric error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Shareable memory could not be allocated.
    #[error("cannot allocate {length} bytes of shareable memory: {}", limits::described(.source))]
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
    /// Device memory could not be exported as a dma-buf.
    #[error("memory of device {device} as a dma-buf: {source}")]
    DmaBuf {
        /// The device's ordinal.
        device: u32,
        /// Driver error, with a remedy.
        source: Box<weft_cuda::Error>,
    },
    /// No common provider reaches the peer.
    #[error(
        "no provider reaches {peer}: this rank has {here}, the peer has {there}; enable one that both have (WEFT_PROVIDERS; for ofi WEFT_OFI_PROVIDER), and set WEFT_STAGED=1 on all ranks or none"
    )]
    NoRoute {
        /// The peer.
        peer: Rank,
        /// Provider kinds here.
        here: String,
        /// Provider kinds there.
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
        /// Provider that was tried.
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
        /// Calling rank.
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
        "no provider has memory of device {device}: add copy to the providers (WEFT_PROVIDERS=copy,tcp), use tcp (WEFT_PROVIDERS=tcp), or set WEFT_STAGED=1 on all ranks"
    )]
    NoDevices {
        /// The device's ordinal.
        device: u32,
    },
    /// A wait passed the deadline. The write stays in flight, and the wait may be repeated.
    #[error("{what} did not finish within {}: {}", Rounded(*waited), missing_text(.missing))]
    Timeout {
        /// The operation.
        what: &'static str,
        /// Time waited.
        waited: Duration,
        /// Peers that the wait lacks, as far as the engine can name them.
        missing: Vec<MissingPeer>,
    },
    /// No pair was formed before an accept deadline.
    #[error(
        "accept at {address}: no pair was formed within {}; check that the other process connects to this address, \
         with the same secret and a provider of this listener",
        Rounded(*waited)
    )]
    NoDialer {
        /// Listener address.
        address: SocketAddr,
        /// Time waited.
        waited: Duration,
    },
    /// Call on a pair listener that was closed.
    #[error("the listener at {address} was closed: listen again")]
    ListenerClosed {
        /// Former listener address.
        address: SocketAddr,
    },
    /// The group is poisoned: every operation fails.
    #[error("{0}")]
    Poisoned(Poison),
    /// A write in a round without credit.
    #[error("round {round} of counter {} at {peer} is not open, {credits} credits have come: wait until the peer has released the bytes of an earlier round", .counter.number())]
    NoCredit {
        /// The peer.
        peer: Rank,
        /// The counter.
        counter: CounterId,
        /// Round that the write named.
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
    /// A counter was used before grants were exchanged.
    #[error("counter {} is not shared: share it with the peers first", .counter.number())]
    NotLinked {
        /// The counter.
        counter: CounterId,
    },
    /// A counter was shared twice.
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
    /// A slice outside the region.
    #[error("bytes {offset}..{end} are outside of {side} region {}, which has {length}", .key.0, end = .offset.saturating_add(*.wanted))]
    OutOfRange {
        /// `local` or `remote`.
        side: &'static str,
        /// The region.
        key: RegionKey,
        /// First byte.
        offset: u64,
        /// Slice length.
        wanted: u64,
        /// Region length.
        length: u64,
    },
    /// A region, counter or rank id that this engine lacks.
    #[error("{what} {number}: {}", expected_in_place_of(what))]
    Unknown {
        /// `region`, `counter`, `rank`, `request`.
        what: &'static str,
        /// Id number.
        number: u64,
    },
    /// A configuration or protocol limit was reached.
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
    /// A peer rejected the arguments that it passed to a collective call.
    #[error("{call}: {peer} rejected its arguments: {detail}; no rank has granted anything")]
    PeerRefused {
        /// The call.
        call: &'static str,
        /// The rank that refused.
        peer: Rank,
        /// The peer's error.
        detail: String,
    },
    /// A provider cannot use this kind of memory.
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
    #[error("{what}: {}", limits::described(.source))]
    System {
        /// The operation that failed.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
}

impl Error {
    /// Error from a failed system call.
    pub fn system(what: &'static str, source: impl Into<std::io::Error>) -> Error {
        Error::System { what, source: source.into() }
    }

    /// Timeout for an operation that lacked `missing` at `now`, after a wait since `since`.
    pub fn timeout(what: &'static str, since: Time, now: Time, missing: Vec<MissingPeer>) -> Error {
        Error::Timeout { what, waited: now.since(since), missing }
    }
}

/// Comma-separated numbers.
fn numbers(list: &[u32]) -> String {
    let list: Vec<String> = list.iter().map(u32::to_string).collect();
    list.join(", ")
}

/// Expectation to print for an unknown rank, region, counter or request.
fn expected_in_place_of(what: &str) -> &'static str {
    match what {
        "rank" => "expected a peer, another rank of this group",
        _ => "expected one of this communicator; it was released, or belongs to another",
    }
}

/// Text that names the peers a wait lacks.
pub fn missing_text(missing: &[MissingPeer]) -> String {
    if missing.is_empty() {
        return "no peer is known to block it".into();
    }
    let list: Vec<String> =
        missing.iter().map(|m| format!("{} raised {} of {}", m.rank, m.seen, m.expected)).collect();
    list.join(", ")
}
