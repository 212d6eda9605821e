//! Everything that can go wrong here, worded for the user.

use crate::member::list;
use crate::{Operation, Poison, Rank};
use std::net::IpAddr;
use std::time::Duration;

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A variable or an argument makes no sense.
    #[error("{variable} is {value:?}: {problem}; {remedy}")]
    Variable {
        /// The variable or argument.
        variable: String,
        /// What it holds.
        value: String,
        /// Why that will not do.
        problem: String,
        /// What to set instead.
        remedy: String,
    },
    /// Of two variables that belong together, one is set.
    #[error("{set} is set but {missing} is not: set both, or neither")]
    HalfSet {
        /// The one that is set.
        set: String,
        /// The one that is not.
        missing: String,
    },
    /// Several hosts, and nothing says where rank 0 is.
    #[error(
        "{launcher} starts ranks on several hosts but does not say where rank 0 is: set WEFT_ADDR to \
         the host of rank 0 (and WEFT_PORT to a free port on it)"
    )]
    NoAddress {
        /// The launcher whose variables were found.
        launcher: &'static str,
    },
    /// Several hosts without a secret.
    #[error(
        "rank 0 is at {host}, which is not this host's loopback, and there is no secret: set \
         WEFT_SECRET (or WEFT_SECRET_FILE) to the same value on every rank, or WEFT_ADDR=127.0.0.1 \
         if all ranks are on this host"
    )]
    SecretMissing {
        /// The address that was asked for.
        host: String,
    },
    /// A listener of pair groups that other hosts reach, without a secret.
    #[error(
        "listener at {address}: expected a secret, since this is not the loopback of this host; pass \
         secret= (or set WEFT_SECRET or WEFT_SECRET_FILE) with the same value in both processes, or \
         use 127.0.0.1 if both are on this host"
    )]
    PairSecretMissing {
        /// The address that was asked for.
        address: String,
    },
    /// The address of a listener of pair groups cannot be listened on.
    #[error(
        "listener at {address}: {source}; choose an address of this host and a free port (port 0: any)"
    )]
    PairListen {
        /// The address.
        address: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The process has no descriptor left.
    #[error(
        "{doing}: all {limit} descriptors of this process are in use; raise its limit (ulimit -n), a pair \
         takes about 8"
    )]
    Descriptors {
        /// What needed one.
        doing: &'static str,
        /// The process's limit.
        limit: u64,
    },
    /// The secret's file cannot be read, or there is nothing in it.
    #[error("the secret file {path} cannot be used: {problem}; check WEFT_SECRET_FILE")]
    SecretFile {
        /// Its path.
        path: String,
        /// Why not.
        problem: String,
    },
    /// The address of rank 0 is taken.
    #[error(
        "rank 0 cannot listen on {address}: the port is in use by another process; set WEFT_PORT to \
         a free port, the same on every rank"
    )]
    PortInUse {
        /// The address.
        address: String,
    },
    /// A listening socket could not be made.
    #[error(
        "cannot listen on {address}: {source}; set WEFT_BIND to an address of this host (0.0.0.0 for \
         all of them)"
    )]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A host name means nothing here.
    #[error("the host {host} cannot be resolved: {problem}; check WEFT_ADDR or MASTER_ADDR")]
    Resolve {
        /// The name.
        host: String,
        /// What the system said.
        problem: String,
    },
    /// A rank of another host is to be reached at a loopback address.
    #[error(
        "{rank} is on another host and its address is {address}, which only its own host reaches: set \
         WEFT_ADVERTISE (and WEFT_BIND, if it listens there too) on that rank to an address that other \
         hosts reach, or WEFT_ADDR to one of rank 0's host"
    )]
    LoopbackAddress {
        /// The rank.
        rank: Rank,
        /// Its address.
        address: IpAddr,
    },
    /// The two sides of a connection hold different secrets.
    #[error(
        "{peer} at {address} holds another secret: set WEFT_SECRET (or WEFT_SECRET_FILE) to the same \
         value on every rank"
    )]
    WrongSecret {
        /// Who was dialed.
        peer: Rank,
        /// Where.
        address: String,
    },
    /// The two sides of a connection speak different versions.
    #[error(
        "{peer} at {address} speaks wire version {theirs}, this rank speaks {ours}: run the same \
         release of Weft on every rank"
    )]
    WrongVersion {
        /// Who was dialed.
        peer: Rank,
        /// Where.
        address: String,
        /// The newest version of this side.
        ours: u16,
        /// The newest version of the other.
        theirs: u16,
    },
    /// The ranks were started with different world sizes.
    #[error(
        "{peer} at {address} expects {theirs} ranks, this rank was started with a world size of \
         {ours}: start all ranks with the same size"
    )]
    WrongWorldSize {
        /// Who was dialed.
        peer: Rank,
        /// Where.
        address: String,
        /// This side's world size.
        ours: u32,
        /// The other's.
        theirs: u32,
    },
    /// Somebody else has this rank already.
    #[error("{rank} has joined already: two processes were started with the same rank")]
    DuplicateRank {
        /// The rank.
        rank: Rank,
    },
    /// Not every rank came in time.
    #[error("after {waited:.1?} {} had not joined{}: {hint}", list(missing), because(last))]
    Bootstrap {
        /// The ranks that did not come, as far as this rank knows.
        missing: Vec<Rank>,
        /// How long this rank waited.
        waited: Duration,
        /// The last thing that failed, where something did.
        last: Option<String>,
        /// What to look at.
        hint: &'static str,
    },
    /// An operation's deadline passed.
    #[error("{operation} took longer than {waited:.1?}: {} did not answer", list(missing))]
    Timeout {
        /// Which operation.
        operation: &'static str,
        /// The ranks that were missing.
        missing: Vec<Rank>,
        /// How long this rank waited.
        waited: Duration,
    },
    /// The group is poisoned.
    #[error("the group is poisoned: {0}")]
    Poisoned(Poison),
    /// A rank that was needed has said goodbye.
    #[error("{rank} has left the group and is still needed by {operation}")]
    Left {
        /// The rank.
        rank: Rank,
        /// What needed it.
        operation: &'static str,
    },
    /// Too much for the control plane.
    #[error(
        "a control message of {size} bytes is over the limit of {limit}: send bulk data by the fabric"
    )]
    TooLarge {
        /// What was asked for.
        size: usize,
        /// The limit.
        limit: usize,
    },
    /// Another rank makes another collective call.
    #[error(
        "{peer} called {theirs}, this rank {ours}: every rank makes the same collective calls in the same \
         order; correct the program at one of them"
    )]
    OtherCall {
        /// The other rank.
        peer: Rank,
        /// Its call.
        theirs: Operation,
        /// This rank's call.
        ours: Operation,
    },
    /// A collective call is unfinished and was repeated with another payload.
    #[error(
        "{operation} with another payload than the call before, which ended early and is unfinished: the \
         payload of the first call stands; repeat the call with the same bytes"
    )]
    RepeatDiffers {
        /// The call.
        operation: Operation,
    },
    /// A call takes one element for each rank.
    #[error(
        "{operation} of {given} elements: expected {world_size}, one for each rank; pass b\"\" where there is nothing to send"
    )]
    WrongCount {
        /// The call.
        operation: &'static str,
        /// Elements given.
        given: usize,
        /// Ranks in the group.
        world_size: usize,
    },
    /// The group has no such rank.
    #[error("{rank}: the group has {world_size} ranks; use 0 to {}", world_size.saturating_sub(1))]
    NoSuchRank {
        /// The rank.
        rank: Rank,
        /// Ranks in the group.
        world_size: u32,
    },
    /// Too many messages to a rank wait there.
    #[error(
        "{queued} bytes wait to be received by {peer}: the limit is {limit}; receive them there before \
         sending more"
    )]
    Backlog {
        /// The rank.
        peer: Rank,
        /// Bytes sent to it that it has not received, with 256 for each message.
        queued: usize,
        /// The most that may wait.
        limit: usize,
    },
    /// The survivors go on without this rank.
    #[error(
        "{by} and others formed a new group without this rank, which they hold for lost: start it again"
    )]
    Excluded {
        /// Who said so, by the rank it had when the job started.
        by: Rank,
    },
    /// This handle's group was replaced, or is being replaced, by a newer one.
    #[error(
        "this group was replaced by a newer generation, or another thread is in `reform`: use the handle \
         that `reform` returns"
    )]
    Superseded,
    /// This process was forked from one that joined the group.
    #[error(
        "this process was forked after the group was joined: the connections belong to its parent; start \
         processes with the spawn or forkserver method, or join in the child"
    )]
    Forked,
    /// This rank has left.
    #[error("this rank has left the group")]
    Closed,
    /// The program asked to stop waiting.
    #[error("interrupted while waiting for {operation}")]
    Interrupted {
        /// What was waited for.
        operation: &'static str,
    },
    /// A peer said something it should not.
    #[error("{peer} broke the control protocol: {problem}")]
    Protocol {
        /// Who.
        peer: Rank,
        /// How.
        problem: String,
    },
    /// The system refused something.
    #[error("{doing} failed: {source}")]
    System {
        /// What this rank was about to do.
        doing: &'static str,
        /// What the system said.
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
