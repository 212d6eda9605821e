//! Registration cache: NIC memory registrations, one for each allocation.
//!
//! Registering pins pages and fills NIC tables: milliseconds for a large allocation. A device's
//! [`RegistrationCache`] holds registrations by [`MemoryId`], which is never used again, so freed memory
//! cannot be confused with later memory at the same address.
//!
//! - A registration stays while a handle lives. Afterwards it is *idle*: the next [`get`] reuses it,
//!   [`IdleLimits`] bounds the idle ones, and the least recently used is evicted first.
//! - An idle registration does not keep the memory. When the memory is dropped, the registration is
//!   dropped first, on the same thread.
//! - A user buffer registered in each step has a new identity each time; a [`UserBufferCache`] returns the
//!   earlier memory.
//!
//! [`get`]: RegistrationCache::get

mod idle_limits;
#[cfg(test)]
mod tests;
mod user_buffers;

pub use user_buffers::UserBufferCache;

use crate::error::Result;
use crate::memory::{Memory, MemoryId, MemoryWatcher};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

pub use idle_limits::IdleLimits;

/// [`RegistrationCache`] totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegistrationStatistics {
    /// Calls that found a registration.
    pub hits: u64,
    /// Calls that registered. Constant in a loop that reuses memory.
    pub misses: u64,
    /// Idle registrations evicted by the limits or by [`RegistrationCache::evict_idle`].
    pub evicted: u64,
    /// Registrations in use or idle.
    pub live: u64,
    /// Idle registrations.
    pub idle: u64,
    /// Memory bytes that the live registrations cover.
    pub bytes: u64,
}

/// A device's registrations `T`, by allocation. Clones share one cache.
///
/// `T` deregisters when it is dropped. Dropping it must not access the memory's bytes, and `T` must not
/// hold the memory, which would never be freed.
pub struct RegistrationCache<T: Send + Sync + 'static> {
    inner: Arc<SharedCache<T>>,
}

/// Handle on a registration in use. It keeps the memory, so NIC requests may name it.
pub struct Registration<T: Send + Sync + 'static> {
    // Drop order: a registration held only by this handle is dropped before the memory.
    slot: Arc<RegistrationSlot<T>>,
    memory: Arc<Memory>,
    inner: Arc<SharedCache<T>>,
}

impl<T: Send + Sync + 'static> RegistrationCache<T> {
    /// An empty cache.
    pub fn new(limits: IdleLimits) -> RegistrationCache<T> {
        let state = CacheState {
            entries: HashMap::new(),
            idle: IdleList::default(),
            totals: CacheTotals::default(),
        };
        RegistrationCache { inner: Arc::new(SharedCache { limits, state: Mutex::new(state) }) }
    }

    /// Registration for a memory; `register` makes it on a miss. Concurrent calls for one memory wait for
    /// one registration; calls for other memories do not. An evicted registration may end after the
    /// memory was registered again.
    ///
    /// # Errors
    /// Errors from `register`. The cache is unchanged then, and the next call registers again.
    pub fn get(
        &self,
        memory: &Arc<Memory>,
        register: impl FnOnce(&Memory) -> Result<T>,
    ) -> Result<Registration<T>> {
        memory.watch(&self.inner);
        let slot = self.inner.enter(memory);
        // If `register` fails or panics, dropping this handle removes the slot.
        let registration = Registration { slot, memory: memory.clone(), inner: self.inner.clone() };
        let registered = registration.slot.fill(|| register(memory))?;
        self.inner.count(memory, registered);
        Ok(registration)
    }

    /// Drops all idle registrations, such as before a second attempt after the system refused to pin more.
    pub fn evict_idle(&self) {
        let evicted = self.inner.lock().evict(IdleLimits::NONE);
        drop(evicted);
    }

    /// Totals so far, and current sizes.
    pub fn statistics(&self) -> RegistrationStatistics {
        let state = self.inner.lock();
        let CacheTotals { hits, misses, evicted, live, bytes } = state.totals;
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

struct SharedCache<T> {
    limits: IdleLimits,
    state: Mutex<CacheState<T>>,
}

struct CacheState<T> {
    entries: HashMap<MemoryId, CacheEntry<T>>,
    idle: IdleList,
    totals: CacheTotals,
}

#[derive(Default)]
struct CacheTotals {
    hits: u64,
    misses: u64,
    evicted: u64,
    live: u64,
    bytes: u64,
}

struct CacheEntry<T> {
    slot: Arc<RegistrationSlot<T>>,
    memory: Weak<Memory>,
    bytes: u64,
    /// Handles, and calls that are about to return one.
    users: usize,
    /// Position in the order of idle entries.
    idle: Option<u64>,
}

/// Idle entries, least recently used first.
#[derive(Default)]
struct IdleList {
    order: BTreeMap<u64, MemoryId>,
    bytes: u64,
    next: u64,
}

/// Slot for a registration, filled once.
struct RegistrationSlot<T> {
    registered: OnceLock<T>,
    making: Mutex<()>,
}

impl<T> RegistrationSlot<T> {
    /// Fills an empty slot. Returns true if this call filled it.
    fn fill(&self, make: impl FnOnce() -> Result<T>) -> Result<bool> {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if self.registered.get().is_some() {
            return Ok(false);
        }
        let filled = self.registered.set(make()?);
        debug_assert!(filled.is_ok(), "a slot is filled only under its lock");
        Ok(true)
    }
}

/// Entry removed from the cache, dropped outside the lock: the registration before the memory.
struct EvictedEntry<T> {
    _slot: Arc<RegistrationSlot<T>>,
    _memory: Arc<Memory>,
}

impl<T> SharedCache<T> {
    fn lock(&self) -> MutexGuard<'_, CacheState<T>> {
        // No foreign code runs under this lock, so the state is consistent even if the lock is poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a user for a memory's slot; makes the slot on a miss.
    fn enter(&self, memory: &Arc<Memory>) -> Arc<RegistrationSlot<T>> {
        let mut state = self.lock();
        let CacheState { entries, idle, .. } = &mut *state;
        let entry = entries.entry(memory.id()).or_insert_with(|| CacheEntry {
            slot: Arc::new(RegistrationSlot {
                registered: OnceLock::new(),
                making: Mutex::new(()),
            }),
            memory: Arc::downgrade(memory),
            bytes: memory.len() as u64,
            users: 0,
            idle: None,
        });
        entry.users += 1;
        idle.remove(entry);
        entry.slot.clone()
    }

    /// Counts a completed call.
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

    /// Removes a user, which is about to drop a memory reference. Returns entries to drop.
    fn leave(&self, memory: &Arc<Memory>) -> Vec<EvictedEntry<T>> {
        let id = memory.id();
        let mut state = self.lock();
        let CacheState { entries, idle, .. } = &mut *state;
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
            // The memory ends with this user: no later call can request it.
            let slot = state.take(id);
            let of = |slot| EvictedEntry { _slot: slot, _memory: memory.clone() };
            return slot.map(of).into_iter().collect();
        }
        idle.push(id, entry);
        state.evict(self.limits)
    }
}

impl<T> CacheState<T> {
    /// Removes idle entries until the limits hold.
    fn evict(&mut self, limits: IdleLimits) -> Vec<EvictedEntry<T>> {
        let mut evicted = Vec::new();
        while self.idle.order.len() > limits.entries || self.idle.bytes > limits.bytes {
            let Some((_, &id)) = self.idle.order.first_key_value() else { break };
            let Some(entry) = self.entries.get_mut(&id) else { break };
            self.idle.remove(entry);
            // Memory being dropped waits for this lock, and removes the entry itself.
            let Some(memory) = entry.memory.upgrade() else { continue };
            self.totals.evicted += 1;
            evicted.extend(self.take(id).map(|slot| EvictedEntry { _slot: slot, _memory: memory }));
        }
        evicted
    }

    /// Removes a registration's entry.
    fn take(&mut self, id: MemoryId) -> Option<Arc<RegistrationSlot<T>>> {
        let mut entry = self.entries.remove(&id)?;
        self.idle.remove(&mut entry);
        self.totals.live -= 1;
        self.totals.bytes -= entry.bytes;
        Some(entry.slot)
    }
}

impl IdleList {
    fn push<T>(&mut self, id: MemoryId, entry: &mut CacheEntry<T>) {
        entry.idle = Some(self.next);
        self.order.insert(self.next, id);
        self.next += 1;
        self.bytes += entry.bytes;
    }

    fn remove<T>(&mut self, entry: &mut CacheEntry<T>) {
        if let Some(position) = entry.idle.take() {
            self.order.remove(&position);
            self.bytes -= entry.bytes;
        }
    }
}

impl<T: Send + Sync> MemoryWatcher for SharedCache<T> {
    /// Called without handles left, since each keeps the memory.
    fn memory_dropped(&self, memory: MemoryId) {
        let slot = self.lock().take(memory);
        drop(slot);
    }
}

impl<T> Drop for SharedCache<T> {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (_, entry) in state.entries.drain() {
            let _memory = entry.memory.upgrade();
            drop(entry.slot);
        }
    }
}
