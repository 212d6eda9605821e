//! Quantisation by block for `weft.float8`.

use crate::all_to_all::{Array, bytes, bytes_mut, token_type};
use crate::errors::raise;
use crate::numbers::Block;
use pyo3::prelude::*;
use weft_moe::{BlockScaled, TokenType};

/// The scaled type with these names, and scale bytes for a row.
fn scaled(
    py: Python<'_>,
    hidden: usize,
    dtype: &str,
    scale_dtype: &str,
    block: u32,
) -> PyResult<(BlockScaled, usize)> {
    let kind = token_type(py, dtype, Some((scale_dtype, block)))?;
    match kind {
        TokenType::Scaled(scaled) if block > 0 => Ok((scaled, kind.scale_bytes(hidden))),
        TokenType::Scaled(_) => Err(raise(py, "ConfigurationError", "block is 0")),
        TokenType::Plain(_) => {
            Err(raise(py, "ConfigurationError", &format!("dtype {dtype:?} has no scales")))
        }
    }
}

/// Rounds rows with `hidden` float32 to codes and scales, as [`BlockScaled::quantise`]; the Python layer
/// has made all arrays with as many rows.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub fn quantise(
    py: Python<'_>,
    values: Array,
    hidden: usize,
    dtype: &str,
    scale_dtype: &str,
    block: Block,
    mut codes: Array,
    mut scales: Array,
) -> PyResult<()> {
    let (scaled, scale_bytes) = scaled(py, hidden, dtype, scale_dtype, block.0)?;
    py.detach(|| {
        // SAFETY: the arrays' owners are arguments to this call; the Python layer has just made them,
        // the first in float32, aligned by numpy.
        let (values, codes, scales) = unsafe {
            (bytes(&values).align_to::<f32>().1, bytes_mut(&mut codes), bytes_mut(&mut scales))
        };
        let rows = values.chunks_exact(hidden).zip(codes.chunks_exact_mut(hidden));
        for ((values, codes), scales) in rows.zip(scales.chunks_exact_mut(scale_bytes)) {
            scaled.quantise(values, codes, scales);
        }
    });
    Ok(())
}

/// Widens rows with `hidden` codes to float32, as [`BlockScaled::dequantise`]; the Python layer has
/// checked that all arrays have as many rows.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub fn dequantise(
    py: Python<'_>,
    codes: Array,
    scales: Array,
    hidden: usize,
    dtype: &str,
    scale_dtype: &str,
    block: Block,
    mut values: Array,
) -> PyResult<()> {
    let (scaled, scale_bytes) = scaled(py, hidden, dtype, scale_dtype, block.0)?;
    py.detach(|| {
        // SAFETY: the arrays' owners are arguments to this call; the Python layer has just made the
        // last, in float32, aligned by numpy, and the caller does not write to the others meanwhile.
        let (codes, scales, values) = unsafe {
            (bytes(&codes), bytes(&scales), bytes_mut(&mut values).align_to_mut::<f32>().1)
        };
        let rows = codes.chunks_exact(hidden).zip(values.chunks_exact_mut(hidden));
        for ((codes, values), scales) in rows.zip(scales.chunks_exact(scale_bytes)) {
            scaled.dequantise(codes, scales, values);
        }
    });
    Ok(())
}
