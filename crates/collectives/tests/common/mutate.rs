//! Schedule mutations.

use super::Random;
use weft_collectives::{Buffer, Op, Program, Rank, Span};

/// Applies one random change. Some keep the schedule correct: verification and the executor must agree on which.
pub fn mutate(program: &mut Program, random: &mut Random) {
    let ranks = program.ops.len() as u32;
    let rank = random.below(ranks) as usize;
    let other = random.below(ranks) as usize;
    let lanes = program.lanes;
    let count = program.ops[rank].len() as u32;
    if count == 0 {
        return;
    }
    let i = random.below(count) as usize;
    let j = random.below(count) as usize;
    match random.below(16) {
        0 => drop(program.ops[rank].remove(i)),
        1 => program.ops[rank].swap(i, (i + 1) % count as usize),
        2 => program.ops[rank].swap(i, j),
        3 => {
            let op = program.ops[rank][i];
            program.ops[rank].insert(j, op);
        }
        4 => {
            let op = program.ops[rank].remove(i);
            program.ops[rank].insert(j, op);
        }
        5 => {
            let op = program.ops[rank][i];
            let at = random.below(program.ops[other].len() as u32 + 1) as usize;
            program.ops[other].insert(at, op);
        }
        6 => match &mut program.ops[rank][i] {
            Op::Write { to: peer, .. } | Op::Wait { from: peer, .. } | Op::Drain { to: peer } => {
                *peer = Rank(random.below(ranks));
            }
            Op::Reduce { source, target } | Op::Copy { source, target } => {
                std::mem::swap(source, target);
            }
        },
        7 => match &mut program.ops[rank][i] {
            Op::Write { lane, .. } | Op::Wait { lane, .. } => *lane = random.below(lanes),
            op => *op = Op::Drain { to: Rank(other as u32) },
        },
        8 => match &mut program.ops[rank][i] {
            Op::Wait { count, .. } => *count = random.below(3),
            op => change_spans(op, random),
        },
        9 => {
            // All writes by a rank to another on one lane, with cumulative counts in the waits.
            let mut risen = 0;
            for op in &mut program.ops[rank] {
                if let Op::Write { to, lane, .. } = op
                    && to.0 as usize == other
                {
                    *lane = 0;
                }
            }
            for op in &mut program.ops[other] {
                if let Op::Wait { from, lane, count } = op
                    && from.0 as usize == rank
                {
                    risen += *count;
                    (*lane, *count) = (0, risen);
                }
            }
        }
        10 => program.ops[rank].retain(|op| !matches!(op, Op::Drain { .. })),
        11 => {
            // Aliased slots.
            let slots = program.scratch_blocks[rank];
            let fewer = 1 + random.below(slots.max(1));
            for owner in 0..ranks {
                for op in &mut program.ops[owner as usize] {
                    let alias = |span: &mut Span| {
                        if span.buffer == Buffer::Scratch && span.first + span.blocks > fewer {
                            span.first %= fewer;
                            if span.first + span.blocks > slots {
                                span.first = 0;
                            }
                        }
                    };
                    match op {
                        Op::Write { to, target, .. } if to.0 as usize == rank => alias(target),
                        Op::Write { source, .. } if owner as usize == rank => alias(source),
                        Op::Reduce { source, target } | Op::Copy { source, target }
                            if owner as usize == rank =>
                        {
                            alias(source);
                            alias(target);
                        }
                        _ => {}
                    }
                }
            }
        }
        12 => {
            let op = &mut program.ops[rank][i];
            *op = match *op {
                Op::Reduce { source, target } => Op::Copy { source, target },
                Op::Copy { source, target } => Op::Reduce { source, target },
                Op::Wait { from, .. } => Op::Drain { to: from },
                Op::Drain { to } => Op::Wait { from: to, lane: 0, count: 1 },
                Op::Write { to, .. } => Op::Wait { from: to, lane: 0, count: 1 },
            };
        }
        13 => {
            // All waits as late as possible, or as early.
            let first = random.below(2) == 0;
            program.ops[rank].sort_by_key(|op| matches!(op, Op::Wait { .. }) != first);
        }
        _ => change_spans(&mut program.ops[rank][i], random),
    }
}

fn change_spans(op: &mut Op, random: &mut Random) {
    let (Op::Write { source, target, .. }
    | Op::Reduce { source, target }
    | Op::Copy { source, target }) = op
    else {
        return;
    };
    match random.below(6) {
        0 => change(source, random),
        1 => change(target, random),
        2 => {
            let by = random.below(3);
            source.first += by;
            target.first += by;
        }
        3 => {
            let less = random.below(source.blocks.max(1));
            source.blocks = source.blocks.saturating_sub(less);
            target.blocks = target.blocks.saturating_sub(less);
        }
        4 => source.buffer = random.choose(&[Buffer::Input, Buffer::Output, Buffer::Scratch]),
        _ => target.buffer = random.choose(&[Buffer::Output, Buffer::Scratch]),
    }
}

fn change(span: &mut Span, random: &mut Random) {
    match random.below(3) {
        0 => span.first = span.first.wrapping_add(1),
        1 => span.first = span.first.saturating_sub(1),
        _ => span.blocks = random.below(4),
    }
}
