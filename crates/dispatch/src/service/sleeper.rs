//! Sleeper: a service thread's waits for pairs, queue and deadlines.

use super::config::ServiceConfig;
use crate::error::{Error, Result};
use rustix::event::{Timespec, epoll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::mem::MaybeUninit;
use std::time::Duration;
use weft_fabric::{Communicator, ProviderKind, Rank, Time, clock};

/// Longest sleep, so that a missed wake-up costs at most this time.
const MAX_SLEEP: Duration = Duration::from_millis(50);
/// Pause instructions between two polls in a spinning thread.
const PAUSES: u32 = 4;
/// Pause instructions at most, where words in memory show all messages: the thread looks at them after each one.
const LOOKS: u32 = 32;
/// Most events in a poll after which it still prepares the writes that follow: with more, the peer is at work on the
/// same words.
pub(super) const FEW_EVENTS: usize = 4;
/// Connections up to which it looks.
const MAX_LOOKED_AT: usize = 8;

/// Next step for a thread without work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    /// Polls again.
    Poll,
    /// Polls again, since a message has arrived in one of few pairs, or an item in the queue.
    Arrival,
    /// Sleeps.
    Sleep,
}

/// Pair that a [`Sleeper`] watches.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watched {
    pub id: u64,
    /// The other end.
    pub peer: Rank,
    /// The descriptor is readable whenever messages have arrived, without [`arm`]: over tcp.
    pub is_reported: bool,
    /// [`Communicator::has_raised`] shows messages: over shm.
    pub is_mapped: bool,
}

/// One thread's waits: it spins, then yields the core, then sleeps on descriptors.
pub(super) struct Sleeper {
    config: ServiceConfig,
    epoll: OwnedFd,
    /// Start of the turns without work.
    idle_since: Option<Time>,
    yields: u32,
    /// Pairs so far.
    watched: u64,
}

/// Event id for [`Sleeper::new`].
const OWN: u64 = 0;
/// Events that one call returns; the others follow in the next.
const MAX_READY: usize = 256;

impl Sleeper {
    /// Sleeper that `event` wakes, besides the pairs from [`Sleeper::watch`].
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new(config: ServiceConfig, event: BorrowedFd<'_>) -> Result<Sleeper> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC);
        let epoll = epoll.map_err(|e| system("cannot create an epoll descriptor", e))?;
        let sleeper = Sleeper { config, epoll, idle_since: None, yields: 0, watched: 0 };
        sleeper.add(event, OWN)?;
        Ok(sleeper)
    }

    fn add(&self, descriptor: BorrowedFd<'_>, id: u64) -> Result<()> {
        let data = epoll::EventData::new_u64(id);
        epoll::add(&self.epoll, descriptor, data, epoll::EventFlags::IN)
            .map_err(|e| system("cannot watch a descriptor", e))
    }

    /// Wakes on a pair's events, too.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn watch(&mut self, pair: &Communicator) -> Result<Watched> {
        let (engine, peer) = (pair.engine(), Rank(1 - pair.rank().0));
        let provider = engine.route(peer).map(|route| route.provider);
        let is_reported = provider == Some(ProviderKind::Tcp);
        let is_mapped = provider == Some(ProviderKind::Shm);
        self.watched += 1;
        self.add(engine.descriptor(), self.watched)?;
        Ok(Watched { id: self.watched, peer, is_reported, is_mapped })
    }

    /// Calls `ready` with each pair whose descriptor is readable.
    pub fn ready(&self, mut ready: impl FnMut(u64)) {
        let mut events = [const { MaybeUninit::uninit() }; MAX_READY];
        // A zero timeout cannot be interrupted, and the descriptor is ours.
        let events = epoll::wait(self.epoll.as_fd(), &mut events, Some(&Timespec::default()));
        let events = events.map_or(&[][..], |(events, _)| &*events);
        events.iter().for_each(|event| ready({ event.data }.u64()));
    }

    /// Ends [`Sleeper::watch`].
    pub fn forget(&self, pair: &Communicator) {
        // Fails only for a descriptor that it does not watch.
        let _ = epoll::delete(&self.epoll, pair.engine().descriptor());
    }

    /// After a turn with work.
    #[inline]
    pub fn busy(&mut self) {
        (self.idle_since, self.yields) = (None, 0);
    }

    /// After a turn without work: pauses or yields. `pairs`: all that it watches. A pause ends with a message in one of
    /// them, or with an item in the queue, as `has_items` returns.
    pub fn idle<'a>(
        &mut self,
        now: Time,
        pairs: impl ExactSizeIterator<Item = (&'a Communicator, &'a Watched)> + Clone,
        has_items: impl Fn() -> bool,
    ) -> Rest {
        let since = *self.idle_since.get_or_insert(now);
        if now.since(since) < self.config.spin {
            let all_mapped =
                pairs.len() <= MAX_LOOKED_AT && pairs.clone().all(|(_, watched)| watched.is_mapped);
            let (looks, found) =
                if all_mapped { (LOOKS, Rest::Arrival) } else { (PAUSES, Rest::Poll) };
            for _ in 0..looks {
                if has_items() || pairs.clone().any(|(pair, _)| pair.has_raised()) {
                    return found;
                }
                std::hint::spin_loop();
            }
            return Rest::Poll;
        }
        if self.yields < self.config.yields {
            self.yields += 1;
            std::thread::yield_now();
            return Rest::Poll;
        }
        Rest::Sleep
    }

    /// Sleeps until a wake-up, at most until `until`. The pairs and the queue are armed.
    pub fn sleep(&mut self, until: Option<Time>) {
        let limit = clock::now().after(MAX_SLEEP);
        let time = until.map_or(limit, |until| until.min(limit)).since(clock::now());
        let timeout =
            Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        let mut events = [MaybeUninit::uninit(); 1];
        // A signal ends it early. The events themselves are taken by polls.
        let _ = epoll::wait(self.epoll.as_fd(), &mut events, Some(&timeout));
    }
}

/// Arms an iterator's pairs for a sleep; true if all are idle. [`disarm`] follows in either case.
pub(super) fn arm<'a>(pairs: impl IntoIterator<Item = &'a Communicator>) -> bool {
    pairs.into_iter().all(|pair| pair.engine().arm_for_poll())
}

/// Ends [`arm`].
pub(super) fn disarm<'a>(pairs: impl IntoIterator<Item = &'a Communicator>) {
    pairs.into_iter().for_each(|pair| pair.engine().disarm());
}

pub(super) fn system(what: &'static str, error: rustix::io::Errno) -> Error {
    Error::System { what, error: error.into() }
}
