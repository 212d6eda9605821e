//! Registration cache: registrations of memory with a NIC, one for each allocation.
//!
//! Registering pins pages and fills tables of the NIC: milliseconds for a large allocation. A
//! [`RegistrationCache`] of a device holds its registrations by [`MemoryId`], which is never used again,
//! so memory that was freed cannot be confused with memory that came to lie at its address.
//!
//! - A registration stays while a handle of it lives. Then it is *idle*: the next [`get`] takes it up
//!   again, at most so many are kept ([`IdleLimits`]), and the one that was used longest ago goes first.
//! - An idle registration does not keep its memory. When the memory is dropped, its registration goes
//!   first, on the same thread.
//! - The user's memory, registered anew in each step, has a new identity each time; a [`LentCache`]
//!   returns the memory that was lent before.
//!
//! [`get`]: RegistrationCache::get

mod lent;
#[cfg(test)]
mod tests;

pub use lent::LentCache;

use crate::error::Result;
use crate::memory::{Memory, MemoryId, MemoryWatcher};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// Bounds on entries that are kept without being in use; both hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleLimits {
    /// The most entries.
    pub entries: usize,
    /// The most bytes that they cover.
    pub bytes: u64,
}

impl IdleLimits {
    /// Nothing is kept.
    pub const NONE: IdleLimits = IdleLimits { entries: 0, bytes: 0 };
}

impl Default for IdleLimits {
    /// 1024 entries of any size.
    fn default() -> IdleLimits {
        IdleLimits { entries: 1024, bytes: u64::MAX }
    }
}

/// Totals of a [`RegistrationCache`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegistrationStatistics {
    /// Calls that found a registration.
    pub hits: u64,
    /// Calls that registered. A loop that reuses its memory does not raise it.
    pub misses: u64,
    /// Idle registrations that went because of the limits, or of [`RegistrationCache::evict_idle`].
    pub evicted: u64,
    /// Registrations that there are, in use or idle.
    pub live: u64,
    /// Those of them that are idle.
    pub idle: u64,
    /// Bytes of memory that the live ones cover.
    pub bytes: u64,
}

/// Registrations `T` of a device, by allocation. Clones are the same cache.
///
/// `T` gives the registration back when it is dropped. That must not touch the memory's bytes, and `T`
/// must not keep the memory, which would never go then.
pub struct RegistrationCache<T: Send + Sync + 'static> {
    inner: Arc<Inner<T>>,
}

/// A registration in use. It keeps the memory; the NIC may be given requests that name it meanwhile.
pub struct Registration<T: Send + Sync + 'static> {
    // Dropped in this order: a registration that only this handle still refers to goes before its memory.
    slot: Arc<Slot<T>>,
    memory: Arc<Memory>,
    inner: Arc<Inner<T>>,
}

impl<T: Send + Sync + 'static> RegistrationCache<T> {
    /// An empty cache.
    pub fn new(limits: IdleLimits) -> RegistrationCache<T> {
        let state =
            State { entries: HashMap::new(), idle: Idle::default(), totals: Totals::default() };
        RegistrationCache { inner: Arc::new(Inner { limits, state: Mutex::new(state) }) }
    }

    /// The registration of a memory; `register` makes it if there is none. Threads that ask for the same
    /// memory at once wait for one registration; those that ask for others do not wait for it. A registration
    /// that is evicted may end after its memory was registered anew.
    ///
    /// # Errors
    /// Those of `register`. Nothing is kept then, and the next call tries again.
    pub fn get(
        &self,
        memory: &Arc<Memory>,
        register: impl FnOnce(&Memory) -> Result<T>,
    ) -> Result<Registration<T>> {
        memory.watch(&self.inner);
        let slot = self.inner.enter(memory);
        // If `register` fails or panics, dropping this takes the slot back.
        let registration = Registration { slot, memory: memory.clone(), inner: self.inner.clone() };
        let registered = registration.slot.fill(|| register(memory))?;
        self.inner.count(memory, registered);
        Ok(registration)
    }

    /// Gives back all registrations that are idle, such as before registering is tried again after the
    /// system refused to pin more.
    pub fn evict_idle(&self) {
        let evicted = self.inner.lock().evict(IdleLimits::NONE);
        drop(evicted);
    }

    /// Totals so far, and current sizes.
    pub fn statistics(&self) -> RegistrationStatistics {
        let state = self.inner.lock();
        let Totals { hits, misses, evicted, live, bytes } = state.totals;
        let idle = state.idle.order.len() as u64;
        RegistrationStatistics { hits, misses, evicted, live, idle, bytes }
    }
}

impl<T: Send + Sync + 'static> Clone for RegistrationCache<T> {
    fn clone(&self) -> RegistrationCache<T> {
        RegistrationCache { inner: self.inner.clone() }
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for RegistrationCache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RegistrationCache").field(&self.statistics()).finish()
    }
}

impl<T: Send + Sync + 'static> Registration<T> {
    /// The memory that is registered.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

impl<T: Send + Sync + 'static> Deref for Registration<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.slot.registered.get().expect("a handle is given out once its slot is filled")
    }
}

impl<T: Send + Sync + 'static> Drop for Registration<T> {
    fn drop(&mut self) {
        drop(self.inner.leave(&self.memory));
    }
}

struct Inner<T> {
    limits: IdleLimits,
    state: Mutex<State<T>>,
}

struct State<T> {
    entries: HashMap<MemoryId, Entry<T>>,
    idle: Idle,
    totals: Totals,
}

#[derive(Default)]
struct Totals {
    hits: u64,
    misses: u64,
    evicted: u64,
    live: u64,
    bytes: u64,
}

struct Entry<T> {
    slot: Arc<Slot<T>>,
    memory: Weak<Memory>,
    bytes: u64,
    /// Handles, and calls that are about to have one.
    users: usize,
    /// Its place in the order of idle entries.
    idle: Option<u64>,
}

/// Idle entries, the one that was used longest ago first.
#[derive(Default)]
struct Idle {
    order: BTreeMap<u64, MemoryId>,
    bytes: u64,
    next: u64,
}

/// Slot of a registration, filled once.
struct Slot<T> {
    registered: OnceLock<T>,
    making: Mutex<()>,
}

impl<T> Slot<T> {
    /// Fills the slot, unless it is filled already. Returns true if this call did.
    fn fill(&self, make: impl FnOnce() -> Result<T>) -> Result<bool> {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if self.registered.get().is_some() {
            return Ok(false);
        }
        let filled = self.registered.set(make()?);
        debug_assert!(filled.is_ok(), "a slot is filled under its lock alone");
        Ok(true)
    }
}

/// Entry taken out of the cache, to be dropped without its lock: the registration before the memory.
struct Evicted<T> {
    _slot: Arc<Slot<T>>,
    _memory: Arc<Memory>,
}

impl<T> Inner<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // No foreign code runs under this lock, so its state is consistent even if it is poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a user of a memory's slot, which is made if there is none.
    fn enter(&self, memory: &Arc<Memory>) -> Arc<Slot<T>> {
        let mut state = self.lock();
        let State { entries, idle, .. } = &mut *state;
        let entry = entries.entry(memory.id()).or_insert_with(|| Entry {
            slot: Arc::new(Slot { registered: OnceLock::new(), making: Mutex::new(()) }),
            memory: Arc::downgrade(memory),
            bytes: memory.len() as u64,
            users: 0,
            idle: None,
        });
        entry.users += 1;
        idle.remove(entry);
        entry.slot.clone()
    }

    /// Counts a call that has its registration.
    fn count(&self, memory: &Memory, registered: bool) {
        let totals = &mut self.lock().totals;
        if registered {
            totals.misses += 1;
            totals.live += 1;
            totals.bytes += memory.len() as u64;
        } else {
            totals.hits += 1;
        }
    }

    /// Removes a user, which is about to drop its reference to the memory. Returns entries to drop.
    fn leave(&self, memory: &Arc<Memory>) -> Vec<Evicted<T>> {
        let id = memory.id();
        let mut state = self.lock();
        let State { entries, idle, .. } = &mut *state;
        let Some(entry) = entries.get_mut(&id) else { return Vec::new() };
        entry.users -= 1;
        if entry.users > 0 {
            return Vec::new();
        }
        if entry.slot.registered.get().is_none() {
            entries.remove(&id);
            return Vec::new();
        }
        if Arc::strong_count(memory) == 1 {
            // It ends with this user: no call can ask for it again.
            let slot = state.take(id);
            let of = |slot| Evicted { _slot: slot, _memory: memory.clone() };
            return slot.map(of).into_iter().collect();
        }
        idle.push(id, entry);
        state.evict(self.limits)
    }
}

impl<T> State<T> {
    /// Takes out idle entries until the limits hold.
    fn evict(&mut self, limits: IdleLimits) -> Vec<Evicted<T>> {
        let mut evicted = Vec::new();
        while self.idle.order.len() > limits.entries || self.idle.bytes > limits.bytes {
            let Some((_, &id)) = self.idle.order.first_key_value() else { break };
            let Some(entry) = self.entries.get_mut(&id) else { break };
            self.idle.remove(entry);
            // Memory that is ending waits for this lock, to take its entry out itself.
            let Some(memory) = entry.memory.upgrade() else { continue };
            self.totals.evicted += 1;
            evicted.extend(self.take(id).map(|slot| Evicted { _slot: slot, _memory: memory }));
        }
        evicted
    }

    /// Takes out the entry of a registration.
    fn take(&mut self, id: MemoryId) -> Option<Arc<Slot<T>>> {
        let mut entry = self.entries.remove(&id)?;
        self.idle.remove(&mut entry);
        self.totals.live -= 1;
        self.totals.bytes -= entry.bytes;
        Some(entry.slot)
    }
}

impl Idle {
    fn push<T>(&mut self, id: MemoryId, entry: &mut Entry<T>) {
        entry.idle = Some(self.next);
        self.order.insert(self.next, id);
        self.next += 1;
        self.bytes += entry.bytes;
    }

    fn remove<T>(&mut self, entry: &mut Entry<T>) {
        if let Some(place) = entry.idle.take() {
            self.order.remove(&place);
            self.bytes -= entry.bytes;
        }
    }
}

impl<T: Send + Sync> MemoryWatcher for Inner<T> {
    /// No handle is left, since each keeps the memory.
    fn ended(&self, memory: MemoryId) {
        let slot = self.lock().take(memory);
        drop(slot);
    }
}

impl<T> Drop for Inner<T> {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (_, entry) in state.entries.drain() {
            let _memory = entry.memory.upgrade();
            drop(entry.slot);
        }
    }
}
