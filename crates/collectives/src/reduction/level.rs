//! Loop selection for an element type, an operation and the processor.

use super::arithmetic::{And, Divide, Map, Max, Min, Operation, Or, Product, Scale, Sum, Xor};
use super::blocks::{self, Sources};
use super::format::{Brain, E4m3, E5m2, Format, Half, Truth};
use super::{Element, Reduction};

/// Calls a function that is generic over an element format and a further argument.
macro_rules! for_element {
    ($element:expr, $integers:ident, $floats:ident $arguments:tt) => {
        match $element {
            Element::Bool => $integers::<Truth, _> $arguments,
            Element::U8 => $integers::<u8, _> $arguments,
            Element::I8 => $integers::<i8, _> $arguments,
            Element::U16 => $integers::<u16, _> $arguments,
            Element::I16 => $integers::<i16, _> $arguments,
            Element::U32 => $integers::<u32, _> $arguments,
            Element::I32 => $integers::<i32, _> $arguments,
            Element::U64 => $integers::<u64, _> $arguments,
            Element::I64 => $integers::<i64, _> $arguments,
            Element::F16 => $floats::<Half, _> $arguments,
            Element::Bf16 => $floats::<Brain, _> $arguments,
            Element::F32 => $floats::<f32, _> $arguments,
            Element::F64 => $floats::<f64, _> $arguments,
            Element::F8E4m3 => $floats::<E4m3, _> $arguments,
            Element::F8E5m2 => $floats::<E5m2, _> $arguments,
        }
    };
}

/// Calls a function that is generic over the format for 8-bit and 16-bit floats.
macro_rules! for_short_float {
    ($element:expr, $function:ident $arguments:tt) => {
        match $element {
            Element::F16 => $function::<Half> $arguments,
            Element::Bf16 => $function::<Brain> $arguments,
            Element::F8E4m3 => $function::<E4m3> $arguments,
            Element::F8E5m2 => $function::<E5m2> $arguments,
            other => panic!("{other}: expected a float of 8 or 16 bits"),
        }
    };
}

/// Folds at least one source.
///
/// # Safety
/// As for [`super::combine_all`].
pub(super) unsafe fn fold(
    reduction: Reduction,
    element: Element,
    target: *mut u8,
    sources: impl Sources,
    count: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        for_element!(element, fold_integers, fold_floats(reduction, target, sources, count));
    }
}

/// # Safety
/// As for [`super::scale`].
pub(super) unsafe fn scale(
    element: Element,
    target: *mut u8,
    source: *const u8,
    count: usize,
    factor: f64,
) {
    // SAFETY: the caller's.
    unsafe { for_element!(element, map, map(target, source, count, Scale(factor))) };
}

/// # Safety
/// As for [`super::divide`].
pub(super) unsafe fn divide(
    element: Element,
    target: *mut u8,
    source: *const u8,
    count: usize,
    divisor: u32,
) {
    // SAFETY: the caller's.
    unsafe { for_element!(element, map, map(target, source, count, Divide(divisor))) };
}

/// # Safety
/// As for [`super::average_all`]; at least one source.
pub(super) unsafe fn average(
    element: Element,
    target: *mut u8,
    sources: &[*const u8],
    count: usize,
    divisor: u32,
) {
    // SAFETY: the caller's.
    unsafe { for_short_float!(element, average_by(target, sources, count, Divide(divisor))) }
}

/// # Safety
/// As for [`super::widen`].
pub(super) unsafe fn widen(element: Element, target: *mut u8, source: *const u8, count: usize) {
    // SAFETY: the caller's.
    unsafe { for_short_float!(element, widen_by(target, source, count)) }
}

/// # Safety
/// As for [`super::narrow`].
pub(super) unsafe fn narrow(
    element: Element,
    target: *mut u8,
    source: *const u8,
    count: usize,
    divisor: u32,
) {
    // SAFETY: the caller's.
    unsafe { for_short_float!(element, narrow_by(target, source, count, Divide(divisor))) }
}

unsafe fn average_by<F: Format<Value = f32>>(
    target: *mut u8,
    sources: &[*const u8],
    count: usize,
    divide: Divide,
) {
    #[cfg(target_arch = "x86_64")]
    if has_avx2() {
        // SAFETY: the caller's, and the processor has the instructions.
        return unsafe { avx2::average::<F::Avx2>(target, sources, count, divide) };
    }
    // SAFETY: the caller's.
    unsafe { blocks::average::<F>(target, sources, count, divide) }
}

unsafe fn widen_by<F: Format<Value = f32>>(target: *mut u8, source: *const u8, count: usize) {
    #[cfg(target_arch = "x86_64")]
    if has_avx2() {
        // SAFETY: the caller's, and the processor has the instructions.
        return unsafe { avx2::widen::<F::Avx2>(target, source, count) };
    }
    // SAFETY: the caller's.
    unsafe { blocks::widen::<F>(target, source, count) }
}

unsafe fn narrow_by<F: Format<Value = f32>>(
    target: *mut u8,
    source: *const u8,
    count: usize,
    divide: Divide,
) {
    #[cfg(target_arch = "x86_64")]
    if has_avx2() {
        // SAFETY: the caller's, and the processor has the instructions.
        return unsafe { avx2::narrow::<F::Avx2>(target, source, count, divide) };
    }
    // SAFETY: the caller's.
    unsafe { blocks::narrow::<F>(target, source, count, divide) }
}

unsafe fn fold_integers<F: Format, S: Sources>(
    reduction: Reduction,
    target: *mut u8,
    sources: S,
    count: usize,
) where
    Sum: Operation<F::Value>,
    Product: Operation<F::Value>,
    Min: Operation<F::Value>,
    Max: Operation<F::Value>,
    And: Operation<F::Value>,
    Or: Operation<F::Value>,
    Xor: Operation<F::Value>,
{
    // SAFETY: the caller's.
    unsafe {
        match reduction {
            Reduction::And => fold_by::<F, And>(target, sources, count),
            Reduction::Or => fold_by::<F, Or>(target, sources, count),
            Reduction::Xor => fold_by::<F, Xor>(target, sources, count),
            _ => fold_floats::<F, S>(reduction, target, sources, count),
        }
    }
}

/// The operations that floats have too.
unsafe fn fold_floats<F: Format, S: Sources>(
    reduction: Reduction,
    target: *mut u8,
    sources: S,
    count: usize,
) where
    Sum: Operation<F::Value>,
    Product: Operation<F::Value>,
    Min: Operation<F::Value>,
    Max: Operation<F::Value>,
{
    // SAFETY: the caller's.
    unsafe {
        match reduction {
            Reduction::Sum => fold_by::<F, Sum>(target, sources, count),
            Reduction::Product => fold_by::<F, Product>(target, sources, count),
            Reduction::Min => fold_by::<F, Min>(target, sources, count),
            Reduction::Max => fold_by::<F, Max>(target, sources, count),
            Reduction::And | Reduction::Or | Reduction::Xor => unreachable!("checked before"),
        }
    }
}

unsafe fn fold_by<F: Format, O: Operation<F::Value>>(
    target: *mut u8,
    sources: impl Sources,
    count: usize,
) {
    #[cfg(target_arch = "x86_64")]
    if has_avx2() {
        // SAFETY: the caller's, and the processor has the instructions.
        return unsafe { avx2::fold::<F::Avx2, O>(target, sources, count) };
    }
    // SAFETY: the caller's.
    unsafe { blocks::fold::<F, O>(target, sources, count) }
}

unsafe fn map<F: Format, M: Map<F::Value>>(
    target: *mut u8,
    source: *const u8,
    count: usize,
    change: M,
) {
    #[cfg(target_arch = "x86_64")]
    if has_avx2() {
        // SAFETY: the caller's, and the processor has the instructions.
        return unsafe { avx2::map::<F::Avx2, M>(target, source, count, change) };
    }
    // SAFETY: the caller's.
    unsafe { blocks::map::<F, M>(target, source, count, change) }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")
}

/// The same loops, compiled for wider instructions. Products and sums are not contracted: FMA is not enabled.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;

    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn fold<F: Format, O: Operation<F::Value>>(
        target: *mut u8,
        sources: impl Sources,
        count: usize,
    ) {
        // SAFETY: the caller's.
        unsafe { blocks::fold::<F, O>(target, sources, count) }
    }

    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn map<F: Format, M: Map<F::Value>>(
        target: *mut u8,
        source: *const u8,
        count: usize,
        change: M,
    ) {
        // SAFETY: the caller's.
        unsafe { blocks::map::<F, M>(target, source, count, change) }
    }

    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn average<F: Format<Value = f32>>(
        target: *mut u8,
        sources: &[*const u8],
        count: usize,
        divide: Divide,
    ) {
        // SAFETY: the caller's.
        unsafe { blocks::average::<F>(target, sources, count, divide) }
    }

    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn widen<F: Format<Value = f32>>(
        target: *mut u8,
        source: *const u8,
        count: usize,
    ) {
        // SAFETY: the caller's.
        unsafe { blocks::widen::<F>(target, source, count) }
    }

    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn narrow<F: Format<Value = f32>>(
        target: *mut u8,
        source: *const u8,
        count: usize,
        divide: Divide,
    ) {
        // SAFETY: the caller's.
        unsafe { blocks::narrow::<F>(target, source, count, divide) }
    }
}
