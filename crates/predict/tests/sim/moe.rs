//! The real dispatch and combine drivers, on networks.

use std::rc::Rc;

use weft_fabric::PartRule;
use weft_fabric::providers::sim::{Cluster, Faults, World, WorldConfig};
use weft_fabric::random::SplitMix64;
use weft_scenarios::{InjectedFault, run, seeds, settle};

use crate::any_network;
use crate::program::Program;
use crate::scenario::Scenario;

#[test]
fn every_round_ends_in_the_right_result() {
    seeds::each("every_round", 600, |seed| {
        let mut random = SplitMix64::new(!seed);
        let scenario = Rc::new(Scenario::random(seed));
        let ranks = scenario.config.ranks;
        let faults = if random.chance(0.2) { Faults::default() } else { Faults::rough() };
        let parts = match random.below(3) {
            0 => PartRule::WHOLE,
            _ => PartRule {
                max_part_bytes: 1 + random.below(400),
                max_pages_per_part: 5,
                ..PartRule::WHOLE
            },
        };
        let world = World::new(WorldConfig {
            parts,
            model: Box::new(any_network(&mut random, ranks)),
            ..WorldConfig::new(ranks, seed).with_faults(faults)
        });
        let mut cluster = Cluster::new(&world).map_err(|error| error.to_string())?;
        let mut programs =
            Program::connect(&mut cluster, &scenario).map_err(|error| error.to_string())?;
        run(&mut cluster, &mut programs, InjectedFault::None)?;
        settle(&mut cluster)
    });
}
