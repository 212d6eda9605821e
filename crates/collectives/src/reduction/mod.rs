//! Element-wise vector reductions in host memory.
//!
//! - `element.rs`: element types; `operation.rs`: operations
//! - `level.rs`: loop selection by element, operation and processor; `blocks.rs`: the loops
//! - `format.rs`, `half_bits.rs`, `float8_bits.rs`: conversions between memory and arithmetic; `arithmetic.rs`: operations on values
//! - `scalar.rs`: definition of each result, one element at a time, for tests
//!
//! Results have the same bits on every machine:
//!
//! - Integer sums and products wrap. A `bool` is a byte, true if not 0; sum and maximum are OR, product and minimum
//!   AND, and results are 0 or 1.
//! - Sums, products and averages for 8-bit and 16-bit floats are accumulated in float32, divided there, and rounded
//!   once at the end, to nearest, ties to even. Products are never contracted with sums. Results beyond the largest
//!   number are infinite, or NaN for `float8_e4m3fn`, which has no infinity.
//! - A minimum or maximum is NaN if either operand is, as in `torch.minimum`; -0 is less than +0.
//! - A computed NaN is the positive quiet NaN without payload. So the operand order does not matter.
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
/// `a` and `b` are valid for reading `count` elements and `target` for writing them, at any alignment. No other thread
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

/// Writes the fold of all sources in order to `target`: `((s0[i] op s1[i]) op s2[i]) ...`.
///
/// Sums and products for 8-bit and 16-bit floats are kept in float32 and rounded once. Other results have the same bits
/// as successive [`combine`] calls. One source is copied; none leave `target` unchanged. `target` may be one source.
///
/// # Panics
/// As [`combine`].
///
/// # Safety
/// Same as for [`combine`]: `target` is one source or overlaps none.
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

/// Writes the average of all sources, their sum in source order divided by `divisor`, to `target`.
///
/// 8-bit and 16-bit floats are summed and divided in float32, and rounded once: a mean in range never overflows on the
/// way. Other elements have the same bits as [`combine_all`], then [`divide`].
///
/// # Safety
/// As for [`combine_all`].
pub unsafe fn average_all(
    element: Element,
    target: *mut u8,
    sources: &[*const u8],
    count: usize,
    divisor: u32,
) {
    match sources {
        [] => {}
        // SAFETY: the caller's.
        _ if element.is_short_float() => unsafe {
            level::average(element, target, sources, count, divisor.max(1))
        },
        // SAFETY: the caller's; the quotients are computed in place.
        _ => unsafe {
            combine_all(Reduction::Sum, element, target, sources, count);
            divide(element, target, target, count, divisor);
        },
    }
}

/// Writes `source[i]`, an 8-bit or 16-bit float, as float32 to `target[i]` for `count` elements; with a factor, the
/// product as [`scale`] rounds it.
///
/// # Panics
/// For other elements.
///
/// # Safety
/// As for [`combine`], with one source; `target` has `count` float32 and does not overlap it.
pub unsafe fn widen(
    element: Element,
    target: *mut u8,
    source: *const u8,
    count: usize,
    factor: Option<f64>,
) {
    let Some(factor) = factor else {
        // SAFETY: the caller's.
        return unsafe { level::widen(element, target, source, count) };
    };
    let mut products = [0u8; WIDENED * 2];
    let bytes = element.bytes();
    for first in (0..count).step_by(WIDENED) {
        let some = WIDENED.min(count - first);
        // SAFETY: the caller's, for these elements; the products have room for them.
        unsafe {
            let source = source.wrapping_add(first * bytes);
            scale(element, products.as_mut_ptr(), source, some, factor);
            level::widen(element, target.wrapping_add(4 * first), products.as_ptr(), some);
        }
    }
}

/// Writes `source[i]`, a float32, divided by `divisor`, to the 8-bit or 16-bit float `target[i]` for `count` elements,
/// rounded once.
///
/// # Panics
/// For other elements.
///
/// # Safety
/// As for [`widen`], with source and target exchanged.
pub unsafe fn narrow(
    element: Element,
    target: *mut u8,
    source: *const u8,
    count: usize,
    divisor: u32,
) {
    // SAFETY: the caller's.
    unsafe { level::narrow(element, target, source, count, divisor.max(1)) }
}

/// Elements whose products are kept before they are widened.
const WIDENED: usize = 64;

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
/// Float quotients are correctly rounded (not multiplied by a reciprocal); integer quotients, and `bool` as 0 or 1, are
/// truncated. A zero divisor counts as 1. For floats up to 32 bits the divisor is rounded to float32.
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
