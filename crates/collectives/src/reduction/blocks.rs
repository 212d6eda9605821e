//! Loops over element blocks, which compilers turn into vector instructions.
//!
//! A block is read whole before its result is written: no target element is read after it was written, so the target
//! may be a source, and the loops need no overlap checks.

use super::arithmetic::{Divide, Map, Operation};
use super::format::Format;

/// Elements per block. The loops over a smaller block are unrolled before they are vectorised, and are slower.
const BLOCK: usize = 64;

/// Pointers to the same number of elements: two, or a slice with any number.
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
        // SAFETY: the caller's: the block is inside the vectors.
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

/// Float sums that are computed in float32, divided before they are rounded; at least one source.
///
/// # Safety
/// As for [`super::average_all`].
#[inline(always)]
pub(super) unsafe fn average<F: Format<Value = f32>>(
    target: *mut u8,
    sources: &[*const u8],
    count: usize,
    divide: Divide,
) {
    let whole = count - count % BLOCK;
    for index in (0..whole).step_by(BLOCK) {
        // SAFETY: the caller's: the block is inside the vectors.
        unsafe { average_block::<F, BLOCK>(target, sources, index, divide) };
    }
    for index in whole..count {
        // SAFETY: as above.
        unsafe { average_block::<F, 1>(target, sources, index, divide) };
    }
}

#[inline(always)]
unsafe fn average_block<F: Format<Value = f32>, const N: usize>(
    target: *mut u8,
    sources: &[*const u8],
    index: usize,
    divide: Divide,
) {
    // SAFETY: the caller's.
    let mut values = unsafe { read::<F, N>(sources[0], index) };
    for &source in &sources[1..] {
        // SAFETY: the caller's.
        let others = unsafe { read::<F, N>(source, index) };
        for (value, other) in values.iter_mut().zip(others) {
            *value += other;
        }
    }
    for value in &mut values {
        *value = divide.apply(*value);
    }
    // SAFETY: the caller's.
    unsafe { write::<F, N>(target, index, values) };
}

/// Writes elements as float32.
///
/// # Safety
/// As for [`super::widen`].
#[inline(always)]
pub(super) unsafe fn widen<F: Format<Value = f32>>(
    target: *mut u8,
    source: *const u8,
    count: usize,
) {
    let whole = count - count % BLOCK;
    for index in (0..whole).step_by(BLOCK) {
        // SAFETY: the caller's: the block is inside the vectors.
        unsafe { write::<f32, BLOCK>(target, index, read::<F, BLOCK>(source, index)) };
    }
    for index in whole..count {
        // SAFETY: as above.
        unsafe { write::<f32, 1>(target, index, read::<F, 1>(source, index)) };
    }
}

/// Writes float32 quotients, rounded to the element.
///
/// # Safety
/// As for [`super::narrow`].
#[inline(always)]
pub(super) unsafe fn narrow<F: Format<Value = f32>>(
    target: *mut u8,
    source: *const u8,
    count: usize,
    divide: Divide,
) {
    let whole = count - count % BLOCK;
    for index in (0..whole).step_by(BLOCK) {
        // SAFETY: the caller's: the block is inside the vectors.
        unsafe { narrow_block::<F, BLOCK>(target, source, index, divide) };
    }
    for index in whole..count {
        // SAFETY: as above.
        unsafe { narrow_block::<F, 1>(target, source, index, divide) };
    }
}

#[inline(always)]
unsafe fn narrow_block<F: Format<Value = f32>, const N: usize>(
    target: *mut u8,
    source: *const u8,
    index: usize,
    divide: Divide,
) {
    // SAFETY: the caller's.
    let mut values = unsafe { read::<f32, N>(source, index) };
    for value in &mut values {
        *value = divide.apply(*value);
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
        // SAFETY: the caller's: the block is inside the vectors.
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
