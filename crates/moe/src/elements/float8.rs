//! 8-bit floating-point numbers, after Micikevicius et al., *FP8 Formats for Deep Learning* (2022).

use std::fmt;

/// 8-bit floating-point format: a sign, an exponent and a mantissa.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float8 {
    /// Four exponent bits, three mantissa bits: up to 448, no infinity (`float8_e4m3fn`).
    E4M3,
    /// Five exponent bits, two mantissa bits: up to 57,344, with infinities (`float8_e5m2`).
    E5M2,
}

static E4M3_VALUES: [f32; 256] = values(Float8::E4M3);
static E5M2_VALUES: [f32; 256] = values(Float8::E5M2);

const SIGN: u8 = 0x80;

impl Float8 {
    /// Both types.
    pub const ALL: [Float8; 2] = [Float8::E4M3, Float8::E5M2];

    /// The name that `ml_dtypes` and torch use.
    pub fn name(self) -> &'static str {
        match self {
            Float8::E4M3 => "float8_e4m3fn",
            Float8::E5M2 => "float8_e5m2",
        }
    }

    /// The largest number.
    pub fn max(self) -> f32 {
        self.decode(self.overflow() - 1)
    }

    /// Largest relative error when a number in the normal range is rounded to this type.
    pub fn unit_roundoff(self) -> f64 {
        two_to(-(self.mantissa_bits() as i32) - 1)
    }

    /// Largest absolute error when a number below the normal range is rounded to this type.
    pub fn underflow_error(self) -> f64 {
        f64::from(self.decode(1)) / 2.0
    }

    /// A code's number; exact. For example, code 0x38 in E4M3 is 1.
    pub fn decode(self, code: u8) -> f32 {
        match self {
            Float8::E4M3 => E4M3_VALUES[usize::from(code)],
            Float8::E5M2 => E5M2_VALUES[usize::from(code)],
        }
    }

    /// Nearest number's code, ties to even; for example, 1 in E5M2 is 0x3C. As in `ml_dtypes`, a value that
    /// rounds beyond the largest number becomes infinity, or NaN in [`Float8::E4M3`].
    pub fn encode(self, value: f32) -> u8 {
        self.nearest(value.into())
    }

    /// [`Float8::encode`] for a float64.
    pub(crate) fn nearest(self, value: f64) -> u8 {
        let (mantissa_bits, bias) = (self.mantissa_bits(), self.bias());
        let magnitude = value.abs();
        let code = if magnitude.is_nan() {
            self.nan()
        } else if magnitude < two_to(1 - bias) {
            // Multiples of the smallest number; the highest one rounds up to the first number in the normal
            // range.
            (magnitude * two_to(bias - 1 + mantissa_bits as i32)).round_ties_even() as u8
        } else {
            let shift = f64::MANTISSA_DIGITS - 1 - mantissa_bits;
            let bits = magnitude.to_bits();
            let half_less_one = (1u64 << (shift - 1)) - 1;
            let rounded = (bits + half_less_one + ((bits >> shift) & 1)) >> shift;
            let least = ((f64::MAX_EXP - 1 - bias) as u64) << mantissa_bits;
            (rounded - least).min(self.overflow().into()) as u8
        };
        if value.is_sign_negative() { code | SIGN } else { code }
    }

    const fn mantissa_bits(self) -> u32 {
        match self {
            Float8::E4M3 => 3,
            Float8::E5M2 => 2,
        }
    }

    const fn bias(self) -> i32 {
        match self {
            Float8::E4M3 => 7,
            Float8::E5M2 => 15,
        }
    }

    /// Code after the largest number's: NaN or infinity.
    const fn overflow(self) -> u8 {
        match self {
            Float8::E4M3 => 0x7f,
            Float8::E5M2 => 0x7c,
        }
    }

    const fn nan(self) -> u8 {
        match self {
            Float8::E4M3 => 0x7f,
            Float8::E5M2 => 0x7e,
        }
    }
}

impl fmt::Display for Float8 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Power of two, exact within float64's normal range. Rust does not specify how precise `powi` is.
pub(crate) const fn two_to(exponent: i32) -> f64 {
    f64::from_bits(((exponent + f64::MAX_EXP - 1) as u64) << (f64::MANTISSA_DIGITS - 1))
}

/// All codes' numbers.
const fn values(format: Float8) -> [f32; 256] {
    let mantissa_bits = format.mantissa_bits();
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let magnitude = code as u32 & 0x7f;
        let exponent = magnitude >> mantissa_bits;
        let value = if magnitude == 0x7f || magnitude > format.overflow() as u32 {
            f32::NAN
        } else if magnitude == format.overflow() as u32 {
            f32::INFINITY
        } else if exponent == 0 {
            // The smallest number is 2^(1 - bias - mantissa bits).
            let step = f32::from_bits((128 - format.bias() as u32 - mantissa_bits) << 23);
            magnitude as f32 * step
        } else {
            let least = (127 - format.bias() as u32) << mantissa_bits;
            f32::from_bits((magnitude + least) << (23 - mantissa_bits))
        };
        values[code] = if code < 0x80 { value } else { -value };
        code += 1;
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A code's number, by the formats' definition.
    fn defined(format: Float8, code: u8) -> f64 {
        let (mantissa_bits, bias) = if format == Float8::E4M3 { (3, 7) } else { (2, 15) };
        let exponent = i32::from((code & 0x7f) >> mantissa_bits);
        let fraction = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
        let magnitude = match (format, exponent) {
            (_, 0) => fraction * two_to(1 - bias),
            (Float8::E4M3, 15) if fraction == 0.875 => f64::NAN,
            (Float8::E5M2, 31) if fraction == 0.0 => f64::INFINITY,
            (Float8::E5M2, 31) => f64::NAN,
            _ => (1.0 + fraction) * two_to(exponent - bias),
        };
        if code < 0x80 { magnitude } else { -magnitude }
    }

    #[test]
    fn every_code_decodes_as_defined_and_encodes_again() {
        for format in Float8::ALL {
            for code in 0..=u8::MAX {
                let (value, expected) = (format.decode(code), defined(format, code));
                if expected.is_nan() {
                    assert!(value.is_nan() && format.decode(format.encode(value)).is_nan());
                } else {
                    assert_eq!(f64::from(value), expected);
                    assert_eq!(value.is_sign_negative(), code >= 0x80);
                    assert_eq!(format.encode(value), code, "{format} {value}");
                }
            }
        }
    }

    /// Rounding is monotonic, so it is correct everywhere if it is correct around each midpoint.
    #[test]
    fn every_middle_rounds_to_even_and_its_neighbours_to_the_nearest() {
        for format in Float8::ALL {
            for code in 0..format.overflow() - 1 {
                let (low, high) = (format.decode(code), format.decode(code + 1));
                let middle = (low + high) / 2.0;
                let even = code + code % 2;
                for (value, expected) in
                    [(middle.next_down(), code), (middle, even), (middle.next_up(), code + 1)]
                {
                    assert_eq!(format.encode(value), expected, "{format} {value}");
                    assert_eq!(format.encode(-value), expected | SIGN, "{format} {value}");
                }
            }
        }
    }

    #[test]
    fn what_is_too_large_is_infinite_or_no_number() {
        // The middle between the largest number and the one that would follow it.
        for (format, max, middle, even_is_max) in
            [(Float8::E4M3, 448.0f32, 464.0f32, true), (Float8::E5M2, 57_344.0, 61_440.0, false)]
        {
            assert_eq!(format.max(), max);
            let beyond = |value| match (format, format.decode(format.encode(value))) {
                (Float8::E4M3, seen) => seen.is_nan(),
                (Float8::E5M2, seen) => seen == f32::INFINITY.copysign(value),
            };
            assert_eq!(format.decode(format.encode(middle.next_down())), max);
            assert_eq!(beyond(middle), !even_is_max);
            for value in [middle.next_up(), f32::MAX, f32::INFINITY, f32::NEG_INFINITY] {
                assert!(beyond(value), "{format} {value}");
            }
            assert!(format.decode(format.encode(f32::NAN)).is_nan());
            assert_eq!(format.encode(f32::from_bits(1)), 0);
            assert_eq!(format.encode(-0.0), SIGN);
        }
    }

    proptest! {
        #[test]
        fn the_error_is_within_its_bound(bits in any::<u32>(), tiny in -30i32..20) {
            for value in [f32::from_bits(bits), (bits as f32 / 1e9) * 2f32.powi(tiny)] {
                for format in Float8::ALL {
                    if value.abs() > format.max() || value.is_nan() {
                        continue;
                    }
                    let error = f64::from(format.decode(format.encode(value))) - f64::from(value);
                    let relative = format.unit_roundoff() * f64::from(value.abs());
                    prop_assert!(error.abs() <= relative.max(format.underflow_error()));
                }
            }
        }
    }
}
