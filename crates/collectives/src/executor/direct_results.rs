//! Direct results: steps that write the last value in a result write it to the caller's memory, which saves a copy from
//! staging memory.
//!
//! A step qualifies if no later step, and no later arrival, accesses the bytes. The caller's output may be its
//! input: no later step may then read the input there, and earlier writes that read it drain first.

use super::layout::{Piece, Place};
use super::step::{Plan, Step};
use crate::op::Collective;
use std::collections::BTreeMap;
use std::ops::Range;

/// Redirects a plan's steps, and splits the results accordingly. A result that is already in the caller's memory stays
/// as a segment from there to itself, for averages. `landed` has the staging memory bytes that each wait in the plan
/// covers, in wait order.
pub(super) fn redirect(
    plan: &mut Plan,
    collective: Collective,
    me: u32,
    landed: &[Vec<Range<u64>>],
) {
    let mut results = std::mem::take(&mut plan.results);
    results.sort_unstable_by_key(|piece| staging(piece.source, piece.bytes).map(|at| at.start));
    let mut later = Later::default();
    let mut waits = landed.iter().rev();
    // Redirected step indices, from the last, with the input that each may overwrite.
    let mut redirected = Vec::new();
    let mut direct = BTreeMap::new();
    for index in (0..plan.steps.len()).rev() {
        if let Some(bytes) = written(&plan.steps[index])
            && !later.staging.overlap(&bytes)
            && let Some(place) = place_of(&results, &bytes)
        {
            let input = alias(collective, me, place);
            if overwrites(&plan.steps[index], input, bytes.end - bytes.start, &later) {
                set_target(&mut plan.steps[index], place);
                redirected.push((index, input, bytes.end - bytes.start));
                direct.insert(bytes.start, (bytes.end, place));
            }
        }
        if let Step::Wait { .. } = plan.steps[index] {
            for bytes in waits.next().into_iter().flatten() {
                later.staging.insert(bytes.clone());
            }
        }
        later.add(plan, index);
    }
    for (index, input, bytes) in redirected {
        let copies_itself =
            matches!(&plan.steps[index], Step::Copy(piece) if Some(piece.source) == input);
        if let Some(input) = input.filter(|_| !copies_itself) {
            let drains = readers(plan, index, input, bytes);
            plan.steps.splice(index..index, drains.into_iter().map(|to| Step::Drain { to }));
        }
    }
    plan.results = split(&results, &direct);
}

/// Accesses by later steps.
#[derive(Default)]
struct Later {
    staging: Ranges,
    /// Reads from the caller's input, by share.
    input: BTreeMap<u32, Ranges>,
}

impl Later {
    fn add(&mut self, plan: &Plan, index: usize) {
        match &plan.steps[index] {
            Step::Write { pieces, .. } => {
                for piece in &plan.pieces[pieces.start as usize..pieces.end as usize] {
                    self.add_place(piece.source, piece.bytes);
                }
            }
            Step::Combine { target, a, b, bytes } => {
                [*target, *a, *b].into_iter().for_each(|place| self.add_place(place, *bytes));
            }
            Step::Copy(piece) => {
                self.add_place(piece.source, piece.bytes);
                self.add_place(piece.target, piece.bytes);
            }
            // Fold plans have no results in staging memory.
            Step::Wait { .. } | Step::Drain { .. } | Step::Fold { .. } => {}
        }
    }

    fn add_place(&mut self, place: Place, bytes: u64) {
        match place {
            Place::Staging(start) => self.staging.insert(start..start + bytes),
            Place::Input { share, offset } => {
                self.input.entry(share).or_default().insert(offset..offset + bytes);
            }
            Place::Output { .. } => {}
        }
    }
}

/// Staging memory bytes that a local step writes.
fn written(step: &Step) -> Option<Range<u64>> {
    match step {
        Step::Combine { target, bytes, .. } => staging(*target, *bytes),
        Step::Copy(piece) => staging(piece.target, piece.bytes),
        _ => None,
    }
}

fn staging(place: Place, bytes: u64) -> Option<Range<u64>> {
    match place {
        Place::Staging(start) => Some(start..start + bytes),
        _ => None,
    }
}

fn set_target(step: &mut Step, place: Place) {
    match step {
        Step::Combine { target, .. } => *target = place,
        Step::Copy(piece) => piece.target = place,
        _ => {}
    }
}

/// Place for these bytes in the caller's output, if one result contains them all. `results` are sorted.
fn place_of(results: &[Piece], bytes: &Range<u64>) -> Option<Place> {
    let after = results.partition_point(|piece| {
        staging(piece.source, piece.bytes).is_some_and(|at| at.start <= bytes.start)
    });
    let piece = results.get(after.checked_sub(1)?)?;
    let at = staging(piece.source, piece.bytes)?;
    (bytes.end <= at.end).then(|| piece.target.after(bytes.start - at.start))
}

/// Input place that this output place may be, see [`Call::output`](super::Call::output).
fn alias(collective: Collective, me: u32, output: Place) -> Option<Place> {
    let Place::Output { share, offset } = output else { return None };
    match collective {
        Collective::AllReduce | Collective::Broadcast { .. } => {
            Some(Place::Input { share, offset })
        }
        Collective::ReduceScatter => Some(Place::Input { share: me, offset }),
        Collective::AllGather if share == me => Some(Place::Input { share: 0, offset }),
        Collective::AllGather | Collective::AllToAll => None,
    }
}

/// True if `step` may overwrite this input place: the step itself reads only the same elements there, and no later step
/// any.
fn overwrites(step: &Step, input: Option<Place>, bytes: u64, later: &Later) -> bool {
    let Some(Place::Input { share, offset }) = input else { return true };
    let range = offset..offset + bytes;
    let reads_same = |source: Place| match source {
        Place::Input { share: other, offset: start } if other == share => {
            start == offset || start >= range.end || start + bytes <= offset
        }
        _ => true,
    };
    let is_free = !later.input.get(&share).is_some_and(|reads| reads.overlap(&range));
    match step {
        Step::Copy(piece) => Some(piece.source) == input || reads_same(piece.source) && is_free,
        Step::Combine { a, b, .. } => reads_same(*a) && reads_same(*b) && is_free,
        _ => false,
    }
}

/// Ranks to which writes before step `end` read this input place, each once.
fn readers(plan: &Plan, end: usize, input: Place, bytes: u64) -> Vec<u32> {
    let Place::Input { share, offset } = input else { return Vec::new() };
    let reads = |piece: &Piece| match piece.source {
        Place::Input { share: other, offset: start } => {
            other == share && start < offset + bytes && offset < start + piece.bytes
        }
        _ => false,
    };
    let mut readers = Vec::new();
    for step in &plan.steps[..end] {
        if let Step::Write { to, pieces, .. } = step
            && plan.pieces[pieces.start as usize..pieces.end as usize].iter().any(reads)
            && !readers.contains(to)
        {
            readers.push(*to);
        }
    }
    readers
}

/// Results without the `direct` bytes, and those bytes as segments in the caller's memory.
fn split(results: &[Piece], direct: &BTreeMap<u64, (u64, Place)>) -> Vec<Piece> {
    let mut all = Vec::new();
    for &Piece { source, target, bytes } in results {
        let Some(Range { start, end }) = staging(source, bytes) else { continue };
        let rest = |from: u64, to: u64| {
            let (source, target) = (Place::Staging(from), target.after(from - start));
            (to > from).then_some(Piece { source, target, bytes: to - from })
        };
        let mut at = start;
        for (&from, &(to, place)) in direct.range(start..end) {
            all.extend(rest(at, from));
            all.push(Piece { source: place, target: place, bytes: to - from });
            at = to;
        }
        all.extend(rest(at, end));
    }
    all
}

/// Disjoint range set: ends by start.
#[derive(Default)]
struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    fn insert(&mut self, Range { mut start, mut end }: Range<u64>) {
        if start >= end {
            return;
        }
        while let Some((&other, &other_end)) = self.0.range(..=end).next_back()
            && other_end >= start
        {
            self.0.remove(&other);
            (start, end) = (start.min(other), end.max(other_end));
        }
        self.0.insert(start, end);
    }

    fn overlap(&self, range: &Range<u64>) -> bool {
        let before = self.0.range(..range.end).next_back();
        before.is_some_and(|(_, &end)| end > range.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{Algorithm, Options};
    use crate::any_schedule::build;
    use crate::executor::plan::{ChunkShape, PlanRoute, plan};
    use crate::op::Rank;

    fn plan_of(collective: Collective, algorithm: Algorithm, ranks: u32, staged: bool) -> Plan {
        let schedule = build(collective, algorithm, ranks, &Options::default()).unwrap();
        let shape =
            ChunkShape { elements: 96, element_bytes: 4, staged_input: staged, is_wide: false };
        plan(&schedule, Rank(1), shape, |_| PlanRoute::SELF)
    }

    fn copied(plan: &Plan) -> u64 {
        let copies = plan.results.iter().filter(|piece| piece.source != piece.target);
        copies.map(|piece| piece.bytes).sum()
    }

    #[test]
    fn sums_of_one_shot_and_reduce_scatter_are_not_copied() {
        for staged in [false, true] {
            let one_shot = plan_of(Collective::AllReduce, Algorithm::OneShot, 3, staged);
            assert_eq!(copied(&one_shot), 0);
            let direct = plan_of(Collective::ReduceScatter, Algorithm::Direct, 3, staged);
            assert_eq!(copied(&direct), 0);
        }
    }

    #[test]
    fn only_arrivals_and_what_is_sent_on_are_copied() {
        let gather = plan_of(Collective::AllGather, Algorithm::Direct, 3, false);
        assert_eq!(copied(&gather), 96 * 4 / 3 * 2);
        // Each rank sends on its part in the sum.
        let two_shot = plan_of(Collective::AllReduce, Algorithm::TwoShot, 3, false);
        assert_eq!(copied(&two_shot), 96 * 4);
    }

    #[test]
    fn writes_that_read_the_input_drain_before_a_result_replaces_it() {
        let drains = |staged| {
            let plan = plan_of(Collective::AllReduce, Algorithm::OneShot, 3, staged);
            let last = plan.steps.iter().position(|step| {
                matches!(step, Step::Combine { target: Place::Output { .. }, .. })
            });
            let drain = |step: &&Step| matches!(step, Step::Drain { .. });
            plan.steps[..last.unwrap()].iter().filter(drain).count()
        };
        assert_eq!(drains(false), 2);
        assert_eq!(drains(true), 0);
        // The input part at the output stays at this rank.
        let own = plan_of(Collective::ReduceScatter, Algorithm::Direct, 3, false);
        assert!(!own.steps.iter().any(|step| matches!(step, Step::Drain { .. })));
    }

    #[test]
    fn ranges_join_and_overlap() {
        let mut ranges = Ranges::default();
        ranges.insert(10..20);
        ranges.insert(30..40);
        assert!(
            !ranges.overlap(&(20..30)) && ranges.overlap(&(19..20)) && ranges.overlap(&(5..50))
        );
        ranges.insert(15..30);
        assert_eq!(ranges.0, BTreeMap::from([(10, 40)]));
        ranges.insert(5..5);
        assert!(!ranges.overlap(&(0..10)));
    }
}
