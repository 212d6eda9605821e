//! Collective call: arguments, with checks.

use super::plan::user_shares;
use crate::algorithm::{Algorithm, Options};
use crate::op::{Collective, Rank};
use crate::reduction::{Element, Reduction};
use crate::run_error::RunError;
use std::ptr::NonNull;
use weft_fabric::{Engine, Memory, MemoryKind, Region};

/// Reduction scaling.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum Scale {
    /// None.
    #[default]
    None,
    /// The result divided by the rank count: the average, with [`Reduction::Sum`].
    Average,
    /// Each contribution multiplied by this factor first.
    Before(f64),
}

/// Collective arguments. All but the pointers are equal on all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Collective.
    pub collective: Collective,
    /// Element type.
    pub element: Element,
    /// Operation in all-reduce and reduce-scatter; ignored by the others.
    pub reduction: Reduction,
    /// Scaling in all-reduce and reduce-scatter; ignored by the others.
    pub scale: Scale,
    /// Elements in the whole vector: for collectives on shares, in all ranks' shares together.
    pub elements: u64,
    /// This rank's input, contiguous; ignored at a rank without input.
    pub input: *const u8,
    /// This rank's output, contiguous. It may be the input itself, or, for reduce-scatter and all-gather, this rank's
    /// share in the larger buffer.
    pub output: *mut u8,
    /// Algorithm with options; `None`: chosen by size and routes.
    pub algorithm: Option<(Algorithm, Options)>,
}

// SAFETY: the pointers are only dereferenced under the `Collectives::start` contract, which holds for any thread.
unsafe impl Send for Call {}
// SAFETY: as above; a call is never changed.
unsafe impl Sync for Call {}

/// Longest vector, in bytes.
const MAX_BYTES: u64 = 1 << 46;

/// Call number, from 0, equal on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(pub(super) u64);

impl Call {
    /// Bytes in the whole vector.
    pub(crate) fn bytes(&self) -> u64 {
        self.elements * self.element.bytes() as u64
    }

    /// Bytes per share in the input, and in the output.
    pub(crate) fn share_bytes(&self, ranks: u32) -> u64 {
        let shares = if self.collective.shares() { u64::from(ranks) } else { 1 };
        self.bytes() / shares
    }

    /// Bytes in a rank's whole input and output.
    pub(crate) fn user_bytes(&self, ranks: u32, rank: Rank) -> (u64, u64) {
        let (inputs, outputs) = user_shares(self.collective, ranks, rank);
        let share = self.share_bytes(ranks);
        (u64::from(inputs) * share, u64::from(outputs) * share)
    }

    /// Factor for the contributions to a reduction.
    pub(super) fn factor(&self) -> Option<f64> {
        match self.scale {
            Scale::Before(factor) if self.collective.reduces() => Some(factor),
            _ => None,
        }
    }

    /// True if the results are divided by the rank count.
    pub(super) fn divides(&self) -> bool {
        self.collective.reduces() && self.scale == Scale::Average
    }

    /// True for a sum or product over 8-bit or 16-bit floats, which is accumulated in float32 and rounded once.
    pub(super) fn is_rounded(&self) -> bool {
        self.collective.reduces()
            && self.element.is_short_float()
            && matches!(self.reduction, Reduction::Sum | Reduction::Product)
    }

    /// Registers the input as a source for writes.
    ///
    /// # Safety
    /// The input stays valid until the region is released.
    pub(super) unsafe fn register(&self, engine: &mut Engine) -> Result<Region, RunError> {
        let (bytes, _) = self.user_bytes(engine.size(), Rank(engine.rank().0));
        let address = NonNull::new(self.input.cast_mut()).unwrap_or(NonNull::dangling());
        // SAFETY: valid for reads until the release, by this function's contract, and only read.
        let memory =
            unsafe { Memory::user_buffer(address, bytes as usize, MemoryKind::Host, Box::new(())) };
        Ok(engine.register(memory)?)
    }

    /// Checks the arguments at `rank`.
    pub(crate) fn check(&self, ranks: u32, rank: Rank) -> Result<(), RunError> {
        let invalid = |what, detail: String| Err(RunError::Invalid { what, detail });
        if let Collective::Broadcast { root } = self.collective
            && root.0 >= ranks
        {
            return invalid("root", format!("{root}: expected 0 to {}", ranks - 1));
        }
        if self
            .elements
            .checked_mul(self.element.bytes() as u64)
            .is_none_or(|bytes| bytes > MAX_BYTES)
        {
            return invalid("elements", format!("{}: the vector is too long", self.elements));
        }
        if self.collective.shares() && !self.elements.is_multiple_of(u64::from(ranks)) {
            let detail = format!("{}: expected a multiple of {ranks} ranks", self.elements);
            return invalid("elements", detail);
        }
        if self.collective.reduces() {
            let (reduction, element) = (self.reduction, self.element);
            if !reduction.supports(element) {
                let detail = format!("{} of {}: not defined", reduction.name(), element.name());
                return invalid("reduction", detail);
            }
            if self.scale != Scale::None && reduction != Reduction::Sum {
                return invalid("scale", format!("with {}: expected sum", reduction.name()));
            }
        }
        let (input, output) = self.user_bytes(ranks, rank);
        if input > 0 && self.input.is_null() || output > 0 && self.output.is_null() {
            return invalid("pointer", "null: expected the address of the elements".to_owned());
        }
        self.check_overlap(ranks, rank, input, output)
    }

    /// Checks that input and output are disjoint, or overlap as [`Call::output`] allows.
    fn check_overlap(
        &self,
        ranks: u32,
        rank: Rank,
        input: u64,
        output: u64,
    ) -> Result<(), RunError> {
        let (from, to) = (self.input as u64, self.output as u64);
        let own = u64::from(rank.0) * self.share_bytes(ranks);
        let allowed = match self.collective {
            Collective::AllReduce | Collective::Broadcast { .. } => from == to,
            Collective::ReduceScatter => to == from.wrapping_add(own),
            Collective::AllGather => from == to.wrapping_add(own),
            Collective::AllToAll => false,
        };
        let disjoint = input == 0 || output == 0 || from + input <= to || to + output <= from;
        if allowed || disjoint {
            return Ok(());
        }
        let detail = format!("{output} bytes that overlap the input: expected disjoint memory");
        Err(RunError::Invalid { what: "output", detail })
    }
}
