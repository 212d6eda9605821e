//! Group handle.

mod clocks;
mod messages;

use crate::clock::ClockOffset;
use crate::core::{Core, FormedGroup, PoisonCallback};
use crate::deadline::Deadline;
use crate::handshake::{GROUP_MAGIC, Identity, JobId};
use crate::mesh::{self, LINGER, SharedCore};
use crate::secret::Key;
use crate::{Config, Error, Interrupt, Member, PeerStatus, Poison, Rank, Result, WIRE_VERSIONS};
use crate::{fork_guard, rendezvous};
use std::net::TcpListener;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// This rank's membership in a group. It is cheap to clone and usable from every thread.
///
/// A handle belongs to one group generation; [`Control::reform`] forms the next one from the
/// survivors. The rank leaves when the last handle is dropped.
#[derive(Clone)]
pub struct Control {
    process: Arc<ProcessState>,
    generation: u32,
    rank: Rank,
    members: Arc<[Member]>,
    /// Deadline for the call that formed this generation.
    deadline: Deadline,
    /// Shared by this generation's handles.
    _handle: Arc<()>,
}

/// State shared by all generations in one process.
struct ProcessState {
    shared: Arc<SharedCore>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// By original rank.
    offsets: OnceLock<Vec<ClockOffset>>,
    interrupt: Option<Interrupt>,
    key: Key,
    job: JobId,
    /// Fork count in the process that joined. A forked child has neither the connections nor the thread, and
    /// its lock copies may stay locked.
    forks: u64,
}

impl Control {
    /// Joins the group: waits until all ranks are connected to each other, at most
    /// `config.connect_timeout` for all phases together.
    /// [`Control::connect_deadline`] marks that time limit, for connections in higher layers.
    pub fn connect(config: Config) -> Result<Control> {
        Control::connect_from(config, None)
    }

    /// [`Control::connect`] with a bound listener, for rank 0. The other ranks dial the listener's address.
    pub fn connect_with_listener(config: Config, listener: TcpListener) -> Result<Control> {
        Control::connect_from(config, Some(listener))
    }

    fn connect_from(config: Config, listener: Option<TcpListener>) -> Result<Control> {
        config.validate()?;
        fork_guard::watch();
        let deadline = Deadline::after(config.connect_timeout, config.interrupt.clone());
        let key = Key::new(config.secret.as_ref());
        let (rank, world_size) = (config.rank, config.world_size);
        let (versions, magic) = (WIRE_VERSIONS, GROUP_MAGIC);
        let identity = Identity { rank, world_size, key: key.clone(), versions, magic };
        let joined = rendezvous::join(&config, &identity, listener, &deadline)?;
        let mut core = Core::new(rank, joined.members.clone());
        let handle = core.first_handle();
        let (shared, thread) =
            mesh::start(core, joined.connections, config.silence_timeout, joined.shortest_silence)?;
        let process = ProcessState {
            shared,
            thread: Mutex::new(Some(thread)),
            offsets: OnceLock::new(),
            interrupt: config.interrupt,
            key,
            job: joined.job,
            forks: fork_guard::forks(),
        };
        let members = joined.members.into();
        let process = Arc::new(process);
        let control = Control { process, generation: 0, rank, members, deadline, _handle: handle };
        control.align_clocks(&control.deadline)?;
        Ok(control)
    }

    /// This process's rank in this generation.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Member count in this generation.
    pub fn world_size(&self) -> u32 {
        self.members.len() as u32
    }

    /// The group's generation. It increases by one or more with every [`Control::reform`].
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// All members by rank, this one included.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Deadline for the call that formed this generation: `connect_timeout` in [`Control::connect`], or the
    /// timeout passed to [`Control::reform`]. `None` if the clock cannot represent it.
    pub fn connect_deadline(&self) -> Option<Instant> {
        self.deadline.end()
    }

    /// Time until [`Control::connect_deadline`]; zero once it has passed.
    pub fn connect_time_left(&self) -> Duration {
        self.deadline.left()
    }

    /// Error if operations in flight on this group cannot complete: for waits outside the control plane,
    /// cheap enough for a call every 50 ms.
    ///
    /// # Errors
    /// [`Error::Poisoned`]; [`Error::Left`] if any member has left; [`Error::Superseded`] after
    /// [`Control::reform`]; [`Error::Closed`]; [`Error::Forked`]; [`Error::Interrupted`] if the
    /// program's interrupt is raised.
    pub fn check(&self) -> Result<()> {
        const CHECK: &str = "the other ranks";
        self.process.shared()?.with(|core| core.check(self.generation, CHECK))?;
        self.deadline.check(CHECK)
    }

    /// Fails the group at every rank. The first cause wins; later ones are ignored.
    pub fn poison(&self, cause: &Poison) {
        if self.process.is_forked_child() {
            return;
        }
        self.process.shared.with(|core| core.poison(self.generation, cause.clone()));
    }

    /// The group's poison, if it is poisoned.
    pub fn poisoned(&self) -> Option<Poison> {
        if self.process.is_forked_child() {
            return None;
        }
        self.process.shared.with(|core| core.poisoned(self.generation))
    }

    /// Calls `call` once when the group is poisoned, on the control thread; at once on this thread if it is
    /// already. `call` must not wait for the control plane.
    pub fn on_poison(&self, call: PoisonCallback) {
        if self.process.is_forked_child() {
            return;
        }
        let already = self.process.shared.with(|core| core.on_poison(self.generation, call));
        if let Some((call, poison)) = already {
            call(&poison);
        }
    }

    /// Calls `call` on the control thread for every rank that leaves; at once on this thread for ranks that
    /// have left. A departure is no poison: it fails only operations that still need the rank.
    pub fn on_peer_left(&self, call: Box<dyn Fn(Rank) + Send + Sync>) {
        if self.process.is_forked_child() {
            return;
        }
        let call: Arc<dyn Fn(Rank) + Send + Sync> = call.into();
        let left = self.process.shared.with(|core| core.on_left(self.generation, call.clone()));
        left.into_iter().for_each(|rank| call(rank));
    }

    /// Status for a rank in this generation; `Lost` for a rank beyond the world size.
    pub fn peer_status(&self, rank: Rank) -> PeerStatus {
        match self.members.get(rank.index()) {
            Some(member) if !self.process.is_forked_child() => {
                self.process.shared.with(|core| core.status(member.original_rank))
            }
            _ => PeerStatus::Lost,
        }
    }

    /// Forms a new group from the surviving ranks over the existing connections.
    ///
    /// Collective over all survivors; returns once all have formed the new group. New ranks are
    /// consecutive, ordered as before. The call poisons this generation. A loss during the
    /// call starts another view change within it.
    ///
    /// After [`Error::Timeout`] or [`Error::Interrupted`], a repeat on this handle continues. A repeat is
    /// also possible once all handles for the new group were dropped: it poisons that group and forms a newer
    /// one.
    ///
    /// There is no quorum: in a partitioned network each part forms a group.
    ///
    /// # Errors
    /// [`Error::Timeout`], which names this generation's missing ranks; [`Error::Excluded`] if the
    /// other survivors excluded this rank; [`Error::Superseded`] if the program has a newer group's handle,
    /// or another thread is in this call.
    pub fn reform(&self, timeout: Duration) -> Result<Control> {
        const REFORM: &str = "reform";
        let shared = self.process.shared()?;
        let deadline = self.deadline(timeout);
        shared.with(|core| core.reform(self.generation))?;
        let waited = shared.wait(&deadline, REFORM, Core::reform_poll);
        let missing = shared.with(|core| {
            let missing = core.reform_missing();
            core.reform_pause();
            missing
        });
        let Some(formed) = waited? else {
            let here = |m: &&Member| missing.contains(&m.original_rank);
            let missing = self.members.iter().filter(here).map(|m| m.rank).collect();
            return Err(Error::Timeout { operation: REFORM, missing, waited: deadline.waited() });
        };
        let FormedGroup { generation, members, handle } = formed?;
        let original = self.members.get(self.rank.index()).map(|member| member.original_rank);
        let rank = members.iter().find(|member| Some(member.original_rank) == original);
        let rank = rank.map_or(Rank(0), |member| member.rank);
        Ok(Control {
            process: self.process.clone(),
            generation,
            rank,
            members,
            deadline,
            _handle: handle,
        })
    }

    /// Leaves the group in order and closes the connections. Other ranks' operations that still need this
    /// rank fail with [`Error::Left`]. Closes every handle in this process.
    pub fn leave(&self) {
        self.process.leave();
    }

    /// Closes every connection without a leave message, as a crash does. For loss tests.
    pub fn abandon(&self) {
        if self.process.is_forked_child() {
            return;
        }
        self.process.shared.abandon();
    }

    /// Key shared by this generation's members, for one purpose: authenticating further
    /// connections between them. Without a secret, any process under this user can obtain it.
    pub fn derive_key(&self, purpose: &str) -> [u8; 32] {
        let generation = self.generation.to_le_bytes();
        self.process
            .key
            .prove("weft derived key", &[&self.process.job, &generation, purpose.as_bytes()])
    }

    fn deadline(&self, timeout: Duration) -> Deadline {
        Deadline::after(timeout, self.process.interrupt.clone())
    }
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size())
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

impl ProcessState {
    /// True in a forked child.
    fn is_forked_child(&self) -> bool {
        self.forks != fork_guard::forks()
    }

    fn shared(&self) -> Result<&SharedCore> {
        if self.is_forked_child() { Err(Error::Forked) } else { Ok(&self.shared) }
    }

    fn leave(&self) {
        if self.is_forked_child() {
            return;
        }
        self.shared.with(Core::leave);
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        let on_the_thread =
            thread.as_ref().is_some_and(|t| t.thread().id() == std::thread::current().id());
        if on_the_thread {
            return;
        }
        // Bounded: a callback may hang.
        let deadline = Deadline::after(2 * LINGER, None);
        let closed = self.shared.wait(&deadline, "leave", |core| core.closed.then_some(()));
        if let (Ok(Some(())), Some(thread)) = (closed, thread.take()) {
            let _ = thread.join();
        }
    }
}

impl Drop for ProcessState {
    fn drop(&mut self) {
        self.leave();
        if self.is_forked_child() {
            let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner);
            // The thread does not exist here; dropping the handle would detach a foreign thread.
            std::mem::forget(thread.take());
        }
    }
}

/// Group with `size` ranks within this process, in rank order, over an ephemeral port: for tests and examples.
/// `adjust` may change each rank's configuration.
pub fn local_world(size: u32, adjust: impl Fn(&mut Config)) -> Result<Vec<Control>> {
    let listener =
        TcpListener::bind("127.0.0.1:0").map_err(Error::system("creating a listener"))?;
    let port = listener.local_addr().map_err(Error::system("querying the port"))?.port();
    let mut listener = Some(listener);
    let ranks: Vec<JoinHandle<Result<Control>>> = (0..size)
        .map(|rank| {
            let mut config = Config::new(rank, size);
            config.port = port;
            adjust(&mut config);
            let listener = listener.take();
            std::thread::spawn(move || Control::connect_from(config, listener))
        })
        .collect();
    ranks
        .into_iter()
        .map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        .collect()
}
