//! The background thread: it moves frames between the sockets and the [`Core`], and keeps time.

use crate::bootstrap::Link;
use crate::core::{Action, Core, Down};
use crate::deadline::Deadline;
use crate::fork_guard::{self, Registration};
use crate::message::Message;
use crate::monotonic_ns;
use crate::reception::timespec;
use crate::wire::Parser;
use crate::{Error, Rank, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a connection is kept for its last bytes to get through.
pub(crate) const LINGER: Duration = Duration::from_secs(1);

/// What the thread and the handles share.
pub(crate) struct Shared {
    core: Mutex<Core>,
    changed: Condvar,
    waker: OwnedFd,
    /// Drop everything at once, as a crash would.
    abandoned: AtomicBool,
}

impl Shared {
    /// Works on the core. The thread then carries out what came of it.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Core) -> T) -> T {
        let mut core = self.lock();
        let result = work(&mut core);
        let wake = !core.actions.is_empty() || core.leaving;
        drop(core);
        if wake {
            self.wake();
        }
        result
    }

    /// Waits until `done` gives something. `None` if the deadline passes before.
    pub(crate) fn wait<T>(
        &self,
        deadline: &Deadline,
        operation: &'static str,
        mut done: impl FnMut(&mut Core) -> Option<T>,
    ) -> Result<Option<T>> {
        let mut core = self.lock();
        loop {
            let result = done(&mut core);
            if !core.actions.is_empty() {
                self.wake();
            }
            if let Some(result) = result {
                return Ok(Some(result));
            }
            if deadline.expired() {
                return Ok(None);
            }
            let waited = self.changed.wait_timeout(core, deadline.slice());
            drop(waited.unwrap_or_else(PoisonError::into_inner).0);
            // The interrupt is the program's code: it must not run under the lock.
            deadline.check(operation)?;
            core = self.lock();
        }
    }

    /// Lets those that wait look again.
    pub(crate) fn notify(&self) {
        self.changed.notify_all();
    }

    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        // A full counter would mean that the thread is awake already.
        let _ = rustix::io::write(&self.waker, &1u64.to_ne_bytes());
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Longest time between two heartbeats.
const LONGEST_INTERVAL: Duration = Duration::from_secs(1);

/// Starts the thread. It sends heartbeats for the rank whose silence timeout is the shortest, and judges
/// silence by its own.
pub(crate) fn start(
    core: Core,
    links: Vec<Link>,
    silence_timeout: Duration,
    shortest_silence: Duration,
) -> Result<(Arc<Shared>, JoinHandle<()>)> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let waker = eventfd(0, flags).map_err(Error::system("making an eventfd"))?;
    let shared = Arc::new(Shared {
        core: Mutex::new(core),
        changed: Condvar::new(),
        waker,
        abandoned: AtomicBool::new(false),
    });
    let now = Instant::now();
    let connections = links.into_iter().map(|link| Connection::new(link, now));
    let connections: Result<Vec<Connection>> = connections.collect();
    let mut mesh = Mesh {
        shared: shared.clone(),
        connections: connections?,
        silence_timeout,
        heartbeat_interval: (shortest_silence / 4).min(LONGEST_INTERVAL),
        heartbeat: Message::Heartbeat.frame().into(),
        next_heartbeat: now,
        last_turn: now,
        leaving: false,
    };
    let thread = std::thread::Builder::new()
        .name("weft-control".into())
        .spawn(move || mesh.run())
        .map_err(Error::system("starting the control thread"))?;
    Ok((shared, thread))
}

struct Mesh {
    shared: Arc<Shared>,
    connections: Vec<Connection>,
    silence_timeout: Duration,
    heartbeat_interval: Duration,
    heartbeat: Arc<[u8]>,
    next_heartbeat: Instant,
    last_turn: Instant,
    leaving: bool,
}

impl Mesh {
    fn run(&mut self) {
        while self.turn() {}
        self.connections.clear();
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
    }

    /// One round. False when there is nothing more to do, ever.
    fn turn(&mut self) -> bool {
        self.act();
        self.transmit();
        if self.shared.abandoned.load(Ordering::Acquire) {
            return false;
        }
        if self.leaving && self.connections.is_empty() {
            return false;
        }
        self.sleep();
        self.receive();
        self.keep_time(Instant::now());
        self.connections.retain(|connection| !connection.done);
        self.shared.changed.notify_all();
        true
    }

    /// Carries out what the core wants.
    fn act(&mut self) {
        loop {
            let (actions, leaving) = {
                let mut core = self.shared.lock();
                (std::mem::take(&mut core.actions), core.leaving)
            };
            if actions.is_empty() && leaving == self.leaving {
                return;
            }
            for action in actions {
                match action {
                    Action::Send(to, frame) => {
                        if let Some(connection) = self.connection(to) {
                            connection.queue.push_back(frame);
                        }
                    }
                    Action::Close(peer) => {
                        if let Some(connection) = self.connection(peer) {
                            connection.close(Instant::now());
                        }
                    }
                    Action::Poisoned(calls, poison) => {
                        self.shared.changed.notify_all();
                        calls.iter().for_each(|call| guarded(|| call(&poison)));
                    }
                    Action::Left(calls, rank) => {
                        self.shared.changed.notify_all();
                        calls.iter().for_each(|call| guarded(|| call(rank)));
                    }
                }
            }
            if leaving && !self.leaving {
                self.leaving = true;
                let now = Instant::now();
                self.connections.iter_mut().for_each(|connection| connection.close(now));
            }
        }
    }

    fn connection(&mut self, peer: Rank) -> Option<&mut Connection> {
        self.connections.iter_mut().find(|connection| connection.peer == peer)
    }

    fn transmit(&mut self) {
        for connection in &mut self.connections {
            if let Err(error) = connection.transmit() {
                connection.done = true;
                let how = Down::Closed(format!("its connection broke ({error})"));
                self.shared.lock().link_down(connection.peer, how);
            }
        }
        self.connections.retain(|connection| !connection.done);
    }

    fn sleep(&self) {
        let mut sockets = vec![PollFd::new(&self.shared.waker, PollFlags::IN)];
        sockets.extend(self.connections.iter().map(|connection| {
            let writing = !connection.queue.is_empty();
            let flags = if writing { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            PollFd::new(&connection.stream, flags)
        }));
        let mut patience =
            self.next_heartbeat.saturating_duration_since(Instant::now()).min(self.silence_timeout);
        if self.connections.iter().any(|connection| connection.closing.is_some()) {
            patience = patience.min(LINGER / 4);
        }
        // What came of callbacks and of broken connections must not wait.
        if !self.shared.lock().actions.is_empty() {
            patience = Duration::ZERO;
        }
        let timeout = if self.connections.is_empty() && !patience.is_zero() {
            None
        } else {
            Some(timespec(patience))
        };
        if let Err(error) = poll(&mut sockets, timeout.as_ref())
            && error != rustix::io::Errno::INTR
        {
            log::error!("the control thread cannot wait for its sockets: {error}");
            std::thread::sleep(Duration::from_millis(100));
        }
        let _ = rustix::io::read(&self.shared.waker, &mut [0u8; 8]);
    }

    fn receive(&mut self) {
        for connection in &mut self.connections {
            if let Err(how) = connection.receive(&self.shared) {
                connection.done = true;
                self.shared.lock().link_down(connection.peer, how);
            }
        }
    }

    fn keep_time(&mut self, now: Instant) {
        // If this very thread did not run (the process was stopped, the machine slept), the
        // silence was its own.
        if now - self.last_turn > self.silence_timeout / 2 {
            self.connections.iter_mut().for_each(|connection| connection.heard = now);
        }
        self.last_turn = now;
        let beat = now >= self.next_heartbeat;
        if beat {
            self.next_heartbeat = now + self.heartbeat_interval;
        }
        for connection in &mut self.connections {
            if let Some(since) = connection.closing {
                connection.done |= now - since > LINGER;
            } else if now - connection.heard > self.silence_timeout {
                let how = format!("no sign of life for {:.1?}", self.silence_timeout);
                self.shared.lock().link_down(connection.peer, Down::Silent(how));
            } else if beat && connection.queue.is_empty() {
                connection.queue.push_back(self.heartbeat.clone());
            }
        }
    }
}

/// Runs the program's code without letting its panic end the thread.
pub(crate) fn guarded(call: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(call)).is_err() {
        log::error!("a callback of the program panicked");
    }
}

/// One peer's socket.
struct Connection {
    peer: Rank,
    /// Before the stream, to be dropped first.
    _guard: Registration,
    stream: TcpStream,
    parser: Parser,
    queue: VecDeque<Arc<[u8]>>,
    /// How much of the first in the queue is written.
    written: usize,
    heard: Instant,
    /// Since when it is only kept for its last bytes.
    closing: Option<Instant>,
    shut: bool,
    done: bool,
}

impl Connection {
    fn new(link: Link, now: Instant) -> Result<Connection> {
        let Link { rank: peer, stream, parser } = link;
        stream
            .set_nonblocking(true)
            .and(stream.set_nodelay(true))
            .map_err(Error::system("setting up a connection"))?;
        Ok(Connection {
            peer,
            _guard: fork_guard::register(&stream),
            stream,
            parser,
            queue: VecDeque::new(),
            written: 0,
            heard: now,
            closing: None,
            shut: false,
            done: false,
        })
    }

    fn close(&mut self, now: Instant) {
        self.closing.get_or_insert(now);
    }

    fn transmit(&mut self) -> std::io::Result<()> {
        while let Some(frame) = self.queue.front() {
            match self.stream.write(frame.get(self.written..).unwrap_or_default()) {
                Ok(count) => {
                    self.written += count;
                    if self.written >= frame.len() {
                        self.queue.pop_front();
                        self.written = 0;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        // The other direction stays open until the peer closes it: closing with unread bytes would
        // make the system discard what was just sent.
        if self.closing.is_some() && !self.shut {
            self.shut = true;
            return self.stream.shutdown(Shutdown::Write);
        }
        Ok(())
    }

    /// Reads what is there, at most a little more than a megabyte so that others get their turn.
    fn receive(&mut self, shared: &Shared) -> std::result::Result<(), Down> {
        let mut bytes = [0; 64 << 10];
        for _ in 0..16 {
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(Down::Closed("its connection was closed".into())),
                Ok(count) => self.parser.feed(bytes.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(Down::Closed(format!("its connection broke ({error})"))),
            }
            self.heard = Instant::now();
            let protocol = |malformed: crate::wire::Malformed| Down::Protocol(malformed.0.into());
            while let Some(frame) = self.parser.next().map_err(protocol)? {
                let message = Message::parse(&frame).map_err(protocol)?;
                shared.lock().receive(self.peer, message, monotonic_ns()).map_err(protocol)?;
            }
        }
        Ok(())
    }
}
