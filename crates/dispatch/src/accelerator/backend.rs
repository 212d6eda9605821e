//! Backends: what an accelerator node runs on a batch.

use super::batch::Batch;

/// Runs batches of queries.
pub trait Backend {
    /// Runs a batch: reads inputs, writes outputs, sets the bytes of variable outputs. It returns when all outputs are
    /// in memory.
    fn run(&mut self, batch: &mut Batch<'_>);
}

/// Backend without work: outputs have their most bytes, of any content.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoOp;

impl Backend for NoOp {
    fn run(&mut self, _: &mut Batch<'_>) {}
}
