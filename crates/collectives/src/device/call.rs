//! Arguments of a call.

use super::message::DeviceOperation;
use super::plan::CallOptions;
use crate::reduction::{Element, Reduction};
use std::hash::{DefaultHasher, Hash, Hasher};
use weft_cuda::Stream;
use weft_gpu::domain::SymmetricPlace;

/// A call of a rank.
#[derive(Clone, Debug)]
pub struct DeviceCall {
    /// Stream; ignored by a twin.
    pub stream: Stream,
    /// Operation.
    pub operation: DeviceOperation,
    /// Address of the input.
    pub input: u64,
    /// Address of the output.
    pub output: u64,
    /// Type of the elements. Operations without arithmetic use its length alone.
    pub element: Element,
    /// Reduction, of operations that reduce.
    pub reduction: Reduction,
    /// True if the result is divided by the number of ranks.
    pub average: bool,
    /// Choices of the caller.
    pub options: CallOptions,
}

impl DeviceCall {
    /// Digest of what is equal on all ranks of a direct call.
    pub(super) fn digest(&self, input: &SymmetricPlace, output: &SymmetricPlace) -> u32 {
        let mut hasher = DefaultHasher::new();
        (input.memory, input.offset, output.memory, output.offset).hash(&mut hasher);
        self.operation.hash(&mut hasher);
        let arithmetic = self.operation.reduces().then_some((self.reduction, self.average));
        (self.element, arithmetic, self.options).hash(&mut hasher);
        let hash = hasher.finish();
        (hash ^ hash >> 32) as u32
    }
}
