//! Rank program: begins rounds when possible, runs experts, checks results.

use crate::common::{Batch, busiest, check_output, run_expert};
use crate::scenario::{Round, Scenario, shape};
use std::collections::BTreeMap;
use std::rc::Rc;
use weft_fabric::providers::sim::{Cluster, World};
use weft_fabric::random::SplitMix64;
use weft_fabric::{
    CounterId, Driver as _, Engine, Event, Memory, Poison, Rank, Region, Requests, Time,
};
use weft_moe::{
    Driver, Error, Layout, PADDING, ReceivedTokens, RoundHandle, Rows, RowsMut, Stage, TokenInput,
    Weighting,
};
use weft_scenarios::{Failure, sleeps};

/// Failure in a rank's program.
#[derive(Debug)]
pub enum Wrong {
    Moe(Error),
    #[expect(dead_code, reason = "shown by Debug")]
    Outcome(&'static str),
}

impl From<Error> for Wrong {
    fn from(error: Error) -> Wrong {
        Wrong::Moe(error)
    }
}

impl From<weft_fabric::Error> for Wrong {
    fn from(error: weft_fabric::Error) -> Wrong {
        Wrong::Moe(error.into())
    }
}

impl Failure for Wrong {
    fn poison(&self) -> Option<&Poison> {
        match self {
            Wrong::Moe(Error::Fabric(weft_fabric::Error::Poisoned(poison))) => Some(poison),
            _ => None,
        }
    }
}

/// A round that was begun and not yet released.
struct Live {
    handle: RoundHandle,
    number: usize,
    input: Option<Region>,
    /// Received bytes, to check that they stay unchanged.
    received: Vec<u8>,
    outputs: Vec<u8>,
    all_replied: bool,
}

pub struct Program {
    scenario: Rc<Scenario>,
    random: SplitMix64,
    driver: Driver,
    live: Vec<Live>,
    begun: usize,
    asleep_until: Time,
    /// By round: the bytes received, then the reply sums if there were any.
    pub results: BTreeMap<usize, Vec<u8>>,
    /// Counter and peers for traffic that the driver does not handle.
    foreign: Option<(CounterId, Vec<Rank>)>,
}

impl weft_scenarios::Program for Program {
    type Failure = Wrong;

    fn step(
        &mut self,
        world: &World,
        engine: &mut Engine,
        now: Time,
        events: &[Event],
        requests: &mut Requests,
    ) -> Result<bool, Wrong> {
        self.driver.poll(now, events, requests)?;
        if let Some((counter, peers)) = self.foreign.take() {
            for peer in peers {
                requests.write(peer, counter, 0, [], u64::from(self.driver.namespace() - 1));
            }
        }
        if sleeps(&mut self.asleep_until, self.scenario.laziness, &mut self.random, world, now) {
            return Ok(false);
        }
        while self.act(engine, requests)? {
            self.driver.poll(now, &[], requests)?;
        }
        Ok(self.begun == self.scenario.rounds.len() && self.live.is_empty())
    }

    fn waits_for(&self) -> String {
        let rounds = self.live.iter().map(|live| {
            let (phase, missing) = self.driver.missing(live.handle);
            let stage = self.driver.stage(live.handle);
            format!("round {} is {stage}, waits for {phase} {missing:?}", live.number)
        });
        let rounds: Vec<String> = rounds.collect();
        format!("rank {}: {}", self.driver.shape().config().rank, rounds.join("; "))
    }
}

impl Program {
    /// A linked program for every rank.
    pub fn connect(cluster: &mut Cluster, scenario: &Rc<Scenario>) -> Result<Vec<Program>, Error> {
        let foreign = cluster.counter()?;
        cluster.share(|_, _| Vec::new(), &[foreign])?;
        let mut programs = Vec::new();
        for rank in cluster.ranks() {
            let engine = cluster.engine(rank);
            let peers = engine.peers().collect();
            programs.push(Program {
                driver: Driver::allocate(engine, &shape(&scenario.config, rank))?,
                random: SplitMix64::new(scenario.seed.wrapping_mul(31) ^ u64::from(rank.0)),
                scenario: scenario.clone(),
                live: Vec::new(),
                begun: 0,
                asleep_until: Time(0),
                results: BTreeMap::new(),
                foreign: Some((foreign, peers)),
            });
        }
        for owner in cluster.ranks() {
            for peer in cluster.ranks().filter(|peer| *peer != owner) {
                let grant = programs[owner.0 as usize].driver.grant(cluster.engine(owner), peer)?;
                let driver = &mut programs[peer.0 as usize].driver;
                driver.link(cluster.engine(peer), owner, &grant, Time::MAX)?;
            }
        }
        Ok(programs)
    }

    /// Does one thing that can be done, if there is one.
    fn act(&mut self, engine: &mut Engine, requests: &mut Requests) -> Result<bool, Wrong> {
        let first = self.random.below(self.live.len() as u64 + 1) as usize;
        for step in 0..=self.live.len() {
            let at = (first + step) % (self.live.len() + 1);
            if at == self.live.len() && self.begin(engine)? {
                return Ok(true);
            }
            if at < self.live.len() && self.go_on(at, engine, requests)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn begin(&mut self, engine: &mut Engine) -> Result<bool, Wrong> {
        let (number, scenario) = (self.begun, self.scenario.clone());
        let Some(round) = scenario.rounds.get(number) else { return Ok(false) };
        let batch = &round.batches[engine.rank().0 as usize];
        let region = engine.register(Memory::from_bytes(batch.tokens.clone()))?;
        let input = TokenInput { region: region.key(), memory: region.memory().clone() };
        let handle = match self.driver.begin(
            input,
            &batch.ids,
            batch.weights.as_deref(),
            Some(&batch.scales),
        ) {
            Ok(handle) => handle,
            Err(Error::InUse { .. }) => {
                let channels = self.scenario.config.channels as usize;
                let holds = |live: &Live| live.number % channels == number % channels;
                engine.release(&region);
                return if self.live.iter().any(holds) {
                    Ok(false)
                } else {
                    Err(Wrong::Outcome("no round holds the channel"))
                };
            }
            Err(error) => return Err(error.into()),
        };
        if handle.round() != number as u64 {
            return Err(Wrong::Outcome("a round's number"));
        }
        self.begun += 1;
        let (received, outputs) = (Vec::new(), Vec::new());
        let input = Some(region);
        self.live.push(Live { handle, number, input, received, outputs, all_replied: false });
        Ok(true)
    }

    /// Moves one round on, if it can be.
    fn go_on(
        &mut self,
        at: usize,
        engine: &mut Engine,
        requests: &mut Requests,
    ) -> Result<bool, Wrong> {
        let scenario = self.scenario.clone();
        let handle = self.live[at].handle;
        let round = &scenario.rounds[self.live[at].number];
        match self.driver.stage(handle) {
            Stage::Idle => return Err(Wrong::Outcome("a round has ended by itself")),
            Stage::Dispatching => return Ok(false),
            Stage::Refused => self.refused(at, engine, requests, round)?,
            Stage::Dispatched if self.live[at].input.is_some() => {
                self.received(at, engine, round)?;
            }
            Stage::Dispatched if !round.combined => self.release(at, engine, requests)?,
            Stage::Combining if self.live[at].all_replied => return Ok(false),
            Stage::Dispatched | Stage::Combining => {
                let bytes = self.driver.shape().row_bytes(self.scenario.config.combine_dtype);
                let live = &mut self.live[at];
                let outputs = Rows::new(&live.outputs, bytes, bytes);
                live.all_replied = !self.driver.reply(handle, outputs, round.weighting)?;
                if live.all_replied {
                    live.outputs.fill(0xEE);
                }
            }
            Stage::Combined => {
                let batch = &round.batches[engine.rank().0 as usize];
                self.check_result(handle, batch, round.weighting)?;
                self.release(at, engine, requests)?;
            }
        }
        Ok(true)
    }

    /// Releases a round's input and overwrites it: it may not be read any more.
    fn drop_input(&mut self, at: usize, engine: &mut Engine) {
        if let Some(region) = self.live[at].input.take() {
            region.memory().fill(0, region.memory().len(), 0xEE);
            engine.release(&region);
        }
    }

    fn refused(
        &mut self,
        at: usize,
        engine: &mut Engine,
        requests: &mut Requests,
        round: &Round,
    ) -> Result<(), Wrong> {
        self.drop_input(at, engine);
        let handle = self.live.remove(at).handle;
        let shape = self.driver.shape();
        if busiest(shape, &round.batches) <= shape.sizes().receive_rows() {
            return Err(Wrong::Outcome("a round that fits was refused"));
        }
        if self.random.chance(0.2) {
            return Ok(self.driver.release(handle, requests)?);
        }
        match self.driver.receive(handle) {
            Err(Error::Capacity { rows, capacity, .. }) if rows > u64::from(capacity) => Ok(()),
            _ => Err(Wrong::Outcome("a refused round has no error")),
        }
    }

    fn received(&mut self, at: usize, engine: &mut Engine, round: &Round) -> Result<(), Wrong> {
        self.drop_input(at, engine);
        let handle = self.live[at].handle;
        let shape = self.driver.shape().clone();
        if busiest(&shape, &round.batches) > shape.sizes().receive_rows() {
            return Err(Wrong::Outcome("a round that does not fit was received"));
        }
        if !self.driver.receive(handle)? {
            return Err(Wrong::Outcome("a received round reports that it was not received"));
        }
        let received = self.driver.received(handle)?;
        check_layout(&shape, &received, &round.batches)?;
        let outputs = run_experts(&shape, &received, round.weighting);
        let copy = copy_of(&received);
        self.results.insert(self.live[at].number, copy.clone());
        (self.live[at].outputs, self.live[at].received) = (outputs, copy);
        Ok(())
    }

    fn check_result(
        &mut self,
        handle: RoundHandle,
        batch: &Batch,
        weighting: Weighting,
    ) -> Result<(), Wrong> {
        let shape = self.driver.shape().clone();
        let bytes = shape.row_bytes(shape.config().output_dtype);
        let mut output = vec![0xAA; self.driver.tokens(handle) * bytes];
        let out = RowsMut::new(&mut output, bytes, bytes);
        self.driver.sum_replies(handle, out, weighting)?;
        check_output(&shape, batch, weighting, &output);
        self.results.entry(handle.round() as usize).or_default().extend(output);
        Ok(())
    }

    fn release(
        &mut self,
        at: usize,
        engine: &mut Engine,
        requests: &mut Requests,
    ) -> Result<(), Wrong> {
        let live = self.live.remove(at);
        if copy_of(&self.driver.received(live.handle)?) != live.received {
            return Err(Wrong::Outcome("received tokens changed before their release"));
        }
        self.driver.release(live.handle, requests)?;
        Ok(engine.submit(requests)?)
    }
}

/// Every position's row, including padding.
fn rows<'a>(received: &ReceivedTokens<'a>, layout: Layout) -> impl Iterator<Item = usize> + 'a {
    let slots = received.plan.slots().iter().enumerate();
    slots.map(move |(position, &slot)| match layout {
        Layout::Contiguous { .. } => position,
        Layout::Indexed => slot as usize,
    })
}

/// A token and its scales.
fn row(received: &ReceivedTokens<'_>, at: usize) -> (Vec<u8>, Vec<u8>) {
    let shape = received.plan.shape();
    let (mut row, mut scales) = (vec![0; shape.token_bytes()], vec![0; shape.scale_bytes()]);
    assert!(at < received.rows, "row {at} of {}", received.rows);
    received.memory.copy_out(received.bytes.start + at * received.stride, &mut row);
    assert_eq!(received.scales.is_some(), !scales.is_empty());
    if let Some(area) = &received.scales {
        let begin = area.bytes.start + at * area.stride;
        assert!(begin + scales.len() <= area.bytes.end, "scales of row {at} are in no area");
        received.memory.copy_out(begin, &mut scales);
    }
    (row, scales)
}

fn copy_of(received: &ReceivedTokens<'_>) -> Vec<u8> {
    let layout = received.plan.shape().config().layout;
    let row = |at| {
        let (token, scales) = row(received, at);
        [token, scales].concat()
    };
    rows(received, layout).flat_map(row).collect()
}

/// Compares each expert's tokens and weights with lists made the slow way.
fn check_layout(
    shape: &weft_moe::Shape,
    received: &ReceivedTokens<'_>,
    batches: &[Batch],
) -> Result<(), Wrong> {
    let config = shape.config();
    let top_k = config.top_k as usize;
    let rows: Vec<usize> = rows(received, config.layout).collect();
    let plan = received.plan;
    for (local, expert) in shape.placement().experts_of(config.rank).enumerate() {
        let mut position = plan.expert_offsets()[local] as usize;
        for batch in batches {
            let named = batch.ids.iter().enumerate().filter(|(_, id)| **id == i64::from(expert));
            for (at, _) in named {
                let (token, scales) = batch.token(config, at / top_k);
                let weight = batch.weights.as_ref().map_or(1.0, |weights| weights[at]);
                if row(received, rows[position]) != (token.to_vec(), scales.to_vec())
                    || plan.weights()[position] != weight
                {
                    return Err(Wrong::Outcome("an expert's tokens"));
                }
                position += 1;
            }
        }
        if position != (plan.expert_offsets()[local] + plan.expert_counts()[local]) as usize {
            return Err(Wrong::Outcome("an expert's number of tokens"));
        }
        let padding = position..plan.expert_offsets()[local + 1] as usize;
        for (place, slot) in rows[padding.clone()].iter().zip(&plan.slots()[padding]) {
            let (token, scales) = row(received, *place);
            if *slot != PADDING || token.iter().chain(&scales).any(|byte| *byte != 0) {
                return Err(Wrong::Outcome("padding"));
            }
        }
    }
    Ok(())
}

/// The experts' outputs, a row for every position.
fn run_experts(
    shape: &weft_moe::Shape,
    received: &ReceivedTokens<'_>,
    weighting: Weighting,
) -> Vec<u8> {
    let config = shape.config();
    let out = shape.row_bytes(config.combine_dtype);
    let plan = received.plan;
    let rows: Vec<usize> = rows(received, config.layout).collect();
    let mut outputs = vec![0xAA; plan.positions() * out];
    for (local, expert) in shape.placement().experts_of(config.rank).enumerate() {
        let first = plan.expert_offsets()[local] as usize;
        for position in first..first + plan.expert_counts()[local] as usize {
            let at_expert = weighting == Weighting::AtExpert;
            let weight = if at_expert { plan.weights()[position] } else { 1.0 };
            let (token, scales) = row(received, rows[position]);
            let output = &mut outputs[position * out..][..out];
            run_expert(config, expert, weight, (&token, &scales), output);
        }
    }
    outputs
}
