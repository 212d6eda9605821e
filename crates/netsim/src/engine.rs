//! The engine.

use crate::error::Result;
use crate::types::{Event, FlowHandle, Link, LinkId, LinkUsage, PathId, ServerId, Tag};

/// A network and what is under way on it. See the [crate] for an example.
#[derive(Clone, Debug)]
pub struct Engine {
    now: f64,
}

impl Engine {
    /// A network of these links, at time 0, with nothing on it.
    pub fn new(_links: &[Link]) -> Result<Engine> {
        Ok(Engine { now: 0.0 })
    }

    /// A path over these links, in this order; none means a copy on one host, which takes no time. The
    /// same path again has the same number.
    pub fn add_path(&mut self, _links: &[LinkId]) -> Result<PathId> {
        unimplemented!()
    }

    /// A server that takes work first in, first out: a NIC's posting, a GPU's stream, a memory.
    pub fn add_server(&mut self) -> ServerId {
        unimplemented!()
    }

    /// The virtual time, in seconds.
    pub fn now(&self) -> f64 {
        self.now
    }

    /// Sends `bytes` along a path: spends `delay` seconds and the path's latency, then shares bandwidth.
    pub fn start_flow(
        &mut self,
        _path: PathId,
        _bytes: u64,
        _delay: f64,
        _tag: Tag,
    ) -> Result<FlowHandle> {
        unimplemented!()
    }

    /// The same once a server has spent `service` seconds on it, after all that was given to the server before.
    pub fn start_flow_after(
        &mut self,
        _server: ServerId,
        _service: f64,
        _path: PathId,
        _bytes: u64,
        _delay: f64,
        _tag: Tag,
    ) -> Result<FlowHandle> {
        unimplemented!()
    }

    /// An event once a server has spent `service` seconds on it, after all that was given to it before.
    pub fn serve(&mut self, _server: ServerId, _service: f64, _tag: Tag) -> Result<()> {
        unimplemented!()
    }

    /// An event in `after` seconds.
    pub fn timer(&mut self, _after: f64, _tag: Tag) -> Result<()> {
        unimplemented!()
    }

    /// Forgets a flow; there will be no event. Nothing happens if it has ended.
    pub fn cancel(&mut self, _flow: FlowHandle) {
        unimplemented!()
    }

    /// Gives a link another bandwidth from now on; 0 means that it has failed.
    pub fn set_bandwidth(&mut self, _link: LinkId, _bandwidth: f64) -> Result<()> {
        unimplemented!()
    }

    /// Moves on to the next instant at which something ends, appends all that ends there, and gives its
    /// time; `None` when nothing is left.
    pub fn next(&mut self, _events: &mut Vec<Event>) -> Result<Option<f64>> {
        unimplemented!()
    }

    /// A time before which nothing ends unless something is started; `None` if nothing will ever end.
    pub fn next_time(&mut self) -> Option<f64> {
        unimplemented!()
    }

    /// Moves on to `to`, and appends all that ends until then, that instant included.
    pub fn advance(&mut self, _to: f64, _events: &mut Vec<Event>) -> Result<()> {
        unimplemented!()
    }

    /// What a link has done so far.
    pub fn link_usage(&self, _link: LinkId) -> LinkUsage {
        unimplemented!()
    }
}
