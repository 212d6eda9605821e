//! Engine: flows, services and timers, from one instant to the next.

use crate::calendar::Calendar;
use crate::error::{Error, Result};
use crate::job::{Jobs, Phase};
use crate::network::{Links, Paths, UncontendedRate};
use crate::solver::Solver;
use crate::types::{Event, FlowHandle, Link, LinkId, LinkUsage, NONE, PathId, ServerId, Tag};

/// Maximum instants at one time; more are [`Error::NoProgress`].
const MAX_INSTANTS: u64 = 1 << 20;
/// Maximum ended jobs at one time; more are [`Error::NoProgress`].
const MAX_ENDS: u64 = 1 << 28;

/// A network with jobs in flight. See the [crate] for an example.
#[derive(Clone, Debug)]
pub struct Engine {
    now: f64,
    links: Links,
    paths: Paths,
    jobs: Jobs,
    calendar: Calendar,
    solver: Solver,
    /// Time at which each server becomes idle.
    servers: Vec<f64>,
    /// Changes since rates were last solved: flows that start to move, links that flows have left (possibly
    /// repeated), and links with a new bandwidth.
    arrived: Vec<u32>,
    touched: Vec<u32>,
    changed: Vec<u32>,
    instant: Vec<u32>,
    /// Flows that start to move, while rates are solved.
    joined: Vec<(u32, UncontendedRate)>,
    /// Instants and ended jobs at the present time.
    instants: u64,
    ends: u64,
    /// Fatal error, returned by all later calls.
    fatal: Option<Error>,
}

impl Engine {
    /// Network with these links at time 0, without jobs.
    ///
    /// # Errors
    /// [`Error::Bandwidth`], [`Error::Latency`], [`Error::TooMany`].
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
            fatal: None,
        })
    }

    /// Adds a path over these links, in order, or returns an equal path's number. A path without links is a copy within
    /// a host, with no duration.
    ///
    /// # Errors
    /// [`Error::UnknownLink`], [`Error::Loop`].
    pub fn add_path(&mut self, links: &[LinkId]) -> Result<PathId> {
        let jobs = &self.jobs;
        let moving = || jobs.moving().map(|(flow, job)| (flow, job.path)).collect();
        self.paths.add(&mut self.links, links, moving, jobs.capacity() as u64)
    }

    /// Adds a first-in first-out server, for example a NIC that posts, a GPU stream, a memory.
    pub fn add_server(&mut self) -> ServerId {
        self.servers.push(0.0);
        ServerId((self.servers.len() - 1) as u32)
    }

    /// The virtual time, in seconds.
    pub fn now(&self) -> f64 {
        self.now
    }

    /// Number of flows, services and timers in flight.
    pub fn in_flight(&self) -> usize {
        self.jobs.len()
    }

    /// Job slot count: the maximum that were in flight at one time.
    pub fn slots(&self) -> usize {
        self.jobs.capacity()
    }

    /// Starts a flow of `bytes` bytes along a path: it waits `delay` seconds and the link latencies, then shares the
    /// link bandwidth. Without bytes or links, it arrives after `delay` and latency.
    ///
    /// # Errors
    /// [`Error::UnknownPath`], [`Error::Duration`].
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

    /// Starts a flow behind a service that takes `service` seconds and queues at a server. Cancelling the flow does not
    /// cancel the service.
    ///
    /// # Errors
    /// [`Error::UnknownServer`], [`Error::UnknownPath`], [`Error::Duration`].
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

    /// Queues a service that takes `service` seconds at a server; its end is an event.
    ///
    /// # Errors
    /// [`Error::UnknownServer`], [`Error::Duration`].
    pub fn serve(&mut self, server: ServerId, service: f64, tag: Tag) -> Result<()> {
        let done = self.service_end(server, service, tag)?;
        self.add_job(Phase::Timer, NONE, 0.0, done, tag)?;
        self.servers[server.0 as usize] = done;
        Ok(())
    }

    /// Starts a timer that expires in `after` seconds.
    ///
    /// # Errors
    /// [`Error::Duration`].
    pub fn timer(&mut self, after: f64, tag: Tag) -> Result<()> {
        check_duration("time", after, tag)?;
        self.add_job(Phase::Timer, NONE, 0.0, self.now + after, tag)?;
        Ok(())
    }

    /// Cancels a flow without an event. Bytes already moved stay counted. No effect on a flow that has ended.
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

    /// Sets a link's bandwidth from now on; 0 is a failed link.
    ///
    /// # Errors
    /// [`Error::UnknownLink`], [`Error::Bandwidth`].
    pub fn set_bandwidth(&mut self, link: LinkId, bandwidth: f64) -> Result<()> {
        let index = self.links.check(link)?;
        if !(bandwidth.is_finite() && bandwidth >= 0.0) {
            return Err(Error::Bandwidth { link, bandwidth });
        }
        self.links.state[index].bandwidth = bandwidth;
        self.changed.push(link.0);
        Ok(())
    }

    /// Advances to the next instant with events, appends them to `events`, and returns the time; `None` without jobs in
    /// flight. The event order within one instant depends only on the call sequence.
    ///
    /// # Errors
    /// [`Error::Stalled`] if only stalled flows are left (recoverable: restore the link and call again);
    /// [`Error::Time`], [`Error::NoProgress`].
    pub fn next(&mut self, events: &mut Vec<Event>) -> Result<Option<f64>> {
        let before = events.len();
        while let Some(time) = self.next_instant()? {
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

    /// Lower bound on the next event's time, unless a job is started: the next instant at which a job ends or a flow
    /// starts to move. `None` without one.
    pub fn next_time(&mut self) -> Option<f64> {
        self.next_instant().ok().flatten().map(|time| time.max(self.now))
    }

    /// Advances to `to` and appends all events until then, inclusive.
    ///
    /// # Errors
    /// [`Error::Past`]; errors from [`Engine::next`] except [`Error::Stalled`].
    pub fn advance(&mut self, to: f64, events: &mut Vec<Event>) -> Result<()> {
        if !(to >= self.now && to.is_finite()) {
            return Err(Error::Past { now: self.now, to });
        }
        while let Some(time) = self.next_instant()?.filter(|&time| time <= to) {
            self.take_instant(time, events)?;
        }
        if to > self.now {
            self.set_time(to);
        }
        Ok(())
    }

    /// Link usage; zeros for an unknown link.
    pub fn link_usage(&self, link: LinkId) -> LinkUsage {
        let Ok(index) = self.links.check(link) else { return LinkUsage::default() };
        let mut usage = self.links.usage(index, self.now);
        for flow in self.links.flows(link.0) {
            let job = &self.jobs.slots[flow as usize];
            usage.bytes += job.bytes - job.left(self.now);
        }
        usage
    }

    /// A flow's rate from now on, in bytes/s: 0 during latency and on a failed link; `None` if it has ended.
    pub fn rate(&mut self, flow: FlowHandle) -> Option<f64> {
        self.solve_rates();
        let job = self.jobs.slots.get(flow.slot as usize)?;
        (job.generation == flow.generation && job.phase != Phase::Free).then_some(job.rate)
    }

    /// Time when a service queued now will end.
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

    /// Starts a flow that starts to move at `time` if it has links and bytes, else arrives then.
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

    /// Time of the next instant. Rates are solved before time advances, once for all changes in an instant.
    #[inline]
    fn next_instant(&mut self) -> Result<Option<f64>> {
        if let Some(fatal) = &self.fatal {
            return Err(fatal.clone());
        }
        if let Some(time) = self.calendar.next_time()
            && time <= self.now
        {
            return Ok(Some(time));
        }
        self.solve_rates();
        match &self.fatal {
            Some(fatal) => Err(fatal.clone()),
            None => Ok(self.calendar.next_time()),
        }
    }

    fn set_time(&mut self, time: f64) {
        self.now = time;
        (self.instants, self.ends) = (0, 0);
    }

    /// Processes all jobs at the next instant, at `time`.
    fn take_instant(&mut self, time: f64, events: &mut Vec<Event>) -> Result<()> {
        if time > self.now {
            self.set_time(time);
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
            && (self.instants > MAX_INSTANTS || self.ends > MAX_ENDS)
        {
            let tag = self.jobs.slots[last as usize].tag;
            let stuck = Error::NoProgress { time: self.now, instants: self.instants, tag };
            self.fatal = Some(stuck.clone());
            return Err(stuck);
        }
        Ok(())
    }

    /// Solves the rates for all moving flows from now on.
    fn solve_rates(&mut self) {
        if self.arrived.is_empty() && self.touched.is_empty() && self.changed.is_empty() {
            return;
        }
        self.solver.begin(&mut self.links, &mut self.jobs);
        let mut joined = std::mem::take(&mut self.joined);
        for slot in self.arrived.drain(..) {
            let job = &mut self.jobs.slots[slot as usize];
            // Otherwise it was cancelled, and the slot may have another flow.
            if job.phase == Phase::Arrived {
                job.phase = Phase::Moving;
                let path = self.paths.links(job.path);
                joined.push((slot, self.links.join(slot, path, self.now)));
            }
        }
        // Without contention, links are not visited again.
        let contended = joined.iter().any(|(_, joined)| joined.contended);
        for (slot, alone) in joined.drain(..) {
            if contended && self.is_shared(slot) {
                self.add_contended(slot);
            } else {
                self.start_alone(slot, alone);
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

    /// True if another flow shares a link with the flow.
    #[inline]
    fn is_shared(&self, slot: u32) -> bool {
        let path = self.paths.links(self.jobs.slots[slot as usize].path);
        path.iter().any(|&link| self.links.state[link as usize].flows > 1)
    }

    /// Sets the rate for a flow that shares no link.
    #[inline]
    fn start_alone(&mut self, slot: u32, alone: UncontendedRate) {
        let job = &mut self.jobs.slots[slot as usize];
        job.bottleneck = alone.bottleneck;
        if alone.rate > 0.0 {
            (job.rate, job.since) = (alone.rate, self.now);
            self.schedule_end(slot);
        }
    }

    /// Adds a flow that shares links, with the rivals, to the solver.
    fn add_contended(&mut self, slot: u32) {
        let job = &mut self.jobs.slots[slot as usize];
        self.solver.add(slot, job);
        for &link in self.paths.links(job.path) {
            if self.links.state[link as usize].flows > 1 {
                self.solver.add_rivals(link, &mut self.links, &mut self.jobs);
            }
        }
    }

    /// Switches a flow from the rate `old` to its job's rate.
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
            self.schedule_end(slot);
        }
    }

    /// Schedules a flow's end by the flow rate.
    #[inline]
    fn schedule_end(&mut self, slot: u32) {
        let job = &self.jobs.slots[slot as usize];
        let time = self.now + job.remaining / job.rate;
        if time.is_finite() {
            self.calendar.insert(slot, time);
        } else {
            self.fatal.get_or_insert(Error::Time { tag: job.tag, time });
        }
    }

    /// Error for stalled flows.
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
