//! Network model for the fabric's simulator: real drivers in a topology's virtual time.
//!
//! The fabric counts whole nanoseconds from an arbitrary origin, the engine seconds as `f64` from 0. One
//! pair of instants ties both clocks; it is set anew whenever the wire is idle. So the engine's clock
//! stands while the wire is idle, and a fabric that has run for years keeps the precision. Arrivals are
//! rounded up to whole nanoseconds. Roundings do not accumulate: each event is computed from the engine's
//! own time.

use std::cell::RefCell;
use std::collections::BTreeMap;

use weft_fabric::{FlowId, NetworkModel, Rank, Time};
use weft_netsim::{Engine, Event, FlowHandle, Link, LinkId, LinkUsage, PathId, ServerId, Tag};
use weft_topology::{EndpointId, Network, Router};

use crate::check::at_least_0;
use crate::error::Error;

/// Fraction of a nanosecond that counts as `f64` rounding.
const ROUNDING_NS: f64 = 1e-3;
/// Further time rounding, in units in the last place.
const ROUNDING_ULPS: f64 = 8.0;
/// Time for which the engine's clock follows an idle fabric, so that the servers finish.
const IDLE_S: f64 = 1.0;

/// Message costs beside the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MessageCosts {
    /// Time for which posting one part occupies the sender's NIC; parts from one rank queue.
    pub post_s: f64,
    /// Time per part beyond link latency and byte transfer.
    pub latency_s: f64,
}

/// [`NetworkModel`] on a [`Network`]: parts share links max-min fairly, on one routed path for each rank pair.
pub struct SimulatedNetwork {
    // `next_event` takes `&self`, and the engine solves the rates when a time is requested.
    state: RefCell<State>,
}

struct State {
    engine: Engine,
    ranks: usize,
    /// Indexed by `from * ranks + to`.
    paths: Vec<PathId>,
    nics: Vec<ServerId>,
    costs: MessageCosts,
    /// Fabric instant at the engine's time `origin_s`.
    origin: Time,
    origin_s: f64,
    flows: BTreeMap<FlowId, FlowHandle>,
    events: Vec<Event>,
    /// Arrivals not yet returned by `advance`.
    arrived: Vec<(Time, FlowId)>,
    /// Next engine event, cached until a change.
    due: Option<Option<Time>>,
}

impl SimulatedNetwork {
    /// Model for ranks with NICs at the endpoints `places[rank]`. Ranks on one endpoint share no link. All paths are
    /// routed here, so that the constructor reports an unreachable pair.
    ///
    /// # Errors
    /// Router errors, which name both ends; [`Error::Field`] for invalid costs.
    pub fn new(
        network: &Network,
        router: &mut Router,
        places: &[EndpointId],
        costs: MessageCosts,
    ) -> Result<SimulatedNetwork, Error> {
        for (field, value) in [("post_s", costs.post_s), ("latency_s", costs.latency_s)] {
            at_least_0(field, value)?;
        }
        let links: Vec<Link> = network
            .links()
            .iter()
            .map(|link| Link { bandwidth: link.bandwidth, latency: link.latency })
            .collect();
        let mut engine = Engine::new(&links)?;
        let mut paths = Vec::with_capacity(places.len() * places.len());
        let (mut route, mut on_engine) = (Vec::new(), Vec::new());
        for (from, &source) in places.iter().enumerate() {
            for (to, &destination) in places.iter().enumerate() {
                route.clear();
                if source != destination {
                    // One connection for each pair, as input to the ECMP hash.
                    let connection = (from * places.len() + to) as u64;
                    router.path(source, destination, connection, &mut route)?;
                }
                on_engine.clear();
                on_engine.extend(route.iter().map(|link| LinkId(link.0)));
                paths.push(engine.add_path(&on_engine)?);
            }
        }
        let nics = places.iter().map(|_| engine.add_server()).collect();
        let state = State {
            engine,
            ranks: places.len(),
            paths,
            nics,
            costs,
            origin: Time(0),
            origin_s: 0.0,
            flows: BTreeMap::new(),
            events: Vec::new(),
            arrived: Vec::new(),
            due: None,
        };
        Ok(SimulatedNetwork { state: RefCell::new(state) })
    }

    /// Traffic on a link so far.
    pub fn link_usage(&self, link: weft_topology::LinkId) -> LinkUsage {
        self.state.borrow().engine.link_usage(LinkId(link.0))
    }
}

impl State {
    /// Engine time at the fabric's `time`.
    fn seconds(&self, time: Time) -> f64 {
        self.origin_s + time.since(self.origin).as_secs_f64()
    }

    /// First fabric instant at or after the engine's `seconds`.
    fn instant(&self, seconds: f64) -> Time {
        let rounding = ROUNDING_NS.max(seconds * 1e9 * f64::EPSILON * ROUNDING_ULPS);
        let nanoseconds = ((seconds - self.origin_s) * 1e9 - rounding).ceil().max(0.0);
        // The cast saturates.
        Time(self.origin.0.saturating_add(nanoseconds as u64))
    }

    /// Advances the engine to `to` and collects the arrivals.
    fn follow(&mut self, to: Time) {
        self.due = None;
        while let Some(seconds) = self.engine.next_time() {
            let at = self.instant(seconds);
            if at > to {
                break;
            }
            // The engine's exact time may be slightly after the whole nanosecond.
            self.move_engine(seconds.max(self.engine.now()), at);
        }
        let end = self.seconds(to);
        if end > self.engine.now() {
            self.move_engine(end, to);
        }
    }

    fn move_engine(&mut self, seconds: f64, at: Time) {
        self.events.clear();
        // The constructor has checked all inputs; a flow without an end shows as a deadlock in the world.
        let _ = self.engine.advance(seconds, &mut self.events);
        for event in &self.events {
            let flow = FlowId(event.tag.0);
            if self.flows.remove(&flow).is_some() {
                self.arrived.push((at, flow));
            }
        }
    }

    fn start(&mut self, now: Time, flow: FlowId, from: Rank, to: Rank, bytes: u64) {
        if self.flows.is_empty() && self.arrived.is_empty() {
            let idle = (self.seconds(now) - self.engine.now()).clamp(0.0, IDLE_S);
            self.move_engine(self.engine.now() + idle, now);
            (self.origin, self.origin_s) = (now, self.engine.now());
        } else {
            self.follow(now);
        }
        self.due = None;
        let (from, to) = (from.0 as usize, to.0 as usize);
        let path = self.paths[from * self.ranks + to];
        let delay = self.costs.latency_s;
        let started = if self.costs.post_s > 0.0 {
            let (nic, post) = (self.nics[from], self.costs.post_s);
            self.engine.start_flow_after(nic, post, path, bytes, delay, Tag(flow.0))
        } else {
            self.engine.start_flow(path, bytes, delay, Tag(flow.0))
        };
        if let Ok(handle) = started {
            self.flows.insert(flow, handle);
        }
    }

    fn next_event(&mut self) -> Option<Time> {
        if let Some((at, _)) = self.arrived.first() {
            return Some(*at);
        }
        if let Some(due) = self.due {
            return due;
        }
        let next = if self.flows.is_empty() { None } else { self.engine.next_time() };
        let due = next.map(|seconds| self.instant(seconds));
        self.due = Some(due);
        due
    }

    fn advance(&mut self, to: Time, finished: &mut Vec<FlowId>) {
        self.follow(to);
        finished.extend(self.arrived.drain(..).map(|(_, flow)| flow));
    }
}

impl NetworkModel for SimulatedNetwork {
    fn start(&mut self, now: Time, flow: FlowId, from: Rank, to: Rank, bytes: u64) {
        self.state.get_mut().start(now, flow, from, to, bytes);
    }

    fn next_event(&self) -> Option<Time> {
        self.state.borrow_mut().next_event()
    }

    fn advance(&mut self, to: Time, finished: &mut Vec<FlowId>) {
        self.state.get_mut().advance(to, finished);
    }

    fn cancel(&mut self, flow: FlowId) {
        let state = self.state.get_mut();
        if let Some(handle) = state.flows.remove(&flow) {
            state.engine.cancel(handle);
            state.due = None;
        }
        state.arrived.retain(|(_, arrived)| *arrived != flow);
    }
}
