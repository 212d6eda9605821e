//! Thread in a front end's service.

use super::commands::Commands;
use super::config::ServiceConfig;
use super::handle::Intake;
use super::handler::{Departure, Handler, Reports};
use super::sleeper::{FEW_EVENTS, Rest, Sleeper, Watched, arm, disarm};
use super::submissions::Submissions;
use super::visits::Visits;
use crate::connection::Connection;
use crate::error::Result;
use crate::front_end::FrontEnd;
use crate::ledger::{Counts, NodeId, Notice};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use weft_fabric::{Cause, Communicator, Event, Poison, RegionKey, Requests, Time, clock};

/// Most submissions in a turn, so that answers do not wait long.
const MAX_SUBMISSIONS: usize = 256;

/// Service stop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stop {
    /// Time at which queries that have not ended are cancelled.
    pub cancel_at: Time,
}

/// Node state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeState {
    /// Id.
    pub node: NodeId,
    /// Name from the handshake.
    pub name: String,
    /// Slots in use.
    pub in_flight: u32,
    /// It takes no more queries.
    pub draining: bool,
}

/// Connected node.
struct Node {
    id: NodeId,
    pair: Communicator,
    watched: Watched,
    /// Dropped with the node.
    leavers: Vec<SyncSender<()>>,
}

/// Thread state.
pub(super) struct FrontEndThread<H> {
    front_end: FrontEnd,
    nodes: Vec<Node>,
    submissions: Submissions,
    intake: Arc<Intake>,
    commands: Arc<Commands<FrontEndThread<H>>>,
    sleeper: Sleeper,
    visits: Visits,
    handler: H,
    stop: Option<Stop>,
    events: Vec<Event>,
    requests: Requests,
    notices: Vec<Notice>,
}

impl<H: Handler> FrontEndThread<H> {
    pub fn new(
        config: ServiceConfig,
        front_end: FrontEnd,
        submissions: Submissions,
        intake: Arc<Intake>,
        commands: Arc<Commands<FrontEndThread<H>>>,
        handler: H,
    ) -> Result<FrontEndThread<H>> {
        Ok(FrontEndThread {
            sleeper: Sleeper::new(config, submissions.receiver.descriptor())?,
            visits: Visits::default(),
            front_end,
            nodes: Vec::new(),
            submissions,
            intake,
            commands,
            handler,
            stop: None,
            events: Vec::with_capacity(1024),
            requests: Requests::with_capacity(1024, 2048),
            notices: Vec::with_capacity(1024),
        })
    }

    /// Runs until the service stops.
    pub fn run(mut self) -> (H, Counts) {
        let _closed = CloseOnDrop(self.intake.clone(), self.commands.clone());
        let commands = self.commands.clone();
        loop {
            let now = clock::now();
            let mut busy = commands.has_any();
            if busy {
                commands.run(&mut self);
            }
            busy |= self.receive(now);
            busy |= self.report();
            busy |= self.take_submissions();
            if !self.front_end.has_room() {
                self.submissions.expire(now);
            }
            self.front_end.advance(now);
            // A deadline may have passed.
            busy |= self.report();
            busy |= self.send();
            if self.stop.is_some() && self.has_stopped(now) {
                return self.finish();
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
        let pairs = self.nodes.iter().map(|node| (&node.pair, &node.watched));
        // A full ledger takes no submissions before an answer.
        let takes = self.front_end.has_room();
        self.sleeper.idle(now, pairs, || takes && !self.submissions.receiver.is_empty())
    }

    /// Prefetches what the next turn is likely to take.
    fn prefetch(&self) {
        for Node { id, pair, .. } in &self.nodes {
            if pair.has_raised() {
                pair.prefetch_raised();
                self.front_end.prefetch_answer(*id);
            }
        }
    }

    /// Takes events from all nodes.
    fn receive(&mut self, now: Time) -> bool {
        let (mut busy, mut index) = (false, 0);
        self.visits.begin(now, self.nodes.iter().map(|node| &node.watched), &self.sleeper);
        while index < self.nodes.len() {
            let node = &mut self.nodes[index];
            if !self.visits.has(&node.watched) {
                index += 1;
                continue;
            }
            self.events.clear();
            let mut engine = node.pair.engine();
            if self.visits.is_ready(&node.watched) {
                engine.expect_messages();
            }
            engine.poll(now, &mut self.events);
            if engine.has_unread() {
                self.visits.again(&node.watched);
            }
            if (1..=FEW_EVENTS).contains(&self.events.len()) {
                // Queries for slots that are free now.
                engine.expect_write(node.watched.peer);
            }
            drop(engine);
            busy |= !self.events.is_empty();
            let received = self.front_end.receive(now, node.id, &self.events);
            let received = received.map_err(|error| error.to_string());
            match received.and_then(|()| self.remains(index)) {
                Ok(true) => index += 1,
                Ok(false) => self.remove(index, None),
                Err(cause) => self.lose(index, &cause),
            }
        }
        self.visits.end(clock::now);
        busy
    }

    /// False for a drained node without queries, which leaves; an error for a lost one.
    fn remains(&self, index: usize) -> std::result::Result<bool, String> {
        let Node { id, pair, .. } = &self.nodes[index];
        match self.front_end.in_flight(*id) {
            Ok(0) => Ok(!self.front_end.is_draining(*id).unwrap_or(true)),
            Ok(_) => Ok(true),
            Err(_) => {
                let cause = pair.engine().poison_flag().get().map(|poison| poison.detail.clone());
                Err(cause.unwrap_or_else(|| "lost".into()))
            }
        }
    }

    /// Removes a node whose queries are sent elsewhere or fail.
    fn lose(&mut self, index: usize, cause: &str) {
        let Node { id, pair, watched, .. } = &self.nodes[index];
        let rank = Some(watched.peer);
        pair.poison(Poison { kind: Cause::Protocol, rank, detail: cause.into() });
        // Fails if the poison was seen before.
        let _ = self.front_end.lose(*id);
        self.remove(index, Some(cause));
    }

    /// Removes a node that has left or, with a cause, was lost.
    fn remove(&mut self, index: usize, loss: Option<&str>) {
        let Node { id, pair, .. } = self.nodes.remove(index);
        let name = self.front_end.name(id).unwrap_or_default().to_owned();
        match loss {
            Some(cause) => log::warn!("accelerator node {name} lost: {cause}"),
            None => log::info!("accelerator node {name} has left"),
        }
        self.sleeper.forget(&pair);
        // A lost node was removed from the front end before.
        let _ = self.front_end.leave(id);
        drop(pair);
        let cause = loss.unwrap_or("it has left");
        let departure = Departure { node: id, name: &name, is_lost: loss.is_some(), cause };
        self.handler.node_gone(&departure);
    }

    /// Delivers the reports.
    fn report(&mut self) -> bool {
        self.notices.clear();
        while let Some(notice) = self.front_end.next_notice() {
            self.notices.push(notice);
        }
        self.submissions.take_ends(&mut self.notices);
        if self.notices.is_empty() {
            return false;
        }
        self.handler.reports(&Reports::new(&self.front_end, &self.notices));
        true
    }

    /// Moves submissions into the ledger while it has room.
    fn take_submissions(&mut self) -> bool {
        let mut taken = 0;
        while taken < MAX_SUBMISSIONS && self.front_end.has_room() {
            let Some(query) = self.submissions.take() else { break };
            self.front_end.prefetch(query.inputs());
            // It has room, and the handle has checked the query.
            let _ = self.front_end.submit_checked(query.token, query.inputs(), query.deadline);
            taken += 1;
        }
        taken > 0
    }

    /// Writes queries and cancels to all nodes.
    fn send(&mut self) -> bool {
        let mut busy = false;
        for node in &self.nodes {
            if !self.front_end.has_output(node.id) {
                continue;
            }
            self.front_end.emit(node.id, &mut self.requests);
            // A poisoned engine refuses; the next poll reports the poison.
            let _ = node.pair.engine().submit(&mut self.requests);
            busy = true;
        }
        busy
    }

    /// Sleeps until a pair, the queue, a command or a deadline has work.
    fn sleep(&mut self) {
        let pairs = || self.nodes.iter().map(|node| &node.pair);
        // A full ledger takes no submissions before an answer, but deadlines count.
        let takes = self.front_end.has_room();
        let idle = self.submissions.receiver.arm() || !takes;
        // A command is posted before the bell rings.
        if idle && !self.commands.has_any() && arm(pairs()) {
            let stop = self.stop.map(|stop| stop.cancel_at);
            let search = self.submissions.next_search();
            let until = self.front_end.next_deadline().into_iter().chain(stop).chain(search).min();
            self.sleeper.sleep(until);
        }
        disarm(pairs());
        self.submissions.receiver.disarm();
        self.visits.all_next();
    }

    /// True if the service stops and every query has ended; cancels the rest after the deadline.
    fn has_stopped(&mut self, now: Time) -> bool {
        self.intake.closed.store(true, Ordering::SeqCst);
        let is_late = self.stop.is_some_and(|stop| now >= stop.cancel_at);
        // Before the queue refuses queries, submitters see the reason.
        self.submissions.receiver.close();
        let is_drained = self.submissions.receiver.is_drained();
        is_late || is_drained && self.front_end.under_way() == 0
    }

    /// Ends all queries and closes all pairs.
    fn finish(mut self) -> (H, Counts) {
        self.front_end.cancel_all();
        for node in &self.nodes {
            if self.front_end.in_flight(node.id).is_ok_and(|slots| slots > 0) {
                let detail = "the front end has stopped before its last answers".into();
                node.pair.poison(Poison {
                    kind: Cause::User,
                    rank: Some(node.pair.rank()),
                    detail,
                });
                // Known, because the slots are.
                let _ = self.front_end.lose(node.id);
            }
        }
        loop {
            let reported = self.report();
            let taken = self.take_submissions();
            self.front_end.cancel_all();
            // A thread may be putting a query that was accepted.
            if !reported && !taken && self.submissions.receiver.is_drained() {
                break;
            }
        }
        let counts = self.counts();
        self.nodes.clear();
        (self.handler, counts)
    }
}

/// Commands.
impl<H: Handler> FrontEndThread<H> {
    pub fn join(
        &mut self,
        pair: Communicator,
        connection: Connection,
        keys: &[RegionKey],
    ) -> Result<NodeId> {
        let watched = self.sleeper.watch(&pair)?;
        let id = self.front_end.join(connection, keys)?;
        self.nodes.push(Node { id, pair, watched, leavers: Vec::new() });
        Ok(id)
    }

    pub fn drain(&mut self, node: NodeId, leaver: Option<SyncSender<()>>) -> Result<()> {
        self.front_end.drain(node)?;
        if let Some(node) = self.nodes.iter_mut().find(|known| known.id == node) {
            node.leavers.extend(leaver);
        }
        Ok(())
    }

    pub fn lose_late(&mut self) {
        for index in (0..self.nodes.len()).rev() {
            let late = self.front_end.quarantined(self.nodes[index].id).unwrap_or(0);
            if late > 0 {
                self.lose(index, &format!("no answer to {late} queries that were withdrawn"));
            }
        }
    }

    pub fn cancel(&mut self, token: u64) -> bool {
        if let Some(query) = self.front_end.find(token) {
            return self.front_end.cancel(query).is_ok();
        }
        self.submissions.cancel(token)
    }

    pub fn nodes(&self) -> Vec<NodeState> {
        let state = |node: &Node| NodeState {
            node: node.id,
            name: self.front_end.name(node.id).unwrap_or_default().to_owned(),
            in_flight: self.front_end.in_flight(node.id).unwrap_or(0),
            draining: self.front_end.is_draining(node.id).unwrap_or(true),
        };
        self.nodes.iter().map(state).collect()
    }

    pub fn counts(&self) -> Counts {
        let counts = self.front_end.counts();
        let ended = self.submissions.ended();
        let (submitted, failed) = (counts.submitted + ended, counts.failed + ended);
        Counts { submitted, failed, ..counts }
    }

    pub fn stop(&mut self, stop: Stop) {
        self.stop = Some(stop);
    }
}

/// Refuses submissions and commands once the thread has ended, also by a handler panic.
struct CloseOnDrop<H>(Arc<Intake>, Arc<Commands<FrontEndThread<H>>>);

impl<H> Drop for CloseOnDrop<H> {
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::SeqCst);
        self.1.close();
    }
}
