//! Timer for calls and local memory, for `weft tune`.

use super::call::{Call, Scale};
use super::collectives::Collectives;
use super::config::CollectivesConfig;
use crate::algorithm::{Algorithm, Options};
use crate::op::{Collective, Rank};
use crate::reduction::{self, Element, Reduction};
use crate::run_error::RunError;
use crate::tuning::TuningSource;
use std::time::Instant;
use weft_fabric::{Communicator, Time, WaitOptions};

/// Block bytes on which copies and additions are timed: beyond a core's caches, as in long calls.
const BLOCK_BYTES: usize = 4 << 20;
/// Repetition count; the fastest counts.
const REPETITIONS: usize = 8;

/// Times calls on float32 vectors on this rank.
pub struct CallTimer {
    collectives: Collectives,
    ranks: u32,
    input: Vec<f32>,
    output: Vec<f32>,
}

/// Call time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timed {
    /// Vector size in bytes: as requested, rounded up to equal shares.
    pub bytes: u64,
    /// Mean seconds per call at this rank.
    pub seconds: f64,
}

impl CallTimer {
    /// Connects collectives with default configuration. Collective.
    ///
    /// # Errors
    /// Errors from [`Collectives::connect_tuned`].
    pub fn connect(
        communicator: &Communicator,
        tuning: Option<TuningSource<'_>>,
        deadline: Time,
    ) -> Result<CallTimer, RunError> {
        let config = CollectivesConfig::default();
        let collectives = Collectives::connect_tuned(communicator, config, tuning, deadline)?;
        let ranks = communicator.world_size();
        Ok(CallTimer { collectives, ranks, input: Vec::new(), output: Vec::new() })
    }

    /// Times `calls` calls, one after another, on vectors of `bytes` bytes. The broadcast root changes from call to
    /// call, so that no root runs ahead. Collective.
    ///
    /// # Errors
    /// Errors from [`Collectives::start`] and [`Collectives::wait`]; the memory for a failed call is leaked, as peers
    /// may still access it.
    pub fn time(
        &mut self,
        communicator: &Communicator,
        collective: Collective,
        algorithm: (Algorithm, Options),
        bytes: u64,
        calls: u32,
        options: &mut WaitOptions<'_>,
    ) -> Result<Timed, RunError> {
        let mut call = self.call(collective, bytes);
        call.algorithm = Some(algorithm);
        let shares = if collective.shares() { self.ranks as usize } else { 1 };
        let elements = call.elements as usize;
        let gathers = collective == Collective::AllGather;
        self.input.resize(if gathers { elements / shares } else { elements }, 1.0);
        let scatters = collective == Collective::ReduceScatter;
        self.output.resize(if scatters { elements / shares } else { elements }, 0.0);
        (call.input, call.output) = (self.input.as_ptr().cast(), self.output.as_mut_ptr().cast());
        let begin = Instant::now();
        for number in 0..calls {
            if let Collective::Broadcast { root } = &mut call.collective {
                *root = Rank(number % self.ranks);
            }
            if let Err(error) = self.run(communicator, &call, options) {
                std::mem::forget((
                    std::mem::take(&mut self.input),
                    std::mem::take(&mut self.output),
                ));
                return Err(error);
            }
        }
        let seconds = begin.elapsed().as_secs_f64() / f64::from(calls.max(1));
        Ok(Timed { bytes: call.elements * 4, seconds })
    }

    /// Algorithm that is selected for a vector of `bytes` bytes.
    ///
    /// # Errors
    /// Errors from [`Collectives::selected`].
    pub fn selected(
        &self,
        communicator: &Communicator,
        collective: Collective,
        bytes: u64,
    ) -> Result<(Algorithm, Options), RunError> {
        let mut call = self.call(collective, bytes);
        // Disjoint addresses, which no call accesses.
        call.input = std::ptr::without_provenance(1 << 46);
        call.output = std::ptr::without_provenance_mut(1 << 62);
        self.collectives.selected(&mut communicator.access(), &call)
    }

    /// Releases the collectives. Collective.
    ///
    /// # Errors
    /// Errors from [`Collectives::close`].
    pub fn close(
        &self,
        communicator: &Communicator,
        options: &mut WaitOptions<'_>,
    ) -> Result<(), RunError> {
        self.collectives.close(communicator, options)
    }

    fn run(
        &self,
        communicator: &Communicator,
        call: &Call,
        options: &mut WaitOptions<'_>,
    ) -> Result<(), RunError> {
        // SAFETY: the vectors have as many elements as the call, do not change until it ends, and are leaked after an
        // error.
        let id = unsafe { self.collectives.start(&mut communicator.access(), call) }?;
        self.collectives.wait(&mut communicator.access(), id, options)
    }

    /// Float32 sum, without memory.
    fn call(&self, collective: Collective, bytes: u64) -> Call {
        let shares = if collective.shares() { u64::from(self.ranks) } else { 1 };
        Call {
            collective,
            element: Element::F32,
            reduction: Reduction::Sum,
            scale: Scale::None,
            elements: bytes.div_ceil(4).max(1).next_multiple_of(shares),
            input: std::ptr::null(),
            output: std::ptr::null_mut(),
            algorithm: None,
        }
    }
}

/// Seconds to copy a byte, and to add one to another, in this rank's memory.
pub fn memory_rates() -> (f64, f64) {
    let count = BLOCK_BYTES / 4;
    let (source, mut target) = (vec![1f32; count], vec![0f32; count]);
    let mut copies = f64::INFINITY;
    let mut additions = f64::INFINITY;
    for _ in 0..REPETITIONS {
        let begin = Instant::now();
        target.copy_from_slice(&source);
        std::hint::black_box(&mut target);
        copies = copies.min(begin.elapsed().as_secs_f64());
        let begin = Instant::now();
        let (to, from) = (target.as_mut_ptr().cast::<u8>(), source.as_ptr().cast());
        // SAFETY: both have `count` elements, and no other thread has access to them.
        unsafe { reduction::combine(Reduction::Sum, Element::F32, to, to, from, count) };
        additions = additions.min(begin.elapsed().as_secs_f64());
    }
    (copies / BLOCK_BYTES as f64, additions / BLOCK_BYTES as f64)
}
