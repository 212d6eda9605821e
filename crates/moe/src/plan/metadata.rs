//! Metadata records for a send plan's rows.
//!
//! Layout, little-endian, aligned to 4 bytes: a count (u32), then for each expert the number within the
//! destination's block (u16), the top-k slot (u16) and the router's weight (float32). Scales begin and end at
//! a multiple of 16 bytes. All records in a shape have the same length.

use crate::area::Area;
use crate::error::Error;
use crate::plan::record::encode;
use crate::plan::rows::RowsMut;
use crate::plan::send::SendPlan;

/// Writes the records for `rows` in the plan, the first into row 0 of `out`. `scales` holds the scales for
/// all tokens in the batch, `[tokens, blocks]`; it is empty for tokens without scales.
///
/// # Errors
/// [`Error::TooFewRows`] or [`Error::RowLength`] if `out` does not fit this plan's shape;
/// [`Error::WrongLength`] if `scales` does not.
pub fn pack(
    plan: &SendPlan,
    rows: std::ops::Range<usize>,
    scales: &[u8],
    mut out: RowsMut<'_>,
) -> Result<(), Error> {
    check_scales(plan, scales)?;
    out.require(Area::SendMetadata, rows.len(), plan.metadata_bytes())?;
    let (scale_bytes, in_record) = (plan.shape().scale_bytes(), plan.shape().scales_in_record());
    for (index, row) in rows.enumerate() {
        let (entries, rest) = out.row(index).split_at_mut(in_record.start);
        encode(entries, plan.entries(row));
        let first = plan.token_of(row) * scale_bytes;
        rest[..scale_bytes].copy_from_slice(&scales[first..first + scale_bytes]);
    }
    Ok(())
}

/// Rejects scales whose length does not fit the plan's tokens.
pub(crate) fn check_scales(plan: &SendPlan, scales: &[u8]) -> Result<(), Error> {
    let (expected, given) = (plan.tokens() * plan.shape().scale_bytes(), scales.len());
    if given != expected {
        return Err(Error::WrongLength { what: "the scales' bytes", expected, given });
    }
    Ok(())
}
