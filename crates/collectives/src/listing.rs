//! Schedule listing: for each rank, a line for each step.

use crate::op::{Op, Rank};
use crate::program::Program;
use crate::schedule::Schedule;
use std::fmt;

/// Printed schedule: `println!("{}", Listing(&schedule))`.
///
/// A line holds a rank's operations from the first write in a step on: for example, `out[2] -> 3:out[2]` writes output
/// block 2 to output block 2 at rank 3, and `wait 1` waits for rank 1. A lane is printed only if there are several and
/// the lane number differs from the step's.
#[derive(Clone, Copy, Debug)]
pub struct Listing<'a, S>(pub &'a S);

impl<S: Schedule> fmt::Display for Listing<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let schedule = self.0;
        let plural = |count: u32| if count == 1 { "" } else { "s" };
        let (ranks, blocks) = (schedule.ranks(), schedule.blocks());
        let (name, collective, steps) = (schedule.name(), schedule.collective(), schedule.steps());
        write!(f, "{collective} by {name}: {ranks} rank{}, ", plural(ranks))?;
        writeln!(f, "{blocks} block{}, {steps} step{}", plural(blocks), plural(steps))?;
        for rank in (0..ranks).map(Rank) {
            let scratch = schedule.scratch_blocks(rank);
            match scratch {
                0 => writeln!(f, "rank {rank}")?,
                _ => writeln!(f, "rank {rank}, {scratch} block{} of scratch", plural(scratch))?,
            }
            let mut current = None;
            for index in 0..schedule.len(rank) {
                let op = schedule.op(rank, index);
                if let Op::Write { step, .. } = op
                    && current != Some(step)
                {
                    let end = if index == 0 { "" } else { "\n" };
                    write!(f, "{end}  step {step:>2} | ")?;
                    current = Some(step);
                } else if index == 0 {
                    f.write_str("          | ")?;
                } else {
                    f.write_str("; ")?;
                }
                let lanes = schedule.lanes();
                short(f, op, if lanes > 1 { Some(current.unwrap_or(0)) } else { None })?;
            }
            if schedule.len(rank) > 0 {
                f.write_str("\n")?;
            }
        }
        Ok(())
    }
}

fn short(f: &mut fmt::Formatter<'_>, op: Op, step: Option<u32>) -> fmt::Result {
    match op {
        Op::Write { to, source, target, lane, .. } => {
            write!(f, "{source} -> {to}:{target}")?;
            lane_unless(f, lane, step)
        }
        Op::Wait { from, lane, count } => {
            write!(f, "wait {from}")?;
            if count > 1 {
                write!(f, " x{count}")?;
            }
            lane_unless(f, lane, step)
        }
        Op::Drain { to } => write!(f, "drain {to}"),
        Op::Reduce { source, target } => write!(f, "{target} += {source}"),
        Op::Copy { source, target } => write!(f, "{target} = {source}"),
    }
}

fn lane_unless(f: &mut fmt::Formatter<'_>, lane: u32, step: Option<u32>) -> fmt::Result {
    if step.is_none_or(|step| step == lane) { Ok(()) } else { write!(f, " lane {lane}") }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Listing(self).fmt(f)
    }
}
