//! What can go wrong, one variant per cause, worded for whoever must act on it.

use crate::types::{CounterId, ProviderKind, RegionKey, Time};
use std::time::Duration;
use weft_control::{Poison, Rank};

/// The result of a fabric call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// One expectation that a wait had when its deadline passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
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
    /// Memory could not be had.
    #[error("cannot allocate {length} bytes of shareable memory: {source}")]
    Allocate {
        /// Bytes asked for.
        length: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// A NUMA node without memory on this machine.
    #[error(
        "NUMA node {node}: expected a node that has memory (here: {}); pass one of these, or leave numa_node out",
        numbers(.nodes)
    )]
    NoNumaNode {
        /// The node asked for.
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
    /// Huge pages could not be had.
    #[error("{length} bytes in huge pages of 2 MiB: {detail}")]
    HugePages {
        /// Bytes asked for.
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
    /// No provider that both ranks have reaches the peer.
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
    /// A peer's address, descriptor or frame does not have the form it should.
    #[error("{peer} sent {what} that cannot be understood: {detail}")]
    Malformed {
        /// The peer.
        peer: Rank,
        /// What it was.
        what: &'static str,
        /// Why.
        detail: String,
    },
    /// Connecting to a peer failed.
    #[error("cannot connect to {peer} over {provider}: {detail}")]
    Connect {
        /// The peer.
        peer: Rank,
        /// The provider that tried.
        provider: ProviderKind,
        /// Why.
        detail: String,
    },
    /// A pair cannot be formed anew.
    #[error(
        "reform at {rank} of a pair: expected a group that was formed at bootstrap; connect a new pair \
         (weft.connect) in place of this one"
    )]
    ReformOfPair {
        /// The rank that asked.
        rank: Rank,
    },
    /// A provider cannot be opened on this machine.
    #[error("the {provider} provider cannot be used here: {detail}")]
    Provider {
        /// Which.
        provider: ProviderKind,
        /// Why, and what to do.
        detail: String,
    },
    /// Memory of a device was asked for, and no provider has any.
    #[error(
        "no provider has memory of device {device}: add copy to the providers (WEFT_PROVIDERS=copy,tcp)"
    )]
    NoDevices {
        /// The device's ordinal.
        device: u32,
    },
    /// A wait's deadline passed. The write it waited for is not recalled, and the wait may be repeated.
    #[error("{what} did not finish within {waited:?}: {}", missing_text(.missing))]
    Timeout {
        /// What was waited for.
        what: &'static str,
        /// For how long.
        waited: Duration,
        /// Which peers are missing, as far as it is known.
        missing: Vec<Missing>,
    },
    /// The group is poisoned; nothing works on it any more.
    #[error("{0}")]
    Poisoned(Poison),
    /// A write was started in a round for which the owner has not given credit.
    #[error("round {round} of counter {} at {peer} is not open, {credits} credits have come: wait until the peer has released the bytes of an earlier round", .counter.number())]
    NoCredit {
        /// The peer.
        peer: Rank,
        /// The counter.
        counter: CounterId,
        /// The round that was to be written.
        round: u64,
        /// Credits received.
        credits: u64,
    },
    /// A round that is over was named again.
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
    /// A counter was shared a second time.
    #[error("counter {} is shared already: share each counter once", .counter.number())]
    AlreadyLinked {
        /// The counter.
        counter: CounterId,
    },
    /// A credit was given for a round of which nothing has arrived.
    #[error("round {round} of counter {} by {peer} has no arrivals: credit a round once, after it is complete", .counter.number())]
    NothingToCredit {
        /// The peer.
        peer: Rank,
        /// The counter.
        counter: CounterId,
        /// The oldest round without a credit.
        round: u64,
    },
    /// A slice is not inside its region.
    #[error("bytes {offset}..{end} are outside of {side} region {}, which has {length}", .key.0, end = .offset.saturating_add(*.wanted))]
    OutOfRange {
        /// `local` or `remote`.
        side: &'static str,
        /// The region.
        key: RegionKey,
        /// First byte.
        offset: u64,
        /// Bytes wanted.
        wanted: u64,
        /// Bytes there are.
        length: u64,
    },
    /// A region, counter or rank that this engine does not know.
    #[error("{what} {number} is not known to this engine")]
    Unknown {
        /// `region`, `counter`, `rank`, `request`.
        what: &'static str,
        /// Its number.
        number: u64,
    },
    /// A limit that was set at construction.
    #[error("{what}: {wanted} wanted, the limit is {limit}")]
    Limit {
        /// Of what.
        what: &'static str,
        /// How many were wanted.
        wanted: u64,
        /// How many there are.
        limit: u64,
    },
    /// A collective call while the same one is under way, in another thread or below a signal handler.
    #[error(
        "{call}: expected one call of this process at a time, and one is under way; call it after that \
         has returned"
    )]
    UnderWay {
        /// The call.
        call: &'static str,
    },
    /// Another rank refused its own arguments of a call that all ranks make.
    #[error("{call}: {peer} refused what it passed: {detail}; nothing was granted")]
    PeerRefused {
        /// The call.
        call: &'static str,
        /// The rank that refused.
        peer: Rank,
        /// Its error.
        detail: String,
    },
    /// A provider cannot use memory of this kind.
    #[error("{provider} cannot use region {} : {detail}", .key.0)]
    Unusable {
        /// The provider.
        provider: ProviderKind,
        /// The region.
        key: RegionKey,
        /// Why, and what to do instead.
        detail: String,
    },
    /// A wait was interrupted by a signal.
    #[error("interrupted")]
    Interrupted,
    /// The control plane failed.
    #[error(transparent)]
    Control(#[from] weft_control::Error),
    /// The system refused something.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What it said.
        source: std::io::Error,
    },
}

impl Error {
    /// The system refused `what`.
    pub fn system(what: &'static str, source: impl Into<std::io::Error>) -> Error {
        Error::System { what, source: source.into() }
    }

    /// `what` was still missing `missing` at `now`, having waited since `since`.
    pub fn timeout(what: &'static str, since: Time, now: Time, missing: Vec<Missing>) -> Error {
        Error::Timeout { what, waited: now.since(since), missing }
    }
}

/// Numbers with commas between them.
fn numbers(list: &[u32]) -> String {
    let list: Vec<String> = list.iter().map(u32::to_string).collect();
    list.join(", ")
}

/// Who is missing, in words.
pub fn missing_text(missing: &[Missing]) -> String {
    if missing.is_empty() {
        return "nothing is known of who is missing".into();
    }
    let list: Vec<String> =
        missing.iter().map(|m| format!("{} raised {} of {}", m.rank, m.seen, m.expected)).collect();
    list.join(", ")
}
