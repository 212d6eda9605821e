//! Errors of query dispatch, one variant per cause.

use crate::ledger::{NodeId, QueryId};

/// Failure of a call on a ledger, a front end or an accelerator node.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A table of fixed size is full: back-pressure.
    #[error("{what}: all {limit} are in use; submit again after the next answer")]
    Full {
        /// Entries of the table.
        what: &'static str,
        /// Their number.
        limit: u32,
    },
    /// Value outside of its range.
    #[error("{what} {value}: expected {expected}")]
    Invalid {
        /// Argument.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The accepted values.
        expected: String,
    },
    /// Id of a query that has ended, or that the ledger never issued.
    #[error("query {0}: expected a query under way; it has ended, or belongs to another front end")]
    UnknownQuery(QueryId),
    /// Id of a node that has left, or that the ledger never issued.
    #[error("node {0}: expected a present node; it has left, or belongs to another front end")]
    UnknownNode(NodeId),
    /// Answer in a slot without a query.
    #[error(
        "protocol violation of node {node}: answer in slot {slot}, which has no query in flight"
    )]
    UnexpectedAnswer {
        /// Node.
        node: NodeId,
        /// Slot.
        slot: u32,
    },
    /// Bytes of a peer that violate the wire format.
    #[error("{what}: {detail}")]
    Malformed {
        /// Message.
        what: &'static str,
        /// Field, its value, and the expected one.
        detail: String,
    },
    /// Peer with another version of the protocol.
    #[error(
        "version {theirs} of the query protocol: expected {ours}; install the same version of Weft on both hosts"
    )]
    Version {
        /// Version here.
        ours: u16,
        /// Version there.
        theirs: u16,
    },
    /// Schema beyond its limits.
    #[error("schema: {detail}")]
    Schema {
        /// Tensor or side, and the limit.
        detail: String,
    },
    /// Two ends that do not fit together.
    #[error("handshake: {detail}")]
    Disagreement {
        /// Both values.
        detail: String,
    },
    /// Slots that would take more memory than this end allows.
    #[error(
        "node {name}: {slots} slots take {bytes} bytes at this end: expected at most {limit}; use fewer slots or a \
         smaller schema, or raise ServiceConfig::max_slot_bytes"
    )]
    SlotMemory {
        /// Node, from its handshake.
        name: String,
        /// Slots of the connection.
        slots: u32,
        /// Their bytes.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Payload that changed on its way.
    #[error(
        "checksum {seen:#018x} of a payload: expected {expected:#018x}; memory or network corrupted it"
    )]
    Checksum {
        /// Checksum of the sender.
        expected: u64,
        /// Checksum of the bytes that arrived.
        seen: u64,
    },
    /// Tensors that the schema excludes, or outside of their memory.
    #[error("query: {detail}")]
    Query {
        /// Tensor and its expected bytes.
        detail: String,
    },
    /// Error of the fabric.
    #[error(transparent)]
    Fabric(#[from] weft_fabric::Error),
    /// Call on a service whose thread has ended, or is about to.
    #[error("{what}: stopped; start another one")]
    Stopped {
        /// Service.
        what: &'static str,
    },
    /// Panic of a handler or of a backend on the thread of a service.
    #[error("{what}: its thread panicked: {message}")]
    Panicked {
        /// Service.
        what: &'static str,
        /// Message of the panic.
        message: String,
    },
    /// Call that did not end by its deadline.
    #[error("{what}: deadline passed; {detail}")]
    Timeout {
        /// Call.
        what: &'static str,
        /// State at the deadline.
        detail: String,
    },
    /// Error of the operating system.
    #[error("{what}: {error}")]
    System {
        /// Operation.
        what: &'static str,
        /// Cause.
        error: std::io::Error,
    },
    /// Departure of a node with queries in flight.
    #[error("node {node}: {in_flight} slots are in use; drain the node before it leaves")]
    NotIdle {
        /// Node.
        node: NodeId,
        /// Slots in use.
        in_flight: u32,
    },
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
