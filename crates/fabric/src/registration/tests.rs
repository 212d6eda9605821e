//! Tests the cache against a reference model, and the guarantees that it gives to a NIC.

use super::*;
use crate::error::Error;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Bytes that live as long as the test, so that memories lie at one address one after the other.
static BYTES: [u8; 64] = [0; 64];

/// A NIC's registration count, by memory. An evicted registration ends outside the cache's lock, when the
/// memory may have been registered again.
#[derive(Clone, Debug, Default)]
struct Nic(Arc<Mutex<BTreeMap<MemoryId, usize>>>);

/// Registration that deregisters on drop, which must precede dropping the memory's owner.
struct Token {
    nic: Nic,
    of: MemoryId,
    owner_gone: Arc<AtomicBool>,
}

/// Memory owner.
struct Owner(Arc<AtomicBool>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        let mut registered = self.nic.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = registered.get_mut(&self.of).expect("given back once");
        *count -= 1;
        if *count == 0 {
            registered.remove(&self.of);
        }
        assert!(!self.owner_gone.load(Ordering::SeqCst), "given back after its memory was freed");
    }
}

/// Memory at the common address, and a flag that dropping the owner sets.
struct Lent {
    memory: Arc<Memory>,
    owner_gone: Arc<AtomicBool>,
}

fn lent(length: usize) -> Lent {
    let owner_gone = Arc::new(AtomicBool::new(false));
    let owner = Box::new(Owner(owner_gone.clone()));
    // SAFETY: the bytes are never freed, and only the address is used.
    let memory = unsafe {
        Memory::user_buffer(
            NonNull::from(&BYTES[0]),
            length,
            crate::memory::MemoryKind::Host,
            owner,
        )
    };
    Lent { memory: Arc::new(memory), owner_gone }
}

impl Nic {
    fn register(&self, lent: &Lent) -> Result<Token> {
        let of = lent.memory.id();
        *self.0.lock().expect("whole").entry(of).or_default() += 1;
        Ok(Token { nic: self.clone(), of, owner_gone: lent.owner_gone.clone() })
    }

    fn get(&self, cache: &RegistrationCache<Token>, lent: &Lent) -> Registration<Token> {
        cache.get(&lent.memory, |_| self.register(lent)).expect("registered")
    }

    fn count(&self) -> usize {
        self.0.lock().expect("whole").values().sum()
    }
}

fn refused() -> Error {
    Error::Limit { what: "pinned pages", wanted: 2, limit: 1 }
}

#[test]
fn memory_is_registered_once_however_many_rounds_there_are() {
    let (cache, nic) = (RegistrationCache::new(IdleLimits::default()), Nic::default());
    let inbox = lent(16);
    for _ in 0..100 {
        let registration = nic.get(&cache, &inbox);
        assert_eq!(registration.of, inbox.memory.id());
        assert!(Arc::ptr_eq(registration.memory(), &inbox.memory));
    }
    let expected =
        RegistrationStatistics { hits: 99, misses: 1, evicted: 0, live: 1, idle: 1, bytes: 16 };
    assert_eq!(cache.statistics(), expected);
}

#[test]
fn memory_at_a_freed_address_is_registered_again() {
    let (cache, nic) = (RegistrationCache::new(IdleLimits::default()), Nic::default());
    for round in 1..=3 {
        let memory = lent(16);
        assert_eq!(memory.memory.address(), BYTES.as_ptr() as u64);
        drop(nic.get(&cache, &memory));
        assert_eq!(cache.statistics().misses, round);
        drop(memory);
        assert_eq!((nic.count(), cache.statistics().live), (0, 0), "it went with its memory");
    }
}

#[test]
fn a_handle_keeps_the_memory_and_its_registration() {
    let (cache, nic) = (RegistrationCache::new(IdleLimits::NONE), Nic::default());
    let Lent { memory, owner_gone } = lent(16);
    let inbox = Lent { memory, owner_gone: owner_gone.clone() };
    let registration = nic.get(&cache, &inbox);
    drop(inbox);
    cache.evict_idle();
    assert_eq!((nic.count(), owner_gone.load(Ordering::SeqCst)), (1, false));
    drop(registration);
    assert_eq!((nic.count(), owner_gone.load(Ordering::SeqCst)), (0, true));
}

#[test]
fn memory_that_ends_with_its_handle_evicts_no_other_registration() {
    let limits = IdleLimits { entries: 1, bytes: u64::MAX };
    let (cache, nic) = (RegistrationCache::new(limits), Nic::default());
    let (inbox, passing) = (lent(16), lent(16));
    drop(nic.get(&cache, &inbox));
    let registration = nic.get(&cache, &passing);
    drop(passing);
    drop(registration);
    drop(nic.get(&cache, &inbox));
    let statistics = cache.statistics();
    assert_eq!((statistics.hits, statistics.evicted, nic.count()), (1, 0, 1));
}

#[test]
fn the_least_recently_used_registration_is_evicted_first() {
    let limits = IdleLimits { entries: 2, bytes: 40 };
    let (cache, nic) = (RegistrationCache::new(limits), Nic::default());
    let memories = [lent(16), lent(16), lent(16), lent(32)];
    let has =
        |number: usize| nic.0.lock().expect("whole").contains_key(&memories[number].memory.id());
    drop(nic.get(&cache, &memories[0]));
    drop(nic.get(&cache, &memories[1]));
    drop(nic.get(&cache, &memories[0]));
    drop(nic.get(&cache, &memories[2]));
    assert_eq!([has(0), has(1), has(2)], [true, false, true]);
    // A 32-byte registration leaves no room for another 16 bytes within 40.
    drop(nic.get(&cache, &memories[3]));
    assert_eq!([has(0), has(2), has(3)], [false, false, true]);
    assert_eq!(cache.statistics().evicted, 3);
}

#[test]
fn a_failed_registration_is_returned_and_the_next_call_registers_again() {
    let (cache, nic) = (RegistrationCache::new(IdleLimits::default()), Nic::default());
    let inbox = lent(16);
    let refusal = cache.get(&inbox.memory, |_| Err(refused())).err().expect("an error");
    assert!(matches!(refusal, Error::Limit { .. }));
    assert_eq!(cache.statistics(), RegistrationStatistics::default());
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        cache.get(&inbox.memory, |_| panic!("a fault of the driver's"))
    }));
    assert!(panicked.is_err());
    let registration = nic.get(&cache, &inbox);
    // In use, it is found without a registration.
    let again = cache.get(&inbox.memory, |_| Err(refused())).expect("found");
    assert_eq!(again.of, registration.of);
    assert_eq!((cache.statistics().hits, cache.statistics().misses), (1, 1));
}

#[test]
fn concurrent_calls_share_one_registration() {
    const THREADS: usize = 4;
    let (cache, nic) = (RegistrationCache::new(IdleLimits::NONE), Nic::default());
    let (inbox, gate, made) = (lent(16), Barrier::new(THREADS), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                gate.wait();
                let registration = cache.get(&inbox.memory, |_| {
                    made.fetch_add(1, Ordering::SeqCst);
                    nic.register(&inbox)
                });
                // All handles are alive at this barrier.
                gate.wait();
                drop(registration);
            });
        }
    });
    assert_eq!((made.load(Ordering::SeqCst), nic.count()), (1, 0));
}

#[test]
fn threads_that_get_and_free_leave_no_registration() {
    const ROUNDS: usize = if cfg!(miri) { 5 } else { 500 };
    let limits = IdleLimits { entries: 1, bytes: u64::MAX };
    let (cache, nic) = (RegistrationCache::new(limits), Nic::default());
    let shared = [lent(8), lent(8)];
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    let own = lent(8);
                    let held = nic.get(&cache, &shared[round % 2]);
                    let mine = nic.get(&cache, &own);
                    // Idle or in use as the memory goes.
                    if round % 2 == 0 {
                        drop(mine);
                        drop(own);
                    } else {
                        drop(own);
                        drop(mine);
                    }
                    drop(held);
                    if round % 7 == 0 {
                        cache.evict_idle();
                    }
                }
            });
        }
    });
    assert!(cache.statistics().live <= 1, "{cache:?}");
    drop(shared);
    assert_eq!((nic.count(), cache.statistics().live), (0, 0));
}

/// Registration during whose drop another thread drops the memory.
struct LastOwner {
    owner: Arc<Mutex<Option<Arc<Memory>>>>,
    owner_gone: Arc<AtomicBool>,
    gone_before: Arc<AtomicBool>,
}

impl Drop for LastOwner {
    fn drop(&mut self) {
        drop(self.owner.lock().expect("whole").take());
        self.gone_before.store(self.owner_gone.load(Ordering::SeqCst), Ordering::SeqCst);
    }
}

#[test]
fn an_evicted_registration_ends_before_memory_that_is_dropped_meanwhile() {
    let cache = RegistrationCache::new(IdleLimits::default());
    let Lent { memory, owner_gone } = lent(16);
    let owner = Arc::new(Mutex::new(Some(memory.clone())));
    let gone_before = Arc::new(AtomicBool::new(true));
    let registered = LastOwner {
        owner: owner.clone(),
        owner_gone: owner_gone.clone(),
        gone_before: gone_before.clone(),
    };
    drop(cache.get(&memory, |_| Ok(registered)).expect("registered"));
    drop(memory);
    cache.evict_idle();
    assert_eq!(cache.statistics().evicted, 1);
    assert!(!gone_before.load(Ordering::SeqCst));
    assert!(owner_gone.load(Ordering::SeqCst));
}

/// Watcher that evicts while a memory is dropped.
struct Evicting(RegistrationCache<Token>);

impl MemoryWatcher for Evicting {
    fn memory_dropped(&self, _: MemoryId) {
        self.0.evict_idle();
    }
}

#[test]
fn memory_being_dropped_drops_its_registration_without_an_eviction() {
    let (cache, nic) = (RegistrationCache::new(IdleLimits::default()), Nic::default());
    let inbox = lent(16);
    let evicting = Arc::new(Evicting(cache.clone()));
    inbox.memory.watch(&evicting);
    drop(nic.get(&cache, &inbox));
    drop(inbox);
    let expected = RegistrationStatistics { misses: 1, ..Default::default() };
    assert_eq!((cache.statistics(), nic.count()), (expected, 0));
}

#[test]
fn registrations_end_with_the_cache_and_its_last_handle() {
    let (cache, nic) = (RegistrationCache::new(IdleLimits::default()), Nic::default());
    let (inbox, outbox) = (lent(16), lent(16));
    let registration = nic.get(&cache, &inbox);
    drop(nic.get(&cache.clone(), &outbox));
    drop(cache);
    assert_eq!(nic.count(), 2);
    drop(registration);
    assert_eq!(nic.count(), 0);
}

/// Step in a random run, on one of a few memory slots.
#[derive(Clone, Debug)]
enum Step {
    /// Frees the slot's memory and allocates another.
    Allocate(usize, usize),
    Free(usize),
    Get(usize),
    /// As `Get`, when the NIC refuses.
    Refuse(usize),
    /// Drops the nth handle.
    Release(usize),
    EvictIdle,
}

const SLOTS: usize = 5;

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0..SLOTS, 1_usize..40).prop_map(|(slot, length)| Step::Allocate(slot, length)),
        1 => (0..SLOTS).prop_map(Step::Free),
        6 => (0..SLOTS).prop_map(Step::Get),
        1 => (0..SLOTS).prop_map(Step::Refuse),
        5 => (0_usize..8).prop_map(Step::Release),
        1 => Just(Step::EvictIdle),
    ]
}

/// Reference model for the cache: a list, searched linearly.
#[derive(Default)]
struct Model {
    /// Id, bytes, users; ordered by last use once idle.
    live: Vec<(MemoryId, u64, usize)>,
    expected: RegistrationStatistics,
}

impl Model {
    fn slot(&self, id: MemoryId) -> Option<usize> {
        self.live.iter().position(|(known, ..)| *known == id)
    }

    fn get(&mut self, id: MemoryId, bytes: u64, refuse: bool) -> bool {
        match self.slot(id) {
            Some(slot) => {
                self.live[slot].2 += 1;
                self.expected.hits += 1;
            }
            None if refuse => return false,
            None => {
                self.live.push((id, bytes, 1));
                self.expected.misses += 1;
            }
        }
        true
    }

    fn release(&mut self, id: MemoryId, is_last: bool, limits: IdleLimits) {
        let slot = self.slot(id).expect("in use");
        let mut entry = self.live.remove(slot);
        entry.2 -= 1;
        if !is_last {
            self.live.push(entry);
            self.evict(limits);
        }
    }

    fn evict(&mut self, limits: IdleLimits) {
        loop {
            let idle = || self.live.iter().filter(|(.., users)| *users == 0);
            let bytes: u64 = idle().map(|(_, bytes, _)| bytes).sum();
            if idle().count() <= limits.entries && bytes <= limits.bytes {
                return;
            }
            let first = self.live.iter().position(|(.., users)| *users == 0).expect("one");
            self.live.remove(first);
            self.expected.evicted += 1;
        }
    }

    /// Drops the owner other than handles.
    fn free(&mut self, id: MemoryId) {
        self.live.retain(|(known, _, users)| *known != id || *users > 0);
    }

    fn statistics(&self) -> RegistrationStatistics {
        RegistrationStatistics {
            live: self.live.len() as u64,
            idle: self.live.iter().filter(|(.., users)| *users == 0).count() as u64,
            bytes: self.live.iter().map(|(_, bytes, _)| bytes).sum(),
            ..self.expected
        }
    }
}

proptest! {
    #[test]
    fn any_sequence_leaves_what_the_model_has(
        steps in prop::collection::vec(step(), 1..80),
        entries in 0_usize..4,
        bytes in 0_u64..100,
    ) {
        let limits = IdleLimits { entries, bytes };
        let (cache, nic) = (RegistrationCache::new(limits), Nic::default());
        let mut model = Model::default();
        let mut memories: Vec<Option<Lent>> = (0..SLOTS).map(|_| None).collect();
        let mut handles: Vec<Registration<Token>> = Vec::new();
        for step in steps {
            match step {
                Step::Allocate(slot, length) => {
                    if let Some(old) = memories[slot].replace(lent(length)) {
                        let id = old.memory.id();
                        drop(old);
                        model.free(id);
                    }
                }
                Step::Free(slot) => {
                    if let Some(old) = memories[slot].take() {
                        let id = old.memory.id();
                        drop(old);
                        model.free(id);
                    }
                }
                Step::Get(slot) | Step::Refuse(slot) => {
                    let Some(lent) = &memories[slot] else { continue };
                    let refuse = matches!(step, Step::Refuse(_));
                    let register = |_: &Memory| if refuse { Err(refused()) } else { nic.register(lent) };
                    let got = cache.get(&lent.memory, register);
                    let (id, length) = (lent.memory.id(), lent.memory.len() as u64);
                    prop_assert_eq!(got.is_ok(), model.get(id, length, refuse));
                    handles.extend(got);
                }
                Step::Release(number) => {
                    if handles.is_empty() {
                        continue;
                    }
                    let handle = handles.swap_remove(number % handles.len());
                    let id = handle.memory().id();
                    drop(handle);
                    let owned = memories.iter().flatten().any(|lent| lent.memory.id() == id);
                    let held = handles.iter().any(|handle| handle.memory().id() == id);
                    model.release(id, !owned && !held, limits);
                }
                Step::EvictIdle => {
                    cache.evict_idle();
                    model.evict(IdleLimits::NONE);
                }
            }
            prop_assert_eq!(cache.statistics(), model.statistics());
            let expected = model.live.iter().map(|(id, ..)| (*id, 1)).collect();
            prop_assert_eq!(&*nic.0.lock().expect("whole"), &expected);
        }
        drop((handles, memories));
        prop_assert_eq!(nic.count(), 0);
    }
}
