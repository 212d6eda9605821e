//! A running proxy: its thread, errors and closing.
//!
//! Only the thread polls the driver, and nobody else calls this engine while it runs, except for the barrier at the end. In each turn it takes commands, polls the driver, and raises words.

use super::backlog::Backlog;
use super::command::{CommandError, CommandFields};
use super::driver::{ProxyConfig, ProxyDriver};
use super::memory::{ProxyMemory, ProxySizes};
use super::ring::{MappedRing, RingError, RingReader};
use super::thread_core::{ProxyCore, pin};
use super::word_store::WordHome;
use super::words::Words;
use crate::domain::Domain;
use crate::error::{Error, Result};
use crate::phase::{PROXY_PUSH, is_proxy};
use crate::table::Table;
use crate::watch::{Code, Record};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use weft_control::{Cause, Poison, Rank};
use weft_fabric::{Communicator, Requests, Time, clock};

/// Maximum slots in a command ring.
pub const MAX_SLOTS: u32 = 1 << 16;
/// Commands that the thread takes before it polls the driver.
const COMMANDS_EACH_TURN: usize = 64;
/// Time after the last command or word for which an idle thread polls without a nap, on a core of its own.
const SPIN: Duration = Duration::from_millis(10);
/// Nap between two polls by an idle thread.
const NAP: Duration = Duration::from_micros(100);
/// Polls before the first nap, if threads share cores.
const SHARED_POLLS: u32 = 64;
/// Turns between two readings of the clock.
const TURNS_EACH_READING: u64 = 64;
/// Turns between two looks at what commands wait for.
const TURNS_EACH_BACKLOG: u64 = 4096;
/// Time without a turn that an error mentions.
const LONG: Duration = Duration::from_secs(1);
/// Time between two looks at an ending proxy.
const LOOK: Duration = Duration::from_micros(50);

/// Idle behaviour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Idle {
    /// Naps for 100 us between polls, 10 ms after the last work.
    #[default]
    Nap,
    /// Polls.
    Spin,
}

/// Options for one rank.
#[derive(Clone, Debug)]
pub struct ProxyOptions {
    /// Slots in the command ring, a power of two up to [`MAX_SLOTS`].
    pub slots: u32,
    /// Idle behaviour.
    pub idle: Idle,
    /// Core for the thread.
    pub core: ProxyCore,
    /// Home of the words.
    pub words: WordHome,
}

impl Default for ProxyOptions {
    fn default() -> ProxyOptions {
        ProxyOptions {
            slots: 1024,
            idle: Idle::Nap,
            core: ProxyCore::Any,
            words: WordHome::default(),
        }
    }
}

/// Group that a proxy writes in: all hosts' ranks, and no other user.
pub trait ProxyGroup: Send + Sync {
    /// The communicator.
    fn communicator(&self) -> &Communicator;
}

impl ProxyGroup for Communicator {
    fn communicator(&self) -> &Communicator {
        self
    }
}

/// One rank's running proxy.
pub struct Proxy {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// True once kernels cannot reach the memory.
    is_withdrawn: AtomicBool,
}

/// State that the thread and the owner share.
struct Shared {
    group: Arc<dyn ProxyGroup>,
    domain: Arc<Domain>,
    memory: ProxyMemory,
    stopping: AtomicBool,
    /// Commands taken. Stored behind `is_idle`.
    taken: AtomicU64,
    /// True if all commands taken were complete.
    is_idle: AtomicBool,
    /// Time of a recent turn.
    turned_at: AtomicU64,
    /// Causes for which commands waited recently.
    backlog: Mutex<Backlog>,
    failure: OnceLock<Failure>,
    /// Time without a turn at the first report on an expired wait, if it was long.
    stall: OnceLock<Option<Duration>>,
}

/// Cause that ended the thread.
enum Failure {
    Command(CommandError),
    Ring(RingError),
    /// A peer's round that cannot be.
    Round {
        peer: Rank,
        word: u32,
        round: u64,
        count: u64,
    },
    /// The group is poisoned.
    Poisoned(Poison),
    Other(String),
    Panicked(String),
}

impl Proxy {
    /// Starts a rank's proxy for kernels on `domain`. Afterwards all ranks in `group` meet, for example at a barrier, and
    /// then kernels may push.
    ///
    /// # Errors
    /// [`Error::ProxyLimit`]; [`Error::ProxyPresent`]; the engine's and CUDA's errors; a system call error if the thread
    /// or its core is refused.
    pub fn start(
        domain: Arc<Domain>,
        group: Arc<dyn ProxyGroup>,
        config: ProxyConfig,
        options: ProxyOptions,
    ) -> Result<Proxy> {
        let ProxyOptions { slots, idle, core, words } = options;
        if !slots.is_power_of_two() || !(2..=MAX_SLOTS).contains(&slots) {
            let (what, value, most) =
                ("command slots, a power of two", slots.into(), MAX_SLOTS.into());
            return Err(Error::ProxyLimit { what, value, least: 2, most });
        }
        let communicator = group.communicator();
        let shares_cores = communicator.engine().shares_cores();
        let core = core.resolve(shares_cores)?;
        let (rank, ranks) = (communicator.rank(), communicator.world_size());
        let each = config.words.len();
        let sizes = ProxySizes {
            slots: slots as usize,
            words: ranks as usize * each,
            lengths: config.list_lengths as usize,
        };
        communicator.engine().use_copy_engines_only();
        let driver = ProxyDriver::new(&mut communicator.engine(), config)?;
        let memory = ProxyMemory::alloc(domain.context(), sizes, words)?;
        let fields = Table {
            words_each: each as u32,
            proxy_rank: rank.0,
            proxy_ranks: ranks,
            ..memory.fields()
        };
        let pace = Pace::new(idle, shares_cores);
        let shared = Arc::new(Shared {
            group,
            domain,
            memory,
            stopping: AtomicBool::new(false),
            taken: AtomicU64::new(0),
            is_idle: AtomicBool::new(true),
            turned_at: AtomicU64::new(clock::now().0),
            backlog: Mutex::default(),
            failure: OnceLock::new(),
            stall: OnceLock::new(),
        });
        shared.domain.publish_proxy(&fields)?;
        let proxy = Proxy {
            shared: shared.clone(),
            thread: Mutex::default(),
            is_withdrawn: AtomicBool::new(false),
        };
        let work = move || shared.run(driver, each, pace, core);
        let thread = std::thread::Builder::new().name(format!("weft-proxy-{}", rank.0)).spawn(work);
        let refused = weft_control::Error::thread("the proxy's thread");
        let thread = thread.map_err(|error| weft_fabric::Error::from(refused(error)))?;
        *proxy.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(proxy)
    }

    /// Home of the words: where [`WordHome::Auto`] has put them, or the home that was asked for.
    pub fn word_home(&self) -> WordHome {
        self.shared.memory.word_home()
    }

    /// Raises the error that ended the proxy, or that a kernel recorded.
    ///
    /// # Errors
    /// [`Error::Command`] for a command out of range; [`Error::ProxyTimeout`] for an expired wait; the group's poison; errors
    /// from [`Domain::check`].
    pub fn check(&self) -> Result<()> {
        let failure = self.shared.failure.get();
        let timeout = self.shared.domain.failures().watch().fatal().filter(is_proxy_timeout);
        match (failure, timeout) {
            (Some(failure), None) => Err(self.shared.error(failure)),
            // A lost peer explains any expired wait; an expired wait explains all that follows.
            (Some(failure), Some(_)) if !failure.may_follow_a_timeout() => {
                Err(self.shared.error(failure))
            }
            (_, Some(record)) => {
                let error = self.shared.timeout(&record);
                self.shared.poison(&error);
                Err(error)
            }
            (None, None) => self.shared.domain.check(),
        }
    }

    /// Waits until all commands are complete; kernels have ended. With an error it returns at once.
    ///
    /// # Errors
    /// Errors from [`Proxy::check`]; [`Error::ProxyBusy`]; [`weft_fabric::Error::Interrupted`].
    pub fn drain(&self, deadline: Time, interrupted: &mut dyn FnMut() -> bool) -> Result<()> {
        let pushed = self.shared.domain.proxy_tickets()?;
        loop {
            self.check()?;
            let sent = self.shared.taken.load(Ordering::Acquire);
            if sent == pushed && self.shared.is_idle.load(Ordering::Acquire) {
                return Ok(());
            }
            if self.shared.stopping.load(Ordering::Acquire) {
                return Err(weft_fabric::Error::from(weft_control::Error::Closed).into());
            }
            if clock::now() > deadline {
                let (rank, backlog) = (self.shared.rank(), self.shared.backlog());
                return Err(Error::ProxyBusy { rank, pushed, sent, backlog });
            }
            if interrupted() {
                return Err(weft_fabric::Error::Interrupted.into());
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Ends the thread and all waits in kernels, and takes the ring back: kernels that start later push nothing.
    ///
    /// # Errors
    /// CUDA's. The memory stays allocated then.
    pub fn stop(&self) -> Result<()> {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.domain.failures().watch().abort();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // The thread catches panics.
            let _ = thread.join();
        }
        if self.is_withdrawn.load(Ordering::Acquire) {
            return Ok(());
        }
        self.shared.domain.withdraw_proxy()?;
        self.is_withdrawn.store(true, Ordering::Release);
        Ok(())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // Kernels may still run, if nobody has waited for them; their waits are bounded.
        let withdrawn = self.stop().and_then(|()| self.shared.domain.synchronize());
        if let Err(error) = withdrawn {
            log::warn!("memory of a proxy left allocated: {error}");
            std::mem::forget(self.shared.clone());
        }
    }
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let taken = self.shared.taken.load(Ordering::Relaxed);
        write!(f, "Proxy({} of {:?}, {taken} commands)", self.shared.rank(), self.shared.domain)
    }
}

impl Shared {
    fn rank(&self) -> Rank {
        self.group.communicator().rank()
    }

    fn backlog(&self) -> Backlog {
        *self.backlog.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread.
    fn run(&self, mut driver: ProxyDriver, words_each: usize, pace: Pace, core: Option<u32>) {
        if let Some(core) = core {
            log::debug!("the proxy's thread of {} runs on core {core}", self.rank());
            pin(core);
        }
        let served = catch_unwind(AssertUnwindSafe(|| self.serve(&mut driver, words_each, pace)));
        let error = match served {
            Ok(Ok(())) => return,
            Ok(Err(error)) => {
                log::info!("the proxy of {} ends: {}: {error}", self.rank(), driver.backlog());
                error
            }
            Err(panic) => return self.end(Failure::Panicked(panic_text(panic.as_ref()))),
        };
        self.end(match error {
            Error::Command(error) => Failure::Command(error),
            Error::Ring(error) => Failure::Ring(error),
            Error::ProxyRound { peer, word, round, count } => {
                Failure::Round { peer, word, round, count }
            }
            Error::Fabric(weft_fabric::Error::Poisoned(poison)) => Failure::Poisoned(poison),
            error => Failure::Other(error.to_string()),
        });
    }

    /// Serves kernels until it is stopped.
    fn serve(&self, driver: &mut ProxyDriver, words_each: usize, mut pace: Pace) -> Result<()> {
        let communicator = self.group.communicator();
        let (mut requests, mut last_poll) = (driver.requests(), 0);
        let mut reader = RingReader::new(self.memory.ring());
        let words = Words::new(self.memory.words(), words_each);
        self.memory.bind_writer()?;
        while !self.stopping.load(Ordering::Acquire) {
            let turn = self.memory.alive().fetch_add(1, Ordering::Relaxed);
            let mut works = self.take_commands(&mut reader, driver, &mut requests)?;
            let mut engine = communicator.engine();
            engine.check()?;
            engine.drive_onward(driver, &mut requests, &mut last_poll)?;
            drop(engine);
            let mut raised = Ok(());
            driver.take_words(|update| {
                raised = std::mem::replace(&mut raised, Ok(())).and_then(|()| words.raise(update));
                works = true;
            });
            raised?;
            self.is_idle.store(driver.is_idle(), Ordering::Release);
            self.taken.store(reader.taken(), Ordering::Release);
            let has_napped = pace.pause(works);
            if has_napped || turn.is_multiple_of(TURNS_EACH_READING) {
                self.turned_at.store(clock::now().0, Ordering::Relaxed);
            }
            if has_napped || turn.is_multiple_of(TURNS_EACH_BACKLOG) {
                *self.backlog.lock().unwrap_or_else(PoisonError::into_inner) = driver.backlog();
            }
        }
        Ok(())
    }

    /// Takes the commands that are in the ring, up to a limit; false if there was none.
    fn take_commands(
        &self,
        reader: &mut RingReader<MappedRing<'_>>,
        driver: &mut ProxyDriver,
        requests: &mut Requests,
    ) -> Result<bool> {
        for taken in 0..COMMANDS_EACH_TURN {
            if !driver.has_room() {
                return Ok(taken > 0);
            }
            let accept = |ticket, fields: &CommandFields| {
                driver.accept(ticket, fields, self.memory.lengths(), requests)
            };
            match reader.take(accept)? {
                Some(accepted) => accepted?,
                None => return Ok(taken > 0),
            }
        }
        Ok(true)
    }

    /// Ends the group and all waits in kernels, with the cause.
    fn end(&self, failure: Failure) {
        if !matches!(failure, Failure::Poisoned(_)) {
            self.poison(&self.error(&failure));
        }
        // Set here only.
        let _ = self.failure.set(failure);
        self.domain.failures().watch().abort();
    }

    fn poison(&self, error: &Error) {
        let (kind, rank) = (Cause::User, Some(self.rank()));
        self.group.communicator().poison(Poison { kind, rank, detail: error.to_string() });
    }

    fn error(&self, failure: &Failure) -> Error {
        match failure {
            Failure::Command(error) => error.clone().into(),
            Failure::Ring(error) => (*error).into(),
            Failure::Poisoned(poison) => weft_fabric::Error::Poisoned(poison.clone()).into(),
            Failure::Round { peer, word, round, count } => {
                Error::ProxyRound { peer: *peer, word: *word, round: *round, count: *count }
            }
            Failure::Other(detail) => {
                Error::ProxyFailed { rank: self.rank(), detail: detail.clone() }
            }
            Failure::Panicked(detail) => {
                Error::ProxyPanicked { rank: self.rank(), detail: detail.clone() }
            }
        }
    }

    /// Error for a kernel's expired wait.
    fn timeout(&self, record: &Record) -> Error {
        let Record { peer, slot, expected, seen, phase, .. } = *record;
        // An ended thread has another error.
        let stall = || {
            let turned_at = Time(self.turned_at.load(Ordering::Relaxed));
            let runs = self.failure.get().is_none() && !self.stopping.load(Ordering::Relaxed);
            Some(clock::now().since(turned_at)).filter(|stall| runs && *stall > LONG)
        };
        Error::ProxyTimeout {
            rank: self.rank(),
            peer: peer.map(Rank).filter(|_| phase != PROXY_PUSH),
            word: slot,
            expected,
            seen,
            backlog: self.backlog(),
            stall: *self.stall.get_or_init(stall),
        }
    }
}

impl Failure {
    /// True if it may be a consequence of an expired wait.
    fn may_follow_a_timeout(&self) -> bool {
        matches!(self, Failure::Poisoned(Poison { kind: Cause::User, .. }))
    }
}

fn is_proxy_timeout(record: &Record) -> bool {
    record.code == Code::Timeout && is_proxy(record.phase)
}

/// Pauses between turns.
struct Pace {
    idle: Idle,
    shares_cores: bool,
    /// Turns without work.
    polls: u32,
    /// Time of the last work, read in the first turn without.
    worked_at: Time,
}

impl Pace {
    fn new(idle: Idle, shares_cores: bool) -> Pace {
        Pace { idle, shares_cores, polls: 0, worked_at: Time(0) }
    }

    /// Pauses after a turn; true if it napped.
    fn pause(&mut self, works: bool) -> bool {
        if works {
            self.polls = 0;
            return false;
        }
        self.polls = self.polls.saturating_add(1);
        if self.polls == 1 {
            self.worked_at = clock::now();
        }
        let naps = match (self.idle, self.shares_cores) {
            (Idle::Spin, false) => false,
            (Idle::Nap, false) => {
                self.polls.is_multiple_of(SHARED_POLLS) && clock::now().since(self.worked_at) > SPIN
            }
            (_, true) => self.polls > SHARED_POLLS,
        };
        match naps {
            true => std::thread::sleep(NAP),
            false if self.shares_cores => std::thread::yield_now(),
            false => std::hint::spin_loop(),
        }
        naps
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().map(str::to_owned);
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "it panicked".to_owned())
}
