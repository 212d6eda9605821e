//! The engine: from one instant to the next.

use crate::calendar::Calendar;
use crate::error::{Error, Result};
use crate::job::{Jobs, Phase};
use crate::network::{Joined, Links, Paths};
use crate::solver::Solver;
use crate::types::{Event, FlowHandle, Link, LinkId, LinkUsage, NONE, PathId, ServerId, Tag};

/// So many instants at one time are taken for time that has stopped.
const MOST_INSTANTS: u64 = 1 << 20;
/// And so are so many ends at one time.
const MOST_ENDS: u64 = 1 << 28;

/// A network and what is under way on it. See the [crate] for an example.
#[derive(Clone, Debug)]
pub struct Engine {
    now: f64,
    links: Links,
    paths: Paths,
    jobs: Jobs,
    calendar: Calendar,
    solver: Solver,
    /// When each server has done all that it was given.
    servers: Vec<f64>,
    /// What has changed since the rates were solved: flows that began to move, links that flows have
    /// left (or have left several times), and links of another bandwidth.
    arrived: Vec<u32>,
    touched: Vec<u32>,
    changed: Vec<u32>,
    instant: Vec<u32>,
    /// Flows that begin to move, while their rates are settled.
    joined: Vec<(u32, Joined)>,
    /// How many instants and ends there were at this time.
    instants: u64,
    ends: u64,
    /// What keeps the simulation from going on for good.
    fault: Option<Error>,
}

impl Engine {
    /// A network of these links, at time 0, with nothing on it.
    ///
    /// # Errors
    /// A bandwidth is not finite and greater than zero, a latency not finite and zero or more.
    pub fn new(links: &[Link]) -> Result<Engine> {
        Ok(Engine {
            now: 0.0,
            links: Links::new(links)?,
            paths: Paths::default(),
            jobs: Jobs::default(),
            calendar: Calendar::new(),
            solver: Solver::default(),
            servers: Vec::new(),
            arrived: Vec::new(),
            joined: Vec::new(),
            touched: Vec::new(),
            changed: Vec::new(),
            instant: Vec::new(),
            instants: 0,
            ends: 0,
            fault: None,
        })
    }

    /// A path over these links, in this order; none means a copy on one host, which takes no time. The
    /// same path again has the same number.
    ///
    /// # Errors
    /// There is no such link, or one comes twice.
    pub fn add_path(&mut self, links: &[LinkId]) -> Result<PathId> {
        let jobs = &self.jobs;
        let moving = || jobs.moving().map(|(flow, job)| (flow, job.path)).collect();
        self.paths.add(&mut self.links, links, moving, jobs.capacity() as u64)
    }

    /// A server that takes work first in, first out: a NIC's posting, a GPU's stream, a memory.
    pub fn add_server(&mut self) -> ServerId {
        self.servers.push(0.0);
        ServerId((self.servers.len() - 1) as u32)
    }

    /// The virtual time, in seconds.
    pub fn now(&self) -> f64 {
        self.now
    }

    /// How many flows, services and timers are under way.
    pub fn under_way(&self) -> usize {
        self.jobs.len()
    }

    /// How many slots there are for them: the most that were under way at one time.
    pub fn slots(&self) -> usize {
        self.jobs.capacity()
    }

    /// Sends `bytes` along a path: spends `delay` seconds and the latencies of the path's links, then
    /// shares their bandwidth. Without bytes, or over no link, it has arrived after `delay` and latency.
    ///
    /// # Errors
    /// There is no such path, or `delay` is not finite and zero or more.
    #[inline]
    pub fn start_flow(
        &mut self,
        path: PathId,
        bytes: u64,
        delay: f64,
        tag: Tag,
    ) -> Result<FlowHandle> {
        let (latency, moves) = self.paths.latency(path)?;
        check_duration("delay", delay, tag)?;
        self.start(self.now + (delay + latency), path, moves, bytes, tag)
    }

    /// The same, but first a server spends `service` seconds on it, after all that was given to the
    /// server before. Cancelling the flow does not give those seconds back.
    ///
    /// # Errors
    /// There is no such server or path, or a duration is not finite and zero or more.
    pub fn start_flow_after(
        &mut self,
        server: ServerId,
        service: f64,
        path: PathId,
        bytes: u64,
        delay: f64,
        tag: Tag,
    ) -> Result<FlowHandle> {
        let (latency, moves) = self.paths.latency(path)?;
        check_duration("delay", delay, tag)?;
        let done = self.service_end(server, service, tag)?;
        let handle = self.start(done + (delay + latency), path, moves, bytes, tag)?;
        self.servers[server.0 as usize] = done;
        Ok(handle)
    }

    /// An event once a server has spent `service` seconds on it, after all that was given to it before.
    ///
    /// # Errors
    /// There is no such server, or `service` is not finite and zero or more.
    pub fn serve(&mut self, server: ServerId, service: f64, tag: Tag) -> Result<()> {
        let done = self.service_end(server, service, tag)?;
        self.add_job(Phase::Timer, NONE, 0.0, done, tag)?;
        self.servers[server.0 as usize] = done;
        Ok(())
    }

    /// An event in `after` seconds.
    ///
    /// # Errors
    /// `after` is not finite and zero or more.
    pub fn timer(&mut self, after: f64, tag: Tag) -> Result<()> {
        check_duration("time", after, tag)?;
        self.add_job(Phase::Timer, NONE, 0.0, self.now + after, tag)?;
        Ok(())
    }

    /// Forgets a flow; there will be no event. The bytes that it has moved stay counted. Nothing
    /// happens if it has ended.
    pub fn cancel(&mut self, flow: FlowHandle) {
        let Some(job) = self.jobs.slots.get(flow.slot as usize) else { return };
        if job.generation != flow.generation || job.phase == Phase::Free {
            return;
        }
        let moved = job.bytes - job.left(self.now);
        if job.phase == Phase::Moving {
            let path = self.paths.links(job.path);
            self.links.leave(flow.slot, path, self.now, moved, &mut self.touched);
        }
        self.calendar.remove(flow.slot);
        self.jobs.remove(flow.slot);
    }

    /// Gives a link another bandwidth from now on; 0 means that it has failed.
    ///
    /// # Errors
    /// There is no such link, or the bandwidth is not finite and zero or more.
    pub fn set_bandwidth(&mut self, link: LinkId, bandwidth: f64) -> Result<()> {
        let index = self.links.check(link)?;
        if !(bandwidth.is_finite() && bandwidth >= 0.0) {
            return Err(Error::Bandwidth { link, bandwidth });
        }
        self.links.state[index].bandwidth = bandwidth;
        self.changed.push(link.0);
        Ok(())
    }

    /// Moves on to the next instant at which something ends, appends all that ends there, and gives its
    /// time; `None` when nothing is left. What ends at one instant comes in an order that depends only on
    /// the calls made so far.
    ///
    /// # Errors
    /// Flows are left that can never end ([`Error::Stalled`]; mending the link and calling again goes
    /// on), something would end at no finite time, or time does not go on.
    pub fn next(&mut self, events: &mut Vec<Event>) -> Result<Option<f64>> {
        let before = events.len();
        while let Some(time) = self.instant_to_come()? {
            self.take_instant(time, events)?;
            if events.len() > before {
                return Ok(Some(self.now));
            }
        }
        match self.jobs.len() {
            0 => Ok(None),
            _ => Err(self.stalled()),
        }
    }

    /// A time before which nothing ends unless something is started: the next instant at which
    /// something ends or begins to move. `None` if nothing is left that will ever end.
    pub fn next_time(&mut self) -> Option<f64> {
        self.instant_to_come().ok().flatten().map(|time| time.max(self.now))
    }

    /// Moves on to `to`, and appends all that ends until then, that instant included.
    ///
    /// # Errors
    /// `to` is over or not finite; and as [`Engine::next`], but stalled flows are no error.
    pub fn advance(&mut self, to: f64, events: &mut Vec<Event>) -> Result<()> {
        if !(to >= self.now && to.is_finite()) {
            return Err(Error::Past { now: self.now, to });
        }
        while let Some(time) = self.instant_to_come()?.filter(|&time| time <= to) {
            self.take_instant(time, events)?;
        }
        if to > self.now {
            self.go_to(to);
        }
        Ok(())
    }

    /// What a link has done so far; nothing if there is no such link.
    pub fn link_usage(&self, link: LinkId) -> LinkUsage {
        let Ok(index) = self.links.check(link) else { return LinkUsage::default() };
        let mut usage = self.links.usage(index, self.now);
        for flow in self.links.flows(link.0) {
            let job = &self.jobs.slots[flow as usize];
            usage.bytes += job.bytes - job.left(self.now);
        }
        usage
    }

    /// The rate of a flow from now on, in bytes/s: 0 while it waits, for its latency or on a failed
    /// link; `None` if it has ended.
    pub fn rate(&mut self, flow: FlowHandle) -> Option<f64> {
        self.settle();
        let job = self.jobs.slots.get(flow.slot as usize)?;
        (job.generation == flow.generation && job.phase != Phase::Free).then_some(job.rate)
    }

    /// When a server would be done with a service that it is given now.
    fn service_end(&self, server: ServerId, service: f64, tag: Tag) -> Result<f64> {
        check_duration("service", service, tag)?;
        match self.servers.get(server.0 as usize) {
            Some(free) => Ok(free.max(self.now) + service),
            None => {
                let servers = self.servers.len() as u32;
                Err(Error::UnknownServer { server: server.0, servers })
            }
        }
    }

    /// Starts a flow that at `time` `moves` on its links, if it has bytes, or has arrived.
    #[inline]
    fn start(
        &mut self,
        time: f64,
        path: PathId,
        moves: bool,
        bytes: u64,
        tag: Tag,
    ) -> Result<FlowHandle> {
        let phase = if moves && bytes > 0 { Phase::Latency } else { Phase::Timer };
        let slot = self.add_job(phase, path.0, bytes as f64, time, tag)?;
        Ok(FlowHandle { slot, generation: self.jobs.slots[slot as usize].generation })
    }

    #[inline]
    fn add_job(&mut self, phase: Phase, path: u32, bytes: f64, time: f64, tag: Tag) -> Result<u32> {
        if !time.is_finite() {
            return Err(Error::Time { tag, time });
        }
        let slot = self.jobs.add(phase, path, bytes, tag, self.links.most_flows())?;
        self.calendar.insert(slot, time);
        Ok(slot)
    }

    /// The time of the next instant. Rates are solved before time goes on, once for all that has
    /// changed at this instant.
    #[inline]
    fn instant_to_come(&mut self) -> Result<Option<f64>> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        if let Some(time) = self.calendar.next_time()
            && time <= self.now
        {
            return Ok(Some(time));
        }
        self.settle();
        match &self.fault {
            Some(fault) => Err(fault.clone()),
            None => Ok(self.calendar.next_time()),
        }
    }

    fn go_to(&mut self, time: f64) {
        self.now = time;
        (self.instants, self.ends) = (0, 0);
    }

    /// Lets everything happen that is down for the next instant, which is at `time`.
    fn take_instant(&mut self, time: f64, events: &mut Vec<Event>) -> Result<()> {
        if time > self.now {
            self.go_to(time);
        }
        let mut instant = std::mem::take(&mut self.instant);
        self.calendar.take_instant(&mut instant);
        for &slot in &instant {
            let job = &mut self.jobs.slots[slot as usize];
            if job.phase == Phase::Latency {
                job.phase = Phase::Arrived;
                self.arrived.push(slot);
                continue;
            }
            if job.phase == Phase::Moving {
                let path = self.paths.links(job.path);
                self.links.leave(slot, path, self.now, job.bytes, &mut self.touched);
            }
            events.push(Event { tag: job.tag });
            self.jobs.remove(slot);
        }
        self.instants += 1;
        self.ends += instant.len() as u64;
        let last = instant.last().copied();
        instant.clear();
        self.instant = instant;
        if let Some(last) = last
            && (self.instants > MOST_INSTANTS || self.ends > MOST_ENDS)
        {
            let tag = self.jobs.slots[last as usize].tag;
            let stuck = Error::NoProgress { time: self.now, instants: self.instants, tag };
            self.fault = Some(stuck.clone());
            return Err(stuck);
        }
        Ok(())
    }

    /// Gives all flows that move the rates that are due to them from now on.
    fn settle(&mut self) {
        if self.arrived.is_empty() && self.touched.is_empty() && self.changed.is_empty() {
            return;
        }
        self.solver.begin(&mut self.links, &mut self.jobs);
        let mut joined = std::mem::take(&mut self.joined);
        for slot in self.arrived.drain(..) {
            let job = &mut self.jobs.slots[slot as usize];
            // Else it was cancelled; the slot may have another flow by now.
            if job.phase == Phase::Arrived {
                job.phase = Phase::Moving;
                let path = self.paths.links(job.path);
                joined.push((slot, self.links.join(slot, path, self.now)));
            }
        }
        // Where nobody has met anybody, links need not be looked at again.
        let met = joined.iter().any(|(_, joined)| joined.meets);
        for (slot, alone) in joined.drain(..) {
            if met && self.is_shared(slot) {
                self.settle_shared(slot);
            } else {
                self.set_off(slot, alone);
            }
        }
        self.joined = joined;
        for link in self.touched.drain(..) {
            self.links.state[link as usize].touched = false;
            self.solver.add_flows(link, false, &self.links, &mut self.jobs);
        }
        for link in self.changed.drain(..) {
            self.solver.add_flows(link, true, &self.links, &mut self.jobs);
        }
        if self.solver.flows.is_empty() {
            return;
        }
        self.solver.solve(&mut self.links, &self.paths, &mut self.jobs);
        for index in 0..self.solver.flows.len() {
            let (slot, old) = self.solver.flows[index];
            self.set_rate(slot, old);
        }
    }

    /// Whether anybody else is on a flow's links.
    #[inline]
    fn is_shared(&self, slot: u32) -> bool {
        let path = self.paths.links(self.jobs.slots[slot as usize].path);
        path.iter().any(|&link| self.links.state[link as usize].flows > 1)
    }

    /// A flow that has begun to move where nobody else is.
    #[inline]
    fn set_off(&mut self, slot: u32, alone: Joined) {
        let job = &mut self.jobs.slots[slot as usize];
        job.bottleneck = alone.bottleneck;
        if alone.rate > 0.0 {
            (job.rate, job.since) = (alone.rate, self.now);
            self.plan_end(slot);
        }
    }

    /// A flow that has begun to move where others are is one for the solver.
    fn settle_shared(&mut self, slot: u32) {
        let job = &mut self.jobs.slots[slot as usize];
        self.solver.add(slot, job);
        for &link in self.paths.links(job.path) {
            if self.links.state[link as usize].flows > 1 {
                self.solver.add_rivals(link, &mut self.links, &mut self.jobs);
            }
        }
    }

    /// A flow that had the rate `old` has its job's rate from now on.
    #[inline]
    fn set_rate(&mut self, slot: u32, old: f64) {
        let now = self.now;
        let job = &mut self.jobs.slots[slot as usize];
        if job.rate == old {
            return;
        }
        let rate = std::mem::replace(&mut job.rate, old);
        (job.remaining, job.since, job.rate) = (job.left(now), now, rate);
        self.calendar.remove(slot);
        if job.rate > 0.0 {
            self.plan_end(slot);
        }
    }

    /// Puts a flow whose rate is known from now on down for its end.
    #[inline]
    fn plan_end(&mut self, slot: u32) {
        let job = &self.jobs.slots[slot as usize];
        let time = self.now + job.remaining / job.rate;
        if time.is_finite() {
            self.calendar.insert(slot, time);
        } else {
            self.fault.get_or_insert(Error::Time { tag: job.tag, time });
        }
    }

    /// Why nothing goes on though flows are left.
    fn stalled(&self) -> Error {
        let mut waiting = self.jobs.moving();
        let first = waiting.next();
        let flows = waiting.count() as u32 + 1;
        let (tag, link) = first.map_or((Tag(0), NONE), |(_, job)| (job.tag, job.bottleneck));
        Error::Stalled { tag, link: LinkId(link), flows, time: self.now }
    }
}

fn check_duration(what: &'static str, seconds: f64, tag: Tag) -> Result<()> {
    if seconds.is_finite() && seconds >= 0.0 {
        return Ok(());
    }
    Err(Error::Duration { what, tag, seconds })
}
