//! An engine's wake-up sources, and sleeping on them.

use crate::clock;
use crate::error::{Error, Result};
use crate::lane_table::LaneTable;
use crate::lanes::SleepMode;
use crate::timer::Timer;
use crate::types::Time;
use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use rustix::fd::{BorrowedFd, OwnedFd};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// Level-triggered readability. Miri supports edges only; no test sleeps on this descriptor there.
const READABLE: EventFlags =
    if cfg!(miri) { EventFlags::IN.union(EventFlags::ET) } else { EventFlags::IN };

/// An engine's wake-up sources.
pub(super) struct WakeSources {
    /// Readable when a sleeping owner has to poll.
    pub(super) epoll: Arc<OwnedFd>,
    /// Added to `epoll` and created with an event loop's first deadline.
    timer: Option<Timer>,
    /// True if links have descriptors, so that the doorbell word does not suffice.
    pub(super) has_links: bool,
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

    pub(super) fn add(&mut self, descriptor: RawFd) -> Result<()> {
        // SAFETY: the owner, one of this engine's links, is alive during this call.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        epoll::add(&*self.epoll, descriptor, epoll::EventData::new_u64(0), READABLE)
            .map_err(|e| Error::system("cannot watch a descriptor", e))
    }

    /// Makes the epoll descriptor readable at `deadline`; `None` stops the timer. Without a timer
    /// descriptor the next poll handles the deadline.
    pub(super) fn set_timer(&mut self, deadline: Option<Time>) {
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

    pub(super) fn mode(&self) -> SleepMode {
        match self {
            AnnouncedSleep::Word(_) => SleepMode::Word,
            AnnouncedSleep::Descriptor(_) => SleepMode::Descriptor,
        }
    }
}

/// Longest sleep between two checks for deadlines and interruptions.
pub(crate) const MAX_PARK: Duration = Duration::from_millis(50);
