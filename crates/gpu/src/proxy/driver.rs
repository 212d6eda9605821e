//! Proxy driver: commands and events in, requests and words out. No thread and no clock; all memory is allocated at construction.
//!
//! A word toward a peer is a counter with a window of rounds, and each put or signal is one round with one part. The
//! driver numbers the rounds, keeps parts that have no credit yet, and counts the leading rounds that have arrived. A
//! round is credited when the word rises; for a word that is held, when a kernel pushes RELEASE.
//!
//! A put waits only for credits from one peer on one word. A SCATTER is one request to the members whose rounds have
//! credits; the others wait as puts do. After [`ProxyConfig::max_outstanding`] parts without credit or completion the
//! driver takes no more commands ([`ProxyDriver::has_room`]), so a RELEASE behind them waits, too: let a kernel's puts into
//! held words stay below that number.

use super::backlog::Backlog;
use super::command::{Command, CommandError, CommandFields, Place, Problem};
use super::limits::{Limits, MAX_WORDS, Template, TemplateMember, check};
use super::outstanding::{Outstanding, PartId, event_of};
use super::rounds::{End, MAX_ROUNDS};
use super::scatter::{ScatterBuffers, ScatterTarget};
use super::words::{WordUpdate, position_of};
use crate::error::{Error, Result};
use std::sync::atomic::AtomicU32;
use weft_control::{Poison, Rank};
use weft_fabric::{
    CounterId, Driver, Engine, Event, Page, PartRule, RegionKey, RemoteRegion, Requests, Time,
};

/// One word index at all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordConfig {
    /// Counter with [`ProxyConfig::rounds`], linked with all peers.
    pub counter: CounterId,
    /// True if kernels credit the rounds, by RELEASE.
    pub hold: bool,
}

/// Regions with one number at all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// This rank's region and the length; `None` if nothing is read there.
    pub source: Option<(RegionKey, u64)>,
    /// The peers' regions, by rank; `None` where this rank writes nothing.
    pub destinations: Vec<Option<RemoteRegion>>,
}

/// Configuration that all ranks have agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyConfig {
    /// Words, at most [`MAX_WORDS`].
    pub words: Vec<WordConfig>,
    /// Rounds in a window, at most [`MAX_ROUNDS`]; 16 by default.
    pub rounds: u32,
    /// Windows.
    pub windows: Vec<Window>,
    /// Templates for SCATTER.
    pub templates: Vec<Template>,
    /// Lengths in the list that SCATTER commands name.
    pub list_lengths: u32,
    /// Longest put in bytes: one part on the routes to all peers.
    pub max_put_bytes: u64,
    /// Parts that wait for a credit or whose source is read. A SCATTER's parts end together.
    pub max_outstanding: u32,
}

impl Default for ProxyConfig {
    fn default() -> ProxyConfig {
        ProxyConfig {
            words: Vec::new(),
            rounds: 16,
            windows: Vec::new(),
            templates: Vec::new(),
            list_lengths: 0,
            max_put_bytes: 1 << 20,
            max_outstanding: 1024,
        }
    }
}

/// Proxy protocol at one rank.
#[derive(Debug)]
pub struct ProxyDriver {
    namespace: u16,
    limits: Limits,
    rounds: u32,
    windows: Vec<Window>,
    /// By word.
    counters: Vec<CounterId>,
    /// Counters in order, each with the word index.
    by_counter: Vec<(CounterId, u32)>,
    /// By peer and word.
    ends: Vec<End>,
    outstanding: Outstanding,
    /// Parts that the largest command has.
    largest: u32,
    scatter: ScatterBuffers,
    words: RaisedWords,
    poison: Option<Poison>,
}

impl ProxyDriver {
    /// Driver on an engine whose counters and windows are linked with all peers.
    ///
    /// # Errors
    /// [`Error::ProxyLimit`] for a configuration that cannot be met; the engine's errors.
    pub fn new(engine: &mut Engine, config: ProxyConfig) -> Result<ProxyDriver> {
        let peers: Vec<Rank> = engine.peers().collect();
        let rank = engine.rank();
        let ranks = peers.len() as u32 + 1;
        check_sizes(&config)?;
        check_routes(engine, &peers, config.max_put_bytes)?;
        check_templates(&config.templates, rank, ranks)?;
        let mut ends: Vec<End> = Vec::new();
        ends.resize_with(ranks as usize * config.words.len(), End::default);
        let counters: Vec<CounterId> = config.words.iter().map(|word| word.counter).collect();
        for peer in peers {
            for (word, counter) in (0..).zip(&counters) {
                let end = &mut ends[position_of(peer, word, counters.len())];
                end.next = engine.next_round(*counter, peer)?;
                end.credits = engine.credits(*counter, peer)?;
                end.credited = engine.open_round(*counter, peer)?;
                end.arrived.leading = end.credited;
            }
        }
        let mut by_counter: Vec<(CounterId, u32)> = counters.iter().copied().zip(0..).collect();
        by_counter.sort_unstable();
        let members = config.templates.iter().map(|template| template.members.len() as u32);
        let largest = members.max().unwrap_or(0).max(1);
        let windows = config.windows.iter().map(|window| window.lengths(rank, ranks)).collect();
        Ok(ProxyDriver {
            namespace: engine.namespace(),
            limits: Limits {
                rank,
                ranks,
                windows,
                holds: config.words.iter().map(|word| word.hold).collect(),
                max_put_bytes: config.max_put_bytes,
                templates: config.templates,
                list_lengths: config.list_lengths,
            },
            rounds: config.rounds,
            windows: config.windows,
            words: RaisedWords::new(ranks, counters.len()),
            counters,
            by_counter,
            ends,
            outstanding: Outstanding::new(config.max_outstanding),
            largest,
            scatter: ScatterBuffers::with_capacity(largest as usize),
            poison: None,
        })
    }

    /// Limits for commands.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Requests with capacity for the largest poll, in which every part leaves and every round is credited.
    pub fn requests(&self) -> Requests {
        let parts = self.limits.ranks as usize * self.counters.len() * self.rounds as usize;
        Requests::with_capacity(2 * parts, parts).with_scatter_capacity(parts)
    }

    /// True if [`ProxyDriver::accept`] may be called.
    pub fn has_room(&self) -> bool {
        self.outstanding.has_room(self.largest)
    }

    /// True if all accepted commands have been written, and all sources may be reused.
    pub fn is_idle(&self) -> bool {
        self.outstanding.is_empty()
    }

    /// Causes for which accepted commands wait.
    pub fn backlog(&self) -> Backlog {
        let (without_credit, in_flight) = self.outstanding.counts();
        let first = (without_credit > 0).then(|| self.waits_for().next()).flatten();
        Backlog { without_credit, in_flight, first }
    }

    /// Peers and words for which parts wait for a credit.
    pub fn waits_for(&self) -> impl Iterator<Item = (Rank, u32)> {
        let each = self.counters.len();
        let waits = self.ends.iter().enumerate().filter(|(_, end)| !end.waiting.is_empty());
        waits.map(move |(at, _)| (Rank((at / each) as u32), (at % each) as u32))
    }

    /// Calls `raise` for each word that has risen since the last call.
    pub fn take_words(&mut self, raise: impl FnMut(WordUpdate)) {
        self.words.take(raise);
    }

    /// Accepts a command; [`ProxyDriver::has_room`] has returned true. `list` holds the lengths for SCATTER; it is read
    /// before the call returns.
    ///
    /// # Errors
    /// [`Error::Command`] if the command is out of range; nothing was written then. [`weft_fabric::Error::Poisoned`].
    pub fn accept(
        &mut self,
        ticket: u64,
        fields: &CommandFields,
        list: &[AtomicU32],
        requests: &mut Requests,
    ) -> Result<()> {
        if let Some(poison) = &self.poison {
            return Err(weft_fabric::Error::Poisoned(poison.clone()).into());
        }
        let refused = |problem| CommandError { ticket, fields: *fields, problem };
        match self.limits.admit(fields).map_err(refused)? {
            Command::Put { peer, target, source, destination, length } => {
                let page = self.page(peer, source, destination, length);
                self.add(peer, target.word, page, requests);
            }
            Command::Signal { peer, target } => self.add(peer, target.word, None, requests),
            Command::Scatter { count, list: first, .. } => {
                let lengths = &list[first as usize..][..count as usize];
                self.scatter(fields, lengths, requests).map_err(refused)?;
            }
            Command::Release { peer, word, count } => {
                let end = &mut self.ends[position_of(peer, word, self.counters.len())];
                let most = end.arrived.leading - end.credited;
                check("count", count.into(), 1, most).map_err(refused)?;
                end.credited += u64::from(count);
                (0..count).for_each(|_| requests.credit(peer, self.counters[word as usize]));
            }
            Command::Drained { word } => {
                self.outstanding.drain(word);
                self.raise_drained();
            }
        }
        Ok(())
    }

    /// Accepts a SCATTER: checks all members before any part is added.
    fn scatter(
        &mut self,
        fields: &CommandFields,
        lengths: &[AtomicU32],
        requests: &mut Requests,
    ) -> std::result::Result<(), Problem> {
        let ProxyDriver { limits, windows, counters, ends, outstanding, scatter, .. } = self;
        let members = &limits.templates[usize::from(fields.peer)].members;
        scatter.read(&limits.scatter_windows(fields)?, members, lengths)?;
        let target = ScatterTarget {
            fields,
            members,
            source: windows[usize::from(fields.source_window)].source.map(|(key, _)| key),
            destinations: &windows[usize::from(fields.destination_window)].destinations,
            counter: counters[fields.word as usize],
            words: counters.len(),
            rounds: self.rounds,
            namespace: self.namespace,
        };
        scatter.write(&target, ends, outstanding, requests);
        Ok(())
    }

    /// Page between two checked places; `None` without bytes.
    fn page(&self, peer: Rank, source: Place, destination: Place, length: u64) -> Option<Page> {
        if length == 0 {
            return None;
        }
        let (from, _) = self.windows[usize::from(source.window)].source?;
        let to = self.windows[usize::from(destination.window)].destinations[peer.index()]?;
        Some(Page {
            source: from,
            source_offset: source.offset,
            destination: to.key,
            destination_offset: destination.offset,
            length,
        })
    }

    /// Writes a part in the next round, or keeps it until that round has a credit.
    fn add(&mut self, peer: Rank, word: u32, page: Option<Page>, requests: &mut Requests) {
        let end = &mut self.ends[position_of(peer, word, self.counters.len())];
        if !end.waiting.is_empty() || !end.has_credit(self.rounds) {
            self.outstanding.add(&mut end.waiting, page);
            return;
        }
        let part = page.map(|_| self.outstanding.start(1));
        let counter = self.counters[word as usize];
        write(self.namespace, end, (peer, counter), (part, page), requests);
    }

    /// Writes parts that have waited and have a credit now.
    fn write_waiting(&mut self, peer: Rank, word: u32, requests: &mut Requests) {
        let end = &mut self.ends[position_of(peer, word, self.counters.len())];
        let counter = self.counters[word as usize];
        while end.has_credit(self.rounds)
            && let Some((part, page)) = self.outstanding.take(&mut end.waiting)
        {
            write(self.namespace, end, (peer, counter), (page.map(|_| part), page), requests);
        }
    }

    /// A round from a peer has arrived.
    fn raised(
        &mut self,
        peer: Rank,
        word: u32,
        round: u64,
        count: u64,
        requests: &mut Requests,
    ) -> Result<()> {
        let end = &mut self.ends[position_of(peer, word, self.counters.len())];
        let more = (count == 1).then(|| end.arrived.add(round)).flatten();
        let Some(more) = more else { return Err(Error::ProxyRound { peer, word, round, count }) };
        if more == 0 {
            return Ok(());
        }
        self.words.set(peer, word, end.arrived.leading as u32);
        if !self.limits.holds[word as usize] {
            end.credited += u64::from(more);
            (0..more).for_each(|_| requests.credit(peer, self.counters[word as usize]));
        }
        Ok(())
    }

    fn raise_drained(&mut self) {
        while let Some(word) = self.outstanding.take_drained() {
            self.words.increment(self.limits.rank, word);
        }
    }

    fn word_of(&self, counter: CounterId) -> Option<u32> {
        let found = self.by_counter.binary_search_by_key(&counter, |(counter, _)| *counter);
        found.ok().map(|at| self.by_counter[at].1)
    }
}

/// Writes an end's next round. A part in the pool reports its completion.
#[inline]
fn write(
    namespace: u16,
    end: &mut End,
    (peer, counter): (Rank, CounterId),
    (part, page): (Option<PartId>, Option<Page>),
    requests: &mut Requests,
) {
    let tag = part.map_or(Requests::NO_EVENT, |part| event_of(namespace, part));
    requests.write(peer, counter, end.next, page, tag);
    end.next += 1;
}

impl Driver for ProxyDriver {
    type Error = Error;

    fn namespace(&self) -> u16 {
        self.namespace
    }

    fn counters(&self) -> &[CounterId] {
        &self.counters
    }

    fn poll(&mut self, _: Time, events: &[Event], requests: &mut Requests) -> Result<()> {
        let mut completes = false;
        for event in events {
            match event {
                Event::Raised { counter, peer, round, count } => {
                    if let Some(word) = self.word_of(*counter) {
                        self.raised(*peer, word, *round, *count, requests)?;
                    }
                }
                Event::Credited { counter, peer, credits } => {
                    if let Some(word) = self.word_of(*counter) {
                        let at = position_of(*peer, word, self.counters.len());
                        let end = &mut self.ends[at];
                        end.credits = end.credits.max(*credits);
                        if !end.waiting.is_empty() {
                            self.write_waiting(*peer, word, requests);
                        }
                    }
                }
                Event::Completed { tag } => {
                    completes |= tag >> Event::NAMESPACE_SHIFT == u64::from(self.namespace)
                        && self.outstanding.complete(*tag as PartId);
                }
                Event::Poisoned(poison) => self.poison = Some(poison.clone()),
            }
        }
        if completes {
            self.raise_drained();
        }
        Ok(())
    }
}

impl Window {
    /// Lengths by rank: the source's at this rank, the destinations' at the others.
    fn lengths(&self, rank: Rank, ranks: u32) -> Vec<u64> {
        let length = |other: Rank| match self.destinations.get(other.index()) {
            _ if other == rank => self.source.map_or(0, |(_, length)| length),
            Some(Some(region)) => region.length,
            _ => 0,
        };
        (0..ranks).map(Rank).map(length).collect()
    }
}

fn check_sizes(config: &ProxyConfig) -> Result<()> {
    let members = config.templates.iter().map(|template| template.members.len() as u64);
    for (what, value, least, most) in [
        ("words", config.words.len() as u64, 1, MAX_WORDS as u64),
        ("rounds in a window", config.rounds.into(), 1, MAX_ROUNDS.into()),
        ("windows", config.windows.len() as u64, 0, 1 << 16),
        ("templates", config.templates.len() as u64, 0, 1 << 16),
        ("peers in a template", members.max().unwrap_or(0), 0, config.max_outstanding.into()),
        ("outstanding parts", config.max_outstanding.into(), 1, 1 << 20),
    ] {
        if !(least..=most).contains(&value) {
            return Err(Error::ProxyLimit { what, value, least, most });
        }
    }
    Ok(())
}

/// A put is one part on each route.
fn check_routes(engine: &Engine, peers: &[Rank], max_put_bytes: u64) -> Result<()> {
    for peer in peers {
        let Some(route) = engine.route(*peer) else { continue };
        if route.parts.count_contiguous(max_put_bytes) > 1 {
            let PartRule { max_part_bytes, stripes, stripe_from, .. } = route.parts;
            let whole = if stripes > 1 { stripe_from.saturating_sub(1) } else { u64::MAX };
            let most = max_part_bytes.min(whole);
            let what = "bytes in the longest put";
            return Err(Error::ProxyLimit { what, value: max_put_bytes, least: 1, most });
        }
    }
    Ok(())
}

fn check_templates(templates: &[Template], rank: Rank, ranks: u32) -> Result<()> {
    let members = templates.iter().flat_map(|template| &template.members);
    for TemplateMember { peer, .. } in members {
        if *peer == rank || peer.0 >= ranks {
            let (what, value, most) = ("peer in a template", peer.0.into(), u64::from(ranks) - 1);
            return Err(Error::ProxyLimit { what, value, least: 0, most });
        }
    }
    Ok(())
}

/// Words that have risen and were not yet taken.
#[derive(Debug)]
struct RaisedWords {
    each: usize,
    values: Vec<u32>,
    listed: Vec<bool>,
    list: Vec<(Rank, u32)>,
}

impl RaisedWords {
    fn new(ranks: u32, each: usize) -> RaisedWords {
        let count = ranks as usize * each;
        RaisedWords {
            each,
            values: vec![0; count],
            listed: vec![false; count],
            list: Vec::with_capacity(count),
        }
    }

    fn set(&mut self, source: Rank, index: u32, value: u32) {
        let at = position_of(source, index, self.each);
        self.values[at] = value;
        if !std::mem::replace(&mut self.listed[at], true) {
            self.list.push((source, index));
        }
    }

    fn increment(&mut self, source: Rank, index: u32) {
        let value = self.values[position_of(source, index, self.each)];
        self.set(source, index, value.wrapping_add(1));
    }

    fn take(&mut self, mut raise: impl FnMut(WordUpdate)) {
        for (source, index) in self.list.drain(..) {
            let at = position_of(source, index, self.each);
            self.listed[at] = false;
            raise(WordUpdate { source, index, value: self.values[at] });
        }
    }
}
