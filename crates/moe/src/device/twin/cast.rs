//! Token casts to 8-bit floats in the kernels' arithmetic: float32 throughout, and multiplication by the
//! inverse scale, where [`BlockScaled::quantise`] divides.

use crate::elements::float8::Float8;
use crate::elements::token_type::{BlockScaled, ScaleType, TokenType};

/// Casts a token, plain elements in type `from`, to codes and scales.
pub(super) fn cast(
    from: TokenType,
    token: &[u8],
    to: BlockScaled,
    codes: &mut [u8],
    scales: &mut [u8],
) {
    let mut values = vec![0f32; codes.len()];
    from.load(token, &[], &mut values);
    let block = to.block as usize;
    let blocks = values.chunks(block).zip(codes.chunks_mut(block));
    for ((values, codes), out) in blocks.zip(scales.chunks_exact_mut(to.scale.bytes())) {
        // `max` ignores NaN.
        let largest = values.iter().fold(0f32, |most, value| most.max(value.abs()));
        let inverse = 1.0 / scale(to, largest, out);
        for (value, code) in values.iter().zip(codes) {
            *code = saturated(to.format, value * inverse);
        }
    }
}

/// Writes a block's scale and returns it. A block with an infinity has an infinite scale (NaN in UE8M0, which
/// has no infinity), so the whole block reads as NaN.
fn scale(to: BlockScaled, largest: f32, out: &mut [u8]) -> f32 {
    if largest.is_finite() {
        return to.scale.store(largest, to.format.max(), out);
    }
    match to.scale {
        ScaleType::F32 => out.copy_from_slice(&f32::INFINITY.to_le_bytes()),
        ScaleType::Ue8m0 => out.fill(0xFF),
    }
    f32::INFINITY
}

/// Nearest code, ties to even; larger values saturate, and NaN has one code.
fn saturated(format: Float8, value: f32) -> u8 {
    match value.is_nan() {
        true => 0x7F,
        false => format.encode(value.clamp(-format.max(), format.max())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elements::dtype::DType;
    use crate::elements::float8::two_to;
    use proptest::prelude::*;

    /// One block's codes and scale, and the values in float64.
    fn cast_block(values: &[f32], scale: ScaleType) -> (Vec<u8>, f64, Vec<f64>) {
        let to = BlockScaled { format: Float8::E4M3, scale, block: values.len() as u32 };
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let (mut codes, mut scales) = (vec![0; values.len()], vec![0; scale.bytes()]);
        cast(TokenType::Plain(DType::F32), &bytes, to, &mut codes, &mut scales);
        let mut one = [0f32];
        to.dequantise(&[Float8::E4M3.encode(1.0)], &scales, &mut one);
        let scale = f64::from(one[0]);
        let number = |code: &u8| f64::from(Float8::E4M3.decode(*code)) * scale;
        let numbers = codes.iter().map(number).collect();
        (codes, scale, numbers)
    }

    /// Error bound: the code is rounded once, after scale, inverse and product. A power of two has an exact
    /// inverse, so with UE8M0 only the code is rounded.
    fn bound(value: f64, scale: f64, scale_type: ScaleType) -> f64 {
        let (code, single) = (Float8::E4M3.unit_roundoff(), two_to(-24));
        let roundings = if scale_type == ScaleType::F32 { 2 } else { 0 };
        let relative = (1.0 + code) * (1.0 + single).powi(roundings) - 1.0;
        let absolute = Float8::E4M3.underflow_error() * (1.0 + single).powi(roundings);
        // A product in float32's subnormal range is far below half the smallest code.
        (value.abs() * relative + scale * (absolute + two_to(-149))) * (1.0 + two_to(-40))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn every_element_is_within_its_bound(
            bits in prop::collection::vec(any::<u32>(), 1..40),
            exponent in 0u32..255,
            spread in 1u32..60,
        ) {
            let values: Vec<f32> = bits
                .iter()
                .map(|bits| {
                    let exponent = exponent.saturating_sub((bits >> 23 & 0xFF) % spread);
                    f32::from_bits(bits & 0x807F_FFFF | exponent << 23)
                })
                .collect();
            let largest = values.iter().fold(0f32, |most, value| most.max(value.abs()));
            for scale_type in ScaleType::ALL {
                let (codes, scale, numbers) = cast_block(&values, scale_type);
                prop_assert!(scale * 448.0 * (1.0 + two_to(-23)) >= f64::from(largest));
                for ((value, number), code) in values.iter().zip(numbers).zip(codes) {
                    let value = f64::from(*value);
                    let error = (number - value).abs();
                    prop_assert!(error <= bound(value, scale, scale_type), "{value} {number}");
                    prop_assert_eq!(code >= 0x80, value.is_sign_negative());
                }
            }
        }
    }

    #[test]
    fn nan_and_infinity_read_as_nan() {
        for scale_type in ScaleType::ALL {
            // NaN does not affect the other elements.
            let (codes, _, _) = cast_block(&[f32::NAN, 448.0, -1.0, -f32::NAN], scale_type);
            assert_eq!(codes, [0x7F, 0x7E, 0xB8, 0x7F]);
            // NaN only: scale 1.
            let (codes, scale, _) = cast_block(&[f32::NAN], scale_type);
            assert_eq!((codes[0], scale), (0x7F, 1.0));
            // A block with an infinity reads as NaN throughout.
            let (codes, scale, numbers) =
                cast_block(&[1.0, f32::INFINITY, -0.0, f32::NEG_INFINITY], scale_type);
            assert_eq!(codes, [0, 0x7F, 0x80, 0x7F]);
            assert!(numbers.iter().all(|number| number.is_nan()));
            assert!(!scale.is_finite());
        }
    }

    #[test]
    fn scales_are_those_of_the_largest_element() {
        for (largest, single, power) in [
            (0.0, 1.0, 1.0),
            (448.0, 1.0, 1.0),
            (448f32.next_up(), f64::from(448f32.next_up() / 448.0), 2.0),
            (1.0, f64::from(1f32 / 448.0), two_to(-8)),
            (f32::MAX, f64::from(f32::MAX / 448.0), two_to(120)),
            (f32::from_bits(1), two_to(-126), two_to(-127)),
        ] {
            assert_eq!(cast_block(&[0.0, -largest], ScaleType::F32).1, single, "{largest}");
            assert_eq!(cast_block(&[0.0, -largest], ScaleType::Ue8m0).1, power, "{largest}");
        }
    }
}
