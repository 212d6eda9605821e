//! Lane names: slots in a table that holds the lanes a connection has carried, so that one immediate
//! holds two lanes.
//!
//! An immediate has 32 bits, as many as a lane. It carries one lane whole, or two names: for a write's
//! lane and for the credit that rides on it. Both ends of a connection enter the lane from each whole
//! immediate; since a connection keeps order, the receiver's table equals the sender's when it reads an
//! immediate.

use crate::types::{Lane, LaneId};

/// Set in an immediate with two names. No whole immediate has it: see [`LANES`].
const NAMES: u32 = 1 << 31;
const BITS: u32 = 10;
const PLACES: usize = 1 << BITS;
/// Lanes in an engine whose immediates lack the bit [`NAMES`].
pub const LANES: usize = 1 << 23;
const _: () = assert!(LANES <= LaneId::LIMIT as usize);

/// Lanes that parts have carried in one direction on a connection, by name.
pub struct LaneNames {
    lanes: Box<[Lane; PLACES]>,
}

impl LaneNames {
    pub fn new() -> LaneNames {
        // A number beyond every table.
        LaneNames { lanes: Box::new([Lane::from_immediate(u32::MAX); PLACES]) }
    }

    /// Enters a part's lane, in place of an earlier one with the same name.
    #[inline(always)]
    pub fn enter(&mut self, lane: Lane) {
        self.lanes[name(lane)] = lane;
    }

    /// Immediate for both lanes; `None` unless both have been entered, and replaced by no other.
    #[inline(always)]
    pub fn immediate(&self, lane: Lane, rider: Lane) -> Option<u32> {
        let (first, second) = (name(lane), name(rider));
        let are_known = self.lanes[first] == lane && self.lanes[second] == rider;
        are_known.then_some(NAMES | (first as u32) << BITS | second as u32)
    }

    /// Lane in an immediate, and the lane of a credit that rides on it.
    #[inline(always)]
    pub fn lanes(&self, immediate: u32) -> (Lane, Option<Lane>) {
        if immediate & NAMES == 0 {
            return (Lane::from_immediate(immediate), None);
        }
        let lane = |bits: u32| self.lanes[bits as usize % PLACES];
        (lane(immediate >> BITS), Some(lane(immediate)))
    }
}

/// Slot for a lane: multiplicative hashing (Knuth, volume 3, section 6.4), since lane numbers have
/// strides.
#[inline(always)]
fn name(lane: Lane) -> usize {
    (lane.immediate().wrapping_mul(0x9e37_79b9) >> (u32::BITS - BITS)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Any sequence of writes with and without credits: the receiver reads what the sender wrote,
        /// also where lanes share a name.
        #[test]
        fn the_receiver_reads_the_lanes_of_the_sender(
            stride in prop::sample::select(vec![1u32, 2, 64, 1000]),
            writes in prop::collection::vec((0u32..2000, prop::option::of(0u32..2000)), 0..4000),
        ) {
            let (mut sender, mut receiver) = (LaneNames::new(), LaneNames::new());
            let known = |number: u32| Lane::from_immediate((number * stride) << 8 | 7);
            for (lane, rider) in writes {
                let (lane, rider) = (known(lane), rider.map(known));
                let both = rider.and_then(|rider| sender.immediate(lane, rider));
                let wholes = if both.is_some() { [None; 2] } else { [rider, Some(lane)] };
                for whole in wholes.into_iter().flatten() {
                    sender.enter(whole);
                    prop_assert_eq!(receiver.lanes(whole.immediate()), (whole, None));
                    receiver.enter(whole);
                }
                if let Some(both) = both {
                    prop_assert_eq!(receiver.lanes(both), (lane, rider));
                }
            }
        }
    }

    #[test]
    fn lanes_of_a_few_counters_have_names_of_their_own() {
        let mut names = LaneNames::new();
        let lanes: Vec<Lane> = (0..16).map(|it| Lane::from_immediate((it * 64 + 5) << 8)).collect();
        lanes.iter().for_each(|&lane| names.enter(lane));
        for &lane in &lanes {
            assert!(lanes.iter().all(|&rider| names.immediate(lane, rider).is_some()));
        }
    }

    #[test]
    fn names_that_were_not_entered_are_no_lanes() {
        let (lane, rider) = LaneNames::new().lanes(NAMES | 77);
        assert_eq!((lane.id().get(), rider.map(|it| it.id().get())), (0xff_ffff, Some(0xff_ffff)));
    }
}
