//! Errors in MoE dispatch and combine, one variant per cause.

use crate::area::Area;
use crate::elements::token_type::TokenType;
use crate::stage::Stage;
use std::time::Duration;
use weft_fabric::{MemoryKind, MissingPeer};

/// Error in a configuration, a call, a round or a peer's data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The all-to-all was closed.
    #[error("the all-to-all was closed: make a new one")]
    Closed,
    /// A configuration field is 0.
    #[error("{field} is 0: expected at least 1")]
    Zero {
        /// The field's name in [`Config`](crate::Config).
        field: &'static str,
    },
    /// A rank outside the group.
    #[error("rank {rank} is outside a group of {ranks} ranks: expected 0 to {}", ranks.saturating_sub(1))]
    RankOutOfRange {
        /// The rank.
        rank: u32,
        /// World size.
        ranks: u32,
    },
    /// A size exceeds a limit, set by the formats or the configuration.
    #[error(
        "{what}: {needed} needed, {limit} allowed, {} too many; lower it, max_tokens, top_k or \
         hidden, or set max_receive_rows below the worst case",
        needed - u128::from(*limit)
    )]
    TooLarge {
        /// The counted quantity.
        what: &'static str,
        /// Amount in this shape.
        needed: u128,
        /// Maximum amount.
        limit: u64,
    },
    /// A batch larger than `max_tokens`.
    #[error(
        "{tokens} tokens in a batch of at most {max_tokens}, {} too many; split the batch or raise \
         max_tokens",
        tokens - *max_tokens as usize
    )]
    TooManyTokens {
        /// Tokens in the batch.
        tokens: usize,
        /// Maximum number of tokens.
        max_tokens: u32,
    },
    /// An array has the wrong length.
    #[error("{what} has {given} elements; {expected} are needed")]
    WrongLength {
        /// The array.
        what: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements in the array.
        given: usize,
    },
    /// An array has too few rows.
    #[error("{what} holds {given} rows; {needed} are needed")]
    TooFewRows {
        /// The array.
        what: Area,
        /// Rows needed.
        needed: usize,
        /// Rows in the array.
        given: usize,
    },
    /// An array whose rows have the wrong length.
    #[error("a row of {what} has {given} bytes; {needed} are needed")]
    RowLength {
        /// The array.
        what: Area,
        /// Bytes needed.
        needed: usize,
        /// Row size in bytes.
        given: usize,
    },
    /// An array in memory that the CPU cannot read.
    #[error("{what}: memory of {place:?}, which the CPU cannot read; copy it to host memory first")]
    NotOnHost {
        /// The array.
        what: Area,
        /// Memory kind.
        place: MemoryKind,
    },
    /// A token names an expert that does not exist.
    #[error(
        "token {token} names expert {expert} in slot {slot}, but there are {experts} experts; \
         a negative id means no expert"
    )]
    ExpertOutOfRange {
        /// The token's number in the batch.
        token: usize,
        /// The top-k slot.
        slot: usize,
        /// The id.
        expert: i64,
        /// Expert count.
        experts: u32,
    },
    /// A token names the same expert in two slots.
    #[error("token {token} names expert {expert} twice; add up its weights and name it once")]
    ExpertTwice {
        /// The token's number in the batch.
        token: usize,
        /// The expert named twice.
        expert: u32,
    },
    /// A rank would receive more rows than it has room for. Every rank derives the same error from the same
    /// headers, before any write beyond the private rows.
    #[error(
        "rank {rank} would receive {rows} rows but has room for {capacity}, {} too few; raise \
         max_receive_rows or send smaller batches",
        rows - u64::from(*capacity)
    )]
    Capacity {
        /// The rank that would overflow; the lowest if there are several.
        rank: u32,
        /// Rows for that rank.
        rows: u64,
        /// Room, in rows.
        capacity: u32,
    },
    /// A peer's header that contradicts the configuration, the round or itself.
    #[error(
        "rank {peer} sent a header whose {what} is {seen}, where {expected} was expected; its \
         configuration differs or its memory is damaged"
    )]
    Header {
        /// The sender.
        peer: u32,
        /// The field.
        what: &'static str,
        /// Expected value, or bound.
        expected: u64,
        /// Value found.
        seen: u64,
    },
    /// A peer's metadata contradict the header or the configuration.
    #[error(
        "row {row} from rank {peer} has metadata whose {what} is {seen}, where {expected} was \
         expected; its configuration differs or its memory is damaged"
    )]
    Metadata {
        /// The sender.
        peer: u32,
        /// Row number among the peer's rows.
        row: u32,
        /// The field.
        what: &'static str,
        /// Expected value, or bound.
        expected: u64,
        /// Value found.
        seen: u64,
    },
    /// A peer that raised a lane more often than announced.
    #[error("rank {peer} wrote {seen} times in the {phase} of a round, {expected} were announced")]
    Overrun {
        /// The peer.
        peer: u32,
        /// `dispatch` or `combine`.
        phase: &'static str,
        /// Raises announced.
        expected: u64,
        /// Raises seen.
        seen: u64,
    },
    /// A peer with another configuration.
    #[error(
        "rank {peer} has {field} {theirs}, this rank {ours}: give every rank the same configuration"
    )]
    Disagreement {
        /// The peer.
        peer: u32,
        /// The first field that differs.
        field: String,
        /// Value here.
        ours: String,
        /// Value there.
        theirs: String,
    },
    /// A configuration for another rank or group than the engine's.
    #[error(
        "the configuration is for rank {rank} of {ranks}, but this engine is rank {engine_rank} of \
         {engine_ranks}"
    )]
    WrongGroup {
        /// The rank in the configuration.
        rank: u32,
        /// The ranks in the configuration.
        ranks: u32,
        /// The engine's rank.
        engine_rank: u32,
        /// World size in the engine's group.
        engine_ranks: u32,
    },
    /// All channels are held by rounds that were not released.
    #[error(
        "all {channels} channels are in use; round {round} holds the next one: release its handle, or \
         pass more channels"
    )]
    InUse {
        /// The round that holds the next channel.
        round: u64,
        /// Channels in the all-to-all.
        channels: u32,
    },
    /// Call out of order.
    #[error("{call} of round {round} while it is {stage}")]
    WrongStage {
        /// The call.
        call: &'static str,
        /// The round.
        round: u64,
        /// Round stage.
        stage: Stage,
    },
    /// A deadline passed. The round continues, and the call may be repeated.
    #[error(
        "rank {rank} waited {} in round {round} ({phase}): {}",
        weft_fabric::Rounded(*waited),
        weft_fabric::missing_text(.missing)
    )]
    Timeout {
        /// The waiting rank.
        rank: u32,
        /// Round phase.
        phase: &'static str,
        /// The round.
        round: u64,
        /// Time waited.
        waited: Duration,
        /// Peers that block the round.
        missing: Vec<MissingPeer>,
    },
    /// A field exceeds a kernel limit.
    #[error("{field} is {given}; on a device it is at most {limit}, since {reason}")]
    DeviceLimit {
        /// The field.
        field: &'static str,
        /// The requested option or value.
        given: u64,
        /// Maximum.
        limit: u64,
        /// Reason for the limit.
        reason: &'static str,
    },
    /// Option combination that excludes itself.
    #[error("{what} is not supported: {reason}")]
    Unsuitable {
        /// The requested option or value.
        what: &'static str,
        /// The reason, and the remedy.
        reason: &'static str,
    },
    /// Unsupported token cast.
    #[error(
        "tokens of {token} cannot travel as {wire}: a device sends tokens and scales unchanged, or \
         casts float32, bfloat16 and float16 to float8_e4m3fn"
    )]
    Cast {
        /// Input token type.
        token: TokenType,
        /// Token type on the wire.
        wire: TokenType,
    },
    /// Unsupported block size for a cast.
    #[error("a cast to blocks of {block} elements, not supported: expected 32, 64, 128 or 256")]
    CastBlock {
        /// Elements per block.
        block: u32,
    },
    /// Row length is not a multiple of 16 bytes.
    #[error(
        "a row of {what} has {bytes} bytes; on a device rows are multiples of 16 bytes: make hidden a \
         multiple of {multiple}"
    )]
    RowPieces {
        /// The array.
        what: &'static str,
        /// Row size in bytes.
        bytes: u64,
        /// Required divisor for `hidden`.
        multiple: u64,
    },
    /// A rank's heap larger than allowed.
    #[error(
        "the symmetric heap needs {needed} bytes, {limit} allowed, {} too many; lower max_tokens, hidden \
         or channels",
        needed - u128::from(*limit)
    )]
    HeapTooLarge {
        /// Bytes needed.
        needed: u128,
        /// Bytes allowed.
        limit: u64,
    },
    /// A peer could not allocate a part in an all-to-all.
    #[error(
        "rank {peer} could not allocate its part of the all-to-all: {detail}; lower max_tokens, hidden or channels"
    )]
    PeerRefused {
        /// The peer.
        peer: u32,
        /// Error text.
        detail: String,
    },
    /// A peer could not create a part in a device all-to-all.
    #[error("rank {peer} could not create its part of the all-to-all: {detail}")]
    PeerFailed {
        /// The peer.
        peer: u32,
        /// Error text.
        detail: String,
    },
    /// A channel outside the range.
    #[error("channel {channel}: expected 0 to {}; pass channels= for more", channels.saturating_sub(1))]
    NoChannel {
        /// The channel.
        channel: u32,
        /// Channel count.
        channels: u32,
    },
    /// A call that waits on the host, on a stream under capture.
    #[error(
        "{what} during stream capture: the host would wait for a kernel that does not run; call it outside the capture"
    )]
    Captured {
        /// The requested option or value.
        what: &'static str,
    },
    /// Counts that did not come to the host in time.
    #[error(
        "the round counts on channel {channel} did not come to the host within {seconds} s: earlier work on \
         the stream, or the slowest rank, may take longer; repeat the call, or raise timeout"
    )]
    CountsLate {
        /// The channel.
        channel: u32,
        /// Seconds waited.
        seconds: f64,
    },
    /// Counts on a channel without tokens in flight.
    #[error(
        "counts of channel {channel}: no tokens are in flight; ask for counts between dispatch_send and recv"
    )]
    NoCounts {
        /// The channel.
        channel: u32,
    },
    /// A placement with an expert that does not exist.
    #[error(
        "the placement is invalid: rank {rank} holds expert {expert}, but there are {experts} experts, numbered from 0"
    )]
    MapExpert {
        /// The rank.
        rank: u32,
        /// The expert.
        expert: u32,
        /// Expert count.
        experts: u32,
    },
    /// A placement has no replica for an expert, or too many.
    #[error("the placement is invalid: expert {expert} has {count} replicas: expected 1 to {most}")]
    MapReplicas {
        /// The expert.
        expert: u32,
        /// Replica count.
        count: u32,
        /// Maximum.
        most: u32,
    },
    /// A placement has other experts, or other numbers per rank, than the all-to-all.
    #[error(
        "the placement of layer {layer} has {what} {given}; this all-to-all was created with {expected}: create another one"
    )]
    MapShape {
        /// The layer.
        layer: u32,
        /// The difference.
        what: &'static str,
        /// Value in the placement.
        given: String,
        /// Value in the all-to-all.
        expected: String,
    },
    /// A layer outside the range.
    #[error(
        "there is no layer {layer}: this all-to-all has {layers}, numbered from 0, one for each placement passed at creation"
    )]
    NoLayer {
        /// The layer.
        layer: u32,
        /// Layer count.
        layers: u32,
    },
    /// A peer that could not change the placement.
    #[error("rank {peer} could not change the placement, so no rank did: {detail}")]
    MapRefused {
        /// The peer.
        peer: u32,
        /// Error text.
        detail: String,
    },
    /// A placement change while a round is in flight.
    #[error(
        "channel {channel} has a round in flight: combine or release it on every rank before a placement change"
    )]
    RoundInFlight {
        /// The channel.
        channel: u32,
    },
    /// Missing call array.
    #[error("{what}: array missing; pass it")]
    NoAddress {
        /// The array.
        what: &'static str,
    },
    /// An array whose address is not aligned to 16 bytes.
    #[error(
        "{what} at {address:#x}: expected an address that is a multiple of 16; copy the array into a \
         new one"
    )]
    Misaligned {
        /// The array.
        what: &'static str,
        /// Array address.
        address: u64,
    },
    /// Error from the heap, the kernel compiler, or a device record.
    #[error(transparent)]
    Gpu(weft_gpu::Error),
    /// CUDA failed.
    #[error(transparent)]
    Cuda(#[from] weft_cuda::Error),
    /// The fabric failed.
    #[error(transparent)]
    Fabric(#[from] weft_fabric::Error),
}

impl From<weft_gpu::Error> for Error {
    /// Unwraps fabric and CUDA errors, so that each has one form.
    fn from(error: weft_gpu::Error) -> Error {
        match error {
            weft_gpu::Error::Fabric(error) => Error::Fabric(error),
            weft_gpu::Error::Cuda(error) => Error::Cuda(error),
            error => Error::Gpu(error),
        }
    }
}

impl Error {
    /// Rank that violated the protocol, if one did.
    pub fn offender(&self) -> Option<u32> {
        match self {
            Error::Header { peer, .. }
            | Error::Metadata { peer, .. }
            | Error::Overrun { peer, .. } => Some(*peer),
            _ => None,
        }
    }
}

/// Rejects an amount for `what` above `limit`.
pub(crate) fn fits(what: &'static str, needed: u128, limit: u64) -> Result<(), Error> {
    if needed > u128::from(limit) {
        return Err(Error::TooLarge { what, needed, limit });
    }
    Ok(())
}
