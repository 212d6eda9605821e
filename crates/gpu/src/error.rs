//! What can go wrong, one variant per cause, worded for whoever must act on it.

use crate::watch::{Phase, Report};
use std::path::PathBuf;
use weft_control::Rank;

/// The result of a call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a heap, a kernel or a wait on the device failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A heap of no bytes, or a group of no ranks.
    #[error(
        "a heap needs at least one byte and one rank; {bytes} bytes at {ranks} ranks were asked for"
    )]
    Empty {
        /// Bytes asked for.
        bytes: u64,
        /// Ranks asked for.
        ranks: usize,
    },
    /// The list of offers does not fit to this rank.
    #[error(
        "rank {rank} was to connect its heap with {offers} offers, of which the one at its own place is \
         not its own: gather the offers of all ranks in rank order"
    )]
    WrongOffers {
        /// The rank.
        rank: u32,
        /// The offers given.
        offers: usize,
    },
    /// A peer's offer does not have the form it should.
    #[error(
        "{peer} sent an offer of memory that cannot be understood: {detail}; run one version of Weft on every rank"
    )]
    Malformed {
        /// The peer.
        peer: Rank,
        /// What is wrong with it.
        detail: String,
    },
    /// A peer made another heap.
    #[error(
        "{peer} has a heap of {theirs}, this rank one of {ours}: give every rank the same configuration"
    )]
    Disagreement {
        /// The peer.
        peer: Rank,
        /// What this rank has.
        ours: String,
        /// What the peer has.
        theirs: String,
    },
    /// A peer is not on this host.
    #[error(
        "{peer} is on another host ({detail}): a heap joins the memory of ranks of one host only; make \
         the group of ranks that share a host"
    )]
    OtherHost {
        /// The peer.
        peer: Rank,
        /// How that is known.
        detail: String,
    },
    /// A peer is on this host, but descriptors cannot be passed to it.
    #[error(
        "{peer} is on this host but {detail}, so memory cannot be passed to it by descriptor: {remedy}"
    )]
    Namespace {
        /// The peer.
        peer: Rank,
        /// What separates them.
        detail: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The peer's descriptor could not be fetched.
    #[error("{source}; {remedy}")]
    Exchange {
        /// What the sockets said; it names the peer.
        source: weft_fabric::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// Two GPUs do not reach each other's memory.
    #[error(
        "the GPU of rank {rank} ({here}) cannot access the memory of the GPU of {peer} ({there}): the \
         two need NVLink, or PCIe with peer-to-peer access (`nvidia-smi topo -p2p r` shows which do); \
         choose GPUs that have it"
    )]
    NoPeerAccess {
        /// This rank.
        rank: u32,
        /// The peer.
        peer: Rank,
        /// This rank's GPU.
        here: String,
        /// The peer's GPU.
        there: String,
    },
    /// A peer's memory cannot be mapped.
    #[error("rank {rank} ({here}) cannot map the memory of {peer} ({there}): {source}; {remedy}")]
    Map {
        /// This rank.
        rank: u32,
        /// The peer.
        peer: Rank,
        /// This rank's GPU.
        here: String,
        /// The peer's GPU.
        there: String,
        /// What CUDA said.
        source: Box<weft_cuda::Error>,
        /// What to do.
        remedy: &'static str,
    },
    /// A GPU's memory was asked for on the CPU.
    #[error(
        "memory=\"twin\" is the CPU's, and {device} is a GPU: its heap is memory=\"fd\" or \"ipc\""
    )]
    TwinOnDevice {
        /// The GPU.
        device: String,
    },
    /// A peer failed where all must succeed.
    #[error("{peer} could not make its part of the heap: {detail}")]
    Peer {
        /// The peer.
        peer: Rank,
        /// What it said.
        detail: String,
    },
    /// No kernel has this name.
    #[error("there is no kernel source {name:?} in this build; it has {known}")]
    NoKernel {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// A compile-time constant cannot be one.
    #[error(
        "{name:?} cannot be defined for a kernel: a name is a letter or _, then letters, digits and _"
    )]
    Define {
        /// Its name.
        name: String,
    },
    /// What was compiled ahead of time cannot be kept.
    #[error("compiled kernels cannot be kept in {}: {detail}; set WEFT_CACHE_DIR to a folder that can be written", .directory.display())]
    Cache {
        /// The folder.
        directory: PathBuf,
        /// What is wrong with it.
        detail: String,
    },
    /// A wait on the device expired.
    #[error(
        "{rank} waited {}in {phase} (channel {channel}, slot {slot}) and gave up: epoch {expected} was \
         expected, {seen} was seen; {} is lost, stuck or further behind than skew_timeout allows",
        for_whom(.peer), who(.peer, "a peer")
    )]
    Timeout {
        /// Who waited.
        rank: Rank,
        /// Where.
        phase: Phase,
        /// For whom.
        peer: Option<Rank>,
        /// The channel.
        channel: u32,
        /// The row.
        slot: u32,
        /// The epoch that was waited for.
        expected: u64,
        /// The epoch that was there.
        seen: u64,
    },
    /// The host ended the waits on the device.
    #[error(
        "{rank} stopped in {phase} (channel {channel}): its host ended all waits, because the group failed or was closed"
    )]
    Aborted {
        /// Who stopped.
        rank: Rank,
        /// Where.
        phase: Phase,
        /// The channel.
        channel: u32,
    },
    /// Two launches at once on one channel.
    #[error(
        "{rank} launched {phase} on channel {channel} while an earlier launch on it was still running: \
         use one stream for a channel, or order the streams with events"
    )]
    Overlap {
        /// Who launched.
        rank: Rank,
        /// What.
        phase: Phase,
        /// The channel.
        channel: u32,
    },
    /// The phases of a round out of order.
    #[error(
        "{rank} launched {phase} of round {expected} on channel {channel} where the phase before it has \
         come to round {seen}{}",
        each_round(.order)
    )]
    OutOfOrder {
        /// Who launched.
        rank: Rank,
        /// What.
        phase: Phase,
        /// The channel.
        channel: u32,
        /// The round of the launch.
        expected: u64,
        /// The round of the phase before it.
        seen: u64,
        /// The order of phases in a round; empty if it is not known.
        order: &'static str,
    },
    /// What only kernels of one family record.
    #[error("{}", .0.text)]
    Reported(Report),
    /// A group too large for the table.
    #[error(
        "{ranks} ranks: the table of a domain has room for {most}; make the group of fewer ranks"
    )]
    TooManyRanks {
        /// Ranks.
        ranks: u32,
        /// The most.
        most: u32,
    },
    /// Launches that cannot all be on the GPU at once.
    #[error(
        "{wanted}: cannot be on the GPU's {sms} multiprocessors at once with {beside}; kernels that wait for \
         peers would keep each other out for ever: pass a smaller num_sms, close what is not needed, or \
         concurrent=False if one stream orders its calls with those of others"
    )]
    NotResident {
        /// The operator to be made.
        wanted: String,
        /// The operators that there are.
        beside: String,
        /// Multiprocessors of the GPU, or of this rank's part of it.
        sms: u32,
    },
    /// Two families with the same numbers.
    #[error("the family {family} has phases or codes that {other} has too: give it others")]
    Families {
        /// The family to be added.
        family: &'static str,
        /// Whose numbers they are.
        other: &'static str,
    },
    /// A record that this build does not know.
    #[error(
        "the device recorded code {code} at {rank} in {phase}{} (expected {expected}, seen {seen}), which \
         this build does not know: its memory is damaged, or kernels of another version ran",
        .peer.map(|peer| format!(" about {peer}")).unwrap_or_default()
    )]
    UnknownRecord {
        /// Who recorded.
        rank: Rank,
        /// The number.
        code: u32,
        /// Where.
        phase: Phase,
        /// About whom.
        peer: Option<Rank>,
        /// A number.
        expected: u64,
        /// Another.
        seen: u64,
    },
    /// CUDA failed, or is not here.
    #[error(transparent)]
    Cuda(#[from] weft_cuda::Error),
    /// The fabric or the control plane failed.
    #[error(transparent)]
    Fabric(#[from] weft_fabric::Error),
}

fn for_whom(peer: &Option<Rank>) -> String {
    peer.map(|peer| format!("for {peer} ")).unwrap_or_default()
}

fn who(peer: &Option<Rank>, nobody: &str) -> String {
    peer.map_or(nobody.to_owned(), |peer| peer.to_string())
}

fn each_round(order: &str) -> String {
    if order.is_empty() { String::new() } else { format!(": each round is {order}") }
}
