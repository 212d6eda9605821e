//! Errors of the control plane, worded for the user.

use crate::member::list_ranks;
use crate::{Operation, Poison, Rank};
use std::net::IpAddr;
use std::time::Duration;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Error of the control plane, with its remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Invalid environment variable or argument.
    #[error("{variable} is {value:?}: {problem}; {remedy}")]
    Variable {
        /// Variable or argument.
        variable: String,
        /// Its value.
        value: String,
        /// Its problem.
        problem: String,
        /// Valid values.
        remedy: String,
    },
    /// One of two variables that belong together is missing.
    #[error("{set} is set without {missing}: set both, or neither")]
    MissingVariable {
        /// Set variable.
        set: String,
        /// Missing variable.
        missing: String,
    },
    /// Several hosts, and no address of rank 0.
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
         WEFT_SECRET (or WEFT_SECRET_FILE) to the same value on every rank, or WEFT_ADDR=127.0.0.1 \
         if all ranks are on this host"
    )]
    SecretMissing {
        /// Requested address.
        host: String,
    },
    /// Listener of pair groups on a non-loopback address, without a secret.
    #[error(
        "listener at {address}: expected a secret, since this is not the loopback of this host; pass \
         secret= (or set WEFT_SECRET or WEFT_SECRET_FILE) with the same value in both processes, or \
         use 127.0.0.1 if both are on this host"
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
        /// Limit of the process.
        limit: u64,
    },
    /// Secret file unreadable or empty.
    #[error("secret file {path}: {problem}; check WEFT_SECRET_FILE")]
    SecretFile {
        /// Path.
        path: String,
        /// Its problem.
        problem: String,
    },
    /// PEM file of TLS unreadable or unusable.
    #[error("TLS file {path}: {problem}; check WEFT_TLS_CERT, WEFT_TLS_KEY and WEFT_TLS_CA")]
    TlsFile {
        /// Path.
        path: String,
        /// Its problem.
        problem: String,
    },
    /// TLS handshake with a listener of pairs failed.
    #[error(
        "TLS with the listener at {address}: {problem}; check WEFT_TLS_CA here, and WEFT_TLS_CERT and \
         WEFT_TLS_KEY at the listener"
    )]
    Tls {
        /// Address of the listener.
        address: String,
        /// Error of the handshake.
        problem: String,
    },
    /// Dialer without TLS at a listener that demands it.
    #[error(
        "the listener at {address} demands TLS: set WEFT_TLS_CA to the file of the authority that issued its \
         certificate"
    )]
    TlsDemanded {
        /// Address of the listener.
        address: String,
    },
    /// One end of a pair has TLS of payloads, the other has not.
    #[error(
        "TLS of payloads with the listener at {address}: {} has it alone; set WEFT_TLS_PAYLOADS=1 at both ends, or at \
         neither",
        if *.here { "this end" } else { "the listener" }
    )]
    TlsPayloads {
        /// Address of the listener.
        address: String,
        /// True if the connector has it.
        here: bool,
    },
    /// Port of rank 0 in use.
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
        "listener at {address}: {source}; set WEFT_BIND to an address of this host (0.0.0.0 for all of them)"
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
    /// Rank of another host at a loopback address.
    #[error(
        "{rank} is on another host at {address}, a loopback address: set WEFT_ADVERTISE (and WEFT_BIND, if it \
         listens there too) on that rank to an address that other hosts reach, or WEFT_ADDR to one of rank \
         0's host"
    )]
    LoopbackAddress {
        /// Rank.
        rank: Rank,
        /// Its address.
        address: IpAddr,
    },
    /// Different secrets on the two sides of a connection.
    #[error(
        "{peer} at {address} has another secret: set WEFT_SECRET (or WEFT_SECRET_FILE) to the same \
         value on every rank"
    )]
    WrongSecret {
        /// Dialed rank.
        peer: Rank,
        /// Its address.
        address: String,
    },
    /// No common wire version.
    #[error(
        "{peer} at {address} has wire version {theirs}, this rank {ours}: run the same \
         release of Weft on every rank"
    )]
    WrongVersion {
        /// Dialed rank.
        peer: Rank,
        /// Its address.
        address: String,
        /// Newest version of this side.
        ours: u16,
        /// Newest version of the other side.
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
        /// Its address.
        address: String,
        /// World size of this side.
        ours: u32,
        /// World size of the other side.
        theirs: u32,
    },
    /// Rank in use by another process.
    #[error("{rank} has joined already: two processes were started with the same rank")]
    DuplicateRank {
        /// Rank.
        rank: Rank,
    },
    /// Rendezvous incomplete at the deadline.
    #[error("after {waited:.1?} {} had not joined{}: {hint}", list_ranks(missing), because(last))]
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
    /// Deadline of an operation passed.
    #[error("{operation} timed out after {waited:.1?}: no response from {}", list_ranks(missing))]
    Timeout {
        /// Operation.
        operation: &'static str,
        /// Missing ranks.
        missing: Vec<Rank>,
        /// Time waited.
        waited: Duration,
    },
    /// Poisoned group.
    #[error("the group is poisoned: {0}")]
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
        /// Its call.
        theirs: Operation,
        /// Call of this rank.
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
    /// Wrong number of elements: a call takes one for each rank.
    #[error(
        "{operation} of {given} elements: expected {world_size}, one for each rank; pass b\"\" for ranks without data"
    )]
    WrongCount {
        /// Call.
        operation: &'static str,
        /// Number of elements.
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
        /// Original rank of the peer whose view excludes this rank.
        by: Rank,
    },
    /// Group replaced by a newer one, or replacement in progress.
    #[error(
        "this group was replaced by a newer generation, or another thread is in `reform`: use the handle \
         that `reform` returns"
    )]
    Superseded,
    /// Forked child of a process that joined the group.
    #[error(
        "this process was forked after the group was joined: the connections belong to its parent; start \
         processes with the spawn or forkserver method, or join in the child"
    )]
    Forked,
    /// Group left by this rank.
    #[error("this rank has left the group")]
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
    /// Failed system call.
    #[error("{doing} failed: {source}")]
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

impl Error {
    pub(crate) fn system<E: Into<std::io::Error>>(doing: &'static str) -> impl Fn(E) -> Error {
        move |source| Error::System { doing, source: source.into() }
    }
}
