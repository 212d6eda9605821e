//! The listening end: one port for all pairs of a process.
//!
//! Every connection is a stranger until it has proved the secret, and counts as one until its pair is
//! formed: strangers are bounded in number and time ([`crate::strangers`]), so a dialler that stalls, or
//! bytes of another protocol, cost a descriptor for two seconds. Nothing waits for a stranger: each moves on
//! as its bytes come.

use super::PairConfig;
use super::forming::{Forming, Introduction, encode_offer, name_descriptors};
use crate::clock;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::strangers::Strangers;
use crate::types::Time;
use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weft_control::Operation;
use weft_control::fork_guard::{self, Registration};
use weft_control::pair::{
    Guest, GuestStep, LISTENER, PairControl, StreamToken, name_of_descriptors, nonblocking_listener,
};

/// The event of the listening socket.
const LISTENING: u64 = u64::MAX;
/// The longest sleep between two looks at a close, at an interrupt and at strangers that expire.
const MAX_PARK: Duration = Duration::from_millis(50);
/// Connections that one turn takes in.
const ACCEPTED_AT_ONCE: usize = 16;
/// Time for the last step of forming, in which both ends connect at once.
const MEETING_TIME: Duration = Duration::from_secs(2);

/// A port on which a process accepts pairs. Any thread may call.
pub struct Listener {
    config: PairConfig,
    address: SocketAddr,
    epoll: Arc<OwnedFd>,
    forks: u64,
    /// `None` once closed.
    state: Mutex<Option<State>>,
}

struct State {
    _guard: Registration,
    listener: TcpListener,
    strangers: Strangers<Stranger>,
}

/// A connection on its way to a pair.
enum Stranger {
    /// It has not proved the secret.
    Guest(Guest),
    /// It has, and was sent the offer.
    Offered(Box<Offered>),
    /// It belongs to an offer that was taken, or is between two states.
    Done,
}

struct Offered {
    forming: Forming,
    control: PairControl,
    /// Of the data connection; `None` if the route needs none.
    token: Option<StreamToken>,
    /// The dialler's introduction, once it has come.
    answer: Option<Vec<u8>>,
}

impl Listener {
    /// Listens at the configuration's address; port 0 is any free port ([`Listener::address`]).
    ///
    /// # Errors
    /// [`Error::Control`]: not an address, not one of this host, a port in use; an address off loopback
    /// without a secret.
    pub fn bind(config: PairConfig) -> Result<Listener> {
        let (host, port) = config.settings.endpoint()?;
        let listener = nonblocking_listener(&host, port)?;
        let address = listener
            .local_addr()
            .map_err(|source| Error::System { what: "cannot listen for pairs", source })?;
        let system = |e| name_descriptors(Error::system("cannot listen for pairs", e));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system)?;
        let data = epoll::EventData::new_u64(LISTENING);
        epoll::add(&epoll, &listener, data, epoll::EventFlags::IN).map_err(system)?;
        let _guard = fork_guard::register(&listener);
        let state = State { _guard, listener, strangers: Strangers::new() };
        let (epoll, state) = (Arc::new(epoll), Mutex::new(Some(state)));
        Ok(Listener { config, address, epoll, forks: fork_guard::forks(), state })
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// For event loops: readable when [`Listener::try_accept`] has something to do.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// The next pair; this end is rank 0.
    ///
    /// # Errors
    /// [`Error::Timeout`] after the deadline; [`Error::Interrupted`]; as [`Listener::try_accept`].
    pub fn accept(
        &self,
        deadline: Time,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Communicator> {
        let since = clock::now();
        loop {
            if let Some(pair) = self.try_accept()? {
                return Ok(pair);
            }
            let now = clock::now();
            if now >= deadline {
                return Err(Error::timeout("accept", since, now, Vec::new()));
            }
            if interrupted() {
                return Err(Error::Interrupted);
            }
            let wait = deadline.since(now).min(MAX_PARK);
            let timeout = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
            let mut polled = [PollFd::new(&*self.epoll, PollFlags::IN)];
            // A signal ends it early, which is right.
            let _ = rustix::event::poll(&mut polled, Some(&timeout));
        }
    }

    /// The next pair, if one is formed by what has come. Moves every stranger on; a peer that
    /// stops in the last step of forming holds it up for at most 2 s.
    ///
    /// # Errors
    /// [`weft_control::Error::Closed`]; [`weft_control::Error::Forked`];
    /// [`weft_control::Error::Descriptors`] if this process has no descriptor left: the dialler's
    /// connection waits, and a later call accepts it. Those of a dialler end its connection alone.
    pub fn try_accept(&self) -> Result<Option<Communicator>> {
        if self.forks != fork_guard::forks() {
            return Err(weft_control::Error::Forked.into());
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(state) = state.as_mut() else { return Err(weft_control::Error::Closed.into()) };
        while state.strangers.drop_expired(clock::now()).is_some() {
            state.refuse("it did not finish in time");
        }
        let mut events = Vec::with_capacity(64);
        let room = rustix::buffer::spare_capacity(&mut events);
        // Without a timeout nothing interrupts it; the descriptor is this listener's.
        let _ = epoll::wait(&*self.epoll, room, Some(&Timespec::default()));
        // Those on their way go first: a crowd of new ones must not push them out.
        events.sort_by_key(|event| { event.data }.u64() == LISTENING);
        for event in &events {
            let made = match { event.data }.u64() {
                LISTENING => state.accept(&self.epoll, &self.config)?,
                id => state.ready(id, &self.epoll, &self.config)?,
            };
            // The other events stay: epoll is level-triggered.
            if made.is_some() {
                return Ok(made);
            }
        }
        Ok(None)
    }

    /// Stops listening; pairs that were accepted stay. A second call changes nothing.
    pub fn close(&self) {
        if self.forks == fork_guard::forks() {
            drop(self.state.lock().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

impl State {
    /// Takes in connections that wait, as many as there is room for strangers.
    fn accept(&mut self, epoll: &OwnedFd, config: &PairConfig) -> Result<Option<Communicator>> {
        for _ in 0..ACCEPTED_AT_ONCE {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                        // The oldest stranger gives up its descriptor to the next connection.
                        if self.strangers.drop_oldest().is_some() {
                            self.refuse("there were no descriptors left");
                            continue;
                        }
                        return Err(name_of_descriptors("accepting a pair", error).into());
                    }
                    // The error of one connection, not of the listener.
                    _ => continue,
                },
            };
            let Ok(guest) = Guest::new(stream, &config.settings) else { continue };
            let descriptor = guest.as_fd().as_raw_fd();
            let (id, dropped) = self.strangers.add(Stranger::Guest(guest), clock::now());
            if dropped.is_some() {
                self.refuse("too many connections were on their way");
            }
            // SAFETY: the stranger owns the descriptor and is alive during this call.
            let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
            let data = epoll::EventData::new_u64(id);
            epoll::add(epoll, descriptor, data, epoll::EventFlags::IN)
                .map_err(|e| Error::system("cannot watch a connection", e))?;
            // A hello, or a token, has often come already.
            if let Some(pair) = self.ready(id, epoll, config)? {
                return Ok(Some(pair));
            }
        }
        Ok(None)
    }

    /// Moves one stranger on.
    fn ready(
        &mut self,
        id: u64,
        epoll: &OwnedFd,
        config: &PairConfig,
    ) -> Result<Option<Communicator>> {
        let Some(stranger) = self.strangers.get_mut(id) else { return Ok(None) };
        let step = match stranger {
            Stranger::Guest(guest) => guest.step(),
            Stranger::Offered(offered) => {
                let answer = offered_answer(offered);
                return self.answered(id, answer, epoll, config);
            }
            Stranger::Done => return Ok(None),
        };
        match step {
            Ok(GuestStep::Pending) => Ok(None),
            Ok(GuestStep::Proved(details)) => {
                let Stranger::Guest(guest) = std::mem::replace(stranger, Stranger::Done) else {
                    return Ok(None);
                };
                match offer(guest, &details, config) {
                    Ok(offered) => {
                        *stranger = Stranger::Offered(Box::new(offered));
                        Ok(None)
                    }
                    Err(error) => self.fail(id, error),
                }
            }
            Ok(GuestStep::Stream(token)) => {
                let Some(Stranger::Guest(guest)) = self.strangers.take(id) else { return Ok(None) };
                // The pair's own epoll watches it next.
                let _ = epoll::delete(epoll, guest.as_fd());
                let Some(pair) = self.pair_of(&token) else {
                    self.refuse("its token is of no pair that is being formed");
                    return Ok(None);
                };
                if let Some(Stranger::Offered(offered)) = self.strangers.get_mut(pair) {
                    offered.token = None;
                    offered.forming.adoption().put(guest.into_stream());
                }
                self.finish(pair, epoll, config)
            }
            Err(why) => {
                drop(self.strangers.take(id));
                self.refuse(why);
                Ok(None)
            }
        }
    }

    /// The stranger that was given this token.
    fn pair_of(&self, token: &StreamToken) -> Option<u64> {
        let with_token = |stranger: &Stranger| {
            matches!(stranger, Stranger::Offered(offered)
                if offered.token.is_some_and(|issued| is_same(&issued, token)))
        };
        self.strangers.iter().find(|(_, stranger)| with_token(stranger)).map(|(id, _)| id)
    }

    fn answered(
        &mut self,
        id: u64,
        answer: Result<bool>,
        epoll: &OwnedFd,
        config: &PairConfig,
    ) -> Result<Option<Communicator>> {
        match answer {
            Ok(true) => self.finish(id, epoll, config),
            Ok(false) => Ok(None),
            Err(error) => self.fail(id, error),
        }
    }

    /// Forms the pair if its answer and its data connection have come.
    fn finish(
        &mut self,
        id: u64,
        epoll: &OwnedFd,
        config: &PairConfig,
    ) -> Result<Option<Communicator>> {
        let is_ready = matches!(self.strangers.get_mut(id), Some(Stranger::Offered(offered))
            if offered.answer.is_some() && offered.token.is_none());
        if !is_ready {
            return Ok(None);
        }
        let Some(Stranger::Offered(offered)) = self.strangers.take(id) else { return Ok(None) };
        let Offered { forming, control, answer, .. } = *offered;
        // SAFETY: the control connection owns the descriptor and is alive during this call.
        let descriptor = unsafe { BorrowedFd::borrow_raw(control.descriptor()) };
        // The pair's own engine watches it next.
        let _ = epoll::delete(epoll, descriptor);
        let answer = answer.unwrap_or_default();
        match forming.finish(&answer, control, config, MEETING_TIME) {
            Ok(pair) => Ok(Some(pair)),
            Err(error) => self.fail(id, error),
        }
    }

    /// The end of one stranger. The error of this process, want of descriptors or memory, is its
    /// program's to know; that of a peer is logged.
    fn fail(&mut self, id: u64, error: Error) -> Result<Option<Communicator>> {
        drop(self.strangers.take(id));
        match name_descriptors(error) {
            error @ (Error::System { .. }
            | Error::Allocate { .. }
            | Error::Control(weft_control::Error::Descriptors { .. })) => Err(error),
            error => {
                if self.strangers.is_new_reason("a pair was not formed") {
                    log::warn!("a pair was not formed: {error}");
                }
                Ok(None)
            }
        }
    }

    fn refuse(&mut self, why: &'static str) {
        if self.strangers.is_new_reason(why) {
            log::warn!("closed a connection to the listener of pairs: {why}");
        }
    }
}

/// Lets a proved guest in and sends it the offer. Where there is no route the offer has no introduction: from
/// the details the dialler finds the same error for its program.
fn offer(guest: Guest, details: &[u8], config: &PairConfig) -> Result<Offered> {
    let mut forming = Forming::new(LISTENER, config)?;
    let introduction = match forming.introduce(details) {
        no_route @ Err(Error::NoRoute { .. }) => no_route,
        introduced => Ok(introduced?),
    };
    let control = guest.admit(&config.settings)?;
    let link = introduction.as_ref().map(Introduction::encode).unwrap_or_default();
    let offer = encode_offer(&forming.details(), &link);
    control.begin(Operation::Introductions, &offer)?;
    let introduction = introduction?;
    let token = if forming.is_over_tcp() { introduction.token() } else { None };
    Ok(Offered { forming, control, token, answer: None })
}

/// Whether the dialler's introduction has come.
fn offered_answer(offered: &mut Offered) -> Result<bool> {
    if offered.answer.is_none() {
        offered.answer = offered.control.finish()?;
    }
    Ok(offered.answer.is_some())
}

/// Compares tokens in constant time.
fn is_same(one: &StreamToken, other: &StreamToken) -> bool {
    one.iter().zip(other).fold(0, |differs, (one, other)| differs | (one ^ other)) == 0
}
