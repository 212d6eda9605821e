//! Thread in an accelerator node's service.

use super::commands::Commands;
use super::config::ServiceConfig;
use super::sleeper::{FEW_EVENTS, Rest, Sleeper, Watched, arm, disarm};
use super::visits::Visits;
use crate::accelerator::{Accelerator, Executor};
use crate::connection::Connection;
use crate::error::Result;
use std::collections::VecDeque;
use std::sync::Arc;
use weft_fabric::{Cause, Communicator, Event, Poison, QueueReceiver, Requests, Time, clock};

/// Maximum number of front end losses kept for [`super::AcceleratorService::take_losses`].
const MAX_LOSSES: usize = 64;

/// Service stop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stop {
    /// Time at which connections are closed that front ends have not left.
    pub close_at: Time,
}

/// Accelerator node state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceleratorState {
    /// Connections to front ends.
    pub front_ends: usize,
    /// Batches run.
    pub batches: u64,
    /// Queries that were cancelled before they started.
    pub cancelled: u64,
}

/// Connected front end.
struct FrontEndPair {
    /// Connection index in the node.
    index: usize,
    pair: Communicator,
    watched: Watched,
}

/// Thread state.
pub(super) struct AcceleratorThread<E> {
    accelerator: Accelerator<E>,
    pairs: Vec<FrontEndPair>,
    /// An item for ended batches.
    receiver: QueueReceiver<()>,
    commands: Arc<Commands<AcceleratorThread<E>>>,
    sleeper: Sleeper,
    visits: Visits,
    stop: Option<Stop>,
    /// Causes for lost front ends, the latest last.
    losses: VecDeque<String>,
    events: Vec<Event>,
    requests: Requests,
}

impl<E: Executor> AcceleratorThread<E> {
    pub fn new(
        config: ServiceConfig,
        accelerator: Accelerator<E>,
        receiver: QueueReceiver<()>,
        commands: Arc<Commands<AcceleratorThread<E>>>,
    ) -> Result<AcceleratorThread<E>> {
        Ok(AcceleratorThread {
            sleeper: Sleeper::new(config, receiver.descriptor())?,
            visits: Visits::default(),
            accelerator,
            pairs: Vec::new(),
            receiver,
            commands,
            stop: None,
            losses: VecDeque::new(),
            events: Vec::with_capacity(1024),
            requests: Requests::with_capacity(1024, 2048),
        })
    }

    /// Runs until the service stops. Returns the node, and the front ends that were connected then.
    pub fn run(mut self) -> (Accelerator<E>, usize) {
        let _closed = CloseOnDrop(self.commands.clone());
        let commands = self.commands.clone();
        loop {
            let now = clock::now();
            let mut busy = commands.has_any();
            if busy {
                commands.run(&mut self);
            }
            while self.receiver.take().is_some() {
                busy = true;
            }
            busy |= self.poll(now);
            if let Some(stop) = self.stop
                && (self.pairs.is_empty() || now >= stop.close_at)
            {
                return (self.accelerator, self.pairs.len());
            }
            if busy {
                self.sleeper.busy();
                continue;
            }
            match self.idle(now) {
                Rest::Poll => {}
                Rest::Arrival => self.prefetch(),
                Rest::Sleep => self.sleep(),
            }
        }
    }

    /// After a turn without work.
    fn idle(&mut self, now: Time) -> Rest {
        let pairs = self.pairs.iter().map(|front_end| (&front_end.pair, &front_end.watched));
        self.sleeper.idle(now, pairs, || !self.receiver.is_empty())
    }

    /// Prefetches what the next turn is likely to take.
    fn prefetch(&self) {
        for FrontEndPair { index, pair, .. } in &self.pairs {
            if pair.has_raised() {
                pair.prefetch_raised();
                self.accelerator.prefetch_query(*index);
            }
        }
    }

    /// Polls every connection: queries, batches, answers.
    fn poll(&mut self, now: Time) -> bool {
        let (mut busy, mut position) = (false, 0);
        self.visits.begin(now, self.pairs.iter().map(|pair| &pair.watched), &self.sleeper);
        if self.visits.may_skip() {
            // Each visit does so, but there may be none; batch answers are a reason for one.
            self.accelerator.run_due(now);
        }
        while let Some(FrontEndPair { index, pair, watched }) = self.pairs.get(position) {
            if !self.visits.has(watched) && !self.accelerator.has_output(*index) {
                position += 1;
                continue;
            }
            self.events.clear();
            let mut engine = pair.engine();
            if self.visits.is_ready(watched) {
                engine.expect_messages();
            }
            engine.poll(now, &mut self.events);
            if engine.has_unread() {
                self.visits.again(watched);
            }
            if (1..=FEW_EVENTS).contains(&self.events.len()) {
                // The answers.
                engine.expect_write(watched.peer);
            }
            drop(engine);
            let polled = self.accelerator.poll(now, *index, &self.events, &mut self.requests);
            busy |= !self.events.is_empty();
            if !self.requests.is_empty() {
                busy = true;
                // A poisoned engine refuses; the next poll reports the poison.
                let _ = pair.engine().submit(&mut self.requests);
            }
            if let Err(error) = &polled {
                let rank = Some(watched.peer);
                pair.poison(Poison { kind: Cause::Protocol, rank, detail: error.to_string() });
            }
            if polled.is_err() || !self.accelerator.is_connected(*index) {
                let loss = pair.engine().poison_flag().get().map(|poison| poison.detail.clone());
                self.remove(position, loss);
            } else {
                position += 1;
            }
        }
        self.visits.end(clock::now);
        busy
    }

    /// Removes a front end that has left or, with a cause, was lost.
    fn remove(&mut self, position: usize, loss: Option<String>) {
        if let Some(cause) = loss {
            log::warn!("front end lost: {cause}");
            if self.losses.len() == MAX_LOSSES {
                self.losses.pop_front();
            }
            self.losses.push_back(cause);
        }
        let FrontEndPair { index, pair, .. } = self.pairs.remove(position);
        self.sleeper.forget(&pair);
        drop(self.accelerator.leave(index));
    }

    /// Sleeps until a pair, a command or a deadline has work.
    fn sleep(&mut self) {
        let pairs = || self.pairs.iter().map(|front_end| &front_end.pair);
        // A command is posted before the bell rings.
        if self.receiver.arm() && !self.commands.has_any() && arm(pairs()) {
            let stop = self.stop.map(|stop| stop.close_at);
            self.sleeper.sleep(self.accelerator.next_deadline().into_iter().chain(stop).min());
        }
        disarm(pairs());
        self.receiver.disarm();
        self.visits.all_next();
    }
}

/// Commands.
impl<E: Executor> AcceleratorThread<E> {
    pub fn join(&mut self, pair: Communicator, connection: Connection) -> Result<()> {
        let watched = self.sleeper.watch(&pair)?;
        let index = self.accelerator.join(connection)?;
        self.pairs.push(FrontEndPair { index, pair, watched });
        if self.stop.is_some() {
            self.accelerator.drain();
        }
        Ok(())
    }

    pub fn state(&self) -> AcceleratorState {
        AcceleratorState {
            front_ends: self.accelerator.front_ends(),
            batches: self.accelerator.batches(),
            cancelled: self.accelerator.cancelled(),
        }
    }

    pub fn take_losses(&mut self) -> Vec<String> {
        self.losses.drain(..).collect()
    }

    pub fn stop(&mut self, stop: Stop) {
        self.stop = Some(stop);
        self.accelerator.drain();
    }
}

/// Refuses commands once the thread has ended, also by a backend panic.
struct CloseOnDrop<E>(Arc<Commands<AcceleratorThread<E>>>);

impl<E> Drop for CloseOnDrop<E> {
    fn drop(&mut self) {
        self.0.close();
    }
}
