//! Heartbeat thread: one for all pairs in a process.
//!
//! It receives messages on the control connections, sends heartbeats, and ends a pair whose peer was silent
//! for the silence timeout. It is independent of program calls, so an end whose program computes is
//! not silent. It starts with the first pair and ends 1 s after the last.
//!
//! Peer silence counts only while this thread runs: time for which the process was stopped is excluded,
//! and buffered bytes are received before silence is concluded.

use super::control::PairControl;
use crate::deadline::timespec;
use crate::fork_guard::{self, PerProcess, Registration};
use crate::mesh::catch_panic;
use crate::{Error, Result};
use rustix::event::epoll::{self, EventFlags};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Longest interval between two clock checks for all pairs.
const LONGEST_TICK: Duration = Duration::from_secs(1);
const SHORTEST_TICK: Duration = Duration::from_millis(1);
/// Time without a pair after which the thread ends; longer than the gaps between successive pairs.
const IDLE: Duration = Duration::from_secs(1);
const EVENTS: usize = 64;

static TABLE: PerProcess<Mutex<PairTable>> = PerProcess::new();

/// A process's pairs.
#[derive(Default)]
struct PairTable {
    pairs: HashMap<u64, Weak<PairControl>>,
    last_id: u64,
    /// `None` while no thread runs.
    watch: Option<Arc<EpollWatch>>,
}

/// Epoll descriptor on which the thread sleeps: one event for each pair.
struct EpollWatch {
    _guard: Registration,
    epoll: OwnedFd,
}

fn table() -> &'static Mutex<PairTable> {
    TABLE.get(Mutex::default)
}

fn locked(table: &'static Mutex<PairTable>) -> MutexGuard<'static, PairTable> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PairControl {
    /// Registers a formed pair with this process's heartbeat thread, until it is dropped.
    ///
    /// # Errors
    /// [`Error::System`] and [`Error::Descriptors`] if the thread cannot be started.
    pub fn watch(self: &Arc<Self>) -> Result<()> {
        if self.watched.get().is_none() {
            let _ = self.watched.set(add(self)?);
        }
        Ok(())
    }

    /// Removes the pair from the heartbeat thread, if it was registered.
    pub(super) fn unwatch(&self) {
        if let Some(&key) = self.watched.get() {
            remove(key, self);
        }
    }
}

/// Registers a pair with the thread; returns the key.
///
/// # Errors
/// [`Error::System`] and [`Error::Descriptors`] if the thread cannot be started.
fn add(control: &Arc<PairControl>) -> Result<u64> {
    let pairs = table();
    let mut table = locked(pairs);
    let watch = match &table.watch {
        Some(watch) => watch.clone(),
        None => {
            let watch = Arc::new(start(pairs)?);
            table.watch = Some(watch.clone());
            watch
        }
    };
    table.last_id += 1;
    let id = table.last_id;
    // A writable socket is an event at once, so the thread includes the pair in the next tick.
    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
    epoll::add(&watch.epoll, control.borrow(), epoll::EventData::new_u64(id), flags)
        .map_err(Error::system("watching the control connection of a pair"))?;
    table.pairs.insert(id, Arc::downgrade(control));
    Ok(id)
}

/// Removes a pair from the thread, while the descriptor is open.
fn remove(id: u64, control: &PairControl) {
    let mut table = locked(table());
    table.pairs.remove(&id);
    if let Some(watch) = &table.watch {
        let _ = epoll::delete(&watch.epoll, control.borrow());
    }
}

fn start(table: &'static Mutex<PairTable>) -> Result<EpollWatch> {
    let failed = |source: rustix::io::Errno| {
        super::socket::descriptor_error("creating an epoll descriptor", source.into())
    };
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
    let _guard = fork_guard::register(&epoll);
    std::thread::Builder::new()
        .name("weft-pairs".into())
        .spawn(move || run(table))
        .map_err(Error::thread("the heartbeat thread of pairs"))?;
    Ok(EpollWatch { _guard, epoll })
}

fn run(table: &'static Mutex<PairTable>) {
    let Some(watch) = locked(table).watch.clone() else { return };
    let mut thread = HeartbeatThread {
        table,
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
        // A signal may end it early; the descriptor and the buffer are valid.
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

struct HeartbeatThread {
    table: &'static Mutex<PairTable>,
    /// Next check time for all clocks.
    due: Instant,
    /// Last time with a pair.
    last_pair: Instant,
    /// Pairs with bytes left unread by the last turn.
    unread: Vec<u64>,
    /// Reused buffer.
    all: Vec<Arc<PairControl>>,
}

impl HeartbeatThread {
    /// Receives one pair's messages.
    fn attend(&mut self, id: u64) {
        // The pair may be dropped here, which locks the table.
        let control = locked(self.table).pairs.get(&id).and_then(Weak::upgrade);
        let Some(control) = control else { return };
        self.due = self.due.min(Instant::now() + control.tick().max(SHORTEST_TICK));
        let mut more = false;
        catch_panic(|| more = control.turn());
        if more {
            self.unread.push(id);
        }
    }

    /// Sends heartbeats and detects silence; false once the thread can end.
    fn keep_time(&mut self) -> bool {
        let now = Instant::now();
        let late = now.saturating_duration_since(self.due);
        let mut all = std::mem::take(&mut self.all);
        {
            let mut table = locked(self.table);
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
            catch_panic(|| control.keep_time(now, late));
        }
        self.all = all;
        self.due = now + tick;
        true
    }
}
