//! A formed pair's control connection: exchanges, poison, leave, loss.
//!
//! The process's heartbeat thread polls a formed pair, and any other thread may, too. A
//! connection that ends without a leave message poisons the pair. An exchange is numbered and carries its operation,
//! as a group's collective call does; the same call continues one whose wait ended early.

use super::protocol::PendingCallbacks;
use super::settings::{CONNECTOR, LISTENER, PairSettings};
use super::socket::FrameSocket;
use super::state::PairState;
use crate::core::PoisonCallback;
use crate::deadline::Deadline;
use crate::message::Message;
use crate::wire::MAX_PAYLOAD;
use crate::{Error, Interrupt, Operation, PeerStatus, Poison, Rank, Result, fork_guard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Longest sleep between two checks for poison from within the process and for interrupts.
const MAX_PARK: Duration = Duration::from_millis(50);

/// One end's control connection.
pub struct PairControl {
    rank: Rank,
    interrupt: Option<Interrupt>,
    forks: u64,
    descriptor: RawFd,
    local: Option<SocketAddr>,
    remote: Option<SocketAddr>,
    state: Mutex<PairState>,
    /// Held during an exchange.
    exchange: Mutex<()>,
    /// Key in the heartbeat thread's table.
    pub(super) watched: OnceLock<u64>,
}

impl PairControl {
    pub(super) fn new(socket: FrameSocket, rank: Rank, settings: &PairSettings) -> PairControl {
        PairControl {
            rank,
            interrupt: settings.interrupt.clone(),
            forks: fork_guard::forks(),
            descriptor: socket.as_fd().as_raw_fd(),
            local: socket.stream().local_addr().ok(),
            remote: socket.stream().peer_addr().ok(),
            state: Mutex::new(PairState::new(socket, rank, settings.silence_timeout)),
            exchange: Mutex::new(()),
            watched: OnceLock::new(),
        }
    }

    /// This end's rank: 0 for the listener, 1 for the connector.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The other end's rank.
    pub fn peer(&self) -> Rank {
        if self.rank == LISTENER { CONNECTOR } else { LISTENER }
    }

    /// The connection's local and remote address.
    pub fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        (self.local, self.remote)
    }

    /// Connection descriptor, open for the lifetime of this value: readable when [`PairControl::poll`]
    /// is due.
    pub fn descriptor(&self) -> RawFd {
        self.descriptor
    }

    pub(super) fn borrow(&self) -> BorrowedFd<'_> {
        // SAFETY: the connection is open for the lifetime of `self`, which the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.descriptor) }
    }

    /// Receives available messages and sends queued ones, without blocking.
    pub fn poll(&self) {
        self.turn();
    }

    /// [`PairControl::poll`] for one turn; true if more may be available.
    pub(super) fn turn(&self) -> bool {
        !self.is_forked_child() && self.with(|state, callbacks| state.poll(callbacks))
    }

    /// Sets the other end's silence timeout, by which this end sends heartbeats.
    pub fn set_peer_silence(&self, silence: Duration) {
        self.with(|state, _| state.set_peer_silence(silence));
    }

    /// [`PairControl::keep_time`] interval.
    pub(super) fn tick(&self) -> Duration {
        self.with(|state, _| state.tick())
    }

    /// Sends a due heartbeat and detects peer silence, without the time `late`.
    pub(super) fn keep_time(&self, now: Instant, late: Duration) {
        if !self.is_forked_child() {
            self.with(|state, callbacks| state.keep_time(now, late, callbacks));
        }
    }

    /// Error if operations in flight on this pair cannot complete.
    ///
    /// # Errors
    /// [`Error::Poisoned`]; [`Error::Left`] if the peer has left; [`Error::Closed`]; [`Error::Forked`];
    /// [`Error::Interrupted`].
    pub fn check(&self) -> Result<()> {
        self.check_for("the other end")
    }

    fn check_for(&self, operation: &'static str) -> Result<()> {
        if self.is_forked_child() {
            return Err(Error::Forked);
        }
        self.with(|state, callbacks| {
            state.poll(callbacks);
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

    /// Sends this end's part in an exchange, or continues the same unfinished exchange.
    ///
    /// # Errors
    /// [`Error::TooLarge`]; [`Error::CallMismatch`] if another exchange is unfinished; [`Error::Closed`].
    pub fn begin(&self, operation: Operation, payload: &[u8]) -> Result<()> {
        if payload.len() > MAX_PAYLOAD {
            return Err(Error::TooLarge { size: payload.len(), limit: MAX_PAYLOAD });
        }
        if self.is_forked_child() {
            return Err(Error::Forked);
        }
        self.with(|state, callbacks| {
            if state.left {
                return Err(Error::Closed);
            }
            if let Some(message) = state.protocol.begin(operation, payload)? {
                state.send(&message, callbacks);
            }
            Ok(())
        })
    }

    /// Copies the peer's part in the next exchange, for an end that needs it to build its own.
    ///
    /// # Errors
    /// As [`PairControl::exchange`].
    pub fn peek(&self, operation: Operation, timeout: Duration) -> Result<Vec<u8>> {
        let deadline = Deadline::after(timeout, self.interrupt.clone());
        loop {
            let part = self.with(|state, callbacks| {
                state.poll(callbacks);
                state.protocol.next_part().map(|(theirs, payload)| (theirs, payload.to_vec()))
            });
            match part {
                Some((theirs, payload)) if theirs == operation => return Ok(payload),
                Some((theirs, _)) => {
                    return Err(Error::CallMismatch { peer: self.peer(), theirs, ours: operation });
                }
                None => self.check_for(operation.name())?,
            }
            self.sleep_before(&deadline, operation)?;
        }
    }

    /// Peer's part in the unfinished exchange, once received.
    ///
    /// # Errors
    /// [`Error::CallMismatch`] if the peer makes a different exchange; as [`PairControl::check`].
    pub fn finish(&self) -> Result<Option<Vec<u8>>> {
        let part = self.with(|state, callbacks| {
            state.poll(callbacks);
            state.protocol.finish()
        })?;
        if part.is_none() {
            let unfinished = self.with(|state, _| state.protocol.unfinished());
            self.check_for(unfinished.map_or("the other end", Operation::name))?;
        }
        Ok(part)
    }

    /// Exchanges payloads with the peer. Both ends make the same calls in the same order.
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

    /// Sleeps until the connection is readable, at most `timeout`.
    fn sleep(&self, timeout: Duration) {
        let unsent = self.with(|state, _| state.socket.has_unsent());
        let room = if unsent { PollFlags::OUT } else { PollFlags::empty() };
        let mut polled = [PollFd::from_borrowed_fd(self.borrow(), PollFlags::IN | room)];
        let tv_sec = i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX);
        let timeout = Timespec { tv_sec, tv_nsec: timeout.subsec_nanos().into() };
        // A signal may end it early; callers loop.
        let _ = poll(&mut polled, Some(&timeout));
    }

    /// Poisons the pair at both ends. The first cause wins.
    pub fn poison(&self, cause: &Poison) {
        if self.is_forked_child() {
            return;
        }
        self.with(|state, callbacks| {
            if state.protocol.poison.is_none() {
                let poison = cause.clone();
                state.send(&Message::Poison { generation: 0, poison }, callbacks);
                state.protocol.poisoned(cause.clone(), callbacks);
            }
        });
    }

    /// The pair's poison, if it is poisoned.
    pub fn poisoned(&self) -> Option<Poison> {
        if self.is_forked_child() {
            None
        } else {
            self.with(|state, _| state.protocol.poison.clone())
        }
    }

    /// Calls `call` once when the pair is poisoned, on the detecting thread; at once if it is already.
    pub fn on_poison(&self, call: PoisonCallback) {
        if self.is_forked_child() {
            return;
        }
        self.with(|state, callbacks| match state.protocol.poison.clone() {
            Some(poison) => callbacks.poisoned = Some((vec![call], poison)),
            None => state.protocol.on_poison.push(call),
        });
    }

    /// Calls `call` once the peer leaves, on the detecting thread; at once if it has left already.
    pub fn on_peer_left(&self, call: Box<dyn Fn(Rank) + Send + Sync>) {
        if self.is_forked_child() {
            return;
        }
        self.with(|state, callbacks| {
            let list = if state.protocol.peer == PeerStatus::Left {
                &mut callbacks.left
            } else {
                &mut state.protocol.on_left
            };
            list.push(call.into());
        });
    }

    /// The other end's status.
    pub fn peer_status(&self) -> PeerStatus {
        if self.is_forked_child() {
            PeerStatus::Lost
        } else {
            self.with(|state, _| state.protocol.peer)
        }
    }

    /// Marks the pair as formed: from now on, dropping this value sends the leave message. The listener
    /// confirms the pair to the connector by a heartbeat.
    pub fn set_formed(&self) {
        self.with(|state, callbacks| {
            if !std::mem::replace(&mut state.formed, true) && self.rank == LISTENER {
                state.send(&Message::Heartbeat, callbacks);
            }
        });
    }

    /// True once the listener has confirmed the pair.
    pub fn is_confirmed(&self) -> bool {
        self.with(|state, _| state.protocol.confirmed)
    }

    /// Waits until the listener has confirmed the pair.
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
                // Confirmation and leave arrived together, after the check above.
                Err(Error::Left { .. }) if self.is_confirmed() => return Ok(()),
                checked => checked?,
            }
            self.sleep_before(&deadline, Operation::Connect)?;
        }
    }

    /// Sends the leave message, so that the peer sees an orderly departure and no loss.
    pub fn leave(&self) {
        if self.is_forked_child() {
            return;
        }
        self.with(|state, callbacks| {
            if !std::mem::replace(&mut state.left, true) {
                state.send(&Message::Leave, callbacks);
                state.socket.shut_down();
            }
        });
    }

    /// Ends the connection without a leave message, as a crash does. For loss tests.
    pub fn abandon(&self) {
        if !self.is_forked_child() {
            self.with(|state, _| {
                state.left = true;
                let _ = state.socket.stream().shutdown(std::net::Shutdown::Both);
            });
        }
    }

    fn is_forked_child(&self) -> bool {
        self.forks != fork_guard::forks()
    }

    fn with<R>(&self, work: impl FnOnce(&mut PairState, &mut PendingCallbacks) -> R) -> R {
        let mut callbacks = PendingCallbacks::default();
        let mut state: MutexGuard<'_, PairState> =
            self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let result = work(&mut state, &mut callbacks);
        drop(state);
        if let Some((calls, poison)) = callbacks.poisoned {
            calls.into_iter().for_each(|call| call(&poison));
        }
        callbacks.left.into_iter().for_each(|call| call(self.peer()));
        result
    }
}

impl Drop for PairControl {
    /// An end that was never formed closes without a leave message: the other end then retries.
    fn drop(&mut self) {
        if self.is_forked_child() {
            return;
        }
        self.unwatch();
        if self.with(|state, _| state.formed) {
            self.leave();
        }
    }
}
