//! Combine's arithmetic: answers at the experts' rank, and their sum at the source.
//!
//! Sums are in float32 from +0, products rounded before they are added. Where answers are reduced at the
//! experts, a rank's answer is its sum in top-k order, rounded once to the answer type; the source
//! adds the answers in rank order and rounds once to the output type. With one answer per expert each
//! output is rounded to the answer type, which changes nothing if that is the outputs' own or float32,
//! and the source adds `weight * answer` in top-k order, as one process would.

use std::ops::Range;

use crate::dtype::weighted_sum;
use crate::error::Error;
use crate::plan::SendPlan;
use crate::receive::ReceivePlan;
use crate::rows::{Area, Rows, RowsMut};
use crate::shape::{CombineMode, Weighting};

/// Writes the answers for `source` to `out`, the first into row 0.
///
/// `outputs` are the experts' outputs in the combine type, a row per position of the plan.
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
    let (from, to) = (config.combine_dtype, config.answer_dtype);
    let row_bytes = |area| plan.shape().area_row_bytes(area);
    outputs.require(Area::ExpertOutput, plan.positions(), row_bytes(Area::ExpertOutput))?;
    out.require(Area::Replies, plan.replies_to(source).len(), row_bytes(Area::Replies))?;
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

/// Writes the combined result of `tokens` to `out`, which has a row for every token of the batch.
/// A token without experts gives zeros.
///
/// `answers` is the answers area, as far as it is used.
///
/// # Errors
/// [`Error::TooFewRows`] or [`Error::RowLength`] if an array does not fit the plan.
pub fn combine(
    plan: &mut SendPlan,
    tokens: Range<usize>,
    weighting: Weighting,
    answers: Rows<'_>,
    mut out: RowsMut<'_>,
) -> Result<(), Error> {
    plan.order_answers(tokens.clone());
    let shape = plan.shape();
    let config = shape.config();
    answers.require(Area::Answers, plan.answer_count(), shape.area_row_bytes(Area::Answers))?;
    out.require(Area::Output, plan.tokens(), shape.area_row_bytes(Area::Output))?;
    for token in tokens {
        let terms = plan.answers_of(token).map(|(weight, row)| {
            let weight = match config.combine {
                CombineMode::ReduceAtExpert => 1.0,
                CombineMode::PerExpert => applied(weighting, weight),
            };
            (weight, answers.row(row as usize))
        });
        weighted_sum(config.answer_dtype, config.output_dtype, terms, out.row(token));
    }
    Ok(())
}

fn applied(weighting: Weighting, weight: f32) -> f32 {
    match weighting {
        Weighting::AtCombine => weight,
        Weighting::AtExpert => 1.0,
    }
}
