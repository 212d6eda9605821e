//! Selection of the loop for an element type, an operation and the processor.

use super::arithmetic::{And, Divide, Map, Max, Min, Operation, Or, Product, Scale, Sum, Xor};
use super::blocks::{self, Sources};
use super::format::{Brain, E4m3, E5m2, Format, Half, Truth};
use super::{Element, Reduction};

/// Calls a function that is generic over the format of an element and a further argument.
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
}
