//! Device collective errors, one variant per cause.

use crate::reduction::{Element, Reduction};

/// Device collective failure.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A rank that does not exist.
    #[error("rank is {rank}: expected one below {ranks}")]
    NoRank {
        /// Rank.
        rank: u32,
        /// Rank count.
        ranks: u32,
    },
    /// A message from a rank to itself.
    #[error("rank {rank} sends to itself or receives from itself: copy the tensor")]
    ToItself {
        /// Rank.
        rank: u32,
    },
    /// A parts list whose length is not the rank count.
    #[error("{given} parts are {what}: expected one for each of {ranks} ranks")]
    Parts {
        /// Direction.
        what: &'static str,
        /// Part count.
        given: usize,
        /// Rank count.
        ranks: u32,
    },
    /// A size beyond a limit.
    #[error("{what} is {given}: expected at most {limit}; pass a smaller one")]
    TooLarge {
        /// Measured quantity, for example `the number of elements`.
        what: &'static str,
        /// Given value.
        given: u64,
        /// Limit.
        limit: u64,
    },
    /// A zero size.
    #[error("{what} is 0: expected at least 1")]
    Zero {
        /// Zero option, for example `num_sms`.
        what: &'static str,
    },
    /// A reduction that its element type does not have.
    #[error(
        "{reduction} of {element}: expected bool or an integer type; use sum, product, min or max"
    )]
    Unsupported {
        /// Reduction.
        reduction: Reduction,
        /// Element type.
        element: Element,
    },
    /// An algorithm that cannot carry the call.
    #[error(
        "{algorithm} of {bytes} bytes: its limit is {limit} here; omit algorithm, or use two_shot"
    )]
    Algorithm {
        /// Algorithm.
        algorithm: &'static str,
        /// Vector size in bytes.
        bytes: u64,
        /// Limit.
        limit: u64,
    },
    /// A one-shot algorithm for parts with different lengths.
    #[error(
        "one_shot of an uneven all_to_all: the longest part is not known to all ranks; omit algorithm, or use two_shot"
    )]
    Uneven,
    /// A direct call for tensors that peers cannot access.
    #[error("direct {operation}: {needed}; omit algorithm, or use two_shot")]
    NotDirect {
        /// Operation.
        operation: &'static str,
        /// Reason.
        needed: &'static str,
    },
    /// A copy-engine call for another operation, or for tensors that peers cannot access.
    #[error("copy_engine of {operation}: {needed}")]
    NotByCopyEngine {
        /// Operation.
        operation: &'static str,
        /// Reason and remedy.
        needed: &'static str,
    },
    /// A direct call for registered tensors whose addresses have other remainders by 16 at a peer.
    #[error(
        "direct {operation}: the registered {what} begins {ours} bytes behind a multiple of 16 here and {theirs} at {peer}; register tensors that begin alike, omit algorithm, or use two_shot"
    )]
    Misaligned {
        /// Operation.
        operation: &'static str,
        /// Tensor.
        what: &'static str,
        /// Peer.
        peer: weft_fabric::Rank,
        /// Remainder here.
        ours: u64,
        /// Remainder there.
        theirs: u64,
    },
    /// Options that differ between two ranks.
    #[error("{what} is {ours} here and {theirs} at {peer}: pass equal ones on all ranks")]
    Disagreement {
        /// Peer.
        peer: weft_fabric::Rank,
        /// Option.
        what: &'static str,
        /// Value here.
        ours: u64,
        /// Value there.
        theirs: u64,
    },
    /// Peer options in an unknown form, for example from another version.
    #[error(
        "options of {peer} have {bytes} bytes, which is not a form of this version: install one version on all ranks"
    )]
    Malformed {
        /// Peer.
        peer: weft_fabric::Rank,
        /// Message length.
        bytes: usize,
    },
    /// Group failure, with the last calls on all ranks.
    #[error("{source}; last calls: {calls}")]
    Failed {
        /// Cause.
        source: Box<weft_gpu::Error>,
        /// Last call on each rank.
        calls: String,
    },
    /// GPU domain error, including CUDA errors.
    #[error(transparent)]
    Gpu(#[from] weft_gpu::Error),
    /// Fabric error.
    #[error(transparent)]
    Fabric(#[from] weft_fabric::Error),
}

impl From<weft_cuda::Error> for DeviceError {
    fn from(error: weft_cuda::Error) -> DeviceError {
        DeviceError::Gpu(error.into())
    }
}
