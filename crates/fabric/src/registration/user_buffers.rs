//! Interns user buffers: a tensor registered in each step is one memory.

use super::idle_limits::IdleLimits;
use crate::memory::{Memory, MemoryId, MemoryKind, MemoryWatcher, Reader};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// User buffers, by kind, address, length and reader.
///
/// An address by itself is ambiguous: it may have been freed and allocated again. But a [`Memory`] keeps its owner,
/// and the owner keeps the bytes. So while an earlier memory *lives*, no other allocation can have the
/// same address, and a buffer there with the same length is the same bytes, whichever object owns it.
/// [`UserBufferCache::intern`] then returns the earlier one, with the same [`MemoryId`] and so the same
/// registrations; a dropped memory is never returned.
///
/// With limits other than [`IdleLimits::NONE`] it also keeps the memories interned last, and so the
/// owners: a step that registers, writes and releases finds the same memory again. In exchange, user
/// buffers are freed later than released.
pub struct UserBufferCache {
    inner: Arc<SharedBuffers>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct BufferKey {
    position: MemoryKind,
    address: u64,
    length: usize,
    reader: Reader,
}

struct SharedBuffers {
    limits: IdleLimits,
    state: Mutex<BufferState>,
}

#[derive(Default)]
struct BufferState {
    memories: HashMap<BufferKey, (MemoryId, Weak<Memory>)>,
    keys: HashMap<MemoryId, BufferKey>,
    /// Kept memories, the one interned last at the back.
    kept: VecDeque<Arc<Memory>>,
    kept_bytes: u64,
}

impl UserBufferCache {
    /// Empty cache, which keeps memories up to these limits, in use or not.
    pub fn new(limits: IdleLimits) -> UserBufferCache {
        UserBufferCache { inner: Arc::new(SharedBuffers { limits, state: Mutex::default() }) }
    }

    /// Returns the live memory with these bytes, if any; `memory` and its owner are then dropped.
    /// Otherwise `memory` itself.
    pub fn intern(&self, memory: Memory) -> Arc<Memory> {
        if memory.is_empty() {
            return Arc::new(memory);
        }
        let key = BufferKey {
            position: memory.kind(),
            address: memory.address(),
            length: memory.len(),
            reader: memory.reader(),
        };
        let mut state = self.inner.lock();
        let known = state.memories.get(&key).and_then(|(_, known)| known.upgrade());
        let interned = match &known {
            Some(known) => known.clone(),
            None => {
                let memory = Arc::new(memory);
                memory.watch(&self.inner);
                state.memories.insert(key, (memory.id(), Arc::downgrade(&memory)));
                state.keys.insert(memory.id(), key);
                memory
            }
        };
        let evicted = state.keep(&interned, self.inner.limits);
        // Memories are dropped outside the lock, since the watcher takes it.
        drop(state);
        drop(evicted);
        interned
    }

    /// Live memories.
    pub fn live(&self) -> usize {
        self.inner.lock().keys.len()
    }

    /// Drops all kept memories.
    pub fn clear(&self) {
        let mut state = self.inner.lock();
        state.kept_bytes = 0;
        let kept = std::mem::take(&mut state.kept);
        drop(state);
        drop(kept);
    }
}

impl fmt::Debug for UserBufferCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LentCache").field("live", &self.live()).finish_non_exhaustive()
    }
}

impl SharedBuffers {
    fn lock(&self) -> MutexGuard<'_, BufferState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BufferState {
    /// Keeps a memory as the last one; returns those evicted by the limits.
    fn keep(&mut self, memory: &Arc<Memory>, limits: IdleLimits) -> Vec<Arc<Memory>> {
        if limits.entries == 0 || memory.len() as u64 > limits.bytes {
            return Vec::new();
        }
        match self.kept.iter().position(|kept| Arc::ptr_eq(kept, memory)) {
            Some(position) => drop(self.kept.remove(position)),
            None => self.kept_bytes += memory.len() as u64,
        }
        self.kept.push_back(memory.clone());
        let mut evicted = Vec::new();
        while self.kept.len() > limits.entries || self.kept_bytes > limits.bytes {
            let Some(first) = self.kept.pop_front() else { break };
            self.kept_bytes -= first.len() as u64;
            evicted.push(first);
        }
        evicted
    }
}

impl MemoryWatcher for SharedBuffers {
    fn memory_dropped(&self, memory: MemoryId) {
        let mut state = self.lock();
        let Some(key) = state.keys.remove(&memory) else { return };
        // Another buffer may have this address since.
        if state.memories.get(&key).is_some_and(|(id, _)| *id == memory) {
            state.memories.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::NonNull;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Bytes that live as long as the test.
    static BYTES: [u8; 64] = [0; 64];
    const KEEP_TWO: IdleLimits = IdleLimits { entries: 2, bytes: 40 };

    /// Owner that counts instances.
    struct Owner(Arc<AtomicUsize>);

    impl Owner {
        fn new(count: &Arc<AtomicUsize>) -> Owner {
            count.fetch_add(1, Ordering::SeqCst);
            Owner(count.clone())
        }
    }

    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn lent_in(
        position: MemoryKind,
        at: usize,
        length: usize,
        owners: &Arc<AtomicUsize>,
    ) -> Memory {
        let address = NonNull::from(&BYTES[at]);
        // SAFETY: the bytes are never freed, and only the address is used.
        unsafe { Memory::user_buffer(address, length, position, Box::new(Owner::new(owners))) }
    }

    fn lent(at: usize, length: usize, owners: &Arc<AtomicUsize>) -> Memory {
        lent_in(MemoryKind::Host, at, length, owners)
    }

    #[test]
    fn the_same_bytes_are_one_memory_while_it_lives() {
        let (cache, owners) = (UserBufferCache::new(IdleLimits::NONE), Arc::default());
        let first = cache.intern(lent(0, 8, &owners));
        let again = cache.intern(lent(0, 8, &owners));
        assert!(Arc::ptr_eq(&first, &again));
        assert_eq!((owners.load(Ordering::SeqCst), cache.live()), (1, 1), "the second owner went");
        drop(first);
        assert!(Arc::ptr_eq(&again, &cache.intern(lent(0, 8, &owners))));
    }

    #[test]
    fn a_buffer_at_a_freed_address_is_another_memory() {
        let (cache, owners) = (UserBufferCache::new(IdleLimits::NONE), Arc::default());
        let first = cache.intern(lent(0, 8, &owners));
        let id = first.id();
        drop(first);
        assert_eq!((owners.load(Ordering::SeqCst), cache.live()), (0, 0));
        assert_ne!(cache.intern(lent(0, 8, &owners)).id(), id);
    }

    #[test]
    fn other_bytes_are_other_memories() {
        let (cache, owners) = (UserBufferCache::new(IdleLimits::NONE), Arc::default());
        let all = [
            cache.intern(lent(0, 8, &owners)),
            cache.intern(lent(0, 9, &owners)),
            cache.intern(lent(1, 8, &owners)),
            cache.intern(lent_in(MemoryKind::Device(0), 0, 8, &owners)),
            cache.intern(lent_in(MemoryKind::Device(1), 0, 8, &owners)),
            // A lane for the owner would say too little to other readers.
            cache.intern(lent_in(MemoryKind::Device(1), 0, 8, &owners).read_by(Reader::Owner)),
            cache.intern(lent(0, 0, &owners)),
            cache.intern(lent(0, 0, &owners)),
        ];
        let mut ids: Vec<MemoryId> = all.iter().map(|memory| memory.id()).collect();
        ids.dedup();
        assert_eq!(ids.len(), all.len());
        assert_eq!(cache.live(), 6, "memory of no bytes is not looked up");
    }

    #[test]
    fn a_buffer_interned_in_each_step_is_found_again_if_it_is_kept() {
        let (cache, owners) = (UserBufferCache::new(KEEP_TWO), Arc::default());
        let id = cache.intern(lent(0, 8, &owners)).id();
        for _ in 0..5 {
            assert_eq!(cache.intern(lent(0, 8, &owners)).id(), id);
        }
        assert_eq!(owners.load(Ordering::SeqCst), 1);
        cache.clear();
        assert_eq!((owners.load(Ordering::SeqCst), cache.live()), (0, 0));
    }

    #[test]
    fn the_least_recently_interned_buffer_is_evicted_first() {
        let (cache, owners) = (UserBufferCache::new(KEEP_TWO), Arc::default());
        let first = cache.intern(lent(0, 8, &owners)).id();
        let second = cache.intern(lent(8, 8, &owners)).id();
        assert_eq!(cache.intern(lent(0, 8, &owners)).id(), first);
        // Entries are full.
        cache.intern(lent(16, 8, &owners));
        assert_eq!(owners.load(Ordering::SeqCst), 2);
        assert_eq!(cache.intern(lent(0, 8, &owners)).id(), first);
        assert_ne!(cache.intern(lent(8, 8, &owners)).id(), second);
        // Bytes are full.
        cache.intern(lent(24, 36, &owners));
        assert_eq!(owners.load(Ordering::SeqCst), 1);
        // A buffer beyond the limits evicts no other.
        cache.intern(lent(0, 41, &owners));
        assert_eq!(owners.load(Ordering::SeqCst), 1);
    }

    /// Interns a memory's bytes again while it is dropped, as another thread might.
    struct Lending(UserBufferCache, Arc<AtomicUsize>, Mutex<Option<Arc<Memory>>>);

    impl MemoryWatcher for Lending {
        fn memory_dropped(&self, _: MemoryId) {
            let again = self.0.intern(lent(0, 8, &self.1));
            *self.2.lock().expect("whole") = Some(again);
        }
    }

    #[test]
    fn a_buffer_interned_while_its_predecessor_is_dropped_is_found() {
        let (cache, owners) = (UserBufferCache::new(IdleLimits::NONE), Arc::default());
        let first = lent(0, 8, &owners);
        let shared = UserBufferCache { inner: cache.inner.clone() };
        let lending = Arc::new(Lending(shared, owners.clone(), Mutex::default()));
        first.watch(&lending);
        drop(cache.intern(first));
        let again = lending.2.lock().expect("whole").take().expect("lent as the first one ended");
        assert!(Arc::ptr_eq(&again, &cache.intern(lent(0, 8, &owners))));
        assert_eq!((owners.load(Ordering::SeqCst), cache.live()), (1, 1));
    }

    #[test]
    fn memory_outlives_the_cache() {
        let (cache, owners) = (UserBufferCache::new(KEEP_TWO), Arc::default());
        let memory = cache.intern(lent(0, 8, &owners));
        drop(cache);
        assert_eq!(owners.load(Ordering::SeqCst), 1);
        drop(memory);
        assert_eq!(owners.load(Ordering::SeqCst), 0);
    }
}
