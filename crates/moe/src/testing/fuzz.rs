//! Parsers for bytes from outside, as functions on arbitrary bytes, for the fuzzer (`fuzz/`) and the
//! tests. Not part of the library. Each panics on a violated guarantee.

use crate::area::Area;
use crate::plan::header::{self, RoundCounts};
use crate::plan::receive::ReceivePlan;
use crate::plan::rows::Rows;
use crate::plan::send::SendPlan;
use crate::shape::Shape;
use crate::shape::config::{CombineMode, Config, Layout};
use crate::shape::wire::header_bytes;
use std::ops::Range;

/// Corpus name and parser.
pub type Target = (&'static str, fn(&[u8]));

/// Every target in this crate.
pub const TARGETS: [Target; 3] =
    [("moe_header", header), ("moe_metadata", metadata), ("moe_agreement", agreement)];

const ROUND: u64 = 5;

/// Shape with two ranks; rank 1 is the peer.
fn shape(choice: u8) -> Option<Shape> {
    let layout = match choice % 2 {
        0 => Layout::Indexed,
        _ => Layout::Contiguous { pad_to: 3 },
    };
    let combine = match choice / 2 % 2 {
        0 => CombineMode::ReduceAtExpert,
        _ => CombineMode::PerExpert,
    };
    let config = Config::new(2, 0, 5, 3).sized(6, 2);
    Shape::new(Config { layout, combine, private_rows: u32::from(choice / 4) % 4, ..config }).ok()
}

/// Counts in a round where this rank sends two tokens.
fn counts(shape: &Shape) -> Option<RoundCounts> {
    let mut plan = SendPlan::new(shape);
    plan.build(&[0, 4, 1, 2, -1, 3], None).ok()?;
    let mut header = vec![0; header_bytes(shape.config()) as usize];
    header::encode(&plan, ROUND, &mut header).ok()?;
    let mut counts = RoundCounts::new(shape);
    counts.begin(ROUND);
    counts.accept(0, &header).ok()?;
    Some(counts)
}

/// An accepted header leads to offsets within the allocated areas.
pub fn header(data: &[u8]) {
    let Some((choice, header)) = data.split_first() else { return };
    let Some(shape) = shape(*choice) else { return };
    let Some(mut counts) = counts(&shape) else { return };
    assert!(!counts.is_complete());
    if counts.accept(1, header).is_err() {
        assert!(!counts.has(1), "a header that was refused counts");
        return;
    }
    let sizes = shape.sizes();
    assert!(counts.is_complete() && counts.rows(1, 0) <= shape.config().max_tokens);
    if counts.check_capacity().is_ok() {
        let begin = 2 * sizes.private_slots() + counts.remainder_offset(1, 0);
        let end = begin + sizes.slots_of(counts.remainder(1, 0));
        assert!(end <= sizes.extent(Area::Tokens).rows, "a remainder past the end");
    }
    assert!(ReceivePlan::new(&shape).begin(&counts).is_ok() == counts.check_capacity().is_ok());
}

/// Accepted metadata name each expert as often as the header, and positions within the plan.
pub fn metadata(data: &[u8]) {
    let Some((choice, data)) = data.split_first() else { return };
    let Some(shape) = shape(*choice) else { return };
    let Some(mut counts) = counts(&shape) else { return };
    let (header, records) = data.split_at(data.len().min(header_bytes(shape.config()) as usize));
    if counts.accept(1, header).is_err() || counts.check_capacity().is_err() {
        return;
    }
    let mut plan = ReceivePlan::new(&shape);
    if plan.begin(&counts).is_err() {
        return;
    }
    let extent = shape.sizes().extent(Area::Metadata);
    let mut area = vec![0; extent.rows as usize * extent.stride as usize];
    let length = records.len().min(area.len());
    area[..length].copy_from_slice(&records[..length]);
    let stride = extent.stride as usize;
    let slots = |slots: Range<usize>| {
        Rows::new(&area[slots.start * stride..slots.end * stride], stride, stride)
    };
    if plan.accept(1, plan.source_rows(1, slots)).is_ok() {
        let pairs: usize = plan.rows_from(1).map(|row| plan.pairs_of(row).count()).sum();
        assert_eq!(pairs, counts.pairs(1, 0) as usize);
        for row in plan.rows_from(1) {
            assert!(plan.pairs_of(row).all(|(position, _)| position < plan.positions()));
        }
    }
}

/// Only the same configuration agrees, and the error is short.
pub fn agreement(data: &[u8]) {
    let config = Config::new(2, 0, 8, 2).sized(16, 64);
    let ours = config.encode();
    match config.agree(&[ours.clone(), data.to_vec()]) {
        Ok(()) => {
            let same =
                String::from_utf8_lossy(data).lines().eq(String::from_utf8_lossy(&ours).lines());
            assert!(same, "another configuration agreed");
        }
        Err(error) => assert!(error.to_string().len() < 800),
    }
}

#[cfg(test)]
use weft_fabric::random::SplitMix64;

#[cfg(test)]
#[path = "../../../../fuzz/replay.rs"]
mod replay;
