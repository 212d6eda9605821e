//! Hand-written schedules that reuse slots, with credits and drains. No library algorithm does, but stored programs
//! may.

use std::collections::HashMap;
use weft_collectives::{Collective, Op, Program, Rank, Span};

/// Broadcast along a chain in `chunks` chunks through two slots: a rank copies a chunk, forwards it from the slot,
/// and returns a credit by a write once the slot is drained.
pub fn chain(ranks: u32, chunks: u32) -> Program {
    let last = ranks - 1;
    let slot = |chunk: u32| Span::scratch(chunk % 2, 1);
    let mut ops: Vec<Vec<Op>> = vec![Vec::new(); ranks as usize];
    for rank in 0..ranks {
        let ops = &mut ops[rank as usize];
        let (before, after) = (Rank(rank.wrapping_sub(1)), Rank(rank + 1));
        for chunk in 0..chunks {
            let place = Span::output(chunk, 1);
            let mut source = Span::input(chunk, 1);
            if rank > 0 {
                source = slot(chunk);
                ops.push(Op::Wait { from: before, lane: chunk, count: 1 });
            }
            ops.push(Op::Copy { source, target: place });
            if rank < last {
                if chunk >= 2 {
                    ops.push(Op::Wait { from: after, lane: chunk - 2, count: 1 });
                }
                let target = slot(chunk);
                ops.push(Op::Write { to: after, source, target, lane: chunk, step: 0 });
            }
            if rank > 0 {
                if rank < last {
                    ops.push(Op::Drain { to: after });
                }
                let credit = Span::scratch(2 + chunk % 2, 1);
                let lane = chunk;
                ops.push(Op::Write { to: before, source: place, target: credit, lane, step: 0 });
            }
        }
        if rank < last {
            for chunk in chunks.saturating_sub(2)..chunks {
                ops.push(Op::Wait { from: after, lane: chunk, count: 1 });
            }
        }
    }
    let mut program = Program {
        name: "credited chain".to_owned(),
        collective: Collective::Broadcast { root: Rank(0) },
        blocks: chunks,
        scratch_blocks: vec![4; ranks as usize],
        steps: 0,
        lanes: chunks,
        ops,
    };
    label(&mut program);
    program
}

/// All-reduce over rank 0: each rank sends its blocks through one slot at rank 0; the write that returns a sum to a
/// rank is also the credit for the slot.
pub fn star(ranks: u32, blocks: u32) -> Program {
    let mut ops: Vec<Vec<Op>> = vec![Vec::new(); ranks as usize];
    for block in 0..blocks {
        let place = Span::output(block, 1);
        let input = Span::input(block, 1);
        ops[0].push(Op::Copy { source: input, target: place });
        for rank in 1..ranks {
            let slot = Span::scratch(rank - 1, 1);
            let write = Op::Write { to: Rank(0), source: input, target: slot, lane: 0, step: 0 };
            ops[rank as usize].push(write);
            ops[0].push(Op::Wait { from: Rank(rank), lane: 0, count: block + 1 });
            ops[0].push(Op::Reduce { source: slot, target: place });
        }
        for rank in 1..ranks {
            let to = Rank(rank);
            ops[0].push(Op::Write { to, source: place, target: place, lane: 0, step: 0 });
            ops[rank as usize].push(Op::Wait { from: Rank(0), lane: 0, count: block + 1 });
        }
    }
    let mut scratch_blocks = vec![0; ranks as usize];
    scratch_blocks[0] = ranks - 1;
    let mut program = Program {
        name: "star".to_owned(),
        collective: Collective::AllReduce,
        blocks,
        scratch_blocks,
        steps: 0,
        lanes: 1,
        ops,
    };
    label(&mut program);
    program
}

/// Assigns to each write the first step after all writes that its rank has waited for.
fn label(program: &mut Program) {
    let ranks = program.ops.len();
    let mut posted: HashMap<(u32, u32, u32), Vec<u32>> = HashMap::new();
    let (mut next, mut step) = (vec![0; ranks], vec![0; ranks]);
    let mut moved = true;
    while std::mem::take(&mut moved) {
        for rank in 0..ranks {
            while let Some(op) = program.ops[rank].get_mut(next[rank]) {
                match op {
                    Op::Write { to, lane, step: its, .. } => {
                        *its = step[rank];
                        program.steps = program.steps.max(*its + 1);
                        posted.entry((rank as u32, to.0, *lane)).or_default().push(*its);
                    }
                    Op::Wait { from, lane, count } => {
                        let key = (from.0, rank as u32, *lane);
                        let Some(steps) = posted.get(&key).and_then(|s| s.get(..*count as usize))
                        else {
                            break;
                        };
                        step[rank] = steps.iter().fold(step[rank], |a, b| a.max(b + 1));
                    }
                    _ => {}
                }
                next[rank] += 1;
                moved = true;
            }
        }
    }
}
