//! A front end in a run: what it submits and cancels, and how each query ends.

use crate::echo;
use std::collections::BTreeMap;
use std::sync::Arc;
use weft_dispatch::wire::Tensor;
use weft_dispatch::{
    Error, Failure, FrontEnd, Input, LedgerConfig, NodeId, QueryId, Report, Schema, Tokens,
};
use weft_fabric::random::SplitMix64;
use weft_fabric::{Memory, Time};

/// Query state.
#[derive(Clone, Debug)]
struct Query {
    id: QueryId,
    sample: usize,
    /// It may fail by the deadline, or by a cancel.
    may_expire: bool,
    cancelled: bool,
    ended: bool,
    returned: bool,
    /// Answer tokens that were reported, and the send that they belong to.
    tokens: Vec<u8>,
    sends: u32,
}

impl Query {
    /// Checks tokens: they continue those before, or begin anew after a loss, and belong to the answer.
    fn take_tokens(
        &mut self,
        token: u64,
        schema: &Schema,
        tokens: &Tokens<'_>,
        is_first: bool,
    ) -> Result<(), String> {
        let Some(stream) = schema.outputs.iter().position(Tensor::has_tokens) else {
            return Err(format!("{token} has no tokens, {tokens:?}"));
        };
        if tokens.sends > self.sends {
            self.sends = tokens.sends;
            self.tokens.clear();
        }
        let unit = schema.outputs[stream].unit().unwrap_or(1) as usize;
        let is_next = tokens.from as usize == self.tokens.len() / unit
            && tokens.bytes.len() == (tokens.to - tokens.from) as usize * unit
            && is_first == (tokens.from == 0);
        self.tokens.extend(tokens.bytes);
        let inputs = echo::query(token, schema);
        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        let is_prefix = echo::answer(&inputs, schema)[stream].starts_with(&self.tokens);
        if self.ended || tokens.bytes.is_empty() || !is_next || !is_prefix {
            return Err(format!("{self:?} has tokens {tokens:?}"));
        }
        Ok(())
    }
}

/// Front end with queries.
pub struct Program {
    pub front_end: FrontEnd,
    pub nodes: Vec<Option<NodeId>>,
    schema: Schema,
    memory: Arc<Memory>,
    sample_bytes: usize,
    /// Samples that no query borrows.
    free: Vec<usize>,
    queries: BTreeMap<u64, Query>,
    first: u64,
    next: u64,
    end: u64,
    short_deadlines: f64,
    cancels: f64,
    cancel_at: Option<Time>,
    random: SplitMix64,
    pub answered: u64,
    /// Token reports after the first tokens, and streams that began anew.
    pub streamed: u64,
    pub restarted: u64,
    /// A node was lost, or may be.
    pub has_losses: bool,
    /// A node leaves without a drain.
    pub has_departures: bool,
    pub lasting: Time,
}

/// Program probabilities and counts.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub queries: u64,
    pub short_deadlines: f64,
    pub cancels: f64,
    /// Time at which the first query is cancelled.
    pub cancel_at: Option<Time>,
    /// Deadline for the other queries.
    pub lasting: Time,
}

impl Program {
    pub fn new(
        index: u64,
        config: LedgerConfig,
        schema: &Schema,
        plan: Plan,
        seed: u64,
    ) -> Program {
        let sample_bytes: u64 = schema.inputs.iter().map(|tensor| tensor.max_bytes()).sum();
        let samples = config.queries as usize;
        let memory = Arc::new(Memory::shared(samples * sample_bytes as usize).unwrap());
        let first = index << 32;
        Program {
            front_end: FrontEnd::new(config, schema.clone(), std::slice::from_ref(&memory))
                .unwrap(),
            nodes: Vec::new(),
            schema: schema.clone(),
            memory,
            sample_bytes: sample_bytes as usize,
            free: (0..samples).collect(),
            queries: BTreeMap::new(),
            first,
            next: first,
            end: first + plan.queries,
            short_deadlines: plan.short_deadlines,
            cancels: plan.cancels,
            cancel_at: plan.cancel_at,
            random: SplitMix64::new(seed ^ 0xf407),
            answered: 0,
            streamed: 0,
            restarted: 0,
            has_losses: false,
            has_departures: false,
            lasting: plan.lasting,
        }
    }

    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Submits and cancels some queries, and takes reports.
    pub fn step(&mut self, now: Time) -> Result<(), String> {
        for _ in 0..self.random.below(6) {
            if self.next == self.end || !self.submit(now)? {
                break;
            }
        }
        if self.cancel_at.is_some_and(|at| at <= now) {
            self.cancel_at = None;
            self.cancel(self.first)?;
        }
        if self.random.chance(self.cancels) && self.next > self.first {
            let token = self.first + self.random.below(self.next - self.first);
            self.cancel(token)?;
        }
        self.take_reports()
    }

    fn submit(&mut self, now: Time) -> Result<bool, String> {
        let token = self.next;
        let Some(&sample) = self.free.last() else { return Ok(false) };
        let mut inputs = Vec::new();
        let mut offset = sample * self.sample_bytes;
        for (tensor, bytes) in self.schema.inputs.iter().zip(echo::query(token, &self.schema)) {
            self.memory.copy_in(offset, &bytes);
            inputs.push(Input { memory: 0, offset: offset as u64, length: bytes.len() as u64 });
            offset += tensor.max_bytes() as usize;
        }
        let may_expire = self.random.chance(self.short_deadlines);
        let in_nanoseconds = self.random.below(200_000);
        let deadline = if may_expire { Time(now.0 + in_nanoseconds) } else { self.lasting };
        match self.front_end.submit(token, &inputs, deadline) {
            Ok(id) => {
                self.free.pop();
                self.next += 1;
                let query = Query {
                    id,
                    sample,
                    may_expire,
                    cancelled: false,
                    ended: false,
                    returned: false,
                    tokens: Vec::new(),
                    sends: 0,
                };
                self.queries.insert(token, query);
                Ok(true)
            }
            Err(Error::Full { .. }) => Ok(false),
            Err(error) => Err(error.to_string()),
        }
    }

    fn cancel(&mut self, token: u64) -> Result<(), String> {
        let Some(query) = self.queries.get_mut(&token) else { return Ok(()) };
        let result = self.front_end.cancel(query.id);
        query.cancelled |= !query.ended;
        match result {
            Ok(()) if query.returned => Err(format!("{token} was cancelled after its end")),
            Err(error) if !query.ended => Err(error.to_string()),
            _ => Ok(()),
        }
    }

    /// Takes all reports, and checks each.
    pub fn take_reports(&mut self) -> Result<(), String> {
        let Program { front_end, queries, schema, .. } = self;
        let mut freed = Vec::new();
        while let Some(report) = front_end.next_report() {
            let token = report.token();
            let query = queries.get_mut(&token).ok_or("unknown token")?;
            if let Report::FirstToken { tokens, .. } | Report::Tokens { tokens, .. } = &report {
                let is_first = matches!(report, Report::FirstToken { .. });
                self.streamed += u64::from(!is_first);
                self.restarted += u64::from(is_first && !query.tokens.is_empty());
                query.take_tokens(token, schema, tokens, is_first)?;
                continue;
            }
            let had_ended = std::mem::replace(&mut query.ended, true);
            if query.returned || had_ended == !matches!(report, Report::Returned { .. }) {
                return Err(format!("{query:?} has another report, {report:?}"));
            }
            match report {
                Report::Answered { answer, .. } => {
                    let inputs = echo::query(token, schema);
                    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
                    let seen: Vec<Vec<u8>> = answer.tensors().map(<[u8]>::to_vec).collect();
                    if echo::is_refused(token) || seen != echo::answer(&inputs, schema) {
                        return Err(format!("the answer to {token} is another one"));
                    }
                    let stream = schema.outputs.iter().position(Tensor::has_tokens);
                    if stream.is_some_and(|stream| query.tokens != seen[stream]) {
                        return Err(format!("tokens of {token} were not reported"));
                    }
                    self.answered += 1;
                }
                Report::Failed { failure, .. } => {
                    let is_explained = match failure {
                        Failure::Cancelled => query.cancelled,
                        Failure::NotSent => query.may_expire || self.has_losses,
                        Failure::NotAnswered(_) => query.may_expire || self.has_losses,
                        Failure::NodeLost { .. } => self.has_losses || self.has_departures,
                        Failure::Refused { code, .. } => {
                            code == echo::REFUSED && echo::is_refused(token)
                        }
                    };
                    if !is_explained {
                        return Err(format!("{query:?} failed: {failure}"));
                    }
                }
                Report::Returned { .. } | Report::FirstToken { .. } | Report::Tokens { .. } => {}
            }
            if report.is_last() {
                query.returned = true;
                freed.push(query.sample);
            }
        }
        for sample in freed {
            // A later read would find other bytes.
            self.memory.fill(sample * self.sample_bytes, self.sample_bytes, 0xee);
            self.free.push(sample);
        }
        Ok(())
    }

    /// True if all queries have ended and all memory returned.
    pub fn is_over(&self) -> bool {
        self.next == self.end && self.queries.values().all(|query| query.returned)
    }

    /// Times that a query was submitted: once, if it was.
    pub fn has_submitted(&self, token: u64) -> bool {
        self.queries.contains_key(&token)
    }

    pub fn waits_for(&self) -> String {
        let open: Vec<_> =
            self.queries.iter().filter(|(_, query)| !query.returned).take(5).collect();
        format!(
            "{} of {}; {:?}; {open:?}",
            self.next - self.first,
            self.end - self.first,
            self.front_end.counts()
        )
    }
}
