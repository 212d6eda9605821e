//! The handle a program holds.

mod clocks;
mod messages;

use crate::clock::Offset;
use crate::core::{Core, Formed, OnPoison};
use crate::deadline::Deadline;
use crate::handshake::{GROUP_MAGIC, Identity, Job};
use crate::mesh::{self, LINGER, Shared};
use crate::secret::Key;
use crate::{Config, Error, Interrupt, Member, PeerStatus, Poison, Rank, Result, WIRE_VERSIONS};
use crate::{bootstrap, fork_guard};
use std::net::TcpListener;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// This rank's membership in a group: cheap to clone, usable from every thread.
///
/// A handle stands for one generation of the group. [`Control::reform`] makes the next one out of
/// the survivors. When the last handle of a process goes, the rank leaves.
#[derive(Clone)]
pub struct Control {
    owner: Arc<Owner>,
    generation: u32,
    rank: Rank,
    members: Arc<[Member]>,
    /// Of the call that formed this generation.
    deadline: Deadline,
    /// Shared by the handles of this generation.
    _handle: Arc<()>,
}

/// What all generations of one process have in common.
struct Owner {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// By original rank.
    offsets: OnceLock<Vec<Offset>>,
    interrupt: Option<Interrupt>,
    key: Key,
    job: Job,
    /// The forks behind the process that joined. In another process, a forked child, the connections
    /// and the thread are not there, and a lock may be held for ever.
    forks: u64,
}

impl Control {
    /// Joins the group: waits until every rank is there and connected to every other, at most
    /// `config.connect_timeout` for all of its phases together.
    /// [`Control::connect_deadline`] is the end of that time, for what is connected on top of it.
    pub fn connect(config: Config) -> Result<Control> {
        Control::connect_from(config, None)
    }

    /// [`Control::connect`] with a listener that is bound already, for rank 0. The other ranks dial
    /// its address.
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
        let joined = bootstrap::join(&config, &identity, listener, &deadline)?;
        let mut core = Core::new(rank, joined.members.clone());
        let handle = core.first_handle();
        let (shared, thread) =
            mesh::start(core, joined.links, config.silence_timeout, joined.shortest_silence)?;
        let owner = Owner {
            shared,
            thread: Mutex::new(Some(thread)),
            offsets: OnceLock::new(),
            interrupt: config.interrupt,
            key,
            job: joined.job,
            forks: fork_guard::forks(),
        };
        let members = joined.members.into();
        let owner = Arc::new(owner);
        let control = Control { owner, generation: 0, rank, members, deadline, _handle: handle };
        control.align_clocks(&control.deadline)?;
        Ok(control)
    }

    /// This rank, in this generation.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many members this generation has.
    pub fn world_size(&self) -> u32 {
        self.members.len() as u32
    }

    /// Which generation of the group this is. It rises with every [`Control::reform`], by one or
    /// more.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// All members, by rank, this one among them.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The end of the time that the program gave to the call that formed this generation: the
    /// `connect_timeout` of [`Control::connect`], or the timeout of [`Control::reform`]. `None` if
    /// that is beyond what the clock can represent.
    pub fn connect_deadline(&self) -> Option<Instant> {
        self.deadline.end()
    }

    /// The time until [`Control::connect_deadline`]; zero once it has passed.
    pub fn connect_time_left(&self) -> Duration {
        self.deadline.left()
    }

    /// An error if what is under way on this group cannot end well: for waits outside of the control
    /// plane, cheap enough for every 50 ms.
    ///
    /// # Errors
    /// [`Error::Poisoned`]; [`Error::Left`] if any member has left; [`Error::Superseded`] after
    /// [`Control::reform`]; [`Error::Closed`]; [`Error::Forked`]; [`Error::Interrupted`] if the
    /// program's interrupt asks for it.
    pub fn check(&self) -> Result<()> {
        const CHECK: &str = "the other ranks";
        self.owner.shared()?.with(|core| core.check(self.generation, CHECK))?;
        self.deadline.check(CHECK)
    }

    /// Fails the group at every rank. The first cause wins; later ones change nothing.
    pub fn poison(&self, cause: &Poison) {
        if self.owner.is_copy() {
            return;
        }
        self.owner.shared.with(|core| core.poison(self.generation, cause.clone()));
    }

    /// What the group was poisoned with, if it was.
    pub fn poisoned(&self) -> Option<Poison> {
        if self.owner.is_copy() {
            return None;
        }
        self.owner.shared.with(|core| core.poisoned(self.generation))
    }

    /// Calls `call` once when the group is poisoned, on the control thread; at once and here if it
    /// is already. It must not wait for anything of the control plane.
    pub fn on_poison(&self, call: OnPoison) {
        if self.owner.is_copy() {
            return;
        }
        let already = self.owner.shared.with(|core| core.on_poison(self.generation, call));
        if let Some((call, poison)) = already {
            call(&poison);
        }
    }

    /// Calls `call` on the control thread for every rank that says goodbye; at once and here for
    /// those that have. That a rank left is no poison: it only matters to who still needs it.
    pub fn on_peer_left(&self, call: Box<dyn Fn(Rank) + Send + Sync>) {
        if self.owner.is_copy() {
            return;
        }
        let call: Arc<dyn Fn(Rank) + Send + Sync> = call.into();
        let left = self.owner.shared.with(|core| core.on_left(self.generation, call.clone()));
        left.into_iter().for_each(|rank| call(rank));
    }

    /// What is known about a rank of this generation. A rank that never was is lost.
    pub fn peer_status(&self, rank: Rank) -> PeerStatus {
        match self.members.get(rank.index()) {
            Some(member) if !self.owner.is_copy() => {
                self.owner.shared.with(|core| core.status(member.original_rank))
            }
            _ => PeerStatus::Lost,
        }
    }

    /// Forms a new group out of the ranks that are left, over the connections that are there.
    ///
    /// All survivors call it; it returns once all of them have formed the new group. The new ranks
    /// are consecutive, in the order of the old. This generation is of no more use afterwards: if it
    /// was not poisoned, it is now. A loss on the way makes the survivors agree once more, within the
    /// same call.
    ///
    /// After [`Error::Timeout`] or [`Error::Interrupted`] a repeat on this handle goes on. So it does
    /// if all handles of the new group were dropped: that group is poisoned then, and a newer one
    /// formed.
    ///
    /// There is no quorum: if the network is cut in two, both parts form a group.
    ///
    /// # Errors
    /// [`Error::Timeout`], which names who is missing by ranks of this generation;
    /// [`Error::Excluded`] if the others go on without this rank; [`Error::Superseded`] if there is a
    /// handle of a newer group, or another thread is in this call.
    pub fn reform(&self, timeout: Duration) -> Result<Control> {
        const REFORM: &str = "reform";
        let shared = self.owner.shared()?;
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
        let Formed { generation, members, handle } = formed?;
        let original = self.members.get(self.rank.index()).map(|member| member.original_rank);
        let rank = members.iter().find(|member| Some(member.original_rank) == original);
        let rank = rank.map_or(Rank(0), |member| member.rank);
        Ok(Control {
            owner: self.owner.clone(),
            generation,
            rank,
            members,
            deadline,
            _handle: handle,
        })
    }

    /// Says goodbye to everybody and closes the connections. Whoever needs this rank afterwards
    /// fails with [`Error::Left`]. Every handle of this process is closed with it.
    pub fn leave(&self) {
        self.owner.leave();
    }

    /// Closes every connection without a goodbye, as a crash would. For tests of what the others
    /// make of it.
    pub fn abandon(&self) {
        if self.owner.is_copy() {
            return;
        }
        self.owner.shared.abandon();
    }

    /// A key that only the members of this generation know, for one purpose: to authenticate
    /// further connections among them. Without a secret it is as open as the loopback is.
    pub fn derive_key(&self, purpose: &str) -> [u8; 32] {
        let generation = self.generation.to_le_bytes();
        self.owner
            .key
            .prove("weft derived key", &[&self.owner.job, &generation, purpose.as_bytes()])
    }

    fn deadline(&self, timeout: Duration) -> Deadline {
        Deadline::after(timeout, self.owner.interrupt.clone())
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

impl Owner {
    /// Whether this is a copy in a forked child.
    fn is_copy(&self) -> bool {
        self.forks != fork_guard::forks()
    }

    fn shared(&self) -> Result<&Shared> {
        if self.is_copy() { Err(Error::Forked) } else { Ok(&self.shared) }
    }

    fn leave(&self) {
        if self.is_copy() {
            return;
        }
        self.shared.with(Core::leave);
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        let on_the_thread =
            thread.as_ref().is_some_and(|t| t.thread().id() == std::thread::current().id());
        if on_the_thread {
            return;
        }
        // A callback that hangs must not hang this too.
        let deadline = Deadline::after(2 * LINGER, None);
        let closed = self.shared.wait(&deadline, "leave", |core| core.closed.then_some(()));
        if let (Ok(Some(())), Some(thread)) = (closed, thread.take()) {
            let _ = thread.join();
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.leave();
        if self.is_copy() {
            let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner);
            // The system has no such thread here, not even to forget it.
            std::mem::forget(thread.take());
        }
    }
}

/// A whole world of `size` ranks within this process, in rank order, over a port of the system's
/// choice: for tests and examples. `adjust` may change each rank's configuration.
pub fn local_world(size: u32, adjust: impl Fn(&mut Config)) -> Result<Vec<Control>> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(Error::system("making a listener"))?;
    let port = listener.local_addr().map_err(Error::system("asking for the port"))?.port();
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
