//! Static schedule checks, and the final output check.

use super::memory::{Memory, Value};
use super::rank_sets::RankSets;
use crate::error::{Error, at_most, in_range};
use crate::op::{Buffer, Collective, MAX_RANKS, Op, OpLocation, Rank, Span};
use crate::schedule::Schedule;

/// Limit on the blocks in all outputs and scratch in a verified schedule.
pub const MAX_SLOTS: u64 = 1 << 24;

/// Limit on the ranks in a verified schedule: each rank's vector clock has a word for every rank.
pub const MAX_VERIFIED_RANKS: u64 = 1 << 14;

/// Checks the rank and block counts, and the root.
pub(crate) fn header(schedule: &impl Schedule) -> Result<(), Error> {
    let (ranks, blocks) = (schedule.ranks(), schedule.blocks());
    in_range("the number of ranks", ranks, 1, MAX_RANKS)?;
    in_range("the number of blocks", blocks, 1, u32::MAX)?;
    if schedule.collective().shares() && !blocks.is_multiple_of(ranks) {
        return Err(Error::Uneven { what: "blocks", whole: blocks, parts: ranks });
    }
    if let Collective::Broadcast { root } = schedule.collective() {
        in_range("the root", root.0, 0, ranks - 1)?;
    }
    Ok(())
}

/// Checks that blocks and clocks fit in memory.
pub(super) fn size(schedule: &impl Schedule) -> Result<(), Error> {
    at_most("ranks of a schedule to verify", schedule.ranks().into(), MAX_VERIFIED_RANKS)?;
    at_most("blocks of all outputs and scratch together", Memory::slots(schedule), MAX_SLOTS)
}

/// Checks that an operation's ranks, lanes, step and spans exist.
pub(crate) fn operation(schedule: &impl Schedule, at: OpLocation) -> Result<(), Error> {
    let peer = |peer: Rank| {
        if peer.0 >= schedule.ranks() {
            Err(Error::Operation { at, problem: format!("there is no rank {peer}") })
        } else if peer == at.rank {
            Err(Error::Operation { at, problem: "its peer is the rank itself".to_owned() })
        } else {
            Ok(())
        }
    };
    let below = |what: &str, value: u32, limit: u32| {
        if value < limit {
            return Ok(());
        }
        let problem = format!("{what} {value}: expected less than {limit}");
        Err(Error::Operation { at, problem })
    };
    match at.op {
        Op::Write { to, source, target, lane, step } => {
            peer(to)?;
            below("lane", lane, schedule.lanes())?;
            below("step", step, schedule.steps())?;
            inside(schedule, at, at.rank, source)?;
            written(schedule, at, to, source, target)
        }
        Op::Wait { from, lane, count } => {
            peer(from)?;
            below("lane", lane, schedule.lanes())?;
            if count == 0 {
                let problem = "its count is 0: expected at least 1".to_owned();
                return Err(Error::Operation { at, problem });
            }
            Ok(())
        }
        Op::Drain { to } => peer(to),
        Op::Reduce { source, target } | Op::Copy { source, target } => {
            inside(schedule, at, at.rank, source)?;
            written(schedule, at, at.rank, source, target)?;
            let apart = source.first + source.blocks <= target.first
                || target.first + target.blocks <= source.first;
            if source.buffer == target.buffer && !apart {
                return bad(at, target, format!("overlaps its source {source}"));
            }
            if matches!(at.op, Op::Reduce { .. }) && !schedule.collective().reduces() {
                let problem = format!("adds, but {} has no sums", schedule.collective());
                return Err(Error::Operation { at, problem });
            }
            Ok(())
        }
    }
}

fn bad(at: OpLocation, span: Span, problem: String) -> Result<(), Error> {
    Err(Error::Span { at, span, problem })
}

fn inside(schedule: &impl Schedule, at: OpLocation, owner: Rank, span: Span) -> Result<(), Error> {
    if span.blocks == 0 {
        return bad(at, span, "is empty".to_owned());
    }
    let all = schedule.buffer_blocks(owner, span.buffer);
    if u64::from(span.first) + u64::from(span.blocks) > u64::from(all) {
        return bad(at, span, format!("does not fit: rank {owner} has {all} blocks there"));
    }
    Ok(())
}

fn written(
    schedule: &impl Schedule,
    at: OpLocation,
    owner: Rank,
    source: Span,
    target: Span,
) -> Result<(), Error> {
    inside(schedule, at, owner, target)?;
    if target.buffer == Buffer::Input {
        return bad(at, target, "is an input, which is read-only".to_owned());
    }
    if source.blocks != target.blocks {
        return bad(at, target, format!("has another length than its source {source}"));
    }
    Ok(())
}

/// Checks final block `index` in the output at `rank`.
pub(super) fn result(
    schedule: &impl Schedule,
    sets: &RankSets,
    rank: Rank,
    index: u32,
    value: Option<Value>,
) -> Result<(), Error> {
    let collective = schedule.collective();
    let wrong = |problem: String| {
        Err(Error::Result { rank, block: Span::block(Buffer::Output, index), problem })
    };
    let Some(value) = value else {
        return wrong("is unwritten".to_owned());
    };
    if collective.reduces() {
        return match sets.lacks(value.set, schedule.ranks()) {
            Some(missing) => wrong(format!("lacks the contribution of rank {missing}")),
            None => Ok(()),
        };
    }
    let share = schedule.blocks() / schedule.ranks();
    let (from, block) = match collective {
        Collective::AllToAll => (index / share, rank.0 * share + index % share),
        Collective::Broadcast { root } => (root.0, index),
        _ => (index / share, index),
    };
    let found = sets.lowest(value.set);
    if (found, value.block) != (from, block) {
        return wrong(format!(
            "is block {} of rank {found}, not block {block} of rank {from}",
            value.block
        ));
    }
    Ok(())
}
