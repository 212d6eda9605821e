//! Errors in this crate, one variant per cause.

use crate::phase::{Phase, Report};
use crate::proxy::{Backlog, CommandError, RingError};
use std::path::PathBuf;
use weft_control::Rank;

/// Result in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Heap, kernel or device wait failure.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Invalid environment variable.
    #[error(transparent)]
    Variable(#[from] weft_environment::Error),
    /// Unreadable source in the `WEFT_KERNELS` folder.
    #[error("source {}: {problem}; correct WEFT_KERNELS, or unset it", path.display())]
    Source {
        /// Path.
        path: PathBuf,
        /// I/O problem.
        problem: String,
    },
    /// Heap without bytes or ranks.
    #[error("heap of {bytes} bytes at {ranks} ranks: expected at least one byte and one rank")]
    Empty {
        /// Bytes.
        bytes: u64,
        /// Ranks.
        ranks: usize,
    },
    /// Offers that are not all ranks' offers in rank order.
    #[error(
        "{offers} offers at rank {rank}: expected its own offer at index {rank}; gather all ranks' offers in rank order"
    )]
    WrongOffers {
        /// The rank.
        rank: u32,
        /// Offer count.
        offers: usize,
    },
    /// Malformed offer from a peer.
    #[error(
        "malformed offer of memory from {peer}: {detail}; run one version of Weft on all ranks"
    )]
    Malformed {
        /// The peer.
        peer: Rank,
        /// Reason.
        detail: String,
    },
    /// A peer's heap has another size or kind.
    #[error(
        "heap of {theirs} at {peer}: expected {ours}, as at this rank; use one configuration on all ranks"
    )]
    Disagreement {
        /// The peer.
        peer: Rank,
        /// Heap on this rank.
        ours: String,
        /// Heap on the peer.
        theirs: String,
    },
    /// Peer on another host.
    #[error(
        "{peer} is on another host ({detail}): ranks in a heap share one host; group only ranks on one host"
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
    /// Failed descriptor exchange.
    #[error("{source}; {remedy}")]
    Exchange {
        /// Socket error, which names the peer.
        source: weft_fabric::Error,
        /// Remedy.
        remedy: &'static str,
    },
    /// GPUs without peer access.
    #[error(
        "rank {rank}'s GPU ({here}) cannot access GPU memory on {peer} ({there}): the \
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
    #[error("rank {rank} ({here}) cannot map memory on {peer} ({there}): {source}; {remedy}")]
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
        "memory=\"twin\" on {device}: expected \"fd\" or \"ipc\" on a GPU; \"twin\" is CPU memory"
    )]
    TwinOnDevice {
        /// The GPU.
        device: String,
    },
    /// User memory on a GPU without an IPC handle.
    #[error(
        "memory at {address:#x} of {device} cannot be shared by IPC: expected memory from cudaMalloc; make the tensor without expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False), or with          weft.symmetric_empty"
    )]
    NotShareable {
        /// Address.
        address: u64,
        /// The GPU.
        device: String,
    },
    /// A peer failed in a collective call.
    #[error("{peer} failed to make its part of the heap: {detail}")]
    Peer {
        /// The peer.
        peer: Rank,
        /// Error text from the peer.
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
    /// Invalid compile-time constant name.
    #[error(
        "{name:?} cannot be defined for a kernel: expected a letter or _, then letters, digits and _"
    )]
    Define {
        /// Constant name.
        name: String,
    },
    /// Unusable compiled-kernel cache.
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
    /// A round's phases were launched out of order.
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
        /// Round in this launch.
        expected: u64,
        /// Round in the phase before it.
        seen: u64,
        /// Phase order in a round; empty if unknown.
        order: &'static str,
    },
    /// Record with a family's code.
    #[error("{}", .0.text)]
    Reported(Report),
    /// Group too large for the table.
    #[error("{ranks} ranks: expected at most {most} in a domain; make a smaller group")]
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
         orders its calls with other operators' calls"
    )]
    NotResident {
        /// New operator.
        wanted: String,
        /// Present operators.
        beside: String,
        /// SMs on the GPU, or in this rank's partition.
        sms: u32,
    },
    /// Families with overlapping numbers.
    #[error("phases or codes of family {family} overlap {other}'s: choose others")]
    Families {
        /// Family to register.
        family: &'static str,
        /// Owner of the numbers.
        other: &'static str,
    },
    /// Record with an unknown code.
    #[error(
        "unknown code {code} in a record of {rank} in {phase}{} (expected {expected}, observed {seen}): device \
         memory is corrupt, or kernels from another version ran",
        .peer.map(|peer| format!(" about {peer}")).unwrap_or_default()
    )]
    UnknownRecord {
        /// Rank in the record.
        rank: Rank,
        /// Code in the record.
        code: u32,
        /// Phase in the record.
        phase: Phase,
        /// Peer in the record.
        peer: Option<Rank>,
        /// Expected value.
        expected: u64,
        /// Observed value.
        seen: u64,
    },
    /// Command that a kernel pushed for the proxy, out of range.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// Damaged command ring.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// Proxy configuration out of range.
    #[error(
        "{value} {what}: expected {least} to {most}; give all ranks another proxy configuration"
    )]
    ProxyLimit {
        /// Counted item.
        what: &'static str,
        /// The count.
        value: u64,
        /// Smallest count.
        least: u64,
        /// Largest count.
        most: u64,
    },
    /// Expired wait in a kernel for a proxy's word, or for a slot in the command ring.
    #[error(
        "{rank} waited for {} in a kernel and timed out: expected {expected}, observed {seen}; {}",
        proxy_target(.peer, *.word), remedy(.rank, .peer, .stall, .backlog)
    )]
    ProxyTimeout {
        /// Rank that waited.
        rank: Rank,
        /// Rank whose rounds the word counts; `None` for the ring.
        peer: Option<Rank>,
        /// Word, or slot in the ring.
        word: u32,
        /// Rounds, or the count of released tickets, modulo 2^32.
        expected: u64,
        /// Observed value.
        seen: u64,
        /// Causes for which this rank's puts wait.
        backlog: Backlog,
        /// Time since this rank's proxy thread last ran, if it is long.
        stall: Option<std::time::Duration>,
    },
    /// Second proxy on a domain.
    #[error("this host's ranks have a proxy on this device: close it first")]
    ProxyPresent,
    /// Core for a proxy's thread that this process may not use.
    #[error(
        "core {core} for the proxy's thread: expected a core that this process may run on (`taskset -p $$`)"
    )]
    ProxyCore {
        /// The core.
        core: u32,
    },
    /// A word in memory that the host does not reach.
    #[error(
        "a word in the GPU's memory: expected a home that the host reaches; take Pinned, Gdrcopy or Auto"
    )]
    WordHome,
    /// Error in a proxy's thread.
    #[error("the proxy of {rank} ended: {detail}; close it, and make another one")]
    ProxyFailed {
        /// This rank.
        rank: Rank,
        /// Reason.
        detail: String,
    },
    /// Panic in a proxy's thread.
    #[error("the proxy of {rank} panicked: {detail}; this is a defect in Weft")]
    ProxyPanicked {
        /// This rank.
        rank: Rank,
        /// Panic message.
        detail: String,
    },
    /// Commands left at the end of a proxy.
    #[error(
        "{pushed} commands pushed at {rank}, but {sent} were sent and complete within the timeout: expected all; \
         {backlog}; let kernels end first, and pass a longer timeout"
    )]
    ProxyBusy {
        /// This rank.
        rank: Rank,
        /// Tickets that kernels have taken.
        pushed: u64,
        /// Commands that the proxy has taken.
        sent: u64,
        /// Causes for which they wait.
        backlog: Backlog,
    },
    /// Round from a peer's proxy that has not one part, or is beyond the window.
    #[error(
        "{peer} raised proxy word {word} by {count} in round {round}: expected one part in an open round; run one \
         version of Weft, with one proxy configuration, on all ranks"
    )]
    ProxyRound {
        /// The peer.
        peer: Rank,
        /// Word index.
        word: u32,
        /// The round.
        round: u64,
        /// Parts.
        count: u64,
    },
    /// CUDA error, or CUDA absent.
    #[error(transparent)]
    Cuda(#[from] weft_cuda::Error),
    /// Fabric or control plane error.
    #[error(transparent)]
    Fabric(#[from] weft_fabric::Error),
}

fn for_peer(peer: &Option<Rank>) -> String {
    peer.map(|peer| format!("for {peer} ")).unwrap_or_default()
}

fn proxy_target(peer: &Option<Rank>, word: u32) -> String {
    peer.map_or_else(
        || format!("slot {word} of the proxy's ring"),
        |peer| format!("{peer} (proxy word {word})"),
    )
}

fn remedy(
    rank: &Rank,
    peer: &Option<Rank>,
    stall: &Option<std::time::Duration>,
    backlog: &Backlog,
) -> String {
    match (stall, peer) {
        (Some(stall), _) => {
            format!("the proxy's thread at {rank} has not run for {:.1} s", stall.as_secs_f64())
        }
        (None, Some(peer)) if peer == rank => {
            format!("{backlog}, or too few commands were pushed")
        }
        (None, Some(peer)) => format!("{peer} is lost, stuck or late, or sent fewer rounds"),
        (None, None) => backlog.to_string(),
    }
}

fn peer_or(peer: &Option<Rank>, default: &str) -> String {
    peer.map_or(default.to_owned(), |peer| peer.to_string())
}

fn each_round(order: &str) -> String {
    if order.is_empty() { String::new() } else { format!(": each round is {order}") }
}
