//! Token elements: plain numbers, or 8-bit floats with a scale for each block.
//!
//! An element's value is `decode(code) * scale`, with the block's scale. Blocks are consecutive along the
//! hidden dimension; the last one may be shorter.

use std::fmt;

use crate::elements::dtype::DType;
use crate::elements::float8::Float8;

/// Token element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenType {
    /// Plain numbers, without scales.
    Plain(DType),
    /// 8-bit floats with scales.
    Scaled(BlockScaled),
}

impl TokenType {
    /// Element size in bytes, without a share of the scale.
    pub fn bytes(self) -> usize {
        match self {
            TokenType::Plain(dtype) => dtype.bytes(),
            TokenType::Scaled(_) => 1,
        }
    }

    /// Scale bytes in a token with `hidden` elements; 0 if it has none.
    pub fn scale_bytes(self, hidden: usize) -> usize {
        match self {
            TokenType::Plain(_) => 0,
            TokenType::Scaled(scaled) => scaled.blocks(hidden) * scaled.scale.bytes(),
        }
    }

    /// Elements that share a scale, if there are scales.
    pub fn block(self) -> Option<u32> {
        match self {
            TokenType::Plain(_) => None,
            TokenType::Scaled(scaled) => Some(scaled.block),
        }
    }

    /// Rounds `values` to nearest into a token and its scales, whose lengths fit a token with `values.len()`
    /// elements.
    pub fn store(self, values: &[f32], token: &mut [u8], scales: &mut [u8]) {
        match self {
            TokenType::Plain(dtype) => dtype.store(values, token),
            TokenType::Scaled(scaled) => scaled.quantise(values, token, scales),
        }
    }

    /// Widens a token into `values`.
    pub fn load(self, token: &[u8], scales: &[u8], values: &mut [f32]) {
        match self {
            TokenType::Plain(dtype) => dtype.load(token, values),
            TokenType::Scaled(scaled) => scaled.dequantise(token, scales, values),
        }
    }
}

impl From<DType> for TokenType {
    fn from(dtype: DType) -> TokenType {
        TokenType::Plain(dtype)
    }
}

impl fmt::Display for TokenType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TokenType::Plain(dtype) => dtype.fmt(f),
            TokenType::Scaled(scaled) => scaled.format.fmt(f),
        }
    }
}

/// 8-bit floats in blocks along the hidden dimension, each block with a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockScaled {
    /// The elements' type.
    pub format: Float8,
    /// The scales' type.
    pub scale: ScaleType,
    /// Block size in elements, at least 1; `hidden` need not be a multiple.
    pub block: u32,
}

impl BlockScaled {
    /// Scales in a token with `hidden` elements: 7168 elements in blocks of 128 have 56, for example.
    pub fn blocks(&self, hidden: usize) -> usize {
        hidden.div_ceil(self.block as usize)
    }

    /// Chooses a scale for each block in `values`, and rounds each element divided by its scale to the
    /// nearest code, ties to even. The quotient itself is not rounded first.
    ///
    /// Let `m` be the largest finite magnitude in a block. A float32 scale is `m / max` rounded to float32,
    /// at least 2^-126; a UE8M0 scale is the smallest power of two from 2^-127 on that is at least `m / max`:
    /// 0.5 if that is 0.3, for example. So no finite element overflows. If `m` is 0, the scale is 1. Elements
    /// that are not finite do not affect the scale: NaN stays NaN; an infinity stays itself in E5M2 and
    /// becomes NaN in E4M3.
    ///
    /// # The bound
    /// With the format's relative and absolute error `u` and `h` ([`Float8::unit_roundoff`],
    /// [`Float8::underflow_error`]), `u32` = 2^-24 and `s` the block's scale, [`BlockScaled::dequantise`]
    /// gives each finite `x` back with an error at most
    ///
    /// `|x| * ((1 + u) * (1 + u32) - 1) + s * h * (1 + u32) + 2^-150`
    ///
    /// if `|x| * (1 + u)` is a float32; a larger value may round to infinity.
    ///
    /// # Panics
    /// If `codes` lacks one byte for each value, or `scales` one scale for each block.
    pub fn quantise(&self, values: &[f32], codes: &mut [u8], scales: &mut [u8]) {
        self.check(values.len(), codes, scales);
        let block = self.block as usize;
        let blocks = values.chunks(block).zip(codes.chunks_mut(block));
        for ((values, codes), out) in blocks.zip(scales.chunks_exact_mut(self.scale.bytes())) {
            let finite = values.iter().map(|value| value.abs()).filter(|value| value.is_finite());
            let scale = self.scale.store(finite.fold(0.0, f32::max), self.format.max(), out);
            for (value, code) in values.iter().zip(codes) {
                // In float64 the quotient of two float32 numbers never rounds to the midpoint between two
                // codes.
                *code = self.format.nearest(f64::from(*value) / f64::from(scale));
            }
        }
    }

    /// Widens codes into `values`: each code's number times the block's scale, rounded to float32.
    ///
    /// # Panics
    /// As [`BlockScaled::quantise`].
    pub fn dequantise(&self, codes: &[u8], scales: &[u8], values: &mut [f32]) {
        self.check(values.len(), codes, scales);
        let block = self.block as usize;
        let blocks = values.chunks_mut(block).zip(codes.chunks(block));
        for ((values, codes), scale) in blocks.zip(scales.chunks_exact(self.scale.bytes())) {
            let scale = self.scale.load(scale);
            for (value, code) in values.iter_mut().zip(codes) {
                *value = self.format.decode(*code) * scale;
            }
        }
    }

    fn check(&self, values: usize, codes: &[u8], scales: &[u8]) {
        assert_eq!(codes.len(), values, "a row has one code per value");
        let needed = self.blocks(values) * self.scale.bytes();
        assert_eq!(scales.len(), needed, "a row has one scale per block");
    }
}

/// Scale type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleType {
    /// IEEE 754 binary32, little-endian.
    F32,
    /// A byte `b` with the value `2^(b - 127)`; 255 is NaN (`float8_e8m0fnu`).
    Ue8m0,
}

impl ScaleType {
    /// Both types.
    pub const ALL: [ScaleType; 2] = [ScaleType::F32, ScaleType::Ue8m0];

    /// Scale size in bytes.
    pub fn bytes(self) -> usize {
        match self {
            ScaleType::F32 => 4,
            ScaleType::Ue8m0 => 1,
        }
    }

    /// The name that `ml_dtypes` and torch use.
    pub fn name(self) -> &'static str {
        match self {
            ScaleType::F32 => "float32",
            ScaleType::Ue8m0 => "float8_e8m0fnu",
        }
    }

    /// Scale in the first bytes of `bytes`.
    fn load(self, bytes: &[u8]) -> f32 {
        match self {
            ScaleType::F32 => bytes.first_chunk().map_or(f32::NAN, |b| f32::from_le_bytes(*b)),
            ScaleType::Ue8m0 => power_of_two(bytes[0]),
        }
    }

    /// Chooses a block's scale, writes it to `out` and returns it.
    pub(crate) fn store(self, largest: f32, max: f32, out: &mut [u8]) -> f32 {
        let least = f64::from(largest) / f64::from(max);
        match self {
            ScaleType::F32 => {
                let scale =
                    if largest == 0.0 { 1.0 } else { (largest / max).max(f32::MIN_POSITIVE) };
                out.copy_from_slice(&scale.to_le_bytes());
                scale
            }
            ScaleType::Ue8m0 => {
                // A float32 divided by the largest number is a normal float64. The quotient is a power of two
                // only if it is exact.
                let exponent = (least.to_bits() >> 52) as i32 - (f64::MAX_EXP - 1);
                let exponent = exponent + i32::from(least.to_bits() << 12 != 0);
                let byte = if largest == 0.0 { 127 } else { (exponent + 127).clamp(0, 254) as u8 };
                out[0] = byte;
                power_of_two(byte)
            }
        }
    }
}

impl fmt::Display for ScaleType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

fn power_of_two(byte: u8) -> f32 {
    f32::from_bits(match byte {
        0 => 1 << 22,
        255 => return f32::NAN,
        _ => u32::from(byte) << 23,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elements::float8::two_to;
    use proptest::prelude::*;

    fn all(block: u32) -> impl Iterator<Item = BlockScaled> {
        Float8::ALL.into_iter().flat_map(move |format| {
            ScaleType::ALL.into_iter().map(move |scale| BlockScaled { format, scale, block })
        })
    }

    /// Codes, scales and dequantised values.
    fn there_and_back(scaled: &BlockScaled, values: &[f32]) -> (Vec<u8>, Vec<f32>, Vec<f32>) {
        let mut codes = vec![0xAA; values.len()];
        let bytes = scaled.scale.bytes();
        let mut scales = vec![0xAA; scaled.blocks(values.len()) * bytes];
        scaled.quantise(values, &mut codes, &mut scales);
        let mut back = vec![0.0; values.len()];
        scaled.dequantise(&codes, &scales, &mut back);
        (codes, scales.chunks(bytes).map(|scale| scaled.scale.load(scale)).collect(), back)
    }

    fn finite() -> impl Strategy<Value = f32> {
        any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |value| value.is_finite())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn the_error_is_within_its_bound(
            wild in prop::collection::vec(finite(), 1..20),
            mild in prop::collection::vec(-2f32..2.0, 1..40),
            exponent in -149i32..120,
            block in 1u32..9,
        ) {
            let mild: Vec<f32> = mild.iter().map(|x| x * 2f32.powi(exponent)).collect();
            for values in [wild, mild] {
                for scaled in all(block) {
                    let (codes, scales, back) = there_and_back(&scaled, &values);
                    let single = 1.0 + two_to(-24);
                    for (at, (x, y)) in values.iter().zip(&back).enumerate() {
                        let scale = f64::from(scales[at / block as usize]);
                        let (x, y) = (f64::from(*x), f64::from(*y));
                        if x.abs() * (1.0 + scaled.format.unit_roundoff()) > f32::MAX.into() {
                            continue;
                        }
                        let relative = (1.0 + scaled.format.unit_roundoff()) * single - 1.0;
                        let least = scale * scaled.format.underflow_error() * single;
                        let bound = x.abs() * relative + least + two_to(-150);
                        prop_assert!((x - y).abs() <= bound, "{scaled:?}: {x} became {y}");
                        // The code is the nearest to the quotient, the even one in a tie.
                        let distance = |code: u8| {
                            (x - f64::from(scaled.format.decode(code)) * scale).abs()
                        };
                        for other in (0..=u8::MAX).filter(|code| *code != codes[at]) {
                            let (near, far) = (distance(codes[at]), distance(other));
                            let tied = near == far && (codes[at] % 2 == 0 || x == 0.0);
                            prop_assert!(near < far || tied || far.is_nan(), "{scaled:?} {x}");
                        }
                    }
                }
            }
        }

        #[test]
        fn the_scale_is_as_small_as_it_can_be(
            values in prop::collection::vec(finite(), 1..6),
        ) {
            for scaled in all(8) {
                let largest = values.iter().fold(0f32, |most, value| most.max(value.abs()));
                let max = f64::from(scaled.format.max());
                let (_, scales, _) = there_and_back(&scaled, &values);
                let (scale, least) = (f64::from(scales[0]), f64::from(largest) / max);
                match scaled.scale {
                    _ if largest == 0.0 => prop_assert_eq!(scale, 1.0),
                    ScaleType::F32 if least < two_to(-126) => {
                        prop_assert_eq!(scale, two_to(-126));
                    }
                    ScaleType::F32 => prop_assert_eq!(scales[0], least as f32),
                    ScaleType::Ue8m0 => {
                        prop_assert!(scale >= least && scale.to_bits() << 12 == 0);
                        prop_assert!(scale / 2.0 < least || scale == two_to(-127));
                    }
                }
            }
        }
    }

    #[test]
    fn a_block_of_zeros_has_scale_one_and_keeps_its_signs() {
        for scaled in all(4) {
            let (codes, scales, back) = there_and_back(&scaled, &[0.0, -0.0, 0.0, 0.0, 3.5]);
            assert_eq!((&codes[..4], scales[0]), (&[0, 0x80, 0, 0][..], 1.0));
            assert!(back[1] == 0.0 && back[1].is_sign_negative());
            let relative = scaled.format.unit_roundoff() as f32 + 1e-6;
            assert!((back[4] - 3.5).abs() <= 3.5 * relative);
        }
    }

    #[test]
    fn what_is_not_finite_stays_so_and_leaves_the_others_alone() {
        for scaled in all(5) {
            let values = [f32::NAN, 1.75, f32::INFINITY, f32::NEG_INFINITY, -0.875];
            let (_, scales, back) = there_and_back(&scaled, &values);
            let alone = there_and_back(&scaled, &[1.75, -0.875]);
            assert_eq!((scales[0], back[1], back[4]), (alone.1[0], alone.2[0], alone.2[1]));
            assert!(back[0].is_nan());
            match scaled.format {
                Float8::E4M3 => assert!(back[2].is_nan() && back[3].is_nan()),
                Float8::E5M2 => assert_eq!(back[2..4], [f32::INFINITY, f32::NEG_INFINITY]),
            }
            let (_, scales, _) = there_and_back(&scaled, &[f32::NAN, f32::INFINITY]);
            assert_eq!(scales, [1.0]);
        }
    }

    #[test]
    fn every_byte_of_a_power_of_two_is_one() {
        for byte in 0..=254u8 {
            let exponent = i32::from(byte) - 127;
            assert_eq!(f64::from(power_of_two(byte)), two_to(exponent));
        }
        assert!(power_of_two(255).is_nan());
    }
}
