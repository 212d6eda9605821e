//! Folds of operands that lie in the memory of several ranks.
//!
//! The first signal of a rank in a chunk carries the addresses and lengths of its input and output, into a slot of the
//! reader's staging memory. A reader checks them against its own plan. A fold reads its operands in pieces that stay in
//! the cache until they are reduced.

use super::call::Call;
use super::layout::Place;
use crate::reduction::{self, Element, Reduction};
use crate::run_error::RunError;
use std::sync::Arc;
use weft_fabric::{MemoryReader, Rank};

/// Bytes of the scratch for pieces of all operands of a fold: a share of a core's second-level cache.
const SCRATCH_BYTES: usize = 256 << 10;
/// Longest and shortest piece of an operand, in bytes; multiples of all elements.
const MAX_PIECE: usize = 64 << 10;
const MIN_PIECE: usize = 4 << 10;
/// Piece of floats of 8 and 16 bits, whose sums are rounded after each operand.
const ROUNDED_PIECE: usize = 4 << 10;

/// Memory that a rank lets its peers read during a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Addresses {
    pub input: u64,
    pub input_bytes: u64,
    pub output: u64,
    pub output_bytes: u64,
}

impl Addresses {
    /// Memory of this rank's call.
    pub fn of(call: &Call, input_bytes: u64, output_bytes: u64) -> Addresses {
        let input = call.input.expose_provenance() as u64;
        let output = call.output.expose_provenance() as u64;
        Addresses { input, input_bytes, output, output_bytes }
    }

    /// Words of a slot.
    pub fn words(self) -> [u64; 4] {
        [self.input, self.input_bytes, self.output, self.output_bytes]
    }

    /// Addresses in a slot.
    pub fn from_words([input, input_bytes, output, output_bytes]: [u64; 4]) -> Addresses {
        Addresses { input, input_bytes, output, output_bytes }
    }

    /// Address of `bytes` bytes `start` bytes into the memory of this place at `peer`.
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

/// Operand of a fold.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operand {
    /// Memory of this rank.
    Local(*const u8),
    /// Address in the memory of a peer.
    Remote { rank: u32, address: u64 },
}

// SAFETY: an address, which is used under the contract of `Folder::fold` alone; that holds for any thread.
unsafe impl Send for Operand {}

impl Operand {
    /// The operand without its first bytes.
    pub fn after(self, bytes: usize) -> Operand {
        match self {
            Operand::Local(source) => Operand::Local(source.wrapping_add(bytes)),
            Operand::Remote { rank, address } => {
                Operand::Remote { rank, address: address.wrapping_add(bytes as u64) }
            }
        }
    }
}

/// Arithmetic of a fold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arithmetic {
    pub reduction: Reduction,
    pub element: Element,
    /// Factor of each operand.
    pub factor: Option<f64>,
    /// Divisor of the result.
    pub divisor: Option<u32>,
}

/// Readers of all peers, and the scratch of their pieces.
#[derive(Debug, Default)]
pub(super) struct Folder {
    /// By rank; `None` for this rank, and if peers cannot be read.
    readers: Vec<Option<Arc<dyn MemoryReader>>>,
    scratch: Vec<u8>,
    /// Operands of the present fold.
    operands: Vec<Operand>,
    /// Addresses of a piece of each operand.
    sources: Vec<*const u8>,
}

// SAFETY: the pointers are those of the present fold, and dead between two of them.
unsafe impl Send for Folder {}

impl Folder {
    pub fn new(readers: Vec<Option<Arc<dyn MemoryReader>>>) -> Folder {
        Folder { readers, ..Folder::default() }
    }

    /// Operands of the next fold, to be filled in.
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
    /// Local operands are valid for reads of `bytes` bytes, and `target` for writes; it is one of them or overlaps none.
    /// No other thread writes to them, or reads `target`, during the call.
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
            // SAFETY: the caller's, for this piece.
            unsafe { reduce(how, target.wrapping_add(start), sources, length) };
            start += length;
        }
        Ok(())
    }
}

/// Reduces one piece of all operands, in their order.
///
/// # Safety
/// As for [`reduction::combine_all`].
pub(super) unsafe fn reduce(how: Arithmetic, target: *mut u8, sources: &[*const u8], bytes: usize) {
    let Arithmetic { reduction, element, .. } = how;
    let count = bytes / element.bytes();
    match *sources {
        [first, second, ref others @ ..] if element.is_short_float() && !others.is_empty() => {
            // SAFETY: the caller's.
            unsafe { reduce_rounded(how, target, (first, second, others), bytes) };
        }
        // SAFETY: the caller's.
        _ => unsafe { reduction::combine_all(reduction, element, target, sources, count) },
    }
    if let Some(divisor) = how.divisor {
        // SAFETY: the caller's.
        unsafe { reduction::divide(element, target, target, count, divisor) };
    }
}

/// As [`reduce`], for three or more operands whose sum is rounded after each, as by the steps of a plan that writes. It
/// stays in a local block until the last one, since `target` may be an operand.
///
/// # Safety
/// As for [`reduction::combine_all`].
unsafe fn reduce_rounded(
    how: Arithmetic,
    target: *mut u8,
    (first, second, others): (*const u8, *const u8, &[*const u8]),
    bytes: usize,
) {
    let Arithmetic { reduction, element, .. } = how;
    let mut sum = [0u8; ROUNDED_PIECE];
    let mut start = 0;
    while start < bytes {
        let length = ROUNDED_PIECE.min(bytes - start);
        let count = length / element.bytes();
        let (at, sum) = (|source: *const u8| source.wrapping_add(start), sum.as_mut_ptr());
        // SAFETY: the caller's, for these bytes; `sum` is local and as long.
        unsafe {
            reduction::combine(reduction, element, sum, at(first), at(second), count);
            for (index, &other) in others.iter().enumerate() {
                let is_last = index + 1 == others.len();
                let to = if is_last { target.wrapping_add(start) } else { sum };
                reduction::combine(reduction, element, to, sum, at(other), count);
            }
        }
        start += length;
    }
}

/// Reads memory of a peer.
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
        // Plans of reads are made for groups whose ranks can all read each other.
        return Err(RunError::Closed);
    };
    // SAFETY: the caller's.
    let read = unsafe { reader.read(address, target, length) };
    read.map_err(|error| RunError::PeerMemory { peer, error })
}
