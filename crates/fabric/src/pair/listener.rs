//! Listening end for pairs: one port for all pairs in a process.
//!
//! Every connection counts as unproven until the pair is formed. Unproven connections are bounded in
//! number and time ([`crate::unproven`]), so a stalled dialler, or bytes from another protocol, cost a
//! descriptor for 2 s. Each connection advances as bytes arrive on it; no other waits for it. The time in
//! which the listener itself opens or closes devices or connects a pair counts for no connection, but
//! each ends at the latest 30 s after it was accepted.

use super::config::PairConfig;
use super::pending_pair::{
    PairIntroduction, PendingPair, encode_offer, name_descriptors, providers_of, verbs_address,
};
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::providers::NicAddress;
use crate::types::{ProviderKind, Time};
use crate::unproven::UnprovenConnections;
use crate::{clock, registry};
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
    IncomingConnection, IncomingStep, LISTENER, PairControl, StreamToken, descriptor_error,
    nonblocking_listener,
};

/// Event for the listening socket.
const LISTENING: u64 = u64::MAX;
/// Longest sleep between two checks for close, interrupt and expired connections.
const MAX_PARK: Duration = Duration::from_millis(50);
/// Connections accepted in one call.
const ACCEPTED_AT_ONCE: usize = 16;
/// Time for the last formation step, in which both ends connect at once.
const CONNECT_TIME: Duration = Duration::from_secs(2);

/// Port on which a process accepts pairs. Any thread may call.
pub struct Listener {
    config: PairConfig,
    address: SocketAddr,
    epoll: Arc<OwnedFd>,
    forks: u64,
    /// `None` once closed.
    state: Mutex<Option<ListenerState>>,
}

struct ListenerState {
    _guard: Registration,
    listener: TcpListener,
    unproven: UnprovenConnections<PairAttempt>,
}

/// Connection on its way to a pair.
enum PairAttempt {
    /// Before the dialler has proved the secret.
    Incoming(Box<IncomingConnection>),
    /// After the proof; the offer was sent.
    Offered(Box<OfferedPair>),
    /// Between two states, or already in an accepted offer.
    Done,
}

struct OfferedPair {
    pending: PendingPair,
    control: PairControl,
    /// Token for the expected data connection; `None` if none is expected.
    token: Option<StreamToken>,
    /// The dialler's introduction, once received.
    reply: Option<Vec<u8>>,
}

impl Listener {
    /// Listens at the configuration's address; port 0 is any free port ([`Listener::address`]).
    ///
    /// # Errors
    /// [`Error::Control`]: no address, no address on this host, a port in use; an address off loopback
    /// without a secret. [`Error::Provider`] for verbs or ofi without library or NIC, for copy without GPUs,
    /// and for only verbs and ofi with payload TLS; [`Error::Control`] for payload TLS without a certificate.
    pub fn bind(config: PairConfig) -> Result<Listener> {
        let (host, port) = config.settings.endpoint()?;
        config.settings.check_listener_tls()?;
        registry::check_variables(&config.ofi, &None)?;
        for provider in providers_of(&config)? {
            match provider {
                ProviderKind::Copy => config.devices.check()?,
                _ => registry::check(provider, &config.ofi, &config.verbs)?,
            }
        }
        let listener = nonblocking_listener(&host, port)?;
        let address = listener
            .local_addr()
            .map_err(|source| Error::System { what: "cannot listen for pairs", source })?;
        let system = |e| name_descriptors(Error::system("cannot listen for pairs", e));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system)?;
        let data = epoll::EventData::new_u64(LISTENING);
        epoll::add(&epoll, &listener, data, epoll::EventFlags::IN).map_err(system)?;
        let _guard = fork_guard::register(&listener);
        let state = ListenerState { _guard, listener, unproven: UnprovenConnections::new() };
        let (epoll, state) = (Arc::new(epoll), Mutex::new(Some(state)));
        Ok(Listener { config, address, epoll, forks: fork_guard::forks(), state })
    }

    /// The bound address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Descriptor for event loops: readable when [`Listener::try_accept`] has work.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// The next pair; this end is rank 0.
    ///
    /// # Errors
    /// [`Error::NoDialer`] after the deadline; [`Error::Interrupted`]; as [`Listener::try_accept`].
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
                let (address, waited) = (self.address, now.since(since));
                return Err(Error::NoDialer { address, waited });
            }
            if interrupted() {
                return Err(Error::Interrupted);
            }
            let wait = deadline.since(now).min(MAX_PARK);
            let timeout = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
            let mut polled = [PollFd::new(&*self.epoll, PollFlags::IN)];
            // A signal ends it early.
            let _ = rustix::event::poll(&mut polled, Some(&timeout));
        }
    }

    /// Next pair, if the received bytes complete one. Advances every connection; a peer that stops in the
    /// last formation step blocks it for at most 2 s.
    ///
    /// # Errors
    /// [`Error::ListenerClosed`]; [`weft_control::Error::Forked`]; [`weft_control::Error::Descriptors`]
    /// if this process has no descriptor left: the dialler's connection waits, and a later call accepts
    /// it. Dialler errors end only that connection.
    pub fn try_accept(&self) -> Result<Option<Communicator>> {
        if self.forks != fork_guard::forks() {
            return Err(weft_control::Error::Forked.into());
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let closed = Error::ListenerClosed { address: self.address };
        let state = state.as_mut().ok_or(closed)?;
        let now = clock::now();
        state.busy(|state| {
            while state.unproven.drop_expired(now).is_some() {
                state.refuse("not formed in time");
            }
        });
        let mut events = Vec::with_capacity(64);
        let room = rustix::buffer::spare_capacity(&mut events);
        // With a zero timeout it cannot be interrupted; the descriptor is this listener's.
        let _ = epoll::wait(&*self.epoll, room, Some(&Timespec::default()));
        // Connections in progress first, so that a burst of new ones cannot evict them.
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

    /// Stops listening; accepted pairs stay. Idempotent.
    pub fn close(&self) {
        if self.forks == fork_guard::forks() {
            drop(self.state.lock().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

impl ListenerState {
    /// Does work whose time counts for no connection. Such work does not nest.
    fn busy<T>(&mut self, work: impl FnOnce(&mut ListenerState) -> T) -> T {
        let begin = clock::now();
        let done = work(self);
        self.unproven.postpone(clock::now().since(begin));
        done
    }

    /// Accepts waiting connections.
    fn accept(&mut self, epoll: &OwnedFd, config: &PairConfig) -> Result<Option<Communicator>> {
        for _ in 0..ACCEPTED_AT_ONCE {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                        // The oldest unproven connection frees a descriptor for the next one.
                        if self.busy(|state| state.unproven.drop_oldest().is_some()) {
                            self.refuse("no descriptors left");
                            continue;
                        }
                        return Err(descriptor_error("accepting a pair", error).into());
                    }
                    // This error concerns one connection, not the listener.
                    _ => continue,
                },
            };
            let Ok(incoming) = IncomingConnection::new(stream, &config.settings) else { continue };
            let descriptor = incoming.as_fd().as_raw_fd();
            let (id, dropped) =
                self.unproven.add(PairAttempt::Incoming(Box::new(incoming)), clock::now());
            if let Some(dropped) = dropped {
                self.busy(|_| drop(dropped));
                self.refuse("too many connections in progress");
            }
            // SAFETY: the connection owns the descriptor and is alive during this call.
            let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
            let data = epoll::EventData::new_u64(id);
            epoll::add(epoll, descriptor, data, epoll::EventFlags::IN)
                .map_err(|e| Error::system("cannot watch a connection", e))?;
            // A hello or a token has often arrived already.
            if let Some(pair) = self.ready(id, epoll, config)? {
                return Ok(Some(pair));
            }
        }
        Ok(None)
    }

    /// Advances one connection.
    fn ready(
        &mut self,
        id: u64,
        epoll: &OwnedFd,
        config: &PairConfig,
    ) -> Result<Option<Communicator>> {
        let Some(attempt) = self.unproven.get_mut(id) else { return Ok(None) };
        let step = match attempt {
            PairAttempt::Incoming(incoming) => incoming.step(),
            PairAttempt::Offered(offered) => {
                let reply = has_reply(offered);
                return self.replied(id, reply, epoll, config);
            }
            PairAttempt::Done => return Ok(None),
        };
        match step {
            Ok(IncomingStep::Pending) => Ok(None),
            Ok(IncomingStep::Authenticated(details)) => {
                let PairAttempt::Incoming(incoming) = std::mem::replace(attempt, PairAttempt::Done)
                else {
                    return Ok(None);
                };
                match self.busy(|_| offer(*incoming, &details, config)) {
                    Ok(offered) => {
                        if let Some(attempt) = self.unproven.get_mut(id) {
                            *attempt = PairAttempt::Offered(Box::new(offered));
                        }
                        Ok(None)
                    }
                    Err(error) => self.fail(id, error),
                }
            }
            Ok(IncomingStep::Stream(token)) => {
                let Some(PairAttempt::Incoming(incoming)) = self.unproven.take(id) else {
                    return Ok(None);
                };
                // The pair's own epoll monitors it from here on.
                let _ = epoll::delete(epoll, incoming.as_fd());
                let Some(pair) = self.pair_of(&token) else {
                    self.refuse("its token belongs to no pending pair");
                    return Ok(None);
                };
                if let Some(PairAttempt::Offered(offered)) = self.unproven.get_mut(pair) {
                    offered.token = None;
                    offered.pending.adoption().put(incoming.into_stream());
                }
                self.finish(pair, epoll, config)
            }
            Err(why) => {
                self.busy(|state| drop(state.unproven.take(id)));
                self.refuse(why);
                Ok(None)
            }
        }
    }

    /// The connection that was issued this token.
    fn pair_of(&self, token: &StreamToken) -> Option<u64> {
        let with_token = |attempt: &PairAttempt| {
            matches!(attempt, PairAttempt::Offered(offered)
                if offered.token.is_some_and(|issued| is_same(&issued, token)))
        };
        self.unproven.iter().find(|(_, attempt)| with_token(attempt)).map(|(id, _)| id)
    }

    fn replied(
        &mut self,
        id: u64,
        reply: Result<bool>,
        epoll: &OwnedFd,
        config: &PairConfig,
    ) -> Result<Option<Communicator>> {
        match reply {
            Ok(true) => self.finish(id, epoll, config),
            Ok(false) => Ok(None),
            Err(error) => self.fail(id, error),
        }
    }

    /// Forms the pair once the reply and the data connection have arrived.
    fn finish(
        &mut self,
        id: u64,
        epoll: &OwnedFd,
        config: &PairConfig,
    ) -> Result<Option<Communicator>> {
        let is_ready = matches!(self.unproven.get_mut(id), Some(PairAttempt::Offered(offered))
            if offered.reply.is_some() && offered.token.is_none());
        if !is_ready {
            return Ok(None);
        }
        let Some(PairAttempt::Offered(offered)) = self.unproven.take(id) else { return Ok(None) };
        let OfferedPair { pending, control, reply, .. } = *offered;
        // SAFETY: the control connection owns the descriptor and is alive during this call.
        let descriptor = unsafe { BorrowedFd::borrow_raw(control.descriptor()) };
        // The pair's own engine monitors it from here on.
        let _ = epoll::delete(epoll, descriptor);
        let reply = reply.unwrap_or_default();
        match self.busy(|_| pending.finish(&reply, control, config, CONNECT_TIME)) {
            Ok(pair) => Ok(Some(pair)),
            Err(error) => self.fail(id, error),
        }
    }

    /// Ends one connection. An error in this process, such as a lack of descriptors or memory, is
    /// returned; a peer's error is logged.
    fn fail(&mut self, id: u64, error: Error) -> Result<Option<Communicator>> {
        self.busy(|state| drop(state.unproven.take(id)));
        match name_descriptors(error) {
            error @ (Error::System { .. }
            | Error::Allocate { .. }
            | Error::Control(
                weft_control::Error::Descriptors { .. } | weft_control::Error::Thread { .. },
            )) => Err(error),
            error => {
                if self.unproven.is_new_reason("a pair was not formed") {
                    log::warn!("a pair was not formed: {error}");
                }
                Ok(None)
            }
        }
    }

    fn refuse(&mut self, why: &'static str) {
        if self.unproven.is_new_reason(why) {
            log::warn!("closed a connection to the listener of pairs: {why}");
        }
    }
}

/// Admits an authenticated connection and sends the offer. Without a route the offer has no introduction:
/// the dialler derives the same error from the details.
fn offer(incoming: IncomingConnection, details: &[u8], config: &PairConfig) -> Result<OfferedPair> {
    #[cfg(test)]
    tests::open_slowly();
    let local = incoming.local_address();
    let nic = verbs_address(details).and_then(|theirs| NicAddress::of_listener(local, &theirs));
    let mut pending = PendingPair::new(LISTENER, config, local, nic)?;
    let introduction = match pending.introduce(details) {
        no_route @ Err(Error::NoRoute { .. }) => no_route,
        introduced => Ok(introduced?),
    };
    let control = incoming.admit(&config.settings)?;
    let link = introduction.as_ref().map(PairIntroduction::encode).unwrap_or_default();
    let offer = encode_offer(&pending.details(), &link);
    control.begin(Operation::Introductions, &offer)?;
    let introduction = introduction?;
    let token = if pending.is_over_tcp() { introduction.token() } else { None };
    Ok(OfferedPair { pending, control, token, reply: None })
}

/// True once the dialler's introduction has arrived.
fn has_reply(offered: &mut OfferedPair) -> Result<bool> {
    if offered.reply.is_none() {
        offered.reply = offered.control.finish()?;
    }
    Ok(offered.reply.is_some())
}

/// Compares tokens in constant time.
fn is_same(one: &StreamToken, other: &StreamToken) -> bool {
    one.iter().zip(other).fold(0, |differs, (one, other)| differs | (one ^ other)) == 0
}

#[cfg(test)]
mod tests {
    use super::super::config::PairConfig;
    use super::super::connect;
    use super::*;
    use crate::providers::CopyBackend;
    use crate::types::ProviderKind;
    use crate::unproven::HELLO_TIME;
    use std::cell::Cell;
    use weft_control::pair::PairSettings;

    thread_local! {
        /// Time that this thread's listeners need to open a pair's devices.
        static OPENING: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    pub fn open_slowly() {
        std::thread::sleep(OPENING.get());
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets, which miri lacks")]
    fn a_listener_whose_providers_lack_a_library_or_a_nic_is_refused_at_once() {
        for provider in [ProviderKind::Verbs, ProviderKind::Ofi] {
            let mut config = local();
            config.providers = vec![ProviderKind::Shm, provider];
            let bound = Listener::bind(config.clone()).map(drop);
            let expected = registry::check(provider, &config.ofi, &None);
            let text = |result: Result<()>| result.map_err(|error| error.to_string());
            assert_eq!(text(bound), text(expected));
        }
        let mut config = local();
        config.providers = vec![ProviderKind::Copy];
        assert_eq!(Listener::bind(config.clone()).is_ok(), config.devices.check().is_ok());
        config.devices = CopyBackend::Twin { seed: 0 };
        assert!(Listener::bind(config).is_ok());
    }

    /// Configuration over shm at a free port.
    fn local() -> PairConfig {
        let settings = PairSettings {
            address: "127.0.0.1:0".into(),
            source: None,
            secret: None,
            host_id: "host".into(),
            silence_timeout: Duration::from_secs(15),
            interrupt: None,
            tls: Default::default(),
        };
        let mut config = PairConfig::new(settings);
        config.providers = vec![ProviderKind::Shm];
        config
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets, which miri lacks")]
    fn a_listener_that_opens_its_devices_slowly_forms_the_pair_at_the_first_attempt() {
        let mut config = local();
        let listener = Listener::bind(config.clone()).unwrap();
        config.settings.address = listener.address().to_string();
        let opening = HELLO_TIME + Duration::from_millis(200);
        // One attempt fits into this time, two do not.
        let deadline = clock::now().after(2 * opening - Duration::from_millis(200));
        let dialer = std::thread::spawn(move || connect(&config, deadline).map(drop));
        OPENING.set(opening);
        assert!(listener.accept(deadline, &mut || false).is_ok());
        dialer.join().unwrap().unwrap();
    }
}
