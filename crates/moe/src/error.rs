//! What can go wrong, one variant per cause.

use crate::exchange::Stage;
use crate::rows::Area;
use crate::token_type::TokenType;
use std::time::Duration;
use weft_fabric::{Missing, Place};

/// Why a shape was refused, a round could not be planned, or a peer's data was not believed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The all-to-all was closed.
    #[error("the all-to-all was closed")]
    Closed,
    /// A field of the configuration must be at least one.
    #[error("{field} is 0; it must be at least 1")]
    Zero {
        /// The field's name in [`Config`](crate::Config).
        field: &'static str,
    },
    /// The rank is not one of the group.
    #[error("rank {rank} is outside a group of {ranks} ranks; ranks are numbered from 0")]
    RankOutOfRange {
        /// The rank given.
        rank: u32,
        /// The size of the group.
        ranks: u32,
    },
    /// The shape needs more than can be named or than the limit allows.
    #[error(
        "{what}: {needed} needed, {limit} allowed, {} too many; lower max_tokens, top_k or hidden, \
         or set max_receive_rows below the worst case",
        needed - u128::from(*limit)
    )]
    TooLarge {
        /// What is counted.
        what: &'static str,
        /// How much the shape asks for.
        needed: u128,
        /// How much there may be.
        limit: u64,
    },
    /// The batch is larger than the buffers were made for.
    #[error(
        "{tokens} tokens in a batch of at most {max_tokens}, {} too many; split the batch or raise \
         max_tokens",
        tokens - *max_tokens as usize
    )]
    TooManyTokens {
        /// Tokens given.
        tokens: usize,
        /// Tokens that the buffers hold.
        max_tokens: u32,
    },
    /// An array has the wrong number of elements.
    #[error("{what} has {given} elements; {expected} are needed")]
    WrongLength {
        /// The array.
        what: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        given: usize,
    },
    /// An array has too few rows, or a buffer too few bytes for them.
    #[error("{what} holds {given} rows; {needed} are needed")]
    TooFewRows {
        /// The array.
        what: Area,
        /// Rows needed.
        needed: usize,
        /// Rows given.
        given: usize,
    },
    /// The rows of an array are not as long as the shape says.
    #[error("a row of {what} has {given} bytes; {needed} are needed")]
    RowLength {
        /// The array.
        what: Area,
        /// Bytes needed.
        needed: usize,
        /// Bytes given.
        given: usize,
    },
    /// An array lies where the CPU cannot read it.
    #[error(
        "{what} are in memory that the CPU cannot read ({place:?}): copy them to host memory first"
    )]
    NotOnHost {
        /// The array.
        what: Area,
        /// Where it lies.
        place: Place,
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
        /// The id given.
        expert: i64,
        /// The number of experts.
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
    /// More tokens are on their way to a rank than it has room for. Every rank of the group finds
    /// the same from the same headers, before anything is written past the private rows.
    #[error(
        "rank {rank} would receive {rows} rows but has room for {capacity}, {} too few; raise \
         max_receive_rows or send smaller batches",
        rows - u64::from(*capacity)
    )]
    Capacity {
        /// The rank that would overflow; of several, the lowest.
        rank: u32,
        /// The rows on their way to it.
        rows: u64,
        /// The rows it has room for.
        capacity: u32,
    },
    /// A peer's header contradicts the configuration, the round or itself.
    #[error(
        "rank {peer} sent a header whose {what} is {seen}, where {expected} was expected; its \
         configuration differs or its memory is damaged"
    )]
    Header {
        /// Who sent it.
        peer: u32,
        /// The field.
        what: &'static str,
        /// The value, or the bound, that would have been right.
        expected: u64,
        /// The value found.
        seen: u64,
    },
    /// A peer's metadata contradict its header or the configuration.
    #[error(
        "row {row} from rank {peer} has metadata whose {what} is {seen}, where {expected} was \
         expected; its configuration differs or its memory is damaged"
    )]
    Metadata {
        /// Who sent it.
        peer: u32,
        /// The row, counted within what the peer sent.
        row: u32,
        /// The field.
        what: &'static str,
        /// The value, or the bound, that would have been right.
        expected: u64,
        /// The value found.
        seen: u64,
    },
    /// A peer raised a lane more often than what it announced.
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
    /// A peer was made with another configuration.
    #[error(
        "rank {peer} has {field} {theirs}, this rank {ours}: give every rank the same configuration"
    )]
    Disagreement {
        /// The peer.
        peer: u32,
        /// The first field that differs.
        field: String,
        /// Its value here.
        ours: String,
        /// Its value there.
        theirs: String,
    },
    /// The configuration is for another place or another group than the engine's.
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
        /// The ranks of the engine's group.
        engine_ranks: u32,
    },
    /// Every set of buffers is held by a round that was not released.
    #[error(
        "round {round} still holds the buffers that this one would use ({buffers} sets): release its \
         handle first, or ask for more buffers"
    )]
    InUse {
        /// The round that holds them.
        round: u64,
        /// Sets of buffers.
        buffers: u32,
    },
    /// A call came out of order.
    #[error("{call} of round {round} while it is {stage}")]
    WrongStage {
        /// The call.
        call: &'static str,
        /// The round.
        round: u64,
        /// Where the round stands.
        stage: Stage,
    },
    /// A deadline passed. The round goes on: the call may be repeated.
    #[error(
        "rank {rank} waited {waited:?} in round {round} ({phase}): {}",
        weft_fabric::error::missing_text(.missing)
    )]
    Timeout {
        /// Who waited.
        rank: u32,
        /// What the round waits for.
        phase: &'static str,
        /// The round.
        round: u64,
        /// For how long.
        waited: Duration,
        /// Whom it waits for.
        missing: Vec<Missing>,
    },
    /// A field is beyond what kernels can do.
    #[error("{field} is {given}; on a device it is at most {limit}, since {reason}")]
    DeviceLimit {
        /// The field.
        field: &'static str,
        /// What was asked for.
        given: u64,
        /// The most there may be.
        limit: u64,
        /// Why.
        reason: &'static str,
    },
    /// Two parts of a device's configuration exclude each other.
    #[error("{what} cannot be had: {reason}")]
    Unsuitable {
        /// What was asked for.
        what: &'static str,
        /// Why not, and what to do.
        reason: &'static str,
    },
    /// Tokens cannot be cast from one type to the other.
    #[error(
        "tokens of {token} cannot travel as {wire}: a device sends tokens and scales as they are, or \
         casts float32, bfloat16 and float16 to float8_e4m3fn"
    )]
    Cast {
        /// What tokens are made of.
        token: TokenType,
        /// What they would be on their way.
        wire: TokenType,
    },
    /// A device cannot cast to blocks of this size.
    #[error("a device casts tokens in blocks of 32, 64, 128 or 256 elements, not {block}")]
    CastBlock {
        /// Elements of a block.
        block: u32,
    },
    /// Rows do not consist of whole pieces.
    #[error(
        "a row of {what} has {bytes} bytes; on a device rows are multiples of 16 bytes: make hidden a \
         multiple of {multiple}"
    )]
    RowPieces {
        /// The array.
        what: &'static str,
        /// Bytes of a row.
        bytes: u64,
        /// What hidden needs to be a multiple of.
        multiple: u64,
    },
    /// The heap of a rank is larger than allowed.
    #[error(
        "the symmetric heap needs {needed} bytes, {limit} allowed, {} too many; lower max_tokens, hidden          or buffers",
        needed - u128::from(*limit)
    )]
    HeapTooLarge {
        /// Bytes needed.
        needed: u128,
        /// Bytes allowed.
        limit: u64,
    },
    /// A peer could not allocate its part of an all-to-all.
    #[error("rank {peer} could not allocate its part of the all-to-all: {detail}; ask for less")]
    PeerRefused {
        /// The peer.
        peer: u32,
        /// The text of its error.
        detail: String,
    },
    /// A peer could not make its part of a device all-to-all.
    #[error("rank {peer} could not make its part of the all-to-all: {detail}")]
    PeerFailed {
        /// The peer.
        peer: u32,
        /// What it said.
        detail: String,
    },
    /// A channel that there is not.
    #[error("there is no channel {channel}: {channels} were asked for (buffers), numbered from 0")]
    NoChannel {
        /// The channel given.
        channel: u32,
        /// Channels there are.
        channels: u32,
    },
    /// An array that a call needs was not given.
    #[error("no array was given for {what}")]
    NoAddress {
        /// The array.
        what: &'static str,
    },
    /// An array begins where a device cannot move whole pieces of it.
    #[error(
        "the array of {what} begins at {address:#x}, which is not a multiple of 16: copy it into one \
         of its own"
    )]
    Misaligned {
        /// The array.
        what: &'static str,
        /// Where it begins.
        address: u64,
    },
    /// The heap, the kernels' compiler, or what a kernel recorded.
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
    /// What the fabric or CUDA say is the same, wherever they were asked.
    fn from(error: weft_gpu::Error) -> Error {
        match error {
            weft_gpu::Error::Fabric(error) => Error::Fabric(error),
            weft_gpu::Error::Cuda(error) => Error::Cuda(error),
            error => Error::Gpu(error),
        }
    }
}

impl Error {
    /// The rank that broke the protocol, if one did.
    pub fn offender(&self) -> Option<u32> {
        match self {
            Error::Header { peer, .. }
            | Error::Metadata { peer, .. }
            | Error::Overrun { peer, .. } => Some(*peer),
            _ => None,
        }
    }
}
