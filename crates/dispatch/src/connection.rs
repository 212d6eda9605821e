//! Connection: the slots, counters and routes between a front end and an accelerator node.

use crate::arrivals::Arrivals;
use crate::error::{Error, Result};
use crate::memory::SlotMemory;
use crate::peer::Peer;
use crate::wire::{Agreement, Checksum, Fields, Header, Hello, Layout, Role};
use weft_fabric::{
    Communicator, CounterConfig, CounterId, Engine, EngineConfig, Event, Grant, Page, PartRule,
    Rank, RegionKey, RemoteRegion, Requests, Time,
};

/// Tag for all requests: completions are no events, since the answer confirms that a query arrived.
const TAG: u64 = Requests::NO_EVENT;
/// Round that announces that a node wants to leave, on the cancel counter.
const LEAVING: u64 = 0;
/// Bytes behind a header that are prefetched with it.
const PREFETCH: u64 = 64;

/// Slot memory at one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotConfig {
    /// Most bytes.
    pub max_bytes: u64,
    /// NUMA node for the pages; `None`: first touch decides.
    pub numa_node: Option<u32>,
}

impl Default for SlotConfig {
    fn default() -> SlotConfig {
        SlotConfig { max_bytes: u64::MAX, numa_node: None }
    }
}

/// One connection end. Both ends make it from the same [`Agreement`].
#[derive(Debug)]
pub struct Connection {
    pub(crate) peer: Peer,
    agreement: Agreement,
    /// Headers with or without tensors; tensors only; cancels and part confirmations.
    counters: [CounterId; 3],
    parts: PartRule,
    /// Each write is one part, by that rule.
    is_whole: bool,
    /// Layouts for what arrives here, and for what leaves.
    pub(crate) incoming_layout: Layout,
    pub(crate) outgoing_layout: Layout,
    pub(crate) incoming: SlotMemory,
    /// Query headers, or whole answers.
    pub(crate) outgoing: SlotMemory,
    pub(crate) arrivals: Arrivals,
    /// The last header that arrived.
    pub(crate) header: Header,
    /// Slot of the last arrival.
    last_slot: u32,
    remote: RegionKey,
    remote_bytes: u64,
}

impl Connection {
    /// Configuration for an engine with room for a connection with this many slots.
    pub fn engine_config(slots: u32) -> EngineConfig {
        let slots = slots as usize;
        EngineConfig {
            lanes: 3 * (slots + 2) + 256,
            max_requests: 3 * slots + 64,
            reserved: slots.min(1024),
            ..EngineConfig::for_pair()
        }
    }

    /// Same as [`Connection::engine_config`], for a schema with a token output.
    pub fn streaming_engine_config(slots: u32) -> EngineConfig {
        let plain = Connection::engine_config(slots);
        EngineConfig { lanes: plain.lanes + slots as usize, ..plain }
    }

    /// Allocates memory and counters at one end. Afterwards both ends exchange grants ([`Connection::grant`],
    /// [`Connection::link`]).
    ///
    /// # Errors
    /// Fabric errors, such as too few lanes: see [`Connection::engine_config`].
    pub fn allocate(
        engine: &mut Engine,
        peer: Rank,
        role: Role,
        agreement: Agreement,
    ) -> Result<Connection> {
        Connection::allocate_on(engine, peer, role, agreement, None)
    }

    /// As [`Connection::allocate`], with slots on a NUMA node.
    fn allocate_on(
        engine: &mut Engine,
        peer: Rank,
        role: Role,
        agreement: Agreement,
        numa_node: Option<u32>,
    ) -> Result<Connection> {
        let (queries, answers) = (agreement.queries(), agreement.answers());
        let (incoming_layout, outgoing_layout, outgoing_stride) = match role {
            Role::FrontEnd => (answers, queries.clone(), queries.header_bytes()),
            Role::Accelerator => (queries, answers.clone(), answers.stride()),
        };
        let (slots, remote_bytes) = (agreement.slots, outgoing_layout.stride());
        let peers = [peer];
        let shape = CounterConfig { window: slots, peers: Some(&peers), ..Default::default() };
        let mut counters = [CounterId::from_number(0); 3];
        // The second half of the third counter's rounds confirms answer parts.
        let streaming = CounterConfig { window: 2 * slots, ..shape };
        let shapes = [shape, shape, if agreement.has_stream() { streaming } else { shape }];
        for (counter, shape) in counters.iter_mut().zip(shapes) {
            *counter = engine.counter_with(shape).map_err(|error| name_lanes(error, &agreement))?;
        }
        let unknown = weft_fabric::Error::Unknown { what: "rank", number: peer.0.into() };
        let parts = engine.route(peer).ok_or(unknown)?.parts;
        let header_parts = parts.count([incoming_layout.header_bytes()]);
        Ok(Connection {
            peer: Peer::of(engine, peer),
            counters,
            parts,
            is_whole: parts == PartRule::WHOLE,
            incoming: SlotMemory::allocate(engine, slots, incoming_layout.stride(), numa_node)?,
            outgoing: SlotMemory::allocate(engine, slots, outgoing_stride, numa_node)?,
            arrivals: Arrivals::new(slots, header_parts),
            header: Header::new(0, 0, []),
            incoming_layout,
            outgoing_layout,
            last_slot: 0,
            remote: RegionKey(0),
            remote_bytes: remote_bytes * u64::from(slots),
            agreement,
        })
    }

    /// Grant for the other end.
    ///
    /// # Errors
    /// Errors from [`Engine::grant`].
    pub fn grant(&self, engine: &mut Engine) -> Result<Grant> {
        let region = self.incoming.region();
        let whole = 0..region.memory().len() as u64;
        Ok(engine.grant(self.peer.rank, &[(region, whole)], &self.counters)?)
    }

    /// Imports the other end's grant.
    ///
    /// # Errors
    /// Errors from [`Engine::import`]; [`Error::Disagreement`] if the memory has another size.
    pub fn link(&mut self, engine: &mut Engine, grant: &Grant, deadline: Time) -> Result<()> {
        let remotes = engine.import(self.peer.rank, grant, &self.counters, deadline)?;
        self.linked(&remotes)
    }

    fn linked(&mut self, remotes: &[RemoteRegion]) -> Result<()> {
        match remotes {
            [remote] if remote.length == self.remote_bytes => self.remote = remote.key,
            _ => {
                let lengths: Vec<u64> = remotes.iter().map(|remote| remote.length).collect();
                let expected = self.remote_bytes;
                let detail =
                    format!("the peer granted regions of {lengths:?} bytes, expected [{expected}]");
                return Err(Error::Disagreement { detail });
            }
        }
        Ok(())
    }

    /// Makes the connection over a pair, at both ends: exchanges hellos, allocates, shares. The pair's progress thread,
    /// which would take events, ends: the caller polls the engine from now on.
    ///
    /// # Errors
    /// Errors from [`Hello::decode`] and [`Agreement::of`], at both ends; fabric errors; [`Error::Disagreement`] for an
    /// engine with too few lanes.
    pub fn over(pair: &Communicator, hello: &Hello, deadline: Time) -> Result<Connection> {
        Connection::over_with(pair, hello, SlotConfig::default(), deadline)
    }

    /// Same as [`Connection::over`], with this slot configuration at this end.
    ///
    /// # Errors
    /// As [`Connection::over`]; [`Error::SlotMemory`] beyond the most bytes.
    pub fn over_with(
        pair: &Communicator,
        hello: &Hello,
        slots: SlotConfig,
        deadline: Time,
    ) -> Result<Connection> {
        if pair.world_size() != 2 {
            let (value, expected) = (pair.world_size().into(), "2: a pair".into());
            return Err(Error::Invalid { what: "ranks of a connection", value, expected });
        }
        pair.end_progress_thread();
        let peer = Rank(1 - pair.rank().0);
        let mut messages = vec![Vec::new(), Vec::new()];
        messages[peer.index()] = hello.encode();
        let replies = pair.exchange(&messages, deadline)?;
        let theirs = Hello::decode(&replies[peer.index()])?;
        let agreement = Agreement::of(hello, &theirs)?;
        let bytes = slot_bytes(&agreement, hello.role);
        let SlotConfig { max_bytes: limit, numa_node } = slots;
        if bytes > limit {
            let (slots, name) = (agreement.slots, agreement.name);
            return Err(Error::SlotMemory { name, slots, bytes, limit });
        }
        let role = hello.role;
        // The engine is free again afterwards.
        let mut connection =
            Connection::allocate_on(&mut pair.engine(), peer, role, agreement, numa_node)?;
        let region = connection.incoming.region().clone();
        let whole = 0..region.memory().len() as u64;
        let remotes = pair.share(&[(&region, whole)], &connection.counters, deadline)?;
        connection.linked(&remotes[peer.index()])?;
        Ok(connection)
    }

    /// The other end.
    pub fn peer(&self) -> Rank {
        self.peer.rank
    }

    /// Handshake result.
    pub fn agreement(&self) -> &Agreement {
        &self.agreement
    }

    /// True once the other end has left in order: what it wrote before arrives, and no more follows.
    #[inline]
    pub fn peer_has_left(&self) -> bool {
        self.peer.has_left()
    }

    /// Meaning of a raised lane.
    #[inline]
    pub(crate) fn raised(&self, counter: CounterId, round: u64, count: u64) -> Option<Raise> {
        let [headers, payloads, cancels] = self.counters;
        let (round, slots) = (u32::try_from(round).ok()?, self.agreement.slots);
        if counter == cancels && round >= slots {
            let slot = round - slots;
            return (slot < slots).then_some(Raise::Confirmation { slot, count });
        }
        let slot = Some(round).filter(|slot| *slot < slots)?;
        match counter {
            counter if counter == headers => Some(Raise::Header { slot, count }),
            counter if counter == payloads => Some(Raise::Payload { slot, count }),
            counter if counter == cancels => Some(Raise::Cancel { slot, count }),
            _ => None,
        }
    }

    /// Prefetches what has arrived, as far as these events report whole queries or answers: headers and the first
    /// tensor bytes.
    #[inline]
    pub(crate) fn prefetch(&self, events: &[Event]) {
        let slots = self.agreement.slots;
        for event in events {
            if let Event::Raised { counter, round, .. } = *event
                && counter == self.counters[0]
                && round < slots.into()
            {
                let bytes = self.incoming_layout.header_bytes() + PREFETCH;
                self.incoming.prefetch(round as u32, bytes);
            }
        }
    }

    /// Prefetches the slot of the last arrival; with few queries in flight the next one uses it too.
    #[inline]
    pub(crate) fn prefetch_next(&self) {
        let bytes = self.incoming_layout.header_bytes() + PREFETCH;
        self.incoming.prefetch(self.last_slot, bytes);
    }

    /// Takes the header in a slot whose write has arrived entirely, to [`Connection::header`]; false before.
    /// `streamed`: token bytes that arrived in earlier parts.
    ///
    /// # Errors
    /// [`Error::Malformed`], [`Error::Checksum`]: the peer violates the protocol.
    #[inline]
    pub(crate) fn take_arrival(
        &mut self,
        slot: u32,
        turn: u32,
        is_answer: bool,
        streamed: u64,
    ) -> Result<bool> {
        if !self.arrivals.has_header(slot)? {
            return Ok(false);
        }
        let layout = &self.incoming_layout;
        let bytes = self.incoming.read(slot, 0, layout.header_bytes());
        self.header.read(bytes, layout, turn, is_answer)?;
        let header = self.header.fields();
        check_tokens(&header, layout, streamed)?;
        let payload_parts = if self.is_whole {
            0
        } else {
            let lengths = carried(&header, layout, streamed).map(|carried| carried.length);
            match fit_beside(self.parts, layout, lengths.clone()) {
                true => 0,
                false => self.parts.count(lengths),
            }
        };
        if !self.arrivals.take(slot, payload_parts) {
            return Ok(false);
        }
        self.last_slot = slot;
        if self.agreement.checksum {
            // An answer is checked as a whole, each part by itself.
            let streamed = if header.is_part { streamed } else { 0 };
            let mut sum = Checksum::default();
            for Carried { tensor, first, length } in carried(&header, layout, streamed) {
                sum.add(self.incoming.read(slot, layout.offset(tensor) + first, length));
            }
            self.header.check(sum.value())?;
        }
        Ok(true)
    }

    /// Writes a header and tensors into the peer's slot. `source` returns a tensor's source by index and position in
    /// the slot; [`Connection::outgoing_source`] does so for the outgoing slot. `streamed`: token bytes that were
    /// written in earlier parts.
    #[inline]
    pub(crate) fn send(
        &mut self,
        slot: u32,
        header: &Fields<'_>,
        source: impl Fn(usize, u64) -> (RegionKey, u64),
        streamed: u64,
        requests: &mut Requests,
    ) {
        let layout = &self.outgoing_layout;
        let header_bytes = layout.header_bytes();
        header.encode(self.outgoing.write(slot, 0, header_bytes));
        let (remote, base) = (self.remote, u64::from(slot) * layout.stride());
        let first = Page {
            source: self.outgoing.key(),
            source_offset: self.outgoing.offset(slot, 0),
            destination: remote,
            destination_offset: base,
            length: header_bytes,
        };
        let pages = carried(header, layout, streamed).filter(|carried| carried.length > 0);
        let pages = pages.map(|Carried { tensor, first, length }| {
            let offset = layout.offset(tensor) + first;
            let (source, source_offset) = source(tensor, offset);
            let destination_offset = base + offset;
            Page { source, source_offset, destination: remote, destination_offset, length }
        });
        let [headers, payloads, _] = self.counters;
        let (peer, round) = (self.peer.rank, u64::from(slot));
        if self.is_whole {
            // An answer follows its header in the outgoing slot: both are one page.
            return requests.write_with(peer, headers, round, TAG, |list| {
                list.push_merged(first);
                pages.for_each(|page| list.push_merged(page));
            });
        }
        let lengths = carried(header, layout, streamed).map(|carried| carried.length);
        if fit_beside(self.parts, layout, lengths) {
            requests.write(peer, headers, round, std::iter::once(first).chain(pages), TAG);
        } else {
            requests.write(peer, payloads, round, pages, TAG);
            requests.write(peer, headers, round, [first], TAG);
        }
    }

    /// Tensor sources in an outgoing slot, for [`Connection::send`].
    #[inline]
    pub(crate) fn outgoing_source(
        &self,
        slot: u32,
    ) -> impl Fn(usize, u64) -> (RegionKey, u64) + use<> {
        let (key, begin) = (self.outgoing.key(), self.outgoing.offset(slot, 0));
        move |_, offset| (key, begin + offset)
    }

    /// Confirms the answer part in a slot: the node may write the next one.
    pub(crate) fn confirm_part(&self, slot: u32, requests: &mut Requests) {
        let round = u64::from(self.agreement.slots) + u64::from(slot);
        requests.write(self.peer.rank, self.counters[2], round, [], TAG);
    }

    /// Cancels the query in a slot.
    pub(crate) fn cancel(&self, slot: u32, requests: &mut Requests) {
        requests.write(self.peer.rank, self.counters[2], slot.into(), [], TAG);
    }

    /// Announces that this node wants to leave.
    pub(crate) fn announce_departure(&self, requests: &mut Requests) {
        requests.write(self.peer.rank, self.counters[2], LEAVING, [], TAG);
    }

    /// Releases memory and counters after the connection was poisoned or is idle.
    ///
    /// # Errors
    /// [`Error::Fabric`] if the counters were released before.
    pub fn release(self, engine: &mut Engine) -> Result<()> {
        engine.release(self.incoming.region());
        engine.release(self.outgoing.region());
        for counter in self.counters {
            engine.release_counter(counter)?;
        }
        Ok(())
    }
}

/// Bytes in all slots at one end.
fn slot_bytes(agreement: &Agreement, role: Role) -> u64 {
    let (queries, answers) = (agreement.queries(), agreement.answers());
    let slot = match role {
        Role::FrontEnd => answers.stride().saturating_add(queries.header_bytes()),
        Role::Accelerator => queries.stride().saturating_add(answers.stride()),
    };
    slot.saturating_mul(agreement.slots.into())
}

/// Counter error, which names the configuration with enough lanes.
fn name_lanes(error: weft_fabric::Error, agreement: &Agreement) -> Error {
    let weft_fabric::Error::Limit { limit, .. } = error else { return error.into() };
    let (name, slots) = (&agreement.name, agreement.slots);
    let (answers, config) = match agreement.has_stream() {
        true => ("answers in tokens", "streaming_engine_config"),
        false => ("whole answers", "engine_config"),
    };
    let detail = format!(
        "node {name} has {answers} and {slots} slots, which need more lanes than the {limit} of the pair's engine; \
         configure the engine by Connection::{config}({slots})"
    );
    Error::Disagreement { detail }
}

/// Tensor bytes that a write carries beside the header.
#[derive(Clone, Copy, Debug)]
struct Carried {
    tensor: usize,
    first: u64,
    length: u64,
}

/// Bytes that a header write carries, where `streamed` token bytes were written before.
#[inline]
fn carried<'a>(
    header: &Fields<'a>,
    layout: &Layout,
    streamed: u64,
) -> impl Iterator<Item = Carried> + Clone + use<'a> {
    let (stream, is_part) = (layout.stream(), header.is_part);
    header.lengths.iter().enumerate().map(move |(place, length)| {
        let tensor = stream.filter(|_| is_part).unwrap_or(place);
        let first = if Some(tensor) == stream { streamed } else { 0 };
        Carried { tensor, first, length: length - first }
    })
}

/// Checks the tokens in a part or an answer after `streamed` bytes.
#[inline]
fn check_tokens(header: &Fields<'_>, layout: &Layout, streamed: u64) -> Result<()> {
    let Some(stream) = layout.stream() else { return Ok(()) };
    let place = if header.is_part { 0 } else { stream };
    let Some(&bytes) = header.lengths.get(place) else { return Ok(()) };
    if bytes < streamed || header.is_part && bytes == streamed {
        let token = layout.token_bytes().max(1);
        let detail = format!("{} after {} in earlier parts", bytes / token, streamed / token);
        return Err(Error::Malformed { what: "tokens of an answer", detail });
    }
    Ok(())
}

/// True if header and tensors are one write, because the header by itself has as many parts.
fn fit_beside(
    parts: PartRule,
    layout: &Layout,
    lengths: impl Iterator<Item = u64> + Clone,
) -> bool {
    let header = layout.header_bytes();
    let lengths = lengths.filter(|length| *length > 0);
    parts.count(std::iter::once(header).chain(lengths)) == parts.count([header])
}

/// Meaning of a raised lane. Counts are totals.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Raise {
    Header {
        slot: u32,
        count: u64,
    },
    Payload {
        slot: u32,
        count: u64,
    },
    Cancel {
        slot: u32,
        count: u64,
    },
    /// Answer part that the front end has taken.
    Confirmation {
        slot: u32,
        count: u64,
    },
}
