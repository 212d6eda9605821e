//! Queries with contents that follow from the tokens, and a backend whose answers follow from the queries.

use std::collections::{BTreeMap, VecDeque};
use weft_dispatch::accelerator::JobQuery;
use weft_dispatch::wire::{Dimension, Tensor};
use weft_dispatch::{Backend, Batch, Buckets, Executor, Job, Schema};
use weft_fabric::Time;
use weft_fabric::random::SplitMix64;

/// Error code for queries that the backend refuses.
pub const REFUSED: u32 = 7;

/// Query tensor bytes. The first tensor begins with the token.
pub fn query(token: u64, schema: &Schema) -> Vec<Vec<u8>> {
    let mut random = SplitMix64::new(token ^ 0x51);
    let content = |(index, tensor): (usize, &Tensor)| {
        let mut bytes =
            vec![0; length(tensor, &mut random, if index == 0 { 8 } else { 0 }) as usize];
        random.fill(&mut bytes);
        if index == 0 {
            bytes[..8].copy_from_slice(&token.to_le_bytes());
        }
        bytes
    };
    schema.inputs.iter().enumerate().map(content).collect()
}

fn length(tensor: &Tensor, random: &mut SplitMix64, least: u64) -> u64 {
    let is_variable =
        tensor.shape.iter().any(|size| matches!(size, Dimension::UpTo(_) | Dimension::Tokens(_)));
    match is_variable {
        true if tensor.has_tokens() => {
            let unit = tensor.unit().unwrap();
            random.below(tensor.max_bytes() / unit + 1) * unit
        }
        true => least + random.below(tensor.max_bytes() - least + 1),
        false => tensor.max_bytes(),
    }
}

/// True if the backend refuses the query.
pub fn is_refused(token: u64) -> bool {
    token % 13 == 5
}

/// Answer tensor bytes.
pub fn answer(inputs: &[&[u8]], schema: &Schema) -> Vec<Vec<u8>> {
    let seed = inputs
        .iter()
        .flat_map(|bytes| bytes.iter())
        .fold(7u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
    let mut random = SplitMix64::new(seed);
    let content = |tensor: &Tensor| {
        let mut bytes = vec![0; length(tensor, &mut random, 0) as usize];
        random.fill(&mut bytes);
        bytes
    };
    schema.outputs.iter().map(content).collect()
}

/// Backend that answers by [`answer`], and counts how often it has run each query.
#[derive(Debug)]
pub struct Echo {
    pub schema: Schema,
    pub buckets: Option<Buckets>,
    pub executed: BTreeMap<u64, u32>,
    pub largest: usize,
    /// Tokens that were appended to answers in progress.
    pub appended: BTreeMap<u64, usize>,
}

impl Echo {
    /// A batch has queries from one bucket, and its rows are its inputs.
    fn check(&self, batch: &Batch<'_>) {
        for tensor in 0..self.schema.inputs.len() {
            let (queries, longest) = (batch.len(), batch.longest(tensor) as usize);
            let mut rows = vec![0xee; queries * longest];
            batch.gather(tensor, longest as u64, 0x77, &mut rows);
            for query in 0..queries {
                let (input, row) =
                    (batch.input(query, tensor), &rows[query * longest..][..longest]);
                assert_eq!(&row[..input.len()], input);
                assert!(row[input.len()..].iter().all(|byte| *byte == 0x77));
            }
            if let Some(buckets) = self.buckets.filter(|buckets| buckets.input() == tensor) {
                let unit = self.schema.inputs[tensor].unit().unwrap();
                let bucket = |query| buckets.of(batch.input(query, tensor).len() as u64 / unit);
                assert!((1..queries).all(|query| bucket(query) == bucket(0)));
            }
        }
    }
}

/// Output runs are the queries' outputs, in order.
fn check_output_runs(batch: &mut Batch<'_>, tensor: usize) {
    let mut first = 0;
    while first < batch.len() {
        let most = batch.len() - first;
        let mut run = batch.output_run(first, most, tensor);
        let rows: Vec<(*const u8, usize)> =
            (0..run.count).map(|row| (run.row(row).as_ptr(), run.row(row).len())).collect();
        for (query, row) in (first..).zip(&rows) {
            let output = batch.output(query, tensor);
            assert_eq!((output.as_ptr(), output.len()), *row);
        }
        first += rows.len();
    }
}

impl Backend for Echo {
    fn run(&mut self, batch: &mut Batch<'_>) {
        self.largest = self.largest.max(batch.len());
        self.check(batch);
        for query in 0..batch.len() {
            let inputs: Vec<&[u8]> =
                (0..self.schema.inputs.len()).map(|tensor| batch.input(query, tensor)).collect();
            let token = u64::from_le_bytes(inputs[0][..8].try_into().unwrap());
            let outputs = answer(&inputs, &self.schema);
            *self.executed.entry(token).or_default() += 1;
            if is_refused(token) {
                batch.fail(query, REFUSED);
                continue;
            }
            let appended = self.appended.remove(&token);
            for (tensor, output) in outputs.iter().enumerate() {
                if self.schema.outputs[tensor].has_tokens()
                    && let Some(tokens) = appended
                {
                    let unit = self.schema.outputs[tensor].unit().unwrap() as usize;
                    assert!(batch.append(query, &output[tokens * unit..]));
                    let is_fixed = tokens > 0 || !output.is_empty();
                    assert!(!is_fixed || !batch.resize(query, tensor, 0));
                    continue;
                }
                assert!(batch.resize(query, tensor, output.len() as u64));
                batch.output(query, tensor).copy_from_slice(output);
            }
        }
        (0..self.schema.outputs.len()).for_each(|tensor| check_output_runs(batch, tensor));
    }
}

impl Echo {
    /// Appends some tokens to some answers in a running batch.
    fn append(&mut self, batch: &mut Batch<'_>, random: &mut SplitMix64) {
        let stream = self.schema.outputs.iter().position(Tensor::has_tokens);
        let Some(stream) = stream else { return };
        let unit = self.schema.outputs[stream].unit().unwrap() as usize;
        for query in 0..batch.len() {
            let inputs: Vec<&[u8]> =
                (0..self.schema.inputs.len()).map(|tensor| batch.input(query, tensor)).collect();
            let token = u64::from_le_bytes(inputs[0][..8].try_into().unwrap());
            let output = &answer(&inputs, &self.schema)[stream];
            let appended = self.appended.entry(token).or_default();
            let more = random.below(4) as usize;
            let after = (*appended + more).min(output.len() / unit);
            assert!(batch.append(query, &output[*appended * unit..after * unit]));
            assert!(!batch.append(query, &vec![0; unit * 1000]), "beyond the bound");
            *appended = after;
        }
    }
}

/// Executor for an [`Echo`]: at once, or one batch after another with virtual times.
#[derive(Debug)]
pub struct Device {
    pub echo: Echo,
    /// Number of batches that it takes at a time; 0: it runs each when it starts.
    pub room: usize,
    pub random: SplitMix64,
    /// Batches with begin and end times.
    pub jobs: VecDeque<(Job, Time, Time)>,
    now: Time,
}

impl Device {
    pub fn new(echo: Echo, room: usize, seed: u64) -> Device {
        let random = SplitMix64::new(seed ^ 0xdef1ce);
        Device { echo, room, random, jobs: VecDeque::new(), now: Time(0) }
    }
}

impl Executor for Device {
    fn has_room(&self) -> bool {
        self.room == 0 || self.jobs.len() < self.room
    }

    fn start(&mut self, now: Time, mut job: Job) -> Option<Job> {
        assert!(self.has_room() && !job.is_empty());
        if self.room == 0 {
            self.echo.run(&mut Batch::of(&mut job));
            return Some(job);
        }
        let begin = self.jobs.back().map_or(now, |(.., end)| now.max(*end));
        let end = Time(begin.0 + self.random.below(40_000));
        self.jobs.push_back((job, begin, end));
        None
    }

    fn next_finished(&mut self, now: Time) -> Option<Job> {
        self.now = now;
        let Device { echo, random, jobs, .. } = self;
        if let Some((job, begin, end)) = jobs.front_mut()
            && (*begin..*end).contains(&now)
            && random.chance(0.5)
        {
            echo.append(&mut Batch::of(job), random);
        }
        self.jobs.front().filter(|(.., end)| *end <= now)?;
        let (mut job, ..) = self.jobs.pop_front()?;
        // Inputs are read and outputs written at the latest moment.
        if !job.is_empty() {
            self.echo.run(&mut Batch::of(&mut job));
        }
        Some(job)
    }

    fn cancel(&mut self, query: JobQuery) -> bool {
        let now = self.now;
        let mut waiting = self.jobs.iter_mut().filter(|(_, begin, _)| *begin > now);
        waiting.any(|(job, ..)| job.remove(query))
    }

    fn next_deadline(&self) -> Option<Time> {
        let (_, _, end) = self.jobs.front()?;
        let streams = self.echo.schema.outputs.iter().any(Tensor::has_tokens);
        Some(if streams { Time(self.now.0 + 4_000).min(*end) } else { *end })
    }
}
