//! Verifies every algorithm.

mod common;

use common::all;
use weft_collectives::{Schedule, verify};

#[test]
fn every_algorithm_for_up_to_70_ranks() {
    for ranks in 1..=70 {
        for schedule in all(ranks) {
            verify(&schedule).unwrap_or_else(|error| {
                panic!("{} {} of {ranks}: {error}", schedule.name(), schedule.collective())
            });
        }
    }
}
