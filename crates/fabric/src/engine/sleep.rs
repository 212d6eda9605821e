//! Engine sleep: descriptors, deadlines, event loops.
//!
//! One epoll descriptor covers all wake-up sources: the lane table's event descriptor, the links'
//! descriptors, and a timer for the next deadline. A program's event loop watches only this descriptor.

use super::state::Engine;
use super::wake_sources::AnnouncedSleep;
use crate::clock;
use crate::driver::Event;
use crate::lanes::SleepMode;
use crate::types::Time;
use rustix::fd::{AsFd, BorrowedFd};
use std::time::Duration;
use weft_control::Rank;

impl Engine {
    /// True if the last poll left received bytes that no descriptor reports: poll again.
    pub fn has_unread(&self) -> bool {
        self.links.iter().any(|link| link.has_unread())
    }

    /// An event loop has reported [`Engine::descriptor`] as readable: the next poll may save a system call.
    pub fn expect_messages(&mut self) {
        self.links.iter_mut().for_each(|link| link.expect_messages());
    }

    /// Moves all pages in GPUs by copy engines, and none by kernels on SMs: those may queue in the GPU behind the
    /// user's kernels, if these wait for the pages.
    pub fn use_copy_engines_only(&mut self) {
        self.links.iter_mut().for_each(|link| link.use_copy_engines_only());
    }

    /// Tells the link that a write to this peer follows soon, such as an answer: it may prefetch.
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
    /// never idle ([`Engine::check`] returns the error).
    ///
    /// It stays armed across calls from any thread: raises, credits and completions that those calls
    /// consume before [`Engine::raised`] make the descriptor readable, except driver events
    /// ([`crate::SharedDriver`]).
    pub fn arm(&mut self) -> bool {
        self.flush_all();
        self.poison.get().is_none() && !self.has_unreported() && self.announce_event_loop()
    }

    /// Same as [`Engine::arm`], for a thread that takes every event by [`Engine::poll`]: lanes that
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

    /// Sets an armed event loop's timer to the engine's next deadline, which may be newer than the
    /// arming.
    pub(super) fn renew_timer(&mut self) {
        if self.armed {
            let retry = self.lacks_doorbell.then(|| clock::now().after(DOORBELL_RETRY));
            let deadline = self.next_deadline().into_iter().chain(retry).min();
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

    /// Time at which a poll is due without other events: when a peer's grace period ends, or at a link's
    /// deadline. `None` without either.
    pub fn next_deadline(&self) -> Option<Time> {
        let grace = self.pending_losses.iter().map(|loss| loss.since.after(self.config.loss_grace));
        let links = self.links.iter().filter_map(|link| link.next_deadline());
        grace.chain(links).min()
    }

    /// Announces that a waiting thread will sleep; `None` if the engine has work. Follow it with
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
        // A parked thread polls the lanes every `MAX_PARK` in any case, an event loop by timer.
        self.lacks_doorbell =
            mode != SleepMode::Word && !self.links.iter_mut().all(|link| link.share_wake());
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

/// Sleep limit for an event loop whose event descriptor a peer may lack.
const DOORBELL_RETRY: Duration = Duration::from_millis(10);
