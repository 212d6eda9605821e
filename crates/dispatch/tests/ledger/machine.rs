//! A ledger with its surroundings (nodes that answer, a caller that takes notices), checked against a model.

use std::collections::BTreeMap;
use weft_dispatch::ledger::Send;
use weft_dispatch::{Failure, Ledger, LedgerConfig, NodeId, Notice, Outcome, QueryId};
use weft_fabric::Time;

/// One step. An index selects among the present candidates, modulo how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    Submit,
    Send,
    /// An answer part with one more token.
    Stream(usize),
    Answer(usize),
    Refuse(usize),
    Cancel(usize),
    /// Time passes until the earliest deadline.
    Expire,
    Notice,
    Release(usize),
    Join,
    Lose(usize),
    /// Drains a node, or removes it if it is drained.
    Drain(usize),
}

impl Step {
    /// All steps in a small case.
    pub fn all(config: &LedgerConfig) -> Vec<Step> {
        let mut steps = vec![Step::Submit, Step::Send, Step::Expire, Step::Notice, Step::Join];
        for index in 0..config.queries as usize {
            steps.extend([Step::Cancel(index), Step::Release(index)]);
            steps.extend([Step::Answer(index), Step::Stream(index)]);
        }
        for index in 0..config.nodes as usize {
            steps.extend([Step::Lose(index), Step::Drain(index)]);
        }
        steps.push(Step::Refuse(0));
        steps
    }
}

/// A query's life in the model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Life {
    /// Without an end. `sent`: in this slot.
    Open {
        sent: Option<(NodeId, u32)>,
        sends: u32,
    },
    /// Ended; `held`: memory and slot are borrowed. `reported`: the notice was taken.
    Failed {
        held: Option<(NodeId, u32)>,
        reported: bool,
        sends: u32,
    },
    Answered {
        at: (NodeId, u32),
        reported: bool,
    },
    /// All notices were taken, and the slot released.
    Over,
}

/// Ledger and model. States are equal if all future steps are alike.
#[derive(Clone, Debug)]
pub struct Machine {
    ledger: Ledger,
    now: u64,
    submitted: u64,
    lives: BTreeMap<u64, (QueryId, Life)>,
    /// Tokens in an open or answered query, and how many were reported.
    tokens: BTreeMap<u64, (u32, u32)>,
    nodes: Vec<(NodeId, bool)>,
    steps: Vec<Step>,
}

impl PartialEq for Machine {
    fn eq(&self, other: &Machine) -> bool {
        (&self.ledger, &self.lives, &self.tokens, &self.nodes)
            == (&other.ledger, &other.lives, &other.tokens, &other.nodes)
    }
}

impl Eq for Machine {}

impl std::hash::Hash for Machine {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.ledger.hash(state);
        self.lives.hash(state);
        self.tokens.hash(state);
        self.nodes.hash(state);
    }
}

type Checked = Result<(), String>;

macro_rules! ensure {
    ($condition:expr, $($text:tt)*) => {
        if !$condition { return Err(format!($($text)*)); }
    };
}

impl Machine {
    pub fn new(config: LedgerConfig) -> Machine {
        Machine {
            ledger: Ledger::new(config).unwrap(),
            now: 0,
            submitted: 0,
            lives: BTreeMap::new(),
            tokens: BTreeMap::new(),
            nodes: Vec::new(),
            steps: Vec::new(),
        }
    }

    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    pub fn step(&mut self, step: Step) -> Checked {
        self.steps.push(step);
        match step {
            Step::Submit => self.submit()?,
            Step::Send => self.send()?,
            Step::Stream(index) => self.stream(index)?,
            Step::Answer(index) => self.answer(index, None)?,
            Step::Refuse(index) => self.answer(index, Some(7))?,
            Step::Cancel(index) => self.cancel(index)?,
            Step::Expire => self.expire()?,
            Step::Notice => self.notice().map(drop)?,
            Step::Release(index) => self.release(index)?,
            Step::Join => self.join()?,
            Step::Lose(index) => self.lose(index)?,
            Step::Drain(index) => self.drain(index)?,
        }
        self.check()
    }

    fn submit(&mut self) -> Checked {
        let token = self.submitted;
        let deadline = Time(self.now + 10 + token);
        let alive = self.lives.values().filter(|(_, life)| *life != Life::Over).count();
        let result = self.ledger.submit(token, deadline);
        let has_room = alive < self.ledger.config().queries as usize;
        ensure!(result.is_ok() == has_room, "{alive} queries under way, and {result:?}");
        if let Ok(id) = result {
            self.submitted += 1;
            self.lives.insert(token, (id, Life::Open { sent: None, sends: 0 }));
        }
        Ok(())
    }

    fn send(&mut self) -> Checked {
        let Some(send) = self.ledger.next_send(Time(self.now)) else {
            let waits =
                self.lives.values().any(|(_, life)| matches!(life, Life::Open { sent: None, .. }));
            let config = *self.ledger.config();
            let room = self.nodes.iter().any(|(node, draining)| {
                let quarantined = self.slots_held(*node).filter(|quarantined| *quarantined).count();
                !draining
                    && self.slots_held(*node).count() < config.slots as usize
                    && quarantined < config.max_quarantined as usize
            });
            ensure!(!waits || !room, "a query waits while a node has room");
            return Ok(());
        };
        let Send { query, token, node, slot } = send;
        ensure!(self.nodes.contains(&(node, false)), "sent to {node}, which takes none");
        let taken = self.lives.values().any(|(_, life)| life.slot() == Some((node, slot)));
        ensure!(!taken, "slot {slot} is in use");
        let config = *self.ledger.config();
        let Some((id, Life::Open { sent, sends })) = self.lives.get_mut(&token) else {
            return Err(format!("sent {token}, which has ended"));
        };
        ensure!(*id == query && sent.is_none(), "sent {token} twice");
        *sends += 1;
        ensure!(*sends <= config.max_sends, "sent {token} {sends} times");
        self.tokens.insert(token, (0, 0));
        *sent = Some((node, slot));
        Ok(())
    }

    /// Quarantine state for each of a node's slots in use.
    fn slots_held(&self, node: NodeId) -> impl Iterator<Item = bool> {
        let of = move |life: &Life| {
            life.slot().filter(|(at, _)| *at == node).map(|_| matches!(life, Life::Failed { .. }))
        };
        self.lives.values().filter_map(move |(_, life)| of(life))
    }

    /// Token, node and slot for a query that a node has; `index` selects it.
    fn held(&self, index: usize) -> Option<(u64, (NodeId, u32))> {
        let at = |life: &Life| match life {
            Life::Open { sent: Some(at), .. } | Life::Failed { held: Some(at), .. } => Some(*at),
            _ => None,
        };
        let held: Vec<_> =
            self.lives.iter().filter_map(|(token, (_, life))| Some((*token, at(life)?))).collect();
        held.get(index % held.len().max(1)).copied()
    }

    /// An answer part arrives: also for a query that has ended meanwhile.
    fn stream(&mut self, index: usize) -> Checked {
        self.now += 1;
        let Some((token, (node, slot))) = self.held(index) else {
            if let Some(&(node, _)) = self.nodes.first() {
                let result = self.ledger.streamed(Time(self.now), node, 0, 1);
                ensure!(result.is_err(), "a token after the answer was accepted");
            }
            return Ok(());
        };
        let is_open = matches!(self.lives[&token].1, Life::Open { .. });
        let (tokens, _) = self.tokens.entry(token).or_default();
        // Few counts, so that the state count is finite.
        if *tokens < 3 {
            *tokens += 1;
            let result = self.ledger.streamed(Time(0), node, slot, *tokens);
            result.map_err(|error| error.to_string())?;
        }
        let again = self.ledger.streamed(Time(0), node, slot, *tokens);
        ensure!(again.is_err() == is_open, "a part without a token: {again:?}");
        let fewer = self.ledger.clone().answered_with(Time(0), node, slot, *tokens - 1);
        ensure!(fewer.is_err() == is_open, "an answer with fewer tokens: {fewer:?}");
        Ok(())
    }

    /// An answer, or an error, arrives in a slot with a query: also for a query that has ended meanwhile.
    fn answer(&mut self, index: usize, code: Option<u32>) -> Checked {
        self.now += 1;
        let Some((token, (node, slot))) = self.held(index) else {
            // An answer that no query waits for.
            if let Some(&(node, _)) = self.nodes.first() {
                let result = self.ledger.answered(Time(self.now), node, 0);
                ensure!(result.is_err(), "an answer without a query was accepted");
            }
            return Ok(());
        };
        let now = Time(self.now);
        let result = match code {
            None => {
                // One more token than in parts, if there were parts.
                let (tokens, _) = self.tokens.entry(token).or_default();
                *tokens += u32::from(*tokens > 0);
                self.ledger.answered_with(now, node, slot, *tokens)
            }
            Some(code) => self.ledger.refused(now, node, slot, code),
        };
        result.map_err(|error| error.to_string())?;
        let again = self.ledger.answered(now, node, slot);
        ensure!(again.is_err(), "a second answer was accepted");
        let late = self.ledger.streamed(now, node, slot, 9);
        ensure!(late.is_err(), "a token after the answer was accepted");
        let life = &mut self.lives.get_mut(&token).unwrap().1;
        *life = match (life.clone(), code) {
            (Life::Open { .. }, None) => Life::Answered { at: (node, slot), reported: false },
            (Life::Open { sends, .. }, Some(_)) => {
                Life::Failed { held: None, reported: false, sends }
            }
            (Life::Failed { reported, sends, .. }, _) => {
                Life::Failed { held: None, reported, sends }
            }
            (life, _) => life,
        };
        Ok(())
    }

    /// Token for a query that is not over; `index` selects it.
    fn alive(&self, index: usize) -> Option<u64> {
        let alive: Vec<u64> = self
            .lives
            .iter()
            .filter(|(_, (_, life))| *life != Life::Over)
            .map(|(token, _)| *token)
            .collect();
        alive.get(index % alive.len().max(1)).copied()
    }

    fn cancel(&mut self, index: usize) -> Checked {
        let Some(token) = self.alive(index) else { return Ok(()) };
        let id = self.lives[&token].0;
        let withdrawal = self.ledger.cancel(id).map_err(|error| error.to_string())?;
        self.ended(token, withdrawal.map(|withdrawal| (withdrawal.node, withdrawal.slot)))
    }

    fn ended(&mut self, token: u64, withdrawn: Option<(NodeId, u32)>) -> Checked {
        let life = &mut self.lives.get_mut(&token).unwrap().1;
        match life.clone() {
            Life::Open { sent, sends } => {
                ensure!(sent == withdrawn, "withdrew {withdrawn:?}, {token} is in {sent:?}");
                *life = Life::Failed { held: sent, reported: false, sends };
            }
            _ => ensure!(
                withdrawn.is_none(),
                "{token} had ended, and was withdrawn from {withdrawn:?}"
            ),
        }
        Ok(())
    }

    fn expire(&mut self) -> Checked {
        let Some(at) = self.ledger.next_deadline() else {
            let open = self.lives.values().any(|(_, life)| matches!(life, Life::Open { .. }));
            ensure!(!open, "an open query has no deadline");
            return Ok(());
        };
        ensure!(
            at == Time::MAX || !self.ledger.clone().expire(Time(at.0 - 1), |_| ()),
            "expired early"
        );
        self.now = self.now.max(at.0);
        let before: Vec<u64> = self.open().collect();
        let mut withdrawn = None;
        ensure!(
            self.ledger.expire(at, |withdrawal| withdrawn = Some(withdrawal)),
            "{at:?} has passed"
        );
        let withdrawn = withdrawn.map(|withdrawal| (withdrawal.node, withdrawal.slot));
        // The oldest open query has the earliest deadline, since deadlines rise with tokens.
        let token = before[0];
        self.ended(token, withdrawn)
    }

    fn open(&self) -> impl Iterator<Item = u64> {
        self.lives
            .iter()
            .filter(|(_, (_, life))| matches!(life, Life::Open { .. }))
            .map(|(token, _)| *token)
    }

    fn notice(&mut self) -> Result<bool, String> {
        let Some(notice) = self.ledger.next_notice() else { return Ok(false) };
        match notice {
            Notice::Tokens { query, token, node, slot, from, to, sends, .. } => {
                let (id, life) = &self.lives[&token];
                let is_streaming = match life {
                    Life::Open { sent, sends: sent_times } => {
                        *sent == Some((node, slot)) && *sent_times == sends
                    }
                    Life::Answered { at, reported: false } => *at == (node, slot),
                    _ => false,
                };
                ensure!(*id == query && is_streaming, "tokens of {token}, which is {life:?}");
                let (tokens, reported_tokens) =
                    self.tokens.get_mut(&token).ok_or("tokens before a send")?;
                ensure!(
                    (from, to) == (*reported_tokens, *tokens) && from < to,
                    "{from} to {to} of {tokens}"
                );
                *reported_tokens = to;
            }
            Notice::Ended { query, token, outcome, quarantined } => {
                let (tokens, reported_tokens) =
                    self.tokens.get(&token).copied().unwrap_or_default();
                let is_answered = matches!(outcome, Outcome::Answered { .. });
                ensure!(
                    !is_answered || tokens == reported_tokens,
                    "{token} ended with {reported_tokens} of {tokens}"
                );
                let (id, life) = self.lives.get_mut(&token).ok_or("unknown token")?;
                ensure!(*id == query, "{token} has another id");
                let after = match (&*life, outcome) {
                    (Life::Answered { at, reported: false }, Outcome::Answered { node, slot }) => {
                        ensure!(
                            *at == (node, slot) && !quarantined,
                            "{token} was answered in {at:?}"
                        );
                        Life::Answered { at: *at, reported: true }
                    }
                    (Life::Failed { held, reported: false, sends }, Outcome::Failed(failure)) => {
                        ensure!(
                            quarantined == held.is_some(),
                            "{token} is quarantined: {quarantined}"
                        );
                        if let Failure::NodeLost { sends: counted, .. } = failure {
                            ensure!(
                                counted == *sends && counted == self.ledger.config().max_sends,
                                "{token} was lost early"
                            );
                        }
                        match held {
                            Some(at) => {
                                Life::Failed { held: Some(*at), reported: true, sends: *sends }
                            }
                            None => Life::Over,
                        }
                    }
                    (life, outcome) => {
                        return Err(format!("{token} is {life:?} and ended in {outcome:?}"));
                    }
                };
                *life = after;
            }
            Notice::Returned { query, token } => {
                let (id, life) = self.lives.get_mut(&token).ok_or("unknown token")?;
                let is_due = matches!(life, Life::Failed { held: None, reported: true, .. });
                ensure!(
                    *id == query && is_due,
                    "the memory of {token} returned while it is {life:?}"
                );
                *life = Life::Over;
            }
        }
        Ok(true)
    }

    fn release(&mut self, index: usize) -> Checked {
        let Some(token) = self.alive(index) else { return Ok(()) };
        let (id, life) = self.lives[&token].clone();
        let result = self.ledger.release(id);
        let expected = matches!(life, Life::Answered { reported: true, .. });
        ensure!(result.is_ok() == expected, "release of {life:?}: {result:?}");
        if expected {
            self.lives.get_mut(&token).unwrap().1 = Life::Over;
        }
        Ok(())
    }

    fn join(&mut self) -> Checked {
        if let Ok(node) = self.ledger.join(self.ledger.config().slots) {
            self.nodes.push((node, false));
        }
        Ok(())
    }

    fn lose(&mut self, index: usize) -> Checked {
        if self.nodes.is_empty() {
            return Ok(());
        }
        let (node, _) = self.nodes.remove(index % self.nodes.len());
        self.ledger.lose(node).map_err(|error| error.to_string())?;
        ensure!(self.ledger.lose(node).is_err(), "{node} was lost twice");
        let max_sends = self.ledger.config().max_sends;
        for (token, (_, life)) in &mut self.lives {
            if life.slot().is_some_and(|(at, _)| at == node) {
                if matches!(life, Life::Open { .. }) {
                    self.tokens.insert(*token, (0, 0));
                }
                *life = match life.clone() {
                    Life::Open { sends, .. } if sends < max_sends => {
                        Life::Open { sent: None, sends }
                    }
                    Life::Open { sends, .. } => Life::Failed { held: None, reported: false, sends },
                    Life::Failed { reported, sends, .. } => {
                        Life::Failed { held: None, reported, sends }
                    }
                    life => life,
                };
            }
        }
        Ok(())
    }

    fn drain(&mut self, index: usize) -> Checked {
        if self.nodes.is_empty() {
            return Ok(());
        }
        let index = index % self.nodes.len();
        let (node, draining) = self.nodes[index];
        if !draining {
            self.nodes[index].1 = true;
            return self.ledger.drain(node).map_err(|error| error.to_string());
        }
        let is_idle = self.slots_held(node).count() == 0;
        ensure!(
            self.ledger.leave(node).is_ok() == is_idle,
            "{node} left with queries, or could not"
        );
        if is_idle {
            self.nodes.remove(index);
        }
        Ok(())
    }

    /// The ledger's counts equal the model's.
    fn check(&self) -> Checked {
        let (counts, lives) = (self.ledger.counts(), || self.lives.values().map(|(_, life)| life));
        let queued = lives().filter(|life| matches!(life, Life::Open { sent: None, .. })).count();
        let quarantined =
            lives().filter(|life| matches!(life, Life::Failed { held: Some(_), .. })).count();
        let held = lives().filter(|life| life.slot().is_some()).count();
        ensure!(counts.queued as usize == queued, "{queued} queries wait, {counts:?}");
        ensure!(
            counts.quarantined as usize == quarantined,
            "{quarantined} are quarantined, {counts:?}"
        );
        ensure!(counts.in_flight as usize == held, "{held} slots are in use, {counts:?}");
        Ok(())
    }

    /// From here, all answers, notices and releases: every query is over, every slot free.
    pub fn check_end(&self) {
        let mut rest = self.clone();
        if let Err(wrong) = rest.finish() {
            panic!("{wrong}\nafter {:?}", rest.steps);
        }
    }

    fn finish(&mut self) -> Checked {
        while self
            .lives
            .values()
            .any(|(_, life)| life.slot().is_some() && !matches!(life, Life::Answered { .. }))
        {
            self.answer(0, None)?;
        }
        while !self.open().collect::<Vec<_>>().is_empty() {
            self.expire()?;
        }
        while self.notice()? {}
        for index in (0..self.lives.len()).rev() {
            self.release(index)?;
            self.check()?;
        }
        while self.lives.values().any(|(_, life)| *life != Life::Over) {
            let before = self.lives.clone();
            self.release(0)?;
            ensure!(before != self.lives, "{:?} never end", self.lives);
        }
        let counts = self.ledger.counts();
        ensure!((counts.queued, counts.in_flight) == (0, 0), "{counts:?} at the end");
        ensure!(counts.submitted == counts.answered + counts.failed, "{counts:?} at the end");
        for (node, _) in std::mem::take(&mut self.nodes) {
            self.ledger.leave(node).map_err(|error| error.to_string())?;
        }
        let joined = (0..self.ledger.config().nodes).all(|_| self.ledger.join(1).is_ok());
        ensure!(joined, "a place of a node was lost");
        Ok(())
    }
}

impl Life {
    fn slot(&self) -> Option<(NodeId, u32)> {
        match self {
            Life::Open { sent, .. } => *sent,
            Life::Failed { held, .. } => *held,
            Life::Answered { at, .. } => Some(*at),
            Life::Over => None,
        }
    }
}
