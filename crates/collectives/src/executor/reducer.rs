//! Reducer: a rank's reductions and copies, the long ones by several threads.
//!
//! A vector is divided by elements, so that the bits are the same for any thread count.

use super::reads::{Arithmetic, Folder, Operand};
use super::team::Team;
use crate::reduction::{self, Element, Reduction};
use crate::run_error::RunError;
use std::sync::{Arc, Mutex, PoisonError};
use weft_fabric::MemoryReader;

/// Result size in bytes that one thread computes at a time; a multiple of all element sizes.
const PART_BYTES: usize = if cfg!(miri) { 128 } else { 64 << 10 };
/// Result size in bytes from which several threads compute it: for shorter results a wake-up costs as much as it saves.
const THREADED_BYTES: usize = 4 * PART_BYTES;

/// Bytes per wider element in a conversion.
const WIDE_BYTES: usize = super::plan::WIDE_BYTES as usize;

/// A rank's memory-bound work.
pub(super) struct Reducer {
    /// One for each team member.
    folders: Vec<Mutex<Folder>>,
    operands: Vec<Operand>,
    team: Team,
}

/// Address that threads share.
#[derive(Clone, Copy)]
struct Shared<T>(T);

// SAFETY: the pointers belong to one call, whose caller vouches for them in all threads; parts are disjoint.
unsafe impl<T> Sync for Shared<T> {}

impl<T: Copy> Shared<T> {
    fn get(&self) -> T {
        self.0
    }
}

impl Reducer {
    /// Reducer with readers for all peers, by rank, and this many threads with the calling one.
    pub fn new(readers: &[Option<Arc<dyn MemoryReader>>], threads: usize) -> Reducer {
        let team = Team::new(threads);
        let folder = |_| Mutex::new(Folder::new(readers.to_vec()));
        let folders = (0..team.members()).map(folder).collect();
        Reducer { folders, operands: Vec::new(), team }
    }

    /// Operands for the next fold or read, to be filled in.
    pub fn operands(&mut self) -> &mut Vec<Operand> {
        self.operands.clear();
        &mut self.operands
    }

    /// Folds the operands into `target`.
    ///
    /// # Safety
    /// As for [`Folder::fold`]; the caller's memory may be accessed by any thread.
    pub unsafe fn fold(
        &mut self,
        how: Arithmetic,
        target: *mut u8,
        bytes: usize,
    ) -> Result<(), RunError> {
        // SAFETY: the caller's, for each part.
        self.fold_parts(target, bytes, |folder, target, bytes| unsafe {
            folder.fold(how, target, bytes)
        })
    }

    /// Reads the operand, or copies it, to `target`.
    ///
    /// # Safety
    /// As for [`Reducer::fold`], with one operand.
    pub unsafe fn read(&mut self, target: *mut u8, bytes: usize) -> Result<(), RunError> {
        // SAFETY: the caller's, for each part.
        self.fold_parts(target, bytes, |folder, target, bytes| unsafe {
            folder.copy(target, bytes)
        })
    }

    fn fold_parts(
        &mut self,
        target: *mut u8,
        bytes: usize,
        fold: impl Fn(&mut Folder, *mut u8, usize) -> Result<(), RunError> + Sync,
    ) -> Result<(), RunError> {
        let Reducer { folders, operands, team } = self;
        let (target, operands) = (Shared(target), Shared(operands.as_slice()));
        let failed = Mutex::new(None);
        parts(team, bytes, |member, start, bytes| {
            let mut folder = folders[member].lock().unwrap_or_else(PoisonError::into_inner);
            let here = operands.get().iter().map(|operand| operand.after(start));
            folder.operands().extend(here);
            if let Err(error) = fold(&mut folder, target.get().wrapping_add(start), bytes) {
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Writes `a op b` to `target`.
    ///
    /// # Safety
    /// Same as for [`reduction::combine`], with `bytes` bytes in whole elements, and as for [`Reducer::fold`].
    pub unsafe fn combine(
        &mut self,
        (reduction, element): (Reduction, Element),
        target: *mut u8,
        [a, b]: [*const u8; 2],
        bytes: usize,
    ) {
        let all = Shared((target, a, b));
        parts(&mut self.team, bytes, |_, start, bytes| {
            let (target, a, b) = all.get();
            let count = bytes / element.bytes();
            let (target, a, b) =
                (target.wrapping_add(start), a.wrapping_add(start), b.wrapping_add(start));
            // SAFETY: the caller's, for this part.
            unsafe { reduction::combine(reduction, element, target, a, b, count) };
        });
    }

    /// Calls `map(target, source, count)` for parts of `count` elements, whose widths differ between source and
    /// target.
    ///
    /// # Safety
    /// As for [`Reducer::map`].
    pub unsafe fn convert(
        &mut self,
        (target, target_bytes): (*mut u8, usize),
        (source, source_bytes): (*const u8, usize),
        count: usize,
        map: impl Fn(*mut u8, *const u8, usize) + Sync,
    ) {
        let both = Shared((target, source));
        parts(&mut self.team, count * WIDE_BYTES, |_, start, bytes| {
            let ((target, source), first) = (both.get(), start / WIDE_BYTES);
            let target = target.wrapping_add(first * target_bytes);
            map(target, source.wrapping_add(first * source_bytes), bytes / WIDE_BYTES);
        });
    }

    /// Calls `map(target, source, bytes)` for parts with whole elements.
    ///
    /// # Safety
    /// `map` accesses only its own part, and as for [`Reducer::fold`].
    pub unsafe fn map(
        &mut self,
        target: *mut u8,
        source: *const u8,
        bytes: usize,
        map: impl Fn(*mut u8, *const u8, usize) + Sync,
    ) {
        let both = Shared((target, source));
        parts(&mut self.team, bytes, |_, start, bytes| {
            let (target, source) = both.get();
            map(target.wrapping_add(start), source.wrapping_add(start), bytes);
        });
    }
}

/// Calls `work(member, start, bytes)` for each part of `bytes` bytes, by several threads if that pays.
fn parts(team: &mut Team, bytes: usize, work: impl Fn(usize, usize, usize) + Sync) {
    if bytes < THREADED_BYTES || team.members() == 1 {
        return work(0, 0, bytes);
    }
    team.run(bytes.div_ceil(PART_BYTES), &|member, part| {
        let start = part * PART_BYTES;
        work(member, start, PART_BYTES.min(bytes - start));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_fabric::random::SplitMix64;

    const SHAPES: usize = if cfg!(miri) { 2 } else { 40 };

    fn bytes(random: &mut SplitMix64, length: usize) -> Vec<u8> {
        (0..length).map(|_| random.bits() as u8).collect()
    }

    /// Results from a fold, a sum of two, a quotient and a read by this many threads.
    fn results(
        threads: usize,
        how: Arithmetic,
        sources: &[Vec<u8>],
    ) -> Result<[Vec<u8>; 4], RunError> {
        let mut reducer = Reducer::new(&[], threads);
        let length = sources[0].len();
        let mut made: [Vec<u8>; 4] = std::array::from_fn(|_| vec![0; length]);
        let [fold, sum, quotient, read] = made.each_mut().map(Vec::as_mut_ptr);
        let (a, b) = (sources[0].as_ptr(), sources[1].as_ptr());
        let Arithmetic { reduction, element, .. } = how;
        reducer.operands().extend(sources.iter().map(|one| Operand::Local(one.as_ptr())));
        // SAFETY: all vectors have `length` bytes, and only these calls access them.
        unsafe {
            reducer.fold(how, fold, length)?;
            reducer.combine((reduction, element), sum, [a, b], length);
            reducer.map(quotient, a, length, |target, source, bytes| {
                reduction::divide(element, target, source, bytes / element.bytes(), 3);
            });
            reducer.operands().push(Operand::Local(b));
            reducer.read(read, length)?;
        }
        Ok(made)
    }

    #[test]
    fn any_number_of_threads_computes_the_same_bits() {
        let mut random = SplitMix64::new(7);
        for _ in 0..SHAPES {
            let mut below = |limit: usize| random.bits() as usize % limit;
            let element = Element::ALL[below(Element::ALL.len())];
            let supported = Reduction::ALL.into_iter().filter(|one| one.supports(element));
            let supported: Vec<_> = supported.collect();
            let reduction = supported[below(supported.len())];
            let factor = (reduction == Reduction::Sum && below(2) == 0).then_some(0.75);
            let divisor = (reduction == Reduction::Sum && below(2) == 0).then_some(3);
            let length = below(2 * THREADED_BYTES) / element.bytes() * element.bytes();
            let (operands, threads) = (2 + below(4), 2 + below(3));
            let sources: Vec<_> = (0..operands).map(|_| bytes(&mut random, length)).collect();
            let how = Arithmetic { reduction, element, factor, divisor };
            let [one, several] =
                [1, threads].map(|threads| results(threads, how, &sources).unwrap());
            assert!(one == several, "{how:?}, {length} bytes, {threads} threads");
            assert!(one[3] == sources[1]);
        }
    }

    #[test]
    fn an_operand_that_cannot_be_read_is_an_error_of_any_number_of_threads() {
        for threads in [1, 2] {
            let mut reducer = Reducer::new(&[None, None], threads);
            let mut target = vec![0u8; 2 * THREADED_BYTES];
            reducer.operands().push(Operand::Remote { rank: 1, address: 64 });
            // SAFETY: the target has as many bytes.
            let read = unsafe { reducer.read(target.as_mut_ptr(), target.len()) };
            assert!(matches!(read, Err(RunError::Closed)));
        }
    }
}
