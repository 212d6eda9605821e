//! A group's background thread: moves frames between sockets and [`Core`], sends heartbeats, detects silence.

use crate::core::{Action, ConnectionLoss, Core};
use crate::deadline::Deadline;
use crate::deadline::timespec;
use crate::fork_guard::{self, Registration};
use crate::message::Message;
use crate::monotonic_ns;
use crate::rendezvous::PeerConnection;
use crate::wire::FrameParser;
use crate::{Error, Rank, Result, Rounded};
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

/// Time that a closing connection is kept open for the last bytes.
pub(crate) const LINGER: Duration = Duration::from_secs(1);

/// State shared by the thread and the handles.
pub(crate) struct SharedCore {
    core: Mutex<Core>,
    changed: Condvar,
    waker: OwnedFd,
    /// Drop all connections at once, as a crash does.
    abandoned: AtomicBool,
}

impl SharedCore {
    /// Locks the core for `work`. The thread then runs the resulting actions.
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

    /// Waits until `done` returns a value; `None` if the deadline passes first.
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
            // The interrupt is program code and must not run under the lock.
            deadline.check(operation)?;
            core = self.lock();
        }
    }

    /// Wakes all waiting calls.
    pub(crate) fn notify(&self) {
        self.changed.notify_all();
    }

    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        // A write fails only on a full counter, and then the thread is awake.
        let _ = rustix::io::write(&self.waker, &1u64.to_ne_bytes());
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Longest time between two heartbeats.
const LONGEST_INTERVAL: Duration = Duration::from_secs(1);

/// Starts the thread. Its heartbeat interval follows from the group's shortest silence timeout; it
/// detects silence by its own timeout.
pub(crate) fn start(
    core: Core,
    peers: Vec<PeerConnection>,
    silence_timeout: Duration,
    shortest_silence: Duration,
) -> Result<(Arc<SharedCore>, JoinHandle<()>)> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let waker = eventfd(0, flags).map_err(Error::system("creating an eventfd"))?;
    let shared = Arc::new(SharedCore {
        core: Mutex::new(core),
        changed: Condvar::new(),
        waker,
        abandoned: AtomicBool::new(false),
    });
    let now = Instant::now();
    let connections = peers.into_iter().map(|peer| Connection::new(peer, now));
    let connections: Result<Vec<Connection>> = connections.collect();
    let mut mesh = Mesh {
        shared: shared.clone(),
        connections: connections?,
        silence_timeout,
        heartbeat_interval: (shortest_silence / 4).min(LONGEST_INTERVAL),
        heartbeat: Message::Heartbeat.frame().into(),
        next_heartbeat: now,
        last_run: now,
        leaving: false,
    };
    let thread = std::thread::Builder::new()
        .name("weft-control".into())
        .spawn(move || mesh.run())
        .map_err(Error::thread("the control thread"))?;
    Ok((shared, thread))
}

struct Mesh {
    shared: Arc<SharedCore>,
    connections: Vec<Connection>,
    silence_timeout: Duration,
    heartbeat_interval: Duration,
    heartbeat: Arc<[u8]>,
    next_heartbeat: Instant,
    last_run: Instant,
    leaving: bool,
}

impl Mesh {
    fn run(&mut self) {
        while self.run_once() {}
        self.connections.clear();
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
    }

    /// One iteration; false once the thread can end.
    fn run_once(&mut self) -> bool {
        while self.run_actions() {}
        if self.shared.abandoned.load(Ordering::Acquire) {
            return false;
        }
        if self.leaving && self.connections.is_empty() {
            return false;
        }
        self.wait_for_events();
        self.receive();
        self.keep_time(Instant::now());
        self.connections.retain(|connection| !connection.done);
        self.shared.changed.notify_all();
        true
    }

    /// Runs the core's actions: messages first, then callbacks, which may hang or end the process. False if
    /// there were none.
    fn run_actions(&mut self) -> bool {
        let (actions, leaving) = {
            let mut core = self.shared.lock();
            (std::mem::take(&mut core.actions), core.leaving)
        };
        let mut callbacks: Vec<Box<dyn FnOnce()>> = Vec::new();
        let any = !actions.is_empty();
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
                    callbacks.push(Box::new(move || call_each(&calls, |call| call(&poison))));
                }
                Action::Left(calls, rank) => {
                    callbacks.push(Box::new(move || call_each(&calls, |call| call(rank))));
                }
            }
        }
        if leaving && !self.leaving {
            self.leaving = true;
            let now = Instant::now();
            self.connections.iter_mut().for_each(|connection| connection.close(now));
        }
        self.transmit();
        if !callbacks.is_empty() {
            self.shared.changed.notify_all();
            callbacks.into_iter().for_each(|call| call());
        }
        any
    }

    fn connection(&mut self, peer: Rank) -> Option<&mut Connection> {
        self.connections.iter_mut().find(|connection| connection.peer == peer)
    }

    fn transmit(&mut self) {
        for connection in &mut self.connections {
            if let Err(error) = connection.transmit() {
                connection.done = true;
                let broken = ConnectionLoss::Closed(format!("its connection broke ({error})"));
                // What the peer sent before, such as a leave message or another rank's loss, comes first.
                let read = || connection.receive(&self.shared).err();
                let how = std::iter::repeat_with(read).take(16).flatten().next().unwrap_or(broken);
                self.shared.lock().connection_lost(connection.peer, how);
            }
        }
        self.connections.retain(|connection| !connection.done);
    }

    fn wait_for_events(&self) {
        let mut sockets = vec![PollFd::new(&self.shared.waker, PollFlags::IN)];
        sockets.extend(self.connections.iter().map(|connection| {
            let writing = !connection.queue.is_empty();
            let flags = if writing { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            PollFd::new(&connection.stream, flags)
        }));
        let mut timeout =
            self.next_heartbeat.saturating_duration_since(Instant::now()).min(self.silence_timeout);
        if self.connections.iter().any(|connection| connection.closing.is_some()) {
            timeout = timeout.min(LINGER / 4);
        }
        // Actions from callbacks and broken connections run at once.
        if !self.shared.lock().actions.is_empty() {
            timeout = Duration::ZERO;
        }
        let timeout = if self.connections.is_empty() && !timeout.is_zero() {
            None
        } else {
            Some(timespec(timeout))
        };
        if let Err(error) = poll(&mut sockets, timeout.as_ref())
            && error != rustix::io::Errno::INTR
        {
            log::error!("control thread: polling its sockets failed: {error}");
            std::thread::sleep(Duration::from_millis(100));
        }
        let _ = rustix::io::read(&self.shared.waker, &mut [0u8; 8]);
    }

    fn receive(&mut self) {
        for connection in &mut self.connections {
            if let Err(how) = connection.receive(&self.shared) {
                connection.done = true;
                self.shared.lock().connection_lost(connection.peer, how);
            }
        }
    }

    fn keep_time(&mut self, now: Instant) {
        // If this thread did not run (the process was stopped, the machine was suspended), the silence was
        // its own.
        if now - self.last_run > self.silence_timeout / 2 {
            self.connections.iter_mut().for_each(|connection| connection.last_received = now);
        }
        self.last_run = now;
        let beat = now >= self.next_heartbeat;
        if beat {
            self.next_heartbeat = now + self.heartbeat_interval;
        }
        for connection in &mut self.connections {
            if let Some(since) = connection.closing {
                connection.done |= now - since > LINGER;
            } else if now - connection.last_received > self.silence_timeout {
                let how = format!("no sign of life for {}", Rounded(self.silence_timeout));
                self.shared.lock().connection_lost(connection.peer, ConnectionLoss::Silent(how));
            } else if beat && connection.queue.is_empty() {
                connection.queue.push_back(self.heartbeat.clone());
            }
        }
    }
}

/// Calls every callback; a panic is logged.
fn call_each<C>(callbacks: &[C], call: impl Fn(&C)) {
    callbacks.iter().for_each(|callback| catch_panic(|| call(callback)));
}

/// Runs a program callback; a panic is logged and does not end the thread.
pub(crate) fn catch_panic(call: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(call)).is_err() {
        log::error!("a callback of the program panicked");
    }
}

/// Connection to one peer.
struct Connection {
    peer: Rank,
    /// Declared before the stream, so it is dropped first.
    _guard: Registration,
    stream: TcpStream,
    parser: FrameParser,
    queue: VecDeque<Arc<[u8]>>,
    /// Bytes already written from the first queued frame.
    written: usize,
    last_received: Instant,
    /// Closing start: only queued bytes are sent from then on.
    closing: Option<Instant>,
    shut: bool,
    done: bool,
}

impl Connection {
    fn new(connection: PeerConnection, now: Instant) -> Result<Connection> {
        let PeerConnection { rank: peer, stream, parser } = connection;
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
            last_received: now,
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
        // The other direction stays open until the peer closes it: closing with unread bytes would make the
        // system discard sent ones.
        if self.closing.is_some() && !self.shut {
            self.shut = true;
            return self.stream.shutdown(Shutdown::Write);
        }
        Ok(())
    }

    /// Reads available bytes, at most 1 MiB, so that each connection gets a turn.
    fn receive(&mut self, shared: &SharedCore) -> std::result::Result<(), ConnectionLoss> {
        let mut bytes = [0; 64 << 10];
        for _ in 0..16 {
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(ConnectionLoss::Closed("its connection was closed".into())),
                Ok(count) => self.parser.feed(bytes.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    return Err(ConnectionLoss::Closed(format!("its connection broke ({error})")));
                }
            }
            self.last_received = Instant::now();
            let protocol =
                |malformed: crate::wire::Malformed| ConnectionLoss::Protocol(malformed.0.into());
            while let Some(frame) = self.parser.next().map_err(protocol)? {
                let message = Message::parse(&frame).map_err(protocol)?;
                shared.lock().receive(self.peer, message, monotonic_ns()).map_err(protocol)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cause;
    use crate::core::tests::member;
    use std::net::TcpListener;

    /// Rank 1 reports rank 2's loss and ends, and this rank's next write to it fails.
    #[test]
    fn messages_before_a_broken_connection_are_received() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        let detail = "the connection was closed".to_string();
        let poison = crate::Poison { kind: Cause::Lost, rank: Some(Rank(2)), detail };
        let message = Message::Poison { generation: 0, poison: poison.clone() };
        peer.write_all(&message.frame()).unwrap();
        // Closing resets the connection.
        rustix::net::sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
        drop(peer);
        let mut core = Core::new(Rank(0), [0, 1, 2].map(member).into());
        core.ping(Rank(1), 0);
        let parser = FrameParser::new(1 << 20);
        let peers = vec![PeerConnection { rank: Rank(1), stream, parser }];
        let silence = Duration::from_secs(60);
        let (shared, thread) = start(core, peers, silence, silence).unwrap();
        let deadline = Deadline::after(silence, None);
        let found = shared.wait(&deadline, "a test", |core| core.poisoned(0)).unwrap();
        assert_eq!(found, Some(poison));
        shared.abandon();
        thread.join().unwrap();
    }
}
