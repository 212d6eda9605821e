//! Element types, and weighted row sums.
//!
//! All sums are in float32, start from +0 and have a stated order. Each product is rounded before it is added
//! (no contraction), so a sum has the same bits on every machine. Elements are little-endian and may be
//! unaligned.

use std::fmt;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::elements::float8::two_to;

/// Element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// bfloat16: the upper half of a float32.
    BF16,
    /// IEEE 754 binary16.
    F16,
}

/// Elements per block of sums, which fits in the L1 cache.
const BLOCK: usize = 256;

impl DType {
    /// All types.
    pub const ALL: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

    /// Element size in bytes.
    pub fn bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::BF16 | DType::F16 => 2,
        }
    }

    /// The name that numpy and torch use.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "float32",
            DType::BF16 => "bfloat16",
            DType::F16 => "float16",
        }
    }

    /// The type with that name (`float32`, `bfloat16`, `float16`).
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Largest relative error when a number in the normal range is rounded to this type, for example 2^-8 for
    /// bfloat16.
    pub fn unit_roundoff(self) -> f64 {
        match self {
            DType::F32 => two_to(-24),
            DType::BF16 => two_to(-8),
            DType::F16 => two_to(-11),
        }
    }

    /// Largest absolute error when a number below the normal range is rounded to this type.
    pub fn underflow_error(self) -> f64 {
        match self {
            DType::F32 => two_to(-150),
            DType::BF16 => two_to(-134),
            DType::F16 => two_to(-25),
        }
    }

    /// True if this type represents every number in `other` exactly.
    pub fn holds(self, other: DType) -> bool {
        self == other || self == DType::F32
    }

    /// Adds `weight` times each element in `row` to the sum with the same index.
    ///
    /// `row` has one element for each sum.
    pub fn accumulate(self, sum: &mut [f32], row: &[u8], weight: f32) {
        assert_eq!(row.len(), sum.len() * self.bytes(), "a row has one element per sum");
        match self {
            DType::F32 => {
                for (sum, element) in sum.iter_mut().zip(row.as_chunks::<4>().0) {
                    *sum += weight * f32::from_le_bytes(*element);
                }
            }
            DType::BF16 => {
                for (sum, element) in sum.iter_mut().zip(row.as_chunks::<2>().0) {
                    *sum += weight * bf16::from_le_bytes(*element).to_f32();
                }
            }
            DType::F16 => {
                // Widened by block, for which `half` uses the processor's instruction.
                let mut narrow = [f16::ZERO; BLOCK];
                let mut wide = [0f32; BLOCK];
                for (sum, row) in sum.chunks_mut(BLOCK).zip(row.chunks(2 * BLOCK)) {
                    let (narrow, wide) = (&mut narrow[..sum.len()], &mut wide[..sum.len()]);
                    for (narrow, element) in narrow.iter_mut().zip(row.as_chunks::<2>().0) {
                        *narrow = f16::from_le_bytes(*element);
                    }
                    narrow.convert_to_f32_slice(wide);
                    for (sum, element) in sum.iter_mut().zip(wide) {
                        *sum += weight * *element;
                    }
                }
            }
        }
    }

    /// Rounds `values` to nearest, ties to even, into `row`, which has one element for each value.
    pub fn store(self, values: &[f32], row: &mut [u8]) {
        assert_eq!(row.len(), values.len() * self.bytes(), "a row has one element per value");
        match self {
            DType::F32 => {
                for (value, element) in values.iter().zip(row.as_chunks_mut::<4>().0) {
                    *element = value.to_le_bytes();
                }
            }
            DType::BF16 => {
                for (value, element) in values.iter().zip(row.as_chunks_mut::<2>().0) {
                    *element = round_to_bf16(*value).to_le_bytes();
                }
            }
            DType::F16 => {
                let mut narrow = [f16::ZERO; BLOCK];
                for (values, row) in values.chunks(BLOCK).zip(row.chunks_mut(2 * BLOCK)) {
                    let narrow = &mut narrow[..values.len()];
                    narrow.convert_from_f32_slice(values);
                    for (narrow, element) in narrow.iter().zip(row.as_chunks_mut::<2>().0) {
                        *element = narrow.to_le_bytes();
                    }
                }
            }
        }
    }

    /// Widens `row` into `values`; exact.
    pub fn load(self, row: &[u8], values: &mut [f32]) {
        assert_eq!(row.len(), values.len() * self.bytes(), "a row has one element per value");
        match self {
            DType::F32 => {
                for (value, element) in values.iter_mut().zip(row.as_chunks::<4>().0) {
                    *value = f32::from_le_bytes(*element);
                }
            }
            DType::BF16 => {
                for (value, element) in values.iter_mut().zip(row.as_chunks::<2>().0) {
                    *value = bf16::from_le_bytes(*element).to_f32();
                }
            }
            DType::F16 => {
                for (value, element) in values.iter_mut().zip(row.as_chunks::<2>().0) {
                    *value = f16::from_le_bytes(*element).to_f32();
                }
            }
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Writes the sum over weighted rows in type `from` to `out`, rounded once to `to`.
///
/// The terms are added in iterator order, each product rounded to float32 first. No terms give zeros. Every
/// row has as many elements as `out`.
pub fn weighted_sum<'a>(
    from: DType,
    to: DType,
    terms: impl Iterator<Item = (f32, &'a [u8])> + Clone,
    out: &mut [u8],
) {
    let mut sums = [0f32; BLOCK];
    for (block, out) in out.chunks_mut(BLOCK * to.bytes()).enumerate() {
        let sums = &mut sums[..out.len() / to.bytes()];
        sums.fill(0.0);
        let begin = block * BLOCK * from.bytes();
        for (weight, row) in terms.clone() {
            from.accumulate(sums, &row[begin..][..sums.len() * from.bytes()], weight);
        }
        to.store(sums, out);
    }
}

/// `bf16::from_f32` without the branch on NaN, which would prevent vectorisation.
fn round_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    (if value.is_nan() { quiet } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rounding_agrees_with_half(bits in any::<u32>()) {
            let value = f32::from_bits(bits);
            prop_assert_eq!(round_to_bf16(value), bf16::from_f32(value).to_bits());
            let mut row = [0; 2];
            DType::F16.store(&[value], &mut row);
            let expected = f16::from_f32(value);
            let stored = f16::from_le_bytes(row);
            prop_assert!(stored == expected || (stored.is_nan() && expected.is_nan()));
        }

        #[test]
        fn a_stored_value_loads_again(bits in any::<u16>(), length in 1usize..600) {
            for dtype in DType::ALL {
                let value = match dtype {
                    DType::F32 => f32::from_bits(u32::from(bits) << 13),
                    DType::BF16 => bf16::from_bits(bits).to_f32(),
                    DType::F16 => f16::from_bits(bits).to_f32(),
                };
                let mut row = vec![0; length * dtype.bytes()];
                dtype.store(&vec![value; length], &mut row);
                let mut loaded = vec![0.0; length];
                dtype.load(&row, &mut loaded);
                prop_assert!(loaded.iter().all(|x| *x == value || (x.is_nan() && value.is_nan())));
            }
        }

        #[test]
        fn a_weighted_sum_is_the_plain_loop(
            length in 1usize..700,
            weights in prop::collection::vec(-2f32..2.0, 0..6),
            seed in any::<u32>(),
        ) {
            for dtype in DType::ALL {
                let rows: Vec<Vec<u8>> = (0..weights.len())
                    .map(|row| {
                        let values: Vec<f32> = (0..length)
                            .map(|i| ((i as u32 * 31 + row as u32 * 7 + seed % 1000) % 97) as f32 / 7.0)
                            .collect();
                        let mut bytes = vec![0; length * dtype.bytes()];
                        dtype.store(&values, &mut bytes);
                        bytes
                    })
                    .collect();
                let mut expected = vec![0f32; length];
                let mut wide = vec![0f32; length];
                for (row, weight) in rows.iter().zip(&weights) {
                    dtype.load(row, &mut wide);
                    for (sum, element) in expected.iter_mut().zip(&wide) {
                        *sum += weight * element;
                    }
                }
                let mut out = vec![0xAA; length * 4];
                let terms = weights.iter().copied().zip(rows.iter().map(|row| &row[..]));
                weighted_sum(dtype, DType::F32, terms, &mut out);
                let mut sums = vec![0f32; length];
                DType::F32.load(&out, &mut sums);
                prop_assert_eq!(sums, expected);
            }
        }
    }

    #[test]
    fn names_are_numpys() {
        assert_eq!(DType::from_name("bfloat16"), Some(DType::BF16));
        assert_eq!(DType::from_name("float8"), None);
    }
}
