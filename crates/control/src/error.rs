//! Control plane errors, worded for the user.

use crate::member::list_ranks;
use crate::{Operation, Poison, Rank, Rounded};
use std::net::IpAddr;
use std::time::Duration;

/// This crate's result.
pub type Result<T> = std::result::Result<T, Error>;

/// Control plane error, with a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Invalid environment variable or argument.
    #[error("{variable} is {value:?}: {problem}; {remedy}")]
    Variable {
        /// Variable or argument.
        variable: String,
        /// Value.
        value: String,
        /// Problem.
        problem: String,
        /// Valid values.
        remedy: String,
    },
    /// Two variables belong together, and one is missing.
    #[error("{set} is set without {missing}: set both, or neither")]
    MissingVariable {
        /// Set variable.
        set: String,
        /// Missing variable.
        missing: String,
    },
    /// Several hosts, and no rank 0 address.
    #[error(
        "{launcher} starts ranks on several hosts without an address of rank 0: set WEFT_ADDR to the host of \
         rank 0 (and WEFT_PORT to a free port on it)"
    )]
    MissingAddress {
        /// Launcher whose variables were found.
        launcher: &'static str,
    },
    /// Several hosts without a secret.
    #[error(
        "address of rank 0 {host}: expected a secret, since this is not the loopback of this host; set \
         WEFT_SECRET (or WEFT_SECRET_FILE) to the same value on every rank, or WEFT_ADDR=localhost \
         if all ranks are on this host"
    )]
    SecretMissing {
        /// Requested address.
        host: String,
    },
    /// Pair listener on a non-loopback address, without a secret.
    #[error(
        "listener at {address}: expected a secret, since this is not the loopback of this host; pass \
         secret= (or set WEFT_SECRET or WEFT_SECRET_FILE) with the same value in both processes, or \
         use localhost if both are on this host"
    )]
    PairSecretMissing {
        /// Requested address.
        address: String,
    },
    /// Failure to listen for pair groups.
    #[error(
        "listener at {address}: {source}; choose an address of this host and a free port (port 0: any)"
    )]
    PairListen {
        /// Address.
        address: String,
        /// System error.
        source: std::io::Error,
    },
    /// File descriptors exhausted.
    #[error(
        "{doing}: all {limit} descriptors of this process are in use; raise its limit (ulimit -n), a pair \
         takes about 8"
    )]
    Descriptors {
        /// Operation that needed one.
        doing: &'static str,
        /// Process limit.
        limit: u64,
    },
    /// Secret file unreadable or empty.
    #[error("secret file {path}: {problem}; check WEFT_SECRET_FILE")]
    SecretFile {
        /// Path.
        path: String,
        /// Problem.
        problem: String,
    },
    /// TLS PEM file unreadable or unusable.
    #[error("TLS file {path}: {problem}; check WEFT_TLS_CERT, WEFT_TLS_KEY and WEFT_TLS_CA")]
    TlsFile {
        /// Path.
        path: String,
        /// Problem.
        problem: String,
    },
    /// TLS handshake with a pair listener failed.
    #[error(
        "TLS with the listener at {address}: {problem}; check WEFT_TLS_CA here, and WEFT_TLS_CERT and \
         WEFT_TLS_KEY at the listener"
    )]
    Tls {
        /// Listener address.
        address: String,
        /// Handshake error.
        problem: String,
    },
    /// Dialer without TLS at a listener that demands it.
    #[error(
        "the listener at {address} demands TLS: set WEFT_TLS_CA to the file of the authority that issued its \
         certificate"
    )]
    TlsDemanded {
        /// Listener address.
        address: String,
    },
    /// One end of a pair has payload TLS, the other has not.
    #[error(
        "TLS of payloads with the listener at {address}: {} has it alone; set WEFT_TLS_PAYLOADS=1 at both ends, or at \
         neither",
        if *.here { "this end" } else { "the listener" }
    )]
    TlsPayloads {
        /// Listener address.
        address: String,
        /// True if the connector has it.
        here: bool,
    },
    /// Rank 0's port in use.
    #[error(
        "listener of rank 0 at {address}: the port is in use by another process; set WEFT_PORT to a free \
         port, the same on every rank"
    )]
    PortInUse {
        /// Address.
        address: String,
    },
    /// Failure to listen.
    #[error(
        "listener at {address}: {source}; set WEFT_BIND to an address of this host (0.0.0.0 or :: for all of them)"
    )]
    Listen {
        /// Address.
        address: String,
        /// System error.
        source: std::io::Error,
    },
    /// Unresolvable host name.
    #[error("host {host} cannot be resolved: {problem}; check WEFT_ADDR or MASTER_ADDR")]
    Resolve {
        /// Name.
        host: String,
        /// System error.
        problem: String,
    },
    /// Rank on another host at a loopback address.
    #[error(
        "{rank} is on another host at {address}, a loopback address: set WEFT_ADVERTISE (and WEFT_BIND, if it \
         listens there too) on that rank to an address that other hosts reach, or WEFT_ADDR to one of rank \
         0's host"
    )]
    LoopbackAddress {
        /// Rank.
        rank: Rank,
        /// Address.
        address: IpAddr,
    },
    /// Different secrets on a connection's two sides.
    #[error(
        "{peer} at {address} has another secret: set WEFT_SECRET (or WEFT_SECRET_FILE) to the same \
         value on every rank"
    )]
    WrongSecret {
        /// Dialed rank.
        peer: Rank,
        /// Address.
        address: String,
    },
    /// Another user's process at the other end, on a connection without a secret.
    #[error(
        "{peer} at {address}: {problem}; without a secret it has to be a process of this user, or root's: set \
         WEFT_SECRET (or WEFT_SECRET_FILE) to the same value in both processes"
    )]
    OtherUser {
        /// Dialed rank.
        peer: Rank,
        /// Address.
        address: String,
        /// User, or the reason why the user is unknown.
        problem: String,
    },
    /// No common wire version.
    #[error(
        "{peer} at {address} has wire version {theirs}, this rank {ours}: run the same \
         release of Weft on every rank"
    )]
    WrongVersion {
        /// Dialed rank.
        peer: Rank,
        /// Address.
        address: String,
        /// This side's newest version.
        ours: u16,
        /// The other side's newest version.
        theirs: u16,
    },
    /// Different world sizes.
    #[error(
        "{peer} at {address} has world size {theirs}, this rank {ours}: start all ranks with the same \
         world size"
    )]
    WrongWorldSize {
        /// Dialed rank.
        peer: Rank,
        /// Address.
        address: String,
        /// This side's world size.
        ours: u32,
        /// The other side's world size.
        theirs: u32,
    },
    /// Rank in use by another process.
    #[error("{rank} has joined already: two processes were started with the same rank")]
    DuplicateRank {
        /// Rank.
        rank: Rank,
    },
    /// Rendezvous incomplete at the deadline.
    #[error("after {} {} had not joined{}: {hint}", Rounded(*waited), list_ranks(missing), because(last))]
    Rendezvous {
        /// Missing ranks, as reported to this rank.
        missing: Vec<Rank>,
        /// Time waited.
        waited: Duration,
        /// Last failure, if any.
        last: Option<String>,
        /// Remedy.
        hint: &'static str,
    },
    /// No pair listener at the dialled address before the deadline.
    #[error(
        "no pair with the listener at {address} within {}: {problem}; check that its process listens, and that the \
         address can be reached from here",
        Rounded(*waited)
    )]
    NoListener {
        /// Listener address.
        address: String,
        /// Time waited.
        waited: Duration,
        /// The last attempt's failure.
        problem: String,
    },
    /// Pair listener whose name does not resolve.
    #[error(
        "listener at {address}: the name cannot be resolved: {problem}; pass an IP address, or a name of \
         /etc/hosts or DNS"
    )]
    PairResolve {
        /// Listener address.
        address: String,
        /// System error.
        problem: String,
    },
    /// Pair listener with another secret.
    #[error(
        "the listener at {address} has another secret: pass secret= (or set WEFT_SECRET or WEFT_SECRET_FILE) with the \
         same value in both processes"
    )]
    PairWrongSecret {
        /// Listener address.
        address: String,
    },
    /// Pair listener without a common wire version.
    #[error(
        "the listener at {address} has version {theirs} of the protocol of pairs, this process {ours}: run the same \
         release of Weft in both"
    )]
    PairWrongVersion {
        /// Listener address.
        address: String,
        /// This side's newest version.
        ours: u16,
        /// The other side's newest version.
        theirs: u16,
    },
    /// Operation deadline passed.
    #[error("{operation} timed out after {}: no response from {}", Rounded(*waited), list_ranks(missing))]
    Timeout {
        /// Operation.
        operation: &'static str,
        /// Missing ranks.
        missing: Vec<Rank>,
        /// Time waited.
        waited: Duration,
    },
    /// Poisoned group.
    #[error("{0}")]
    Poisoned(Poison),
    /// Departed rank that is still needed.
    #[error("{rank} has left the group and is still needed by {operation}")]
    Left {
        /// Rank.
        rank: Rank,
        /// Operation that needs it.
        operation: &'static str,
    },
    /// Message too large for the control plane.
    #[error(
        "control message of {size} bytes: the limit is {limit}; send bulk data through the fabric"
    )]
    TooLarge {
        /// Requested size in bytes.
        size: usize,
        /// Limit in bytes.
        limit: usize,
    },
    /// Mismatched collective calls.
    #[error(
        "{peer} called {theirs}, this rank {ours}: every rank makes the same collective calls in the same \
         order; correct the program at one of them"
    )]
    CallMismatch {
        /// Other rank.
        peer: Rank,
        /// Other rank's call.
        theirs: Operation,
        /// This rank's call.
        ours: Operation,
    },
    /// Unfinished collective call repeated with another payload.
    #[error(
        "{operation} with another payload than the unfinished call before: the first payload is final; repeat \
         the call with the same bytes"
    )]
    PayloadMismatch {
        /// Call.
        operation: Operation,
    },
    /// Wrong element count: a call takes one for each rank.
    #[error(
        "{operation} of {given} elements: expected {world_size}, one for each rank; pass b\"\" for ranks without data"
    )]
    WrongCount {
        /// Call.
        operation: &'static str,
        /// Element count.
        given: usize,
        /// World size.
        world_size: usize,
    },
    /// Rank beyond the world size.
    #[error("{rank}: the group has {world_size} ranks; use 0 to {}", world_size.saturating_sub(1))]
    NoSuchRank {
        /// Rank.
        rank: Rank,
        /// World size.
        world_size: u32,
    },
    /// Too many unreceived bytes at a rank.
    #[error(
        "{queued} unreceived bytes at {peer}: the limit is {limit}; receive them there before sending more"
    )]
    Backlog {
        /// Rank.
        peer: Rank,
        /// Bytes sent to it and not received, with 256 for each message.
        queued: usize,
        /// Limit in bytes.
        limit: usize,
    },
    /// Excluded from the new group.
    #[error(
        "{by} and others formed a new group without this rank, which counts as lost there: start it again"
    )]
    Excluded {
        /// Original rank for the peer whose view excludes this rank.
        by: Rank,
    },
    /// Group replaced by a newer one, or replacement in progress.
    #[error(
        "this group was replaced by a newer generation, or another thread is in `reform`: use the handle \
         that `reform` returns"
    )]
    Superseded,
    /// Forked child whose parent joined the group.
    #[error(
        "this process was forked after the group was joined: the connections belong to its parent; start \
         processes with the spawn or forkserver method, or join in the child"
    )]
    Forked,
    /// Group left by this rank.
    #[error("this rank has left the group: a closed communicator takes no calls; form a new group")]
    Closed,
    /// Wait interrupted by the program.
    #[error("interrupted while waiting for {operation}")]
    Interrupted {
        /// Operation that was waited for.
        operation: &'static str,
    },
    /// Protocol violation by a peer.
    #[error("{peer} violated the control protocol: {problem}")]
    Protocol {
        /// Peer.
        peer: Rank,
        /// Violation.
        problem: String,
    },
    /// No local port left.
    #[error("{doing}: no local port is left{}", crate::limits::ports_remedy())]
    Ports {
        /// Operation that needed one.
        doing: &'static str,
    },
    /// A thread that could not be started.
    #[error("starting {thread} failed: {source}{}", crate::limits::threads_remedy())]
    Thread {
        /// The thread.
        thread: &'static str,
        /// System error.
        source: std::io::Error,
    },
    /// Failed system call.
    #[error("{doing} failed: {}", crate::limits::described(.source))]
    System {
        /// Operation.
        doing: &'static str,
        /// System error.
        source: std::io::Error,
    },
}

fn because(last: &Option<String>) -> String {
    last.as_ref().map(|last| format!(" (last: {last})")).unwrap_or_default()
}

impl From<weft_environment::Error> for Error {
    fn from(error: weft_environment::Error) -> Error {
        let weft_environment::Error { name: variable, value, problem, remedy } = error;
        Error::Variable { variable, value, problem, remedy }
    }
}

impl Error {
    pub(crate) fn system<E: Into<std::io::Error>>(doing: &'static str) -> impl Fn(E) -> Error {
        move |source| Error::System { doing, source: source.into() }
    }

    /// Error for a thread that could not be started, named for example "the control thread".
    pub fn thread(thread: &'static str) -> impl Fn(std::io::Error) -> Error {
        move |source| Error::Thread { thread, source }
    }
}
