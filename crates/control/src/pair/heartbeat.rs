//! Heartbeat thread: one for all pairs of a process.
//!
//! It receives what comes on their control connections, sends heartbeats, and ends a pair whose peer was silent
//! for the silence timeout. It runs whether or not the program makes calls, so an end whose program computes
//! is not silent. It starts with the first pair and ends a second after the last.
//!
//! The peer's silence counts only while this thread runs: time for which the process was stopped is left out,
//! and what has come is received before silence is judged.

use super::PairControl;
use crate::fork_guard::{self, OfProcess, Registration};
use crate::mesh::guarded;
use crate::reception::timespec;
use crate::{Error, Result};
use rustix::event::epoll::{self, EventFlags};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Time between two looks at the clocks of all pairs, unless one needs it more often.
const LONGEST_TICK: Duration = Duration::from_secs(1);
const SHORTEST_TICK: Duration = Duration::from_millis(1);
/// Time without a pair after which the thread ends. A program that forms one pair after another keeps it.
const IDLE: Duration = Duration::from_secs(1);
const EVENTS: usize = 64;

static TABLE: OfProcess<Mutex<Table>> = OfProcess::new();

/// The pairs of a process.
#[derive(Default)]
struct Table {
    pairs: HashMap<u64, Weak<PairControl>>,
    last_id: u64,
    /// `None` while there is no thread.
    watch: Option<Arc<Watch>>,
}

/// Descriptor that the thread sleeps on: each event is a pair's.
struct Watch {
    _guard: Registration,
    epoll: OwnedFd,
}

fn table() -> &'static Mutex<Table> {
    TABLE.get(Mutex::default)
}

fn locked(table: &'static Mutex<Table>) -> MutexGuard<'static, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hands a pair to the thread; returns its place.
///
/// # Errors
/// [`Error::System`] and [`Error::Descriptors`] if there can be no thread.
pub(super) fn add(control: &Arc<PairControl>) -> Result<u64> {
    let place = table();
    let mut table = locked(place);
    let watch = match &table.watch {
        Some(watch) => watch.clone(),
        None => {
            let watch = Arc::new(start(place)?);
            table.watch = Some(watch.clone());
            watch
        }
    };
    table.last_id += 1;
    let id = table.last_id;
    // A socket that can be written to is an event at once, so the thread's next tick knows of the pair.
    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
    epoll::add(&watch.epoll, control.borrow(), epoll::EventData::new_u64(id), flags)
        .map_err(Error::system("watching the control connection of a pair"))?;
    table.pairs.insert(id, Arc::downgrade(control));
    Ok(id)
}

/// Takes a pair from the thread, while its descriptor is open.
pub(super) fn remove(id: u64, control: &PairControl) {
    let mut table = locked(table());
    table.pairs.remove(&id);
    if let Some(watch) = &table.watch {
        let _ = epoll::delete(&watch.epoll, control.borrow());
    }
}

fn start(place: &'static Mutex<Table>) -> Result<Watch> {
    let failed = |source: rustix::io::Errno| {
        super::name_of_descriptors("making an epoll descriptor", source.into())
    };
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
    let _guard = fork_guard::register(&epoll);
    std::thread::Builder::new()
        .name("weft-pairs".into())
        .spawn(move || run(place))
        .map_err(Error::system("starting the heartbeat thread of pairs"))?;
    Ok(Watch { _guard, epoll })
}

fn run(place: &'static Mutex<Table>) {
    let Some(watch) = locked(place).watch.clone() else { return };
    let mut thread = Thread {
        place,
        due: Instant::now(),
        last_pair: Instant::now(),
        unread: Vec::new(),
        all: Vec::new(),
    };
    let mut events = Vec::with_capacity(EVENTS);
    loop {
        let left = thread.due.saturating_duration_since(Instant::now());
        let timeout = if thread.unread.is_empty() { left } else { Duration::ZERO };
        events.clear();
        let room = rustix::buffer::spare_capacity(&mut events);
        // A signal ends it early, which is right; the descriptor and the room are valid.
        let _ = epoll::wait(&watch.epoll, room, Some(&timespec(timeout)));
        for id in std::mem::take(&mut thread.unread) {
            thread.attend(id);
        }
        for event in &events {
            thread.attend({ event.data }.u64());
        }
        if Instant::now() >= thread.due && !thread.keep_time() {
            return;
        }
    }
}

struct Thread {
    place: &'static Mutex<Table>,
    /// When the clocks of all pairs are looked at next.
    due: Instant,
    /// When there was a pair last.
    last_pair: Instant,
    /// Pairs that have more to receive than one turn takes.
    unread: Vec<u64>,
    /// Kept for its memory.
    all: Vec<Arc<PairControl>>,
}

impl Thread {
    /// Receives what has come for one pair.
    fn attend(&mut self, id: u64) {
        // The pair may end here: the table must not be locked then.
        let control = locked(self.place).pairs.get(&id).and_then(Weak::upgrade);
        let Some(control) = control else { return };
        self.due = self.due.min(Instant::now() + control.tick().max(SHORTEST_TICK));
        let mut more = false;
        guarded(|| more = control.turn());
        if more {
            self.unread.push(id);
        }
    }

    /// Sends heartbeats and judges silence; returns whether the thread goes on.
    fn keep_time(&mut self) -> bool {
        let now = Instant::now();
        let late = now.saturating_duration_since(self.due);
        let mut all = std::mem::take(&mut self.all);
        {
            let mut table = locked(self.place);
            if !table.pairs.is_empty() {
                self.last_pair = now;
            } else if now - self.last_pair >= IDLE {
                table.watch = None;
                return false;
            }
            all.extend(table.pairs.values().filter_map(Weak::upgrade));
        }
        let mut tick = LONGEST_TICK;
        for control in all.drain(..) {
            tick = tick.min(control.tick()).max(SHORTEST_TICK);
            guarded(|| control.keep_time(now, late));
        }
        self.all = all;
        self.due = now + tick;
        true
    }
}
