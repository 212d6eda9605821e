//! Combine arithmetic: replies at the experts' rank, and the sum at the source.
//!
//! Sums are in float32 from +0; products are rounded before they are added. If replies are reduced at the
//! experts, a rank's reply is the sum in top-k order, rounded once to the reply type; the source adds the
//! replies in rank order and rounds once to the output type. With one reply per expert each output is rounded
//! to the reply type, which is exact if that is the outputs' own type or float32; the source adds
//! `weight * reply` in top-k order, as a single process does.

use std::ops::Range;

use crate::area::Area;
use crate::elements::dtype::weighted_sum;
use crate::error::Error;
use crate::plan::receive::ReceivePlan;
use crate::plan::rows::{Rows, RowsMut};
use crate::plan::send::SendPlan;
use crate::shape::config::{CombineMode, Weighting};

/// Writes the replies to `source` into `out`, the first into row 0.
///
/// `outputs` holds the experts' outputs in the combine type, a row for each position in the plan.
///
/// # Errors
/// [`Error::TooFewRows`] or [`Error::RowLength`] if an array does not fit the plan.
pub fn reply(
    plan: &ReceivePlan,
    source: u32,
    weighting: Weighting,
    outputs: Rows<'_>,
    mut out: RowsMut<'_>,
) -> Result<(), Error> {
    let config = plan.shape().config();
    let (from, to) = (config.combine_dtype, config.reply_dtype);
    let row_bytes = |area| plan.shape().area_row_bytes(area);
    outputs.require(Area::ExpertOutput, plan.positions(), row_bytes(Area::ExpertOutput))?;
    out.require(Area::SendReplies, plan.replies_to(source).len(), row_bytes(Area::SendReplies))?;
    let rows = plan.rows_from(source);
    match config.combine {
        CombineMode::ReduceAtExpert => {
            for (index, row) in rows.enumerate() {
                let terms = plan
                    .pairs_of(row)
                    .map(|(position, weight)| (applied(weighting, weight), outputs.row(position)));
                weighted_sum(from, to, terms, out.row(index));
            }
        }
        CombineMode::PerExpert => {
            let positions = rows.flat_map(|row| plan.pairs_of(row));
            for (index, (position, _)) in positions.enumerate() {
                let (output, out) = (outputs.row(position), out.row(index));
                if from == to {
                    out.copy_from_slice(output);
                } else {
                    weighted_sum(from, to, std::iter::once((1.0, output)), out);
                }
            }
        }
    }
    Ok(())
}

/// Writes the combined result for `tokens` to `out`, which has a row for each token in the batch. A token
/// without experts gives zeros.
///
/// `replies` is the used part in the replies area.
///
/// # Errors
/// [`Error::TooFewRows`] or [`Error::RowLength`] if an array does not fit the plan.
pub fn combine(
    plan: &mut SendPlan,
    tokens: Range<usize>,
    weighting: Weighting,
    replies: Rows<'_>,
    mut out: RowsMut<'_>,
) -> Result<(), Error> {
    plan.order_replies(tokens.clone());
    let shape = plan.shape();
    let config = shape.config();
    replies.require(Area::Replies, plan.reply_count(), shape.area_row_bytes(Area::Replies))?;
    out.require(Area::Output, plan.tokens(), shape.area_row_bytes(Area::Output))?;
    for token in tokens {
        let terms = plan.replies_of(token).map(|(weight, row)| {
            let weight = match config.combine {
                CombineMode::ReduceAtExpert => 1.0,
                CombineMode::PerExpert => applied(weighting, weight),
            };
            (weight, replies.row(row as usize))
        });
        weighted_sum(config.reply_dtype, config.output_dtype, terms, out.row(token));
    }
    Ok(())
}

fn applied(weighting: Weighting, weight: f32) -> f32 {
    match weighting {
        Weighting::AtCombine => weight,
        Weighting::AtExpert => 1.0,
    }
}
