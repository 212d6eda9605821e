//! Scatters as tests post them, over any link.

use crate::link::{Link, Scatter, ScatterPart, ScatterStatus, Sink};

/// Parts taken, parts in flight, and the error of one call.
pub type Outcome = (usize, u32, Option<String>);

/// Posts a scatter's parts: by one call as far as it goes, or all one by one. The parts behind one that was
/// not accepted follow one by one, as the engine posts them.
pub fn post(
    link: &mut dyn Link,
    sink: &mut Sink,
    scatter: &Scatter<'_>,
    is_one_call: bool,
) -> Vec<Outcome> {
    let one_by_one = |link: &mut dyn Link, sink: &mut Sink, parts: &[ScatterPart]| {
        let mut posted = ScatterStatus::default();
        for part in parts {
            if !posted.add(link.post(&scatter.work(part), sink)) {
                break;
            }
        }
        posted
    };
    let first = match is_one_call {
        true => link.post_scatter(scatter, sink),
        false => one_by_one(link, sink, scatter.parts),
    };
    let rest = scatter.parts.get(first.taken + 1..).unwrap_or(&[]).chunks(1);
    let mut outcomes = vec![first];
    outcomes.extend(rest.map(|part| one_by_one(link, sink, part)));
    outcomes.into_iter().map(|it| (it.taken, it.in_flight, it.failed)).collect()
}
