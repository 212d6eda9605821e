//! Descriptors, deadlines and sleep.
//!
//! One epoll descriptor covers all that can wake an engine: the lane table's event descriptor, those of
//! its links, and a timer for the next deadline, so that an event loop of the program needs to watch
//! nothing else.

use super::Engine;
use crate::clock;
use crate::driver::Event;
use crate::error::{Error, Result};
use crate::lane_table::LaneTable;
use crate::lanes::Sleep;
use crate::timer::Timer;
use crate::types::Time;
use rustix::event::epoll::{self, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// Readable, and for as long as it is. Miri supports edges only; no test sleeps on this descriptor there.
const READABLE: EventFlags =
    if cfg!(miri) { EventFlags::IN.union(EventFlags::ET) } else { EventFlags::IN };

/// What an engine sleeps on.
pub(super) struct Sleeper {
    /// Readable when a sleeping owner should poll.
    epoll: Arc<OwnedFd>,
    /// In `epoll`; made when a deadline first has to wake an event loop.
    timer: Option<Timer>,
    /// Whether peers' stores alone cannot wake this engine.
    has_links: bool,
}

impl Sleeper {
    pub fn new(lanes: &LaneTable) -> Result<Sleeper> {
        let failed = |e| Error::system("cannot create an epoll descriptor", e);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        epoll::add(&epoll, lanes.descriptor(), epoll::EventData::new_u64(0), READABLE)
            .map_err(failed)?;
        Ok(Sleeper { epoll: Arc::new(epoll), timer: None, has_links: false })
    }

    /// Covers the descriptors of a link that has peers.
    pub fn watch(&mut self, descriptors: Vec<RawFd>) -> Result<()> {
        for descriptor in descriptors {
            self.add(descriptor)?;
            self.has_links = true;
        }
        Ok(())
    }

    fn add(&mut self, descriptor: RawFd) -> Result<()> {
        // SAFETY: its owner, a link of this engine, is alive during this call.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        epoll::add(&*self.epoll, descriptor, epoll::EventData::new_u64(0), READABLE)
            .map_err(|e| Error::system("cannot watch a descriptor", e))
    }

    /// Makes the epoll descriptor readable at `deadline`, or no more for want of one. A timer that
    /// cannot be had leaves the deadline to the next poll.
    fn set_timer(&mut self, deadline: Option<Time>) {
        if self.timer.is_none() && deadline.is_some() {
            self.timer = Timer::new().ok().filter(|timer| {
                let data = epoll::EventData::new_u64(0);
                epoll::add(&*self.epoll, timer.descriptor(), data, READABLE).is_ok()
            });
        }
        if let Some(timer) = &mut self.timer {
            timer.set(deadline);
        }
    }
}

/// A sleep that was announced: what to sleep on, without the engine.
pub(crate) enum Park {
    /// On the bell word.
    Word(Arc<LaneTable>),
    /// On descriptors.
    Descriptor(Arc<OwnedFd>),
}

impl Park {
    /// Sleeps until something may have happened, at most until `until`.
    pub fn sleep(&self, until: Time) {
        let timeout = until.since(clock::now());
        match self {
            Park::Word(lanes) => lanes.sleep_on_word(timeout),
            Park::Descriptor(epoll) => {
                let timeout = Timespec {
                    tv_sec: timeout.as_secs().min(i64::MAX as u64) as i64,
                    tv_nsec: timeout.subsec_nanos().into(),
                };
                let mut polled = [PollFd::new(&**epoll, PollFlags::IN)];
                // A signal ends it early, which is right.
                let _ = rustix::event::poll(&mut polled, Some(&timeout));
            }
        }
    }

    fn how(&self) -> Sleep {
        match self {
            Park::Word(_) => Sleep::Word,
            Park::Descriptor(_) => Sleep::Descriptor,
        }
    }
}

impl Engine {
    /// For callers with an event loop of their own: becomes readable, once [`Engine::arm`] has returned
    /// `true`, as soon as there is something to do, a deadline of the engine included.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.sleeper.epoll.as_fd()
    }

    /// Before sleeping on [`Engine::descriptor`]: returns whether there is nothing to do. If there
    /// is, or when awake again, call [`Engine::disarm`] and ask [`Engine::raised`], which polls. In a
    /// poisoned group there always is: the error ([`Engine::check`]).
    ///
    /// It stays armed whatever other calls are made, by whichever thread: raises, credits and ends of
    /// requests that those come across before [`Engine::raised`] is asked make the descriptor readable,
    /// but for those of drivers ([`crate::SharedDriver`]).
    pub fn arm(&mut self) -> bool {
        self.flush_all();
        let poisoned = self.poison.get().is_some();
        if poisoned || self.has_news() || !self.announce(Sleep::EventLoop) {
            return false;
        }
        self.armed = true;
        self.renew_timer();
        true
    }

    /// Lets an event loop that sleeps wake for the engine's next deadline, which may have come up after
    /// it armed.
    pub(super) fn renew_timer(&mut self) {
        if self.armed {
            let deadline = self.next_deadline();
            self.sleeper.set_timer(deadline);
        }
    }

    /// After sleeping on [`Engine::descriptor`].
    pub fn disarm(&mut self) {
        if std::mem::take(&mut self.armed) {
            self.lanes.finish_sleep(Sleep::EventLoop);
            self.sleeper.set_timer(None);
        }
    }

    /// When the engine must be polled even if nothing happens: a peer's grace period ends, or a link
    /// has a timer. `None`: not before something happens.
    pub fn next_deadline(&self) -> Option<Time> {
        let grace = self.suspects.iter().map(|suspect| suspect.since.after(self.config.loss_grace));
        let links = self.links.iter().filter_map(|link| link.next_deadline());
        grace.chain(links).min()
    }

    /// Announces a sleep of a waiting thread; `None` if there is something to do. Follow it with
    /// [`Park::sleep`] and [`Engine::finish_park`].
    pub(crate) fn prepare_park(&mut self) -> Option<Park> {
        let park = if self.sleeper.has_links {
            Park::Descriptor(self.sleeper.epoll.clone())
        } else {
            Park::Word(self.lanes.clone())
        };
        self.announce(park.how()).then_some(park)
    }

    pub(crate) fn finish_park(&mut self, park: &Park) {
        self.lanes.finish_sleep(park.how());
    }

    fn announce(&mut self, how: Sleep) -> bool {
        if !self.lanes.prepare_sleep(how) {
            return false;
        }
        let idle = self.sink.is_empty() && self.links.iter_mut().all(|link| link.prepare_sleep());
        if !idle {
            self.lanes.finish_sleep(how);
        }
        idle
    }

    /// Makes the event loop look again, if one sleeps.
    pub(super) fn ring_event_loop(&mut self) {
        if self.armed {
            self.lanes.nudge();
        }
    }

    /// Whether the lane table holds all that peers do, without a poll.
    pub(crate) fn is_raised_by_stores(&self) -> bool {
        !self.sleeper.has_links && self.trace.is_none()
    }

    pub(crate) fn event_buffer(&mut self) -> &mut Vec<Event> {
        &mut self.events
    }
}

/// The longest sleep between two looks at deadlines and interruptions.
pub(crate) const MAX_PARK: Duration = Duration::from_millis(50);
