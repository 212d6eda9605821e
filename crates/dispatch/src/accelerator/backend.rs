//! Backends: what an accelerator node runs on a batch.

use super::batch::Batch;

/// Runs query batches.
pub trait Backend {
    /// Runs a batch: reads inputs, writes outputs, sets the bytes in variable outputs. It returns when all outputs are
    /// in memory.
    fn run(&mut self, batch: &mut Batch<'_>);
}

/// Backend without work: outputs have maximum size and any content.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoOp;

impl Backend for NoOp {
    fn run(&mut self, _: &mut Batch<'_>) {}
}
