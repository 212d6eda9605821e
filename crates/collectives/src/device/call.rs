//! Call arguments.

use super::message::DeviceOperation;
use super::plan::CallOptions;
use crate::reduction::{Element, Reduction};
use std::hash::{DefaultHasher, Hash, Hasher};
use weft_cuda::Stream;
use weft_gpu::domain::SymmetricPlace;

/// A rank's call.
#[derive(Clone, Debug)]
pub struct DeviceCall {
    /// Stream; ignored by a twin.
    pub stream: Stream,
    /// Operation.
    pub operation: DeviceOperation,
    /// Input address.
    pub input: u64,
    /// Output address.
    pub output: u64,
    /// Element type. Operations without arithmetic use only its length.
    pub element: Element,
    /// Reduction, for operations that reduce.
    pub reduction: Reduction,
    /// True if the result is divided by the rank count.
    pub average: bool,
    /// Caller options.
    pub options: CallOptions,
}

impl DeviceCall {
    /// Digest over what is equal on all ranks in a direct call.
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
