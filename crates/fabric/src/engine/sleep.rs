//! Sleep of an engine: descriptors, deadlines, event loops.
//!
//! One epoll descriptor covers all wake-up sources of an engine: the lane table's event descriptor, those
//! of its links, and a timer for the next deadline. A program's event loop watches this descriptor only.

use super::Engine;
use crate::clock;
use crate::driver::Event;
use crate::error::{Error, Result};
use crate::lane_table::LaneTable;
use crate::lanes::SleepMode;
use crate::timer::Timer;
use crate::types::Time;
use rustix::event::epoll::{self, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;
use weft_control::Rank;

/// Level-triggered readability. Miri supports edges only; no test sleeps on this descriptor there.
const READABLE: EventFlags =
    if cfg!(miri) { EventFlags::IN.union(EventFlags::ET) } else { EventFlags::IN };

/// Wake-up sources of an engine.
pub(super) struct WakeSources {
    /// Readable when a sleeping owner has to poll.
    epoll: Arc<OwnedFd>,
    /// Member of `epoll`; created with the first deadline of an event loop.
    timer: Option<Timer>,
    /// True if links have descriptors, so that the doorbell word does not suffice.
    has_links: bool,
}

impl WakeSources {
    pub fn new(lanes: &LaneTable) -> Result<WakeSources> {
        let failed = |e| Error::system("cannot create an epoll descriptor", e);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        epoll::add(&epoll, lanes.descriptor(), epoll::EventData::new_u64(0), READABLE)
            .map_err(failed)?;
        Ok(WakeSources { epoll: Arc::new(epoll), timer: None, has_links: false })
    }

    /// Adds the descriptors of a link with peers.
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

    /// Makes the epoll descriptor readable at `deadline`; `None` stops the timer. Without a timer
    /// descriptor the next poll handles the deadline.
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

/// Announced sleep, which borrows no engine.
pub(crate) enum AnnouncedSleep {
    /// On the doorbell word.
    Word(Arc<LaneTable>),
    /// On descriptors.
    Descriptor(Arc<OwnedFd>),
}

impl AnnouncedSleep {
    /// Sleeps until a wake-up, at most until `until`.
    pub fn sleep(&self, until: Time) {
        let timeout = until.since(clock::now());
        match self {
            AnnouncedSleep::Word(lanes) => lanes.sleep_on_word(timeout),
            AnnouncedSleep::Descriptor(epoll) => {
                let timeout = Timespec {
                    tv_sec: timeout.as_secs().min(i64::MAX as u64) as i64,
                    tv_nsec: timeout.subsec_nanos().into(),
                };
                let mut polled = [PollFd::new(&**epoll, PollFlags::IN)];
                // A signal ends it early.
                let _ = rustix::event::poll(&mut polled, Some(&timeout));
            }
        }
    }

    fn mode(&self) -> SleepMode {
        match self {
            AnnouncedSleep::Word(_) => SleepMode::Word,
            AnnouncedSleep::Descriptor(_) => SleepMode::Descriptor,
        }
    }
}

impl Engine {
    /// True if the last poll left received bytes that no descriptor reports: poll again.
    pub fn has_unread(&self) -> bool {
        self.links.iter().any(|link| link.has_unread())
    }

    /// An event loop has reported [`Engine::descriptor`] as readable: the next poll may save a system call.
    pub fn expect_messages(&mut self) {
        self.links.iter_mut().for_each(|link| link.expect_messages());
    }

    /// A write to this peer follows soon, such as an answer: its link may prefetch.
    #[inline]
    pub fn expect_write(&mut self, peer: Rank) {
        if let Some(path) = self.peers.get(peer.index()).and_then(|peer| peer.path.as_ref()) {
            self.links[usize::from(path.link)].expect_write(peer);
        }
    }

    /// Descriptor for an event loop: readable, after [`Engine::arm`] has returned `true`, as soon as the
    /// engine has work, deadlines included.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.wake_sources.epoll.as_fd()
    }

    /// Arms [`Engine::descriptor`] before a sleep; returns true if the engine is idle. If it is not, and
    /// after the sleep, call [`Engine::disarm`] and [`Engine::raised`], which polls. A poisoned group is
    /// never idle ([`Engine::check`] returns its error).
    ///
    /// It stays armed across other calls of any thread: raises, credits and completions that those consume
    /// before [`Engine::raised`] make the descriptor readable, except events of drivers
    /// ([`crate::SharedDriver`]).
    pub fn arm(&mut self) -> bool {
        self.flush_all();
        self.poison.get().is_none() && !self.has_unreported() && self.announce_event_loop()
    }

    /// As [`Engine::arm`], for a thread that takes every event by [`Engine::poll`]: lanes that
    /// [`Engine::raised`] would list are not work for it, and neither is a poison that a poll has reported.
    pub fn arm_for_poll(&mut self) -> bool {
        self.flush_all();
        let poison_is_new = self.poison.is_set() && !self.poison_reported;
        !poison_is_new && self.completed_tags.is_empty() && self.announce_event_loop()
    }

    fn announce_event_loop(&mut self) -> bool {
        if !self.announce(SleepMode::EventLoop) {
            return false;
        }
        self.armed = true;
        self.renew_timer();
        true
    }

    /// Sets the timer of an armed event loop to the engine's next deadline, which may be newer than the
    /// arming.
    pub(super) fn renew_timer(&mut self) {
        if self.armed {
            let deadline = self.next_deadline();
            self.wake_sources.set_timer(deadline);
        }
    }

    /// After sleeping on [`Engine::descriptor`].
    pub fn disarm(&mut self) {
        if std::mem::take(&mut self.armed) {
            self.lanes.finish_sleep(SleepMode::EventLoop);
            self.wake_sources.set_timer(None);
        }
    }

    /// Time at which a poll is due without other events: the end of a peer's grace period, or a link's
    /// deadline. `None` without either.
    pub fn next_deadline(&self) -> Option<Time> {
        let grace = self.pending_losses.iter().map(|loss| loss.since.after(self.config.loss_grace));
        let links = self.links.iter().filter_map(|link| link.next_deadline());
        grace.chain(links).min()
    }

    /// Announces a sleep of a waiting thread; `None` if the engine has work. Follow it with
    /// [`AnnouncedSleep::sleep`] and [`Engine::finish_park`].
    pub(crate) fn prepare_park(&mut self) -> Option<AnnouncedSleep> {
        let park = if self.wake_sources.has_links {
            AnnouncedSleep::Descriptor(self.wake_sources.epoll.clone())
        } else {
            AnnouncedSleep::Word(self.lanes.clone())
        };
        self.announce(park.mode()).then_some(park)
    }

    pub(crate) fn finish_park(&mut self, park: &AnnouncedSleep) {
        self.lanes.finish_sleep(park.mode());
    }

    fn announce(&mut self, mode: SleepMode) -> bool {
        if !self.lanes.prepare_sleep(mode) {
            return false;
        }
        let idle = self.sink.is_empty() && self.links.iter_mut().all(|link| link.prepare_sleep());
        if !idle {
            self.lanes.finish_sleep(mode);
        }
        idle
    }

    /// Wakes the event loop, if one sleeps.
    pub(super) fn ring_event_loop(&mut self) {
        if self.armed {
            self.lanes.notify();
        }
    }

    /// True if peers raise lanes by stores only, so that waits need no poll.
    pub(crate) fn is_raised_by_stores(&self) -> bool {
        !self.wake_sources.has_links && self.trace.is_none()
    }

    pub(crate) fn event_buffer(&mut self) -> &mut Vec<Event> {
        &mut self.events
    }
}

/// Longest sleep between two checks of deadlines and interruptions.
pub(crate) const MAX_PARK: Duration = Duration::from_millis(50);
