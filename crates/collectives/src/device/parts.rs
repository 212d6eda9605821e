//! Resources for a rank's kernels.

use super::call_board::CallBoard;
use super::error::DeviceError;
use super::program::Programs;
use super::twin::Twin;
use std::sync::Arc;
use weft_fabric::clock;
use weft_gpu::domain::{Block, Domain, Reservation};

/// Kernel resources, released in this order once no kernel runs.
pub(super) struct Parts {
    pub backend: Backend,
    pub peers: Vec<u64>,
    pub block: Block,
    /// `None` if ranks cannot share host memory.
    pub board: Option<Arc<CallBoard>>,
    pub _reservation: Option<Reservation>,
    pub domain: Arc<Domain>,
}

impl Parts {
    /// Adds the last calls on all ranks to an error that ended the group.
    pub fn failed(&self, source: weft_gpu::Error) -> DeviceError {
        match &self.board {
            Some(board) => {
                let calls = board.describe(clock::now());
                DeviceError::Failed { source: Box::new(source), calls }
            }
            None => source.into(),
        }
    }
}

/// The kernels or the twin.
pub(super) enum Backend {
    Cuda(Box<Programs>),
    Twin(Twin),
}
