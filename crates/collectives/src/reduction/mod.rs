//! Element-wise reductions of vectors in host memory.
//!
//! - `element.rs`: element types; `operation.rs`: operations
//! - `level.rs`: selection of a loop by element, operation and processor; `blocks.rs`: the loops
//! - `format.rs`, `half_bits.rs`, `float8_bits.rs`: conversions between memory and arithmetic; `arithmetic.rs`: operations on values
//! - `scalar.rs`: definition of each result, one element at a time, for tests
//!
//! Results have the same bits on every machine:
//!
//! - Integer sums and products wrap. A `bool` is a byte, true if not 0; its sum and maximum are OR, its product and
//!   minimum AND, and results are 0 or 1.
//! - Each operation on floats of 8 and 16 bits is computed in float32 and rounded once, to nearest, ties to even.
//!   Products are never contracted with sums. Results beyond the largest number are infinite, or NaN of `float8_e4m3fn`,
//!   which has no infinity.
//! - A minimum or maximum is NaN if either operand is, as that of `torch.minimum`; -0 is less than +0.
//! - A NaN that is computed is the positive quiet NaN without payload. So the order of two operands does not matter.
//!
//! Pointers need no alignment.

mod arithmetic;
mod blocks;
mod element;
mod float8_bits;
mod format;
mod half_bits;
mod level;
mod operation;
#[cfg(test)]
mod scalar;
#[cfg(test)]
mod tests;

pub use element::Element;
pub use operation::Reduction;

/// Writes `a[i] op b[i]` to `target[i]` for `count` elements.
///
/// `target` is `a`, or `b`, or overlaps neither.
///
/// # Panics
/// If the reduction does not [support](Reduction::supports) the element.
///
/// # Safety
/// `a` and `b` are valid for reads of `count` elements and `target` for writes, at any alignment. No other thread
/// writes to them, or reads `target`, during the call.
pub unsafe fn combine(
    reduction: Reduction,
    element: Element,
    target: *mut u8,
    a: *const u8,
    b: *const u8,
    count: usize,
) {
    check(reduction, element);
    // SAFETY: the caller's.
    unsafe { level::fold(reduction, element, target, [a, b], count) }
}

/// Writes the fold of all sources in their order to `target`: `((s0[i] op s1[i]) op s2[i]) ...`.
///
/// Sums and products of floats of 8 and 16 bits are kept in float32 and rounded once. Other results have the bits of successive calls
/// of [`combine`]. One source is copied; none leave `target` unchanged. `target` may be one of the sources.
///
/// # Panics
/// As [`combine`].
///
/// # Safety
/// As for [`combine`]: `target` is one of the sources or overlaps none.
pub unsafe fn combine_all(
    reduction: Reduction,
    element: Element,
    target: *mut u8,
    sources: &[*const u8],
    count: usize,
) {
    check(reduction, element);
    match *sources {
        [] => {}
        // SAFETY: the caller's; `copy` permits equal pointers.
        [source] => unsafe { std::ptr::copy(source, target, count * element.bytes()) },
        // SAFETY: the caller's.
        _ => unsafe { level::fold(reduction, element, target, sources, count) },
    }
}

/// Writes `source[i] * factor` to `target[i]` for `count` elements.
///
/// The factor is rounded to float32, but for `float64`. Integers, and `bool` as 0 or 1, are multiplied in float64;
/// the product is truncated and saturates.
///
/// # Safety
/// As for [`combine`], with one source.
pub unsafe fn scale(
    element: Element,
    target: *mut u8,
    source: *const u8,
    count: usize,
    factor: f64,
) {
    // SAFETY: the caller's.
    unsafe { level::scale(element, target, source, count, factor) }
}

/// Writes `source[i] / divisor` to `target[i]` for `count` elements: the average of `divisor` ranks.
///
/// Quotients of floats are correctly rounded (not multiplied by a reciprocal), those of integers, and of `bool` as 0
/// or 1, truncated. A divisor of 0 counts as 1. For floats of up to 32 bits the divisor is rounded to float32.
///
/// # Safety
/// As for [`combine`], with one source.
pub unsafe fn divide(
    element: Element,
    target: *mut u8,
    source: *const u8,
    count: usize,
    divisor: u32,
) {
    // SAFETY: the caller's.
    unsafe { level::divide(element, target, source, count, divisor.max(1)) }
}

fn check(reduction: Reduction, element: Element) {
    assert!(
        reduction.supports(element),
        "{reduction} of {element}: expected bool or an integer type; use sum, product, min or max"
    );
}
