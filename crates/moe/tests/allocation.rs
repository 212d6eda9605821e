//! Allocation after construction: a driver allocates neither in polls nor in round calls.

#[expect(dead_code, reason = "other tests use the rest")]
mod common;
#[path = "../../fabric/tests/common/counting.rs"]
mod counting;

use common::{Batch, batches};
use counting::counting;
use weft_fabric::providers::sim::{Cluster, Faults, Outcome, World, WorldConfig};
use weft_fabric::{Driver as _, Engine, Event, Memory, PartRule, Rank, Region, Requests, Time};
use weft_moe::routing::Routing;
use weft_moe::{
    CombineMode, Config, Driver, Error, Layout, RoundHandle, Rows, RowsMut, Shape, Stage,
    TokenInput, Weighting,
};

const ROUNDS: usize = 6;

/// A rank that runs its rounds one after the other, counting what each call allocates.
struct Member {
    driver: Driver,
    requests: Requests,
    batches: Vec<Batch>,
    begun: usize,
    live: Option<(RoundHandle, Region)>,
    outputs: Vec<u8>,
    sums: Vec<u8>,
    polls: usize,
    allocations: Vec<(&'static str, usize)>,
}

impl Member {
    fn counted<T>(
        &mut self,
        call: &'static str,
        run: impl FnOnce(&mut Driver, &mut Requests) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let Member { driver, requests, .. } = self;
        let (result, allocations) = counting(|| run(driver, requests));
        if allocations > 0 {
            self.allocations.push((call, allocations));
        }
        result
    }

    fn step(&mut self, engine: &mut Engine, now: Time, events: &[Event]) -> Result<bool, Error> {
        self.polls += 1;
        self.counted("poll", |driver, requests| driver.poll(now, events, requests))?;
        engine.submit(&mut self.requests)?;
        let Some((handle, _)) = &self.live else { return self.begin(engine) };
        let (handle, config) = (*handle, self.driver.shape().config().clone());
        match self.driver.stage(handle) {
            Stage::Dispatched => {
                let row = self.driver.shape().row_bytes(config.combine_dtype);
                let positions = self.driver.received(handle)?.plan.positions();
                let outputs = std::mem::take(&mut self.outputs);
                while self.counted("reply", |driver, _| {
                    let outputs = Rows::new(&outputs[..positions * row], row, row);
                    driver.reply(handle, outputs, Weighting::AtCombine)
                })? {}
                self.outputs = outputs;
                self.counted("poll", |driver, requests| driver.poll(now, &[], requests))?;
            }
            Stage::Combined => {
                let row = self.driver.shape().row_bytes(config.output_dtype);
                let mut sums = std::mem::take(&mut self.sums);
                self.counted("sum", |driver, _| {
                    driver.sum_replies(
                        handle,
                        RowsMut::new(&mut sums, row, row),
                        Weighting::AtCombine,
                    )
                })?;
                self.sums = sums;
                self.counted("release", |driver, requests| driver.release(handle, requests))?;
                if let Some((_, region)) = self.live.take() {
                    engine.release(&region);
                }
            }
            _ => {}
        }
        engine.submit(&mut self.requests)?;
        Ok(self.begun == ROUNDS && self.live.is_none())
    }

    fn begin(&mut self, engine: &mut Engine) -> Result<bool, Error> {
        if self.begun == ROUNDS {
            return Ok(true);
        }
        let batch = self.batches[self.begun].clone();
        let region = engine.register(Memory::from_bytes(batch.tokens))?;
        let input = TokenInput { region: region.key(), memory: region.memory().clone() };
        let handle = self.counted("begin", |driver, _| {
            driver.begin(input, &batch.ids, batch.weights.as_deref(), Some(&batch.scales))
        })?;
        self.begun += 1;
        self.live = Some((handle, region));
        self.counted("poll", |driver, requests| driver.poll(Time(0), &[], requests))?;
        engine.submit(&mut self.requests)?;
        Ok(false)
    }
}

fn run(config: &Config, seed: u64, max_pages_per_part: u32) {
    let parts = PartRule { max_part_bytes: 50, max_pages_per_part, ..PartRule::WHOLE };
    let world = WorldConfig::new(config.ranks, seed).with_faults(Faults::rough());
    let mut cluster = Cluster::new(&World::new(WorldConfig { parts, ..world })).unwrap();
    let rounds: Vec<Vec<Batch>> = (0..ROUNDS as u64)
        .map(|round| batches(config, Some(Routing::Uniform), round % 3, seed * 100 + round))
        .collect();
    let mut members = Vec::new();
    for rank in cluster.ranks() {
        let shape = Shape::new(Config { rank: rank.0, ..config.clone() }).unwrap();
        let driver = Driver::allocate(cluster.engine(rank), &shape).unwrap();
        let positions = shape.sizes().receive_pairs() as usize
            + shape.local_experts() * config.layout.pad_to() as usize;
        members.push(Member {
            requests: driver.requests(),
            driver,
            batches: rounds.iter().map(|round| round[rank.0 as usize].clone()).collect(),
            begun: 0,
            live: None,
            outputs: vec![0; positions * shape.row_bytes(config.combine_dtype)],
            sums: vec![0; config.max_tokens as usize * shape.row_bytes(config.output_dtype)],
            polls: 0,
            allocations: Vec::new(),
        });
    }
    for owner in cluster.ranks() {
        for peer in cluster.ranks().filter(|peer| *peer != owner) {
            let owners = &members[owner.0 as usize].driver;
            let grant = owners.grant(cluster.engine(owner), peer).unwrap();
            let driver = &mut members[peer.0 as usize].driver;
            driver.link(cluster.engine(peer), owner, &grant, Time::MAX).unwrap();
        }
    }
    let outcomes = cluster
        .run(|engine, now, events, _| members[engine.rank().0 as usize].step(engine, now, events))
        .unwrap();
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Done)), "{outcomes:?}");
    for (rank, member) in (0..).map(Rank).zip(&members) {
        assert!(member.polls > ROUNDS, "{rank} was polled {} times", member.polls);
        assert_eq!(member.allocations, [], "{rank} in {config:?}, seed {seed}");
    }
}

#[test]
fn rounds_allocate_nothing() {
    for (seed, layout) in (0..).zip([Layout::Contiguous { pad_to: 4 }, Layout::Indexed]) {
        for combine in [CombineMode::ReduceAtExpert, CombineMode::PerExpert] {
            for token_type in common::token_types(5) {
                let config = Config::new(3, 0, 7, 3).sized(20, 12);
                let config = Config { token_type, private_rows: 5, layout, combine, ..config };
                // Packed rows, packed ones beside single ones, and rows from the caller's array.
                for max_pages_per_part in [1, 3, 16] {
                    run(&config, seed, max_pages_per_part);
                }
            }
        }
    }
}
