//! Errors of this crate, one variant per cause.

use crate::phase::{Phase, Report};
use std::path::PathBuf;
use weft_control::Rank;

/// Result of a call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Failure of a heap, a kernel or a wait on the device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Heap without bytes or ranks.
    #[error("heap of {bytes} bytes at {ranks} ranks: expected at least one byte and one rank")]
    Empty {
        /// Bytes.
        bytes: u64,
        /// Ranks.
        ranks: usize,
    },
    /// Offers that are not those of all ranks in rank order.
    #[error(
        "{offers} offers at rank {rank}: expected its own offer at index {rank}; gather the offers of all ranks \
         in rank order"
    )]
    WrongOffers {
        /// The rank.
        rank: u32,
        /// Number of offers.
        offers: usize,
    },
    /// Malformed offer of a peer.
    #[error(
        "malformed offer of memory from {peer}: {detail}; run one version of Weft on all ranks"
    )]
    Malformed {
        /// The peer.
        peer: Rank,
        /// Reason.
        detail: String,
    },
    /// Heap of a peer with another size or kind.
    #[error(
        "heap of {theirs} at {peer}: expected {ours}, as at this rank; use one configuration on all ranks"
    )]
    Disagreement {
        /// The peer.
        peer: Rank,
        /// Heap of this rank.
        ours: String,
        /// Heap of the peer.
        theirs: String,
    },
    /// Peer on another host.
    #[error(
        "{peer} is on another host ({detail}): the ranks of a heap share one host; make the group of ranks \
         of one host"
    )]
    OtherHost {
        /// The peer.
        peer: Rank,
        /// Evidence.
        detail: String,
    },
    /// Peer on this host that descriptors cannot be passed to.
    #[error(
        "{peer} is on this host but {detail}, so memory cannot be passed to it by descriptor: {remedy}"
    )]
    Namespace {
        /// The peer.
        peer: Rank,
        /// Difference between the two processes.
        detail: String,
        /// Remedy.
        remedy: &'static str,
    },
    /// Failed exchange of descriptors.
    #[error("{source}; {remedy}")]
    Exchange {
        /// Error of the socket, which names the peer.
        source: weft_fabric::Error,
        /// Remedy.
        remedy: &'static str,
    },
    /// GPUs without peer access.
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
    /// Failed mapping of a peer's memory.
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
        /// CUDA's error.
        source: Box<weft_cuda::Error>,
        /// Remedy.
        remedy: &'static str,
    },
    /// Twin memory on a GPU.
    #[error(
        "memory=\"twin\" on {device}: expected \"fd\" or \"ipc\" on a GPU; \"twin\" is memory of the CPU"
    )]
    TwinOnDevice {
        /// The GPU.
        device: String,
    },
    /// User memory on a GPU without an IPC handle.
    #[error(
        "memory at {address:#x} of {device} cannot be shared by IPC: expected memory of cudaMalloc; make the tensor without expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False), or with          weft.symmetric_empty"
    )]
    NotShareable {
        /// Its address.
        address: u64,
        /// The GPU.
        device: String,
    },
    /// Failure of a peer in a collective call.
    #[error("{peer} failed to make its part of the heap: {detail}")]
    Peer {
        /// The peer.
        peer: Rank,
        /// Its error.
        detail: String,
    },
    /// Unknown kernel source.
    #[error("no kernel source {name:?} in this build: expected one of {known}")]
    NoKernel {
        /// The name.
        name: String,
        /// Known names.
        known: String,
    },
    /// Invalid name of a compile-time constant.
    #[error(
        "{name:?} cannot be defined for a kernel: expected a letter or _, then letters, digits and _"
    )]
    Define {
        /// Its name.
        name: String,
    },
    /// Unusable cache of compiled kernels.
    #[error("compiled kernels cannot be cached in {}: {detail}; set WEFT_CACHE_DIR to a writable folder", .directory.display())]
    Cache {
        /// The folder.
        directory: PathBuf,
        /// Reason.
        detail: String,
    },
    /// Expired wait on the device.
    #[error(
        "{rank} waited {}in {phase} (channel {channel}, slot {slot}) and timed out: expected epoch {expected}, \
         observed {seen}; {} is lost, stuck or further behind than skew_timeout allows",
        for_peer(.peer), peer_or(.peer, "a peer")
    )]
    Timeout {
        /// Rank that waited.
        rank: Rank,
        /// Phase.
        phase: Phase,
        /// Peer awaited.
        peer: Option<Rank>,
        /// The channel.
        channel: u32,
        /// The row.
        slot: u32,
        /// Epoch awaited.
        expected: u64,
        /// Epoch observed.
        seen: u64,
    },
    /// Wait ended by the host.
    #[error(
        "{rank} stopped in {phase} (channel {channel}): its host ended all waits, because the group failed or was closed"
    )]
    Aborted {
        /// Rank that stopped.
        rank: Rank,
        /// Phase.
        phase: Phase,
        /// The channel.
        channel: u32,
    },
    /// Overlapping launches on one channel.
    #[error(
        "{rank} launched {phase} on channel {channel} while an earlier launch on it was in flight: use one \
         stream for a channel, or order the streams with events"
    )]
    Overlap {
        /// Rank.
        rank: Rank,
        /// Phase launched.
        phase: Phase,
        /// The channel.
        channel: u32,
    },
    /// Phases of a round launched out of order.
    #[error(
        "{rank} launched {phase} of round {expected} on channel {channel}, but the phase before it is at round \
         {seen}{}",
        each_round(.order)
    )]
    OutOfOrder {
        /// Rank.
        rank: Rank,
        /// Phase launched.
        phase: Phase,
        /// The channel.
        channel: u32,
        /// Round of the launch.
        expected: u64,
        /// Round of the phase before it.
        seen: u64,
        /// Order of phases in a round; empty if unknown.
        order: &'static str,
    },
    /// Record with a code of one family.
    #[error("{}", .0.text)]
    Reported(Report),
    /// Group too large for the table.
    #[error("{ranks} ranks: expected at most {most} in a domain; make the group of fewer ranks")]
    TooManyRanks {
        /// Ranks.
        ranks: u32,
        /// Limit.
        most: u32,
    },
    /// Launches that do not fit on the GPU together.
    #[error(
        "{wanted}: does not fit on the GPU's {sms} multiprocessors together with {beside}; kernels that wait for \
         peers could deadlock: pass a smaller num_sms, close operators, or pass concurrent=False if one stream \
         orders its calls with those of others"
    )]
    NotResident {
        /// New operator.
        wanted: String,
        /// Present operators.
        beside: String,
        /// Multiprocessors of the GPU, or of this rank's partition of it.
        sms: u32,
    },
    /// Families with overlapping numbers.
    #[error("phases or codes of family {family} overlap those of {other}: choose others")]
    Families {
        /// Family to register.
        family: &'static str,
        /// Owner of the numbers.
        other: &'static str,
    },
    /// Record with an unknown code.
    #[error(
        "unknown code {code} in a record of {rank} in {phase}{} (expected {expected}, observed {seen}): device \
         memory is corrupt, or kernels of another version ran",
        .peer.map(|peer| format!(" about {peer}")).unwrap_or_default()
    )]
    UnknownRecord {
        /// Rank of the record.
        rank: Rank,
        /// Its code.
        code: u32,
        /// Its phase.
        phase: Phase,
        /// Its peer.
        peer: Option<Rank>,
        /// Its expected value.
        expected: u64,
        /// Its observed value.
        seen: u64,
    },
    /// Error of CUDA, or CUDA absent.
    #[error(transparent)]
    Cuda(#[from] weft_cuda::Error),
    /// Error of the fabric or the control plane.
    #[error(transparent)]
    Fabric(#[from] weft_fabric::Error),
}

fn for_peer(peer: &Option<Rank>) -> String {
    peer.map(|peer| format!("for {peer} ")).unwrap_or_default()
}

fn peer_or(peer: &Option<Rank>, default: &str) -> String {
    peer.map_or(default.to_owned(), |peer| peer.to_string())
}

fn each_round(order: &str) -> String {
    if order.is_empty() { String::new() } else { format!(": each round is {order}") }
}
