//! Control connection of a formed pair: exchanges, poison, goodbye, loss.
//!
//! Once the pair is formed, the heartbeat thread of the process polls it; any other thread may, too. The end of the connection without a goodbye poisons the pair. An
//! exchange is numbered and carries its operation, as a collective call of a group does; one whose wait
//! ended early is continued by the same call.

use super::protocol::News;
use super::socket::FrameSocket;
use super::state::State;
use super::{CONNECTOR, LISTENER, Settings, heartbeat};
use crate::core::OnPoison;
use crate::deadline::Deadline;
use crate::fork_guard;
use crate::message::Message;
use crate::wire::MAX_PAYLOAD;
use crate::{Error, Interrupt, Operation, PeerStatus, Poison, Rank, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Longest sleep between two looks at poison from within the process and at interrupts.
const MAX_PARK: Duration = Duration::from_millis(50);

/// One end's control connection.
pub struct PairControl {
    rank: Rank,
    interrupt: Option<Interrupt>,
    forks: u64,
    descriptor: RawFd,
    local: Option<SocketAddr>,
    remote: Option<SocketAddr>,
    state: Mutex<State>,
    /// Held during an exchange.
    exchange: Mutex<()>,
    /// Place in the table of the heartbeat thread.
    watched: OnceLock<u64>,
}

impl PairControl {
    pub(super) fn new(socket: FrameSocket, rank: Rank, settings: &Settings) -> PairControl {
        PairControl {
            rank,
            interrupt: settings.interrupt.clone(),
            forks: fork_guard::forks(),
            descriptor: socket.as_fd().as_raw_fd(),
            local: socket.stream().local_addr().ok(),
            remote: socket.stream().peer_addr().ok(),
            state: Mutex::new(State::new(socket, rank, settings.silence_timeout)),
            exchange: Mutex::new(()),
            watched: OnceLock::new(),
        }
    }

    /// This end's rank: 0 is the listener, 1 the connector.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The other end's rank.
    pub fn peer(&self) -> Rank {
        if self.rank == LISTENER { CONNECTOR } else { LISTENER }
    }

    /// The addresses of this end and of the other end of the connection.
    pub fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        (self.local, self.remote)
    }

    /// The connection's descriptor, open as long as this is: readable when [`PairControl::poll`] has
    /// something to do.
    pub fn descriptor(&self) -> RawFd {
        self.descriptor
    }

    pub(super) fn borrow(&self) -> BorrowedFd<'_> {
        // SAFETY: the connection is open as long as this is, which the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.descriptor) }
    }

    /// Receives what has come and sends what waits, without blocking.
    pub fn poll(&self) {
        self.turn();
    }

    /// [`PairControl::poll`]; returns whether there may be more to receive.
    pub(super) fn turn(&self) -> bool {
        !self.is_copy() && self.with(|state, news| state.poll(news))
    }

    /// Hands a formed pair to the heartbeat thread of this process, which watches it until it is dropped.
    ///
    /// # Errors
    /// [`Error::System`] and [`Error::Descriptors`] if there can be no such thread.
    pub fn watch(self: &Arc<Self>) -> Result<()> {
        if self.watched.get().is_none() {
            let _ = self.watched.set(heartbeat::add(self)?);
        }
        Ok(())
    }

    /// Takes over the silence timeout of the other end, by which this end sends heartbeats.
    pub fn set_peer_silence(&self, silence: Duration) {
        self.with(|state, _| state.set_peer_silence(silence));
    }

    /// How often [`PairControl::keep_time`] is due.
    pub(super) fn tick(&self) -> Duration {
        self.with(|state, _| state.tick())
    }

    /// Sends a heartbeat if one is due, and judges the peer's silence, but for the time `late`.
    pub(super) fn keep_time(&self, now: Instant, late: Duration) {
        if !self.is_copy() {
            self.with(|state, news| state.keep_time(now, late, news));
        }
    }

    /// [`Error::Poisoned`]; [`Error::Left`] if the peer has; [`Error::Closed`]; [`Error::Forked`];
    /// [`Error::Interrupted`].
    ///
    /// # Errors
    /// As above.
    pub fn check(&self) -> Result<()> {
        self.check_for("the other end")
    }

    fn check_for(&self, operation: &'static str) -> Result<()> {
        if self.is_copy() {
            return Err(Error::Forked);
        }
        self.with(|state, news| {
            state.poll(news);
            if state.left {
                return Err(Error::Closed);
            }
            if let Some(poison) = &state.protocol.poison {
                return Err(Error::Poisoned(poison.clone()));
            }
            if state.protocol.peer == PeerStatus::Left {
                return Err(Error::Left { rank: self.peer(), operation });
            }
            Ok(())
        })?;
        match &self.interrupt {
            Some(interrupt) if interrupt() => Err(Error::Interrupted { operation }),
            _ => Ok(()),
        }
    }

    /// Sends this end's part of an exchange, or continues the same one that was begun before.
    ///
    /// # Errors
    /// [`Error::TooLarge`]; [`Error::OtherCall`] if another exchange is unfinished; [`Error::Closed`].
    pub fn begin(&self, operation: Operation, payload: &[u8]) -> Result<()> {
        if payload.len() > MAX_PAYLOAD {
            return Err(Error::TooLarge { size: payload.len(), limit: MAX_PAYLOAD });
        }
        if self.is_copy() {
            return Err(Error::Forked);
        }
        self.with(|state, news| {
            if state.left {
                return Err(Error::Closed);
            }
            if let Some(message) = state.protocol.begin(operation, payload)? {
                state.send(&message, news);
            }
            Ok(())
        })
    }

    /// A copy of the peer's part of the next exchange, for an end that needs it to make its own.
    ///
    /// # Errors
    /// As [`PairControl::exchange`].
    pub fn peek(&self, operation: Operation, timeout: Duration) -> Result<Vec<u8>> {
        let deadline = Deadline::after(timeout, self.interrupt.clone());
        loop {
            let part = self.with(|state, news| {
                state.poll(news);
                state.protocol.next_part().map(|(theirs, payload)| (theirs, payload.to_vec()))
            });
            match part {
                Some((theirs, payload)) if theirs == operation => return Ok(payload),
                Some((theirs, _)) => {
                    return Err(Error::OtherCall { peer: self.peer(), theirs, ours: operation });
                }
                None => self.check_for(operation.name())?,
            }
            self.sleep_before(&deadline, operation)?;
        }
    }

    /// The peer's part of the exchange that was begun, if it has come.
    ///
    /// # Errors
    /// [`Error::OtherCall`] if the peer makes another exchange; as [`PairControl::check`].
    pub fn finish(&self) -> Result<Option<Vec<u8>>> {
        let part = self.with(|state, news| {
            state.poll(news);
            state.protocol.finish()
        })?;
        if part.is_none() {
            let begun = self.with(|state, _| state.protocol.begun());
            self.check_for(begun.map_or("the other end", Operation::name))?;
        }
        Ok(part)
    }

    /// Gives the peer `payload` and returns what it gave. Both ends make the same calls in the same order.
    ///
    /// # Errors
    /// [`Error::Timeout`]: the same call continues the exchange; as [`PairControl::begin`] and
    /// [`PairControl::finish`].
    pub fn exchange(
        &self,
        operation: Operation,
        payload: &[u8],
        timeout: Duration,
    ) -> Result<Vec<u8>> {
        let _one = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        let deadline = Deadline::after(timeout, self.interrupt.clone());
        self.begin(operation, payload)?;
        loop {
            if let Some(part) = self.finish()? {
                return Ok(part);
            }
            self.sleep_before(&deadline, operation)?;
        }
    }

    fn sleep_before(&self, deadline: &Deadline, operation: Operation) -> Result<()> {
        if deadline.expired() {
            let (operation, missing) = (operation.name(), vec![self.peer()]);
            return Err(Error::Timeout { operation, missing, waited: deadline.waited() });
        }
        self.sleep(deadline.slice().min(MAX_PARK));
        Ok(())
    }

    /// Sleeps until the connection has something to receive, at most `timeout`.
    fn sleep(&self, timeout: Duration) {
        let unsent = self.with(|state, _| state.socket.has_unsent());
        let room = if unsent { PollFlags::OUT } else { PollFlags::empty() };
        let mut polled = [PollFd::from_borrowed_fd(self.borrow(), PollFlags::IN | room)];
        let tv_sec = i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX);
        let timeout = Timespec { tv_sec, tv_nsec: timeout.subsec_nanos().into() };
        // A signal ends it early, which is right.
        let _ = poll(&mut polled, Some(&timeout));
    }

    /// Poisons the pair at both ends. The first cause wins.
    pub fn poison(&self, cause: &Poison) {
        if self.is_copy() {
            return;
        }
        self.with(|state, news| {
            if state.protocol.poison.is_none() {
                let poison = cause.clone();
                state.send(&Message::Poison { generation: 0, poison }, news);
                state.protocol.poisoned(cause.clone(), news);
            }
        });
    }

    /// The cause, if the pair is poisoned.
    pub fn poisoned(&self) -> Option<Poison> {
        if self.is_copy() { None } else { self.with(|state, _| state.protocol.poison.clone()) }
    }

    /// Calls `call` once when the pair is poisoned, on the thread that finds it; at once if it is already.
    pub fn on_poison(&self, call: OnPoison) {
        if self.is_copy() {
            return;
        }
        self.with(|state, news| match state.protocol.poison.clone() {
            Some(poison) => news.poisoned = Some((vec![call], poison)),
            None => state.protocol.on_poison.push(call),
        });
    }

    /// Calls `call` once the peer leaves the group, on the thread that finds it; at once if it has already.
    pub fn on_peer_left(&self, call: Box<dyn Fn(Rank) + Send + Sync>) {
        if self.is_copy() {
            return;
        }
        self.with(|state, news| {
            let list = if state.protocol.peer == PeerStatus::Left {
                &mut news.left
            } else {
                &mut state.protocol.on_left
            };
            list.push(call.into());
        });
    }

    /// The state of the other end; this end is alive.
    pub fn peer_status(&self) -> PeerStatus {
        if self.is_copy() { PeerStatus::Lost } else { self.with(|state, _| state.protocol.peer) }
    }

    /// Marks the pair as formed: from now on, dropping this sends the goodbye. The listener's end
    /// confirms it to the connector's.
    pub fn set_formed(&self) {
        self.with(|state, news| {
            if !std::mem::replace(&mut state.formed, true) && self.rank == LISTENER {
                state.send(&Message::Heartbeat, news);
            }
        });
    }

    /// Whether the listener has confirmed the pair.
    pub fn is_confirmed(&self) -> bool {
        self.with(|state, _| state.protocol.confirmed)
    }

    /// Waits until the listener has formed the pair.
    ///
    /// # Errors
    /// As [`PairControl::exchange`].
    pub fn wait_until_formed(&self, timeout: Duration) -> Result<()> {
        let deadline = Deadline::after(timeout, self.interrupt.clone());
        loop {
            self.poll();
            if self.is_confirmed() {
                return Ok(());
            }
            match self.check_for(Operation::Connect.name()) {
                // The confirmation and a goodbye came together, after the look above.
                Err(Error::Left { .. }) if self.is_confirmed() => return Ok(()),
                checked => checked?,
            }
            self.sleep_before(&deadline, Operation::Connect)?;
        }
    }

    /// Sends the goodbye. The peer then sees that this end left, and did not die.
    pub fn leave(&self) {
        if self.is_copy() {
            return;
        }
        self.with(|state, news| {
            if !std::mem::replace(&mut state.left, true) {
                state.send(&Message::Leave, news);
                state.socket.shut_down();
            }
        });
    }

    /// Ends the connection without a goodbye, as a crash does. For tests of losses.
    pub fn abandon(&self) {
        if !self.is_copy() {
            self.with(|state, _| {
                state.left = true;
                let _ = state.socket.stream().shutdown(std::net::Shutdown::Both);
            });
        }
    }

    fn is_copy(&self) -> bool {
        self.forks != fork_guard::forks()
    }

    fn with<R>(&self, work: impl FnOnce(&mut State, &mut News) -> R) -> R {
        let mut news = News::default();
        let mut state: MutexGuard<'_, State> =
            self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let result = work(&mut state, &mut news);
        drop(state);
        if let Some((calls, poison)) = news.poisoned {
            calls.into_iter().for_each(|call| call(&poison));
        }
        news.left.into_iter().for_each(|call| call(self.peer()));
        result
    }
}

impl Drop for PairControl {
    /// An end that was never formed closes without a goodbye: the other end then tries again.
    fn drop(&mut self) {
        if self.is_copy() {
            return;
        }
        if let Some(&place) = self.watched.get() {
            heartbeat::remove(place, self);
        }
        if self.with(|state, _| state.formed) {
            self.leave();
        }
    }
}
