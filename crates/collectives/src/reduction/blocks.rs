//! Loops over blocks of elements, which compilers turn into vector instructions.
//!
//! A block is read whole before its result is written: no element of a target is read after it was written, so the
//! target may be a source, and the loops need no checks of overlap.

use super::arithmetic::{Map, Operation};
use super::format::Format;

/// Elements of a block. The loops over a smaller one are unrolled before they are vectorised, and are slower.
const BLOCK: usize = 64;

/// Pointers to the same number of elements: two, or a slice of any number.
pub(super) trait Sources: AsRef<[*const u8]> + Copy {}

impl Sources for [*const u8; 2] {}
impl Sources for &[*const u8] {}

/// Folds sources; at least one.
///
/// # Safety
/// As for [`super::combine_all`].
#[inline(always)]
pub(super) unsafe fn fold<F: Format, O: Operation<F::Value>>(
    target: *mut u8,
    sources: impl Sources,
    count: usize,
) {
    let sources = sources.as_ref();
    let whole = count - count % BLOCK;
    for index in (0..whole).step_by(BLOCK) {
        // SAFETY: the caller's: the block is inside of the vectors.
        unsafe { fold_block::<F, O, BLOCK>(target, sources, index) };
    }
    for index in whole..count {
        // SAFETY: as above.
        unsafe { fold_block::<F, O, 1>(target, sources, index) };
    }
}

#[inline(always)]
unsafe fn fold_block<F: Format, O: Operation<F::Value>, const N: usize>(
    target: *mut u8,
    sources: &[*const u8],
    index: usize,
) {
    // SAFETY: the caller's.
    let mut values = unsafe { read::<F, N>(sources[0], index) };
    for &source in &sources[1..] {
        // SAFETY: the caller's.
        let others = unsafe { read::<F, N>(source, index) };
        for (value, other) in values.iter_mut().zip(others) {
            *value = O::apply(*value, other);
        }
    }
    // SAFETY: the caller's.
    unsafe { write::<F, N>(target, index, values) };
}

/// Changes each element.
///
/// # Safety
/// As for [`super::scale`].
#[inline(always)]
pub(super) unsafe fn map<F: Format, M: Map<F::Value>>(
    target: *mut u8,
    source: *const u8,
    count: usize,
    change: M,
) {
    let whole = count - count % BLOCK;
    for index in (0..whole).step_by(BLOCK) {
        // SAFETY: the caller's: the block is inside of the vectors.
        unsafe { map_block::<F, M, BLOCK>(target, source, index, change) };
    }
    for index in whole..count {
        // SAFETY: as above.
        unsafe { map_block::<F, M, 1>(target, source, index, change) };
    }
}

#[inline(always)]
unsafe fn map_block<F: Format, M: Map<F::Value>, const N: usize>(
    target: *mut u8,
    source: *const u8,
    index: usize,
    change: M,
) {
    // SAFETY: the caller's.
    let mut values = unsafe { read::<F, N>(source, index) };
    for value in &mut values {
        *value = change.apply(*value);
    }
    // SAFETY: the caller's.
    unsafe { write::<F, N>(target, index, values) };
}

#[inline(always)]
unsafe fn read<F: Format, const N: usize>(source: *const u8, index: usize) -> [F::Value; N] {
    let block = source.cast::<F::Stored>().wrapping_add(index).cast::<[F::Stored; N]>();
    // SAFETY: the caller's; any bits are valid.
    F::widen(unsafe { block.read_unaligned() })
}

#[inline(always)]
unsafe fn write<F: Format, const N: usize>(target: *mut u8, index: usize, values: [F::Value; N]) {
    let block = target.cast::<F::Stored>().wrapping_add(index).cast::<[F::Stored; N]>();
    // SAFETY: the caller's.
    unsafe { block.write_unaligned(F::narrow(values)) };
}
