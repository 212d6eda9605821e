//! Folds over operands that lie in several ranks' memory.
//!
//! A rank's first signal in a chunk carries the input and output addresses and lengths, into a slot in the reader's
//! staging memory. A reader checks them against its own plan. A fold reads its operands in segments that stay in the
//! cache until they are reduced.

use super::call::Call;
use super::layout::Place;
use crate::reduction::{self, Element, Reduction};
use crate::run_error::RunError;
use std::sync::Arc;
use weft_fabric::{MemoryReader, Rank};

/// Scratch bytes for segments from all operands in a fold: a share in a core's second-level cache.
const SCRATCH_BYTES: usize = 256 << 10;
/// Maximum and minimum operand segment, in bytes; multiples of all element sizes.
const MAX_PIECE: usize = 64 << 10;
const MIN_PIECE: usize = 4 << 10;

/// Memory that a rank lets the peers read during a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Addresses {
    pub input: u64,
    pub input_bytes: u64,
    pub output: u64,
    pub output_bytes: u64,
}

impl Addresses {
    /// Memory in this rank's call.
    pub fn of(call: &Call, input_bytes: u64, output_bytes: u64) -> Addresses {
        let input = call.input.expose_provenance() as u64;
        let output = call.output.expose_provenance() as u64;
        Addresses { input, input_bytes, output, output_bytes }
    }

    /// Words in a slot.
    pub fn words(self) -> [u64; 4] {
        [self.input, self.input_bytes, self.output, self.output_bytes]
    }

    /// Addresses in a slot.
    pub fn from_words([input, input_bytes, output, output_bytes]: [u64; 4]) -> Addresses {
        Addresses { input, input_bytes, output, output_bytes }
    }

    /// Address at `peer` for `bytes` bytes that begin `start` bytes into this place.
    pub fn locate(&self, peer: u32, place: Place, start: u64, bytes: u64) -> Result<u64, RunError> {
        let (what, address, length) = match place {
            Place::Input { .. } => ("length of its input", self.input, self.input_bytes),
            _ => ("length of its output", self.output, self.output_bytes),
        };
        let expected = start.saturating_add(bytes);
        if expected > length {
            return Err(RunError::Violation { peer: Rank(peer), what, expected, seen: length });
        }
        Ok(address.wrapping_add(start))
    }
}

/// Fold operand.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operand {
    /// This rank's memory.
    Local(*const u8),
    /// Address in a peer's memory.
    Remote { rank: u32, address: u64 },
}

// SAFETY: an address, which is used only under the `Folder::fold` contract; that holds for any thread.
unsafe impl Send for Operand {}

impl Operand {
    /// The operand without the first bytes.
    pub fn after(self, bytes: usize) -> Operand {
        match self {
            Operand::Local(source) => Operand::Local(source.wrapping_add(bytes)),
            Operand::Remote { rank, address } => {
                Operand::Remote { rank, address: address.wrapping_add(bytes as u64) }
            }
        }
    }
}

/// Fold arithmetic.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arithmetic {
    pub reduction: Reduction,
    pub element: Element,
    /// Factor for each operand.
    pub factor: Option<f64>,
    /// Result divisor.
    pub divisor: Option<u32>,
}

/// Readers for all peers, with segment scratch.
#[derive(Debug, Default)]
pub(super) struct Folder {
    /// By rank; `None` for this rank, and if peers cannot be read.
    readers: Vec<Option<Arc<dyn MemoryReader>>>,
    scratch: Vec<u8>,
    /// Operands in the present fold.
    operands: Vec<Operand>,
    /// Segment address for each operand.
    sources: Vec<*const u8>,
}

// SAFETY: the pointers belong to the present fold, and are dead between two folds.
unsafe impl Send for Folder {}

impl Folder {
    pub fn new(readers: Vec<Option<Arc<dyn MemoryReader>>>) -> Folder {
        Folder { readers, ..Folder::default() }
    }

    /// Operands for the next fold, to be filled in.
    pub fn operands(&mut self) -> &mut Vec<Operand> {
        self.operands.clear();
        &mut self.operands
    }

    /// Reads the operand, or copies it, to `target`.
    ///
    /// # Safety
    /// As for [`Folder::fold`], with one operand.
    pub unsafe fn copy(&mut self, target: *mut u8, bytes: usize) -> Result<(), RunError> {
        match self.operands.first() {
            None => Ok(()),
            Some(&Operand::Local(source)) => {
                if target.cast_const() != source {
                    // SAFETY: both are valid for these bytes, by the caller; `copy_bytes` permits overlap.
                    unsafe { weft_fabric::copy_bytes(source, target, bytes) };
                }
                Ok(())
            }
            Some(&Operand::Remote { rank, address }) => {
                // SAFETY: the caller's.
                unsafe { read(&self.readers, rank, address, target, bytes) }
            }
        }
    }

    /// Folds the operands into `target`.
    ///
    /// # Safety
    /// Local operands are valid for reads of `bytes` bytes, and `target` for writes; it is one operand or overlaps
    /// none. No other thread writes to them, or reads `target`, during the call.
    pub unsafe fn fold(
        &mut self,
        how: Arithmetic,
        target: *mut u8,
        bytes: usize,
    ) -> Result<(), RunError> {
        let Folder { readers, scratch, operands, sources } = self;
        let piece = (SCRATCH_BYTES / operands.len().max(1)).clamp(MIN_PIECE, MAX_PIECE);
        let piece = piece / MIN_PIECE * MIN_PIECE;
        if scratch.len() < piece * operands.len() {
            *scratch = vec![0; piece * operands.len()];
        }
        let mut start = 0;
        while start < bytes {
            let length = piece.min(bytes - start);
            sources.clear();
            for (operand, slot) in operands.iter().zip(scratch.chunks_exact_mut(piece)) {
                let slot = slot.as_mut_ptr();
                let source = match *operand {
                    Operand::Local(source) => source.wrapping_add(start),
                    Operand::Remote { rank, address } => {
                        let address = address.wrapping_add(start as u64);
                        // SAFETY: the slot has `piece` bytes.
                        unsafe { read(readers, rank, address, slot, length) }?;
                        slot.cast_const()
                    }
                };
                let count = length / how.element.bytes();
                sources.push(match how.factor {
                    None => source,
                    Some(factor) => {
                        // SAFETY: the source is valid for these elements, and is the slot or disjoint from it.
                        unsafe { reduction::scale(how.element, slot, source, count, factor) };
                        slot.cast_const()
                    }
                });
            }
            // SAFETY: the caller's, for this segment.
            unsafe { reduce(how, target.wrapping_add(start), sources, length) };
            start += length;
        }
        Ok(())
    }
}

/// Reduces one segment from all operands, in order.
///
/// # Safety
/// As for [`reduction::combine_all`].
pub(super) unsafe fn reduce(how: Arithmetic, target: *mut u8, sources: &[*const u8], bytes: usize) {
    let Arithmetic { reduction, element, .. } = how;
    let count = bytes / element.bytes();
    match how.divisor {
        // SAFETY: the caller's.
        None => unsafe { reduction::combine_all(reduction, element, target, sources, count) },
        // SAFETY: the caller's; only sums are divided.
        Some(divisor) => unsafe {
            reduction::average_all(element, target, sources, count, divisor);
        },
    }
}

/// Reads peer memory.
///
/// # Safety
/// As for [`MemoryReader::read`].
unsafe fn read(
    readers: &[Option<Arc<dyn MemoryReader>>],
    rank: u32,
    address: u64,
    target: *mut u8,
    length: usize,
) -> Result<(), RunError> {
    let peer = Rank(rank);
    let reader = readers.get(rank as usize).and_then(Option::as_ref);
    let Some(reader) = reader else {
        // Read plans are made only for groups whose ranks can all read each other.
        return Err(RunError::Closed);
    };
    // SAFETY: the caller's.
    let read = unsafe { reader.read(address, target, length) };
    read.map_err(|error| RunError::PeerMemory { peer, error })
}
