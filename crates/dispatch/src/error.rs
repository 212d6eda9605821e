//! Query dispatch errors, one variant per cause.

use crate::ledger::{NodeId, QueryId};

/// A call on a ledger, a front end or an accelerator node failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A fixed-size table is full: back-pressure.
    #[error("{what}: all {limit} are in use; submit again after the next answer")]
    Full {
        /// Table entries.
        what: &'static str,
        /// Entry limit.
        limit: u32,
    },
    /// Value out of range.
    #[error("{what} {value}: expected {expected}")]
    Invalid {
        /// Argument.
        what: &'static str,
        /// Value.
        value: u64,
        /// The accepted values.
        expected: String,
    },
    /// Id for a query that has ended, or that the ledger never issued.
    #[error("query {0}: expected a query under way; it has ended, or belongs to another front end")]
    UnknownQuery(QueryId),
    /// Id for a node that has left, or that the ledger never issued.
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
    /// Bytes from a peer that violate the wire format.
    #[error("{what}: {detail}")]
    Malformed {
        /// Message.
        what: &'static str,
        /// Field, value, and expected value.
        detail: String,
    },
    /// Peer with another protocol version.
    #[error(
        "version {theirs} of the query protocol: expected {ours}; install the same version of Weft on both hosts"
    )]
    Version {
        /// Version here.
        ours: u16,
        /// Version there.
        theirs: u16,
    },
    /// Schema beyond the limits.
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
        /// Node name, from the handshake.
        name: String,
        /// Connection slots.
        slots: u32,
        /// Slot bytes.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Payload that changed in transit.
    #[error(
        "payload checksum {seen:#018x}: expected {expected:#018x}; memory or network corrupted it"
    )]
    Checksum {
        /// Sender's checksum.
        expected: u64,
        /// Checksum over the bytes that arrived.
        seen: u64,
    },
    /// Tensors that the schema excludes, or that lie outside the memory.
    #[error("query: {detail}")]
    Query {
        /// Tensor and expected bytes.
        detail: String,
    },
    /// Fabric error.
    #[error(transparent)]
    Fabric(#[from] weft_fabric::Error),
    /// Call on a service whose thread has ended, or is about to.
    #[error("{what}: stopped; start another one")]
    Stopped {
        /// Service.
        what: &'static str,
    },
    /// Handler or backend panic on a service thread.
    #[error("{what}: its thread panicked: {message}")]
    Panicked {
        /// Service.
        what: &'static str,
        /// Panic message.
        message: String,
    },
    /// Call that did not end by the deadline.
    #[error("{what}: deadline passed; {detail}")]
    Timeout {
        /// Call.
        what: &'static str,
        /// State at the deadline.
        detail: String,
    },
    /// Operating system error.
    #[error("{what}: {error}")]
    System {
        /// Operation.
        what: &'static str,
        /// Cause.
        error: std::io::Error,
    },
    /// A node departs with queries in flight.
    #[error("node {node}: {in_flight} slots are in use; drain the node before it leaves")]
    NotIdle {
        /// Node.
        node: NodeId,
        /// Slots in use.
        in_flight: u32,
    },
}

/// Result in this crate.
pub type Result<T> = std::result::Result<T, Error>;
