//! Schedules from JSON.

use serde_json::Value;
use weft_collectives::{Op, Program, Rank, Schedule};

use crate::error::Error;

/// Parses a schedule and rejects operations with unknown ranks or blocks. [`weft_collectives::verify`] proves that it
/// computes the collective; the run detects deadlocks.
pub(crate) fn program(value: &Value, ranks: Option<u32>) -> Result<Program, Error> {
    let program: Program = serde_json::from_value(value.clone())?;
    let has = program.ranks();
    if has == 0 || program.blocks == 0 {
        return Err(Error::field(
            "job.program",
            "an empty schedule",
            "at least one rank and one block",
        ));
    }
    if let Some(ranks) = ranks
        && ranks != has
    {
        return Err(Error::field("job.ranks", ranks, format!("{has}, as many as the program has")));
    }
    let shares = program.collective.shares();
    if shares && !program.blocks.is_multiple_of(has) {
        let must = format!("a multiple of the number of ranks, {has}");
        return Err(Error::field("job.program.blocks", program.blocks, must));
    }
    for rank in 0..has {
        for (index, op) in program.ops[rank as usize].iter().enumerate() {
            if let Some(problem) = problem(&program, rank, op) {
                let field = format!("job.program: rank {rank}, operation {index} ({op})");
                return Err(Error::field(field, problem.0, problem.1));
            }
        }
    }
    Ok(program)
}

/// An operation's problem and the expected values, if it has one.
fn problem(program: &Program, rank: u32, op: &Op) -> Option<(String, String)> {
    let ranks = program.ranks();
    let peer = match op {
        Op::Write { to, .. } | Op::Drain { to } => Some(*to),
        Op::Wait { from, .. } => Some(*from),
        _ => None,
    };
    if let Some(Rank(peer)) = peer
        && (peer >= ranks || peer == rank)
    {
        return Some((format!("with rank {peer}"), format!("another one of {ranks} ranks")));
    }
    let spans = match op {
        Op::Write { to, source, target, .. } => vec![(rank, source), (to.0, target)],
        Op::Reduce { source, target } | Op::Copy { source, target } => {
            vec![(rank, source), (rank, target)]
        }
        _ => Vec::new(),
    };
    for (whose, span) in spans {
        let has = u64::from(program.buffer_blocks(Rank(whose), span.buffer));
        let end = u64::from(span.first) + u64::from(span.blocks);
        if end > has {
            let is = format!("with {span} of rank {whose}");
            return Some((is, format!("a span within its {has} blocks")));
        }
    }
    match op {
        Op::Wait { count: 0, .. } => Some(("with count 0".into(), "a count of at least 1".into())),
        _ => None,
    }
}
