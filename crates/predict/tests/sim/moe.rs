//! The real drivers of dispatch and combine, on networks.

use std::rc::Rc;

use weft_fabric::PartRule;
use weft_fabric::providers::sim::{Cluster, Faults, Outcome, World, WorldConfig};
use weft_fabric::random::SplitMix64;

use crate::program::{Program, Wrong};
use crate::scenario::Scenario;
use crate::{any_network, seeds};

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
        let outcomes = cluster.run(|engine, now, events, requests| {
            programs[engine.rank().0 as usize].step(&world, engine, now, events, requests)
        });
        let outcomes = outcomes.map_err(|hang| {
            let waiting: Vec<String> = programs.iter().map(Program::waits_for).collect();
            format!("{hang}\n{}", waiting.join("\n"))
        })?;
        for outcome in &outcomes {
            match outcome {
                Outcome::Done => {}
                Outcome::Failed(Wrong::Moe(error)) => return Err(error.to_string()),
                wrong => return Err(format!("a rank ended in {wrong:?}")),
            }
        }
        cluster.settle().map_err(|hang| hang.to_string())?;
        world.violations().first().map_or(Ok(()), |violation| Err(violation.to_string()))
    });
}
