//! How an owner with nothing to do is woken.

use super::Engine;
use crate::driver::Event;
use crate::error::{Error, Result};
use crate::lane_table::LaneTable;
use crate::provider::Provider;
use rustix::event::epoll::{self, EventFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Readable, and for as long as it is. Miri knows edges only; nobody sleeps on this descriptor there.
const READABLE: EventFlags =
    if cfg!(miri) { EventFlags::IN.union(EventFlags::ET) } else { EventFlags::IN };

/// One descriptor over all that can wake an engine.
pub(super) fn epoll(lanes: &LaneTable, providers: &[Box<dyn Provider>]) -> Result<OwnedFd> {
    let failed = |e| Error::system("cannot create an epoll descriptor", e);
    let all = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
    let data = epoll::EventData::new_u64(0);
    epoll::add(&all, lanes.descriptor(), data, READABLE).map_err(failed)?;
    for fd in providers.iter().filter_map(|provider| provider.descriptor()) {
        // SAFETY: the provider owns the descriptor and is alive during this call.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        epoll::add(&all, fd, data, READABLE).map_err(failed)?;
    }
    Ok(all)
}

impl Engine {
    /// For callers with an event loop of their own: becomes readable, once [`Engine::arm`] has said
    /// that there is nothing to do, as soon as there is.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Before sleeping on [`Engine::descriptor`]: returns whether there is nothing to do. If there
    /// is, or when awake again, call [`Engine::disarm`] and poll, or ask [`Engine::raised`].
    ///
    /// What [`Engine::progress`] came across since that was last asked is something to do: it will wake
    /// nobody a second time.
    pub fn arm(&mut self) -> bool {
        !self.news && self.may_sleep()
    }

    /// Whether nothing rose since the last poll, whoever made it.
    pub(crate) fn may_sleep(&mut self) -> bool {
        self.lanes.prepare_sleep_on_descriptor(&mut self.pending)
    }

    /// After sleeping on [`Engine::descriptor`].
    pub fn disarm(&mut self) {
        self.lanes.finish_sleep_on_descriptor(&mut self.pending);
    }

    /// Whether peers' stores alone cannot wake this engine.
    pub(crate) fn needs_descriptors(&self) -> bool {
        self.needs_descriptors
    }

    /// Whether all there is to know of peers is in the lane table, without a poll.
    pub(crate) fn is_told_by_stores(&self) -> bool {
        !self.needs_descriptors && self.trace.is_none()
    }

    pub(crate) fn sleep_on_word(&mut self, timeout: Duration) {
        self.lanes.sleep_on_word(&mut self.pending, timeout);
    }

    pub(crate) fn event_buffer(&mut self) -> &mut Vec<Event> {
        &mut self.events
    }
}
