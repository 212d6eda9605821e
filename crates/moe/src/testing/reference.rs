//! Reference result for a round in float64, with an error bound. Tests and benchmarks compare with it.

use crate::area::Area;
use crate::elements::dtype::DType;
use crate::error::Error;
use crate::plan::rows::Rows;
use crate::shape::Shape;
use crate::shape::config::CombineMode;

/// Sum over each token's experts in float64, as a single process computes it.
#[derive(Clone, Debug)]
pub struct Reference {
    hidden: usize,
    output_dtype: DType,
    sums: Vec<f64>,
    bounds: Vec<f64>,
}

/// Element whose error exceeds the bound.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error(
    "element {element} of token {token} is {actual}, where {expected} was expected with an error of at \
     most {bound}"
)]
pub struct Mismatch {
    /// The token.
    pub token: usize,
    /// The element within the token.
    pub element: usize,
    /// Computed value.
    pub actual: f64,
    /// Reference value.
    pub expected: f64,
    /// The largest error allowed.
    pub bound: f64,
}

impl Reference {
    /// Computes the reference for a batch. `expert(token, expert, output)` writes that expert's output for
    /// the token, which is rounded to the combine type before the sum. Without `weights` every weight is 1,
    /// as for experts that apply the weights themselves.
    ///
    /// # The bound
    /// Let a token have `m` experts on `d` ranks, with outputs `y` and weights `w`, `A` the sum over `|w*y|`,
    /// and `u32`, `ua`, `uo` the unit roundoffs for float32, the reply and the output type. A term is
    /// multiplied once, added at most `m - 1` times in float32 (within its rank and then over ranks, the
    /// first addition to zero being exact), rounded once to the reply type and once to the output type, so
    /// the error is at most
    ///
    /// `A * ((1 + u32)^m * (1 + ua) * (1 + uo) - 1)`
    ///
    /// plus what underflow adds: at most half the type's smallest positive number for each of `m` products,
    /// `d` replies and one output, doubled for later roundings. With one reply per expert there are `m`
    /// replies, each multiplied by its weight afterwards; if every output is a reply without rounding, `ua`
    /// and the replies drop out. A sum beyond a type's largest number is infinite; in float16 that can happen
    /// to a rank's reply even where the whole sum is small.
    pub fn new(
        shape: &Shape,
        ids: &[i64],
        weights: Option<&[f32]>,
        mut expert: impl FnMut(usize, u32, &mut [f32]),
    ) -> Reference {
        let config = shape.config();
        let (hidden, top_k) = (config.hidden as usize, config.top_k as usize);
        let tokens = ids.len() / top_k;
        let mut reference = Reference {
            hidden,
            output_dtype: config.output_dtype,
            sums: vec![0.0; tokens * hidden],
            bounds: vec![0.0; tokens * hidden],
        };
        let mut output = vec![0f32; hidden];
        let mut rounded = vec![0u8; shape.row_bytes(config.combine_dtype)];
        let mut ranks = Vec::new();
        for (token, ids) in ids.chunks_exact(top_k).enumerate() {
            let elements = token * hidden..(token + 1) * hidden;
            let sums = &mut reference.sums[elements.clone()];
            let magnitudes = &mut reference.bounds[elements];
            ranks.clear();
            let (mut terms, mut weight_sum) = (0, 0.0);
            for (slot, &id) in ids.iter().enumerate() {
                let Ok(id) = u32::try_from(id) else { continue };
                expert(token, id, &mut output);
                config.combine_dtype.store(&output, &mut rounded);
                config.combine_dtype.load(&rounded, &mut output);
                let weight =
                    weights.map_or(1.0, |weights| f64::from(weights[token * top_k + slot]));
                for ((sum, magnitude), y) in sums.iter_mut().zip(&mut *magnitudes).zip(&output) {
                    let term = weight * f64::from(*y);
                    *sum += term;
                    *magnitude += term.abs();
                }
                terms += 1;
                weight_sum += weight.abs();
                ranks.push(shape.placement().owner(id));
            }
            ranks.sort_unstable();
            ranks.dedup();
            let bound = Bound::new(shape, terms, ranks.len(), weight_sum);
            for magnitude in magnitudes {
                *magnitude = bound.of(*magnitude);
            }
        }
        reference
    }

    /// The reference sums, token by token.
    pub fn sums(&self) -> &[f64] {
        &self.sums
    }

    /// The largest error allowed, element by element.
    pub fn bounds(&self) -> &[f64] {
        &self.bounds
    }

    /// Compares `output`, a row per token in the output type. Returns the largest error found, as a fraction
    /// of the bound.
    ///
    /// # Errors
    /// The first element that is out of bounds; or [`Error`] if the array does not fit.
    pub fn check(&self, output: Rows<'_>) -> Result<Result<f64, Mismatch>, Error> {
        let tokens = self.sums.len() / self.hidden;
        output.require(Area::Output, tokens, self.hidden * self.output_dtype.bytes())?;
        let mut actual = vec![0f32; self.hidden];
        let mut worst = 0f64;
        for token in 0..tokens {
            self.output_dtype.load(output.row(token), &mut actual);
            for (element, &actual) in actual.iter().enumerate() {
                let at = token * self.hidden + element;
                let (expected, bound) = (self.sums[at], self.bounds[at]);
                let actual = f64::from(actual);
                let error = (actual - expected).abs();
                if error.is_nan() || error > bound {
                    return Ok(Err(Mismatch { token, element, actual, expected, bound }));
                }
                if error > 0.0 {
                    worst = worst.max(error / bound);
                }
            }
        }
        Ok(Ok(worst))
    }
}

/// Error bound for one token.
struct Bound {
    relative: f64,
    absolute: f64,
}

impl Bound {
    fn new(shape: &Shape, terms: usize, ranks: usize, weight_sum: f64) -> Bound {
        if terms == 0 {
            return Bound { relative: 0.0, absolute: 0.0 };
        }
        let config = shape.config();
        let (single, output) = (DType::F32, config.output_dtype);
        let mut growth = (1.0 + single.unit_roundoff()).powi(terms as i32);
        growth *= 1.0 + output.unit_roundoff();
        let mut underflow = terms as f64 * single.underflow_error() + output.underflow_error();
        let reply = config.reply_dtype;
        let replies = match config.combine {
            CombineMode::ReduceAtExpert => ranks as f64,
            CombineMode::PerExpert if reply.holds(config.combine_dtype) => 0.0,
            CombineMode::PerExpert => weight_sum,
        };
        if replies > 0.0 {
            growth *= 1.0 + reply.unit_roundoff();
            underflow += replies * reply.underflow_error();
        }
        // The float64 sum's error is far below the last term.
        Bound { relative: (growth - 1.0) * (1.0 + 1e-6), absolute: 2.0 * underflow }
    }

    fn of(&self, magnitude: f64) -> f64 {
        self.relative * magnitude + self.absolute
    }
}

/// Expert for tests and benchmarks: scale and shift depend on the expert, and the elements are reversed, so a
/// token at the wrong expert or position is detected.
pub fn toy_expert(expert: u32, input: &[f32], output: &mut [f32]) {
    let scale = 0.5 + (expert % 13) as f32 / 8.0;
    let shift = (expert % 7) as f32 / 4.0 - 0.75;
    for (out, input) in output.iter_mut().zip(input.iter().rev()) {
        *out = scale * input + shift;
    }
}
