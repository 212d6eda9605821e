//! One collective, timed.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use super::clusters::{Net, Order};
use crate::collective::{CollectiveJob, CollectiveWorkload};
use crate::constants::Constants;
use crate::error::Error;
use crate::world::World;

/// What a collective took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Measured {
    pub time_s: f64,
    pub max_link_load: u32,
}

/// Times collectives with one set of constants.
pub(crate) struct Bench {
    pub constants: Constants,
    /// Of every link.
    pub link_latency_s: f64,
    pub seed: u64,
    seeds: u64,
    flows: Cell<u64>,
    /// What was measured already: figures are quoted out of the sweeps.
    known: RefCell<HashMap<Key, Measured>>,
}

/// Network, ranks, algorithm, bytes, order.
type Key = (Net, u32, String, u64, Order);

/// The pieces in which a tree pipelines, and the most of them.
const CHUNK: u64 = 128 << 10;
const CHUNKS: u64 = 256;

impl Bench {
    pub fn new(constants: Constants, link_latency_s: f64, seed: u64, seeds: u64) -> Bench {
        Bench {
            constants,
            link_latency_s,
            seed,
            seeds,
            flows: Cell::new(0),
            known: RefCell::default(),
        }
    }

    /// Messages sent so far.
    pub fn flows(&self) -> u64 {
        self.flows.get()
    }

    /// An all-reduce with ranks node by node.
    pub fn measure(
        &self,
        net: Net,
        ranks: u32,
        algorithm: &str,
        bytes: u64,
    ) -> Result<Measured, Error> {
        self.measure_placed(net, ranks, algorithm, bytes, Order::ByNode)
    }

    /// The median over seeds; one is enough where no two ways can be chosen from.
    pub fn measure_placed(
        &self,
        net: Net,
        ranks: u32,
        algorithm: &str,
        bytes: u64,
        order: Order,
    ) -> Result<Measured, Error> {
        let key = (net, ranks, algorithm.to_string(), bytes, order);
        if let Some(measured) = self.known.borrow().get(&key) {
            return Ok(*measured);
        }
        // These have no link to share with anybody, whatever the hash.
        let fixed = order == Order::ByNode
            && (algorithm == "ring" || net == Net::BiGraph && algorithm == "hdrm");
        let mut all = Vec::new();
        for seed in self.seed..self.seed + if fixed { 1 } else { self.seeds } {
            all.push(self.once(net, ranks, algorithm, bytes, order, seed)?);
        }
        all.sort_by(|one, other| one.time_s.total_cmp(&other.time_s));
        let median = all[all.len() / 2];
        self.known.borrow_mut().insert(key, median);
        Ok(median)
    }

    /// The job of an algorithm.
    pub fn job(
        &self,
        net: Net,
        ranks: u32,
        algorithm: &str,
        bytes: u64,
        order: Order,
    ) -> CollectiveJob {
        let segment = self.constants.segment_bytes.map_or(bytes, |most| bytes.min(most));
        CollectiveJob {
            collective: "all-reduce".into(),
            algorithm: algorithm.into(),
            program: None,
            bytes,
            ranks: Some(ranks),
            placement: net.placement(ranks, algorithm, order),
            chunks: Some((segment / 2 / CHUNK).clamp(1, CHUNKS) as u32),
            local: None,
            rounds: 1,
        }
    }

    fn once(
        &self,
        net: Net,
        ranks: u32,
        algorithm: &str,
        bytes: u64,
        order: Order,
        seed: u64,
    ) -> Result<Measured, Error> {
        let mut world = World::new(&net.cluster(ranks, self, seed)?)?;
        let job = self.job(net, ranks, algorithm, bytes, order);
        let mut workload = CollectiveWorkload::new(&mut world, &job, &[], 0)?;
        let time_s = world.run(&mut [&mut workload], &mut |_, _| true)?;
        self.flows.set(self.flows.get() + world.flows());
        Ok(Measured { time_s, max_link_load: world.max_link_load() })
    }
}
