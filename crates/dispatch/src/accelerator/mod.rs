//! Accelerator node: collects queries into batches, runs them on a backend, and writes the answers back.
//!
//! One [`Accelerator`] serves any number of front ends, a connection each; a batch may have queries from several. The
//! caller polls each pair's engine and passes the events to [`Accelerator::poll`] for that connection. There is no
//! clock, no I/O, and no allocation but in [`Accelerator::new`] and [`Accelerator::join`], and for a batch where more
//! run at a time than before.
//!
//! - `backend.rs`: [`Backend`]; `batch.rs`: [`Batch`]; `rows.rs`: batch inputs as rows in one array
//! - `executor.rs`: [`Executor`], batches that run while the node polls; `threaded.rs`: [`Threaded`], one with threads
//! - `batcher.rs`: [`Batcher`], which batch starts next; `batches.rs`: batch start, cancel and end
//! - `tokens.rs`, `streams.rs`: answers in parts, from the backend and to the front end
//! - `job.rs`: [`Job`], a batch with memory; `link.rs`: one connection's slots; `reply.rs`: reply to one query

mod backend;
mod batch;
mod batcher;
mod batches;
mod executor;
mod job;
mod link;
mod reply;
mod rows;
mod streams;
mod threaded;
mod tokens;

pub use backend::{Backend, NoOp};
pub use batch::Batch;
pub use batcher::{Batcher, Buckets};
pub use executor::Executor;
pub use job::Job;
pub use rows::{Run, RunMut};
pub use threaded::Threaded;
pub use tokens::{JobQuery, Waker};

use crate::connection::{Connection, Raise};
use crate::error::{Error, Result};
use crate::wire::{CANCELLED, Layout, Schema, Tensor};
use link::Link;
use std::sync::Arc;
use std::time::Duration;
use tokens::{Appended, TokenQueue};
use weft_fabric::{Event, Requests, Time};

/// Accelerator node sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceleratorConfig {
    /// Front ends at a time; at least 1.
    pub front_ends: u32,
    /// Maximum queries per batch; at least 1. A full batch starts at once.
    pub max_batch: u32,
    /// Time after which a batch starts with the queries that have arrived. With zero, a batch is what one poll finds.
    pub window: Duration,
    /// Batches whose queries have similar sizes, such as sequences up to 128 and up to 512 tokens; `None`: any queries.
    pub buckets: Option<Buckets>,
    /// Sorts a batch by front end and slot, so that inputs in neighbouring slots are one copy ([`Batch::runs`]).
    pub by_slot: bool,
}

impl Default for AcceleratorConfig {
    fn default() -> AcceleratorConfig {
        AcceleratorConfig {
            front_ends: 1,
            max_batch: 64,
            window: Duration::ZERO,
            buckets: None,
            by_slot: false,
        }
    }
}

/// Accelerator node driver. See the module's page.
#[derive(Debug)]
pub struct Accelerator<E> {
    config: AcceleratorConfig,
    schema: Schema,
    /// Bytes per index along the dimension that selects a bucket.
    bucket_unit: u64,
    executor: E,
    links: Box<[Option<Link>]>,
    /// Queries by connection index and slot.
    waiting: Batcher<(u32, u32)>,
    /// The next batch, and batches that have ended.
    batch: Vec<(u32, u32)>,
    spare: Vec<Job>,
    /// Maximum bytes in each output.
    most: Box<[u64]>,
    /// Tokens from backends.
    tokens: Arc<TokenQueue>,
    appended: Vec<Appended>,
    /// Connections so far.
    joined: u64,
    cancelled: u64,
    batches: u64,
}

/// Maximum number of front ends, and queries per batch.
const MOST: u32 = 1 << 16;

impl<E: Executor> Accelerator<E> {
    /// Node that runs queries in this schema on a backend or another executor.
    ///
    /// # Errors
    /// [`Error::Schema`]; [`Error::Invalid`] for a size that is zero or beyond the limit, and for buckets on an input
    /// without a variable dimension.
    pub fn new(config: AcceleratorConfig, schema: Schema, executor: E) -> Result<Accelerator<E>> {
        schema.check()?;
        for (what, value) in
            [("front ends of a node", config.front_ends), ("queries of a batch", config.max_batch)]
        {
            // More would only take memory: connections and slots have limits below.
            if value == 0 || value > MOST {
                let (value, expected) = (value.into(), format!("1 to {MOST}"));
                return Err(Error::Invalid { what, value, expected });
            }
        }
        let unit = |buckets: Buckets| {
            let unit = schema.inputs.get(buckets.input()).and_then(Tensor::unit);
            unit.ok_or_else(|| Error::Invalid {
                what: "input of buckets",
                value: buckets.input() as u64,
                expected: "an input with a variable dimension".into(),
            })
        };
        let (max_batch, inputs) = (config.max_batch as usize, schema.inputs.len());
        let tokens = Arc::new(TokenQueue::default());
        let most: Box<[u64]> = Layout::new(&schema.outputs).most().collect();
        Ok(Accelerator {
            bucket_unit: config.buckets.map(unit).transpose()?.unwrap_or(1).max(1),
            executor,
            links: (0..config.front_ends).map(|_| None).collect(),
            waiting: Batcher::new(
                config.buckets.map_or(1, |buckets| buckets.len()),
                max_batch,
                config.window,
            ),
            batch: Vec::with_capacity(max_batch),
            spare: vec![Job::with_capacity(max_batch, inputs, &most, tokens.clone())],
            most,
            tokens,
            appended: Vec::new(),
            joined: 0,
            cancelled: 0,
            batches: 0,
            config,
            schema,
        })
    }

    /// Adds the connection to a front end; returns the index.
    ///
    /// # Errors
    /// [`Error::Full`]; [`Error::Disagreement`] for another schema.
    pub fn join(&mut self, connection: Connection) -> Result<usize> {
        if connection.agreement().schema != self.schema {
            let (ours, theirs) = (&self.schema, &connection.agreement().schema);
            let detail = format!("the node has {ours}, the connection {theirs}");
            return Err(Error::Disagreement { detail });
        }
        let limit = self.config.front_ends;
        let vacant = self.links.iter().position(Option::is_none);
        let index = vacant.ok_or(Error::Full { what: "front ends", limit })?;
        self.joined += 1;
        self.links[index] = Some(Link::new(connection, self.joined, index));
        let slots: u32 = self.links.iter().flatten().map(Link::slots).sum();
        self.waiting.reserve(slots as usize);
        Ok(index)
    }

    /// Removes a connection with its queries; returns it. Outputs in batches in flight are dropped.
    pub fn leave(&mut self, index: usize) -> Option<Connection> {
        let link = self.links.get_mut(index)?.take()?;
        self.waiting.retain(|(link, _)| link as usize != index);
        Some(link.connection)
    }

    /// Announces to every front end that this node wants to leave. They send no more queries; all that have arrived
    /// are answered.
    pub fn drain(&mut self) {
        for link in self.links.iter_mut().flatten() {
            link.announce_departure();
        }
    }

    /// Consumes events from a connection's engine, starts the batches that are due, takes the ended ones, and emits the
    /// answers to this front end. Answers to others leave when those are polled. A poisoned engine and the front end's
    /// departure remove the connection ([`Accelerator::is_connected`]).
    ///
    /// # Errors
    /// Protocol violations by the front end ([`Error::Malformed`], [`Error::Checksum`]): poison the pair and call
    /// [`Accelerator::leave`].
    pub fn poll(
        &mut self,
        now: Time,
        index: usize,
        events: &[Event],
        requests: &mut Requests,
    ) -> Result<()> {
        if let Some(Some(link)) = self.links.get(index) {
            link.connection.prefetch(events);
        }
        for event in events {
            match *event {
                Event::Raised { counter, round, count, .. } => {
                    let Some(Some(link)) = self.links.get_mut(index) else { return Ok(()) };
                    match link.connection.raised(counter, round, count) {
                        Some(Raise::Header { slot, count }) => {
                            link.connection.arrivals.headers(slot, count);
                            self.arrived(now, index, slot)?;
                        }
                        Some(Raise::Payload { slot, count }) => {
                            link.connection.arrivals.payloads(slot, count);
                            self.arrived(now, index, slot)?;
                        }
                        Some(Raise::Cancel { slot, count }) => {
                            link.cancels(slot, count as u32);
                            self.cancel_if_not_begun(index, slot);
                        }
                        Some(Raise::Confirmation { slot, count }) => link.confirmed(slot, count)?,
                        None => {}
                    }
                }
                Event::Poisoned(_) => {
                    self.leave(index);
                    return Ok(());
                }
                Event::Credited { .. } | Event::Completed { .. } => {}
            }
        }
        if let Some(Some(link)) = self.links.get(index)
            && link.connection.peer_has_left()
        {
            self.leave(index);
        }
        self.run_due(now);
        if let Some(Some(link)) = self.links.get_mut(index) {
            link.emit(requests);
        }
        Ok(())
    }

    /// Prefetches a front end's likely next query.
    #[inline]
    pub(crate) fn prefetch_query(&self, index: usize) {
        if let Some(Some(link)) = self.links.get(index) {
            link.connection.prefetch_next();
        }
    }

    /// True with answers or an announcement to write to a front end.
    pub(crate) fn has_output(&self, index: usize) -> bool {
        self.links.get(index).and_then(Option::as_ref).is_some_and(Link::has_output)
    }

    /// Enters a query if it has arrived entirely.
    #[inline]
    fn arrived(&mut self, now: Time, index: usize, slot: u32) -> Result<()> {
        let Some(Some(link)) = self.links.get_mut(index) else { return Ok(()) };
        if !link.take_query(slot)? {
            return Ok(());
        }
        if link.is_cancelled(slot) {
            self.cancelled += 1;
            link.answer_error(slot, CANCELLED);
        } else {
            let bucket = self.config.buckets.map_or(0, |buckets| {
                buckets.of(link.lengths(slot)[buckets.input()] / self.bucket_unit)
            });
            self.waiting.push(bucket, (index as u32, slot), now);
        }
        Ok(())
    }

    /// The next time at which a poll has work without an event.
    pub fn next_deadline(&self) -> Option<Time> {
        let waiting = self.waiting.next_deadline().filter(|_| self.executor.has_room());
        waiting.into_iter().chain(self.executor.next_deadline()).min()
    }

    /// Calls `waker` whenever a backend has appended tokens, on the backend's thread. Only the first call has an
    /// effect.
    pub fn wake_with(&self, waker: Waker) {
        self.tokens.wake_with(waker);
    }

    /// Queries that were cancelled before they started.
    pub fn cancelled(&self) -> u64 {
        self.cancelled
    }

    /// Batches started.
    pub fn batches(&self) -> u64 {
        self.batches
    }

    /// The backend or other executor.
    pub fn backend(&self) -> &E {
        &self.executor
    }

    /// True while the connection with this index is there: the front end was neither lost nor has it left.
    pub fn is_connected(&self, index: usize) -> bool {
        self.links.get(index).is_some_and(Option::is_some)
    }

    /// Connection count.
    pub fn front_ends(&self) -> usize {
        self.links.iter().flatten().count()
    }
}
