//! Fork guard: registered descriptors are closed in forked children.
//!
//! A `fork` child has copies of all descriptors. While it lives, the system keeps a
//! killed parent's connections open, and peers detect only silence. So a child drops its copies of registered
//! descriptors before `fork` returns in it. The parent is unaffected.
//!
//! The handler may make async-signal-safe calls only: the registry is a grow-only table with atomics, and the
//! handler calls `open`, `dup3` and `close`. A copy is replaced by `/dev/null` rather than closed, so
//! that the number is not reused by another file, which a destructor in the child would then close.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

const CHUNK_SLOTS: usize = 1024;
/// With [`CHUNK_SLOTS`], four descriptors for each rank in the largest world.
const CHUNKS: usize = 256;
const FREE: RawFd = -1;

type Chunk = [AtomicI32; CHUNK_SLOTS];

/// Slot chunks; each slot has a descriptor or [`FREE`]. Chunks are allocated in order and never freed.
static TABLE: [AtomicPtr<Chunk>; CHUNKS] = [const { AtomicPtr::new(null_mut()) }; CHUNKS];
/// Free-slot search start.
static HINT: AtomicUsize = AtomicUsize::new(0);
/// Forks between the started process and this one.
static FORKS: AtomicU64 = AtomicU64::new(0);
static WATCH: Once = Once::new();

/// Descriptor registration. Declare a field with this type before the one that closes the descriptor, so
/// that it is dropped first.
#[derive(Debug)]
#[must_use = "the descriptor is registered as long as this lives"]
pub struct Registration {
    slot: Option<&'static AtomicI32>,
    descriptor: RawFd,
}

/// Registers a descriptor: this process's forked children drop their copies.
pub fn register(descriptor: &impl AsFd) -> Registration {
    watch();
    let descriptor = descriptor.as_fd().as_raw_fd();
    let first = HINT.load(Ordering::Relaxed);
    let all = CHUNKS * CHUNK_SLOTS;
    for number in (first..all).chain(0..first) {
        let slot = &chunk(number / CHUNK_SLOTS)[number % CHUNK_SLOTS];
        let taken = slot.compare_exchange(FREE, descriptor, Ordering::Release, Ordering::Relaxed);
        if taken.is_ok() {
            HINT.store((number + 1) % all, Ordering::Relaxed);
            return Registration { slot: Some(slot), descriptor };
        }
    }
    log::warn!("{all} descriptors are registered: a forked child keeps any further one open");
    Registration { slot: None, descriptor }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            // In a child the slot is free already, or holds another descriptor.
            let own = self.descriptor;
            let _ = slot.compare_exchange(own, FREE, Ordering::Release, Ordering::Relaxed);
        }
    }
}

/// This process's fork count. An object that stores the count at construction is in a forked child if the
/// counts differ.
pub fn forks() -> u64 {
    FORKS.load(Ordering::Relaxed)
}

/// Lazily constructed process-wide value. A forked child constructs a new one: in the parent's, a lock may be
/// held by a thread that does not exist in the child.
pub(crate) struct PerProcess<T: 'static>(AtomicPtr<(u64, T)>);

impl<T: Send + Sync> PerProcess<T> {
    pub(crate) const fn new() -> PerProcess<T> {
        PerProcess(AtomicPtr::new(null_mut()))
    }

    /// This process's value, constructed by `make` at the first call.
    pub(crate) fn get(&self, make: impl FnOnce() -> T) -> &'static T {
        watch();
        let current = self.0.load(Ordering::Acquire);
        // SAFETY: the pointer came from a box and is never freed.
        if let Some((forks_then, value)) = unsafe { current.as_ref() }
            && *forks_then == forks()
        {
            return value;
        }
        let new = Box::into_raw(Box::new((forks(), make())));
        let place = match self.0.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => new,
            Err(other) => {
                // SAFETY: `new` came from a box above and was not shared.
                drop(unsafe { Box::from_raw(new) });
                // Another thread in this process won the race.
                other
            }
        };
        // SAFETY: the pointer came from a box and is never freed.
        unsafe { &(*place).1 }
    }
}

/// Installs the fork handler, once.
pub(crate) fn watch() {
    WATCH.call_once(|| {
        // SAFETY: the handler makes async-signal-safe calls only and belongs to this library, which is never
        // unloaded.
        let refused = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if refused != 0 {
            log::warn!("pthread_atfork failed ({refused}): forked children keep connections open");
        }
    });
}

fn chunk(number: usize) -> &'static Chunk {
    let place = &TABLE[number];
    let mut chunk = place.load(Ordering::Acquire);
    if chunk.is_null() {
        let new = Box::into_raw(Box::new([const { AtomicI32::new(FREE) }; CHUNK_SLOTS]));
        match place.compare_exchange(null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => chunk = new,
            Err(other) => {
                // SAFETY: `new` came from a box above and was not shared.
                drop(unsafe { Box::from_raw(new) });
                chunk = other;
            }
        }
    }
    // SAFETY: a chunk in the table came from a box and is never freed.
    unsafe { &*chunk }
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    let mut null = FREE;
    for place in &TABLE {
        let chunk = place.load(Ordering::Acquire);
        if chunk.is_null() {
            break;
        }
        // SAFETY: a chunk in the table came from a box and is never freed.
        for slot in unsafe { &*chunk } {
            let descriptor = slot.swap(FREE, Ordering::Relaxed);
            if descriptor == FREE {
                continue;
            }
            // SAFETY: system calls, with a NUL-terminated constant. The descriptor is this child's copy, and the
            // original is open while registered; a use through the owner's handle in this child reaches /dev/null.
            unsafe {
                if null == FREE {
                    null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
                }
                if null == FREE || libc::dup3(null, descriptor, libc::O_CLOEXEC) < 0 {
                    libc::close(descriptor);
                }
            }
        }
    }
    if null != FREE {
        // SAFETY: opened above and used here only.
        unsafe { libc::close(null) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn slots_are_reused_and_a_registration_frees_its_own_only() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let held = |slot: &AtomicI32| slot.load(Ordering::Relaxed);
        let first = register(&socket);
        let slot = first.slot.unwrap();
        assert_eq!(held(slot), socket.as_raw_fd());
        drop(first);
        let other = UdpSocket::bind("127.0.0.1:0").unwrap();
        for _ in 0..3 * CHUNK_SLOTS {
            drop(register(&other));
        }
        let kept: Vec<_> = (0..2 * CHUNK_SLOTS).map(|_| register(&other)).collect();
        assert!(kept.iter().all(|each| each.slot.is_some()));
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no fork")]
    fn a_forked_child_makes_a_value_of_its_own_though_a_lock_of_its_parents_is_held() {
        static PLACE: PerProcess<std::sync::Mutex<u32>> = PerProcess::new();
        let ours = PLACE.get(|| 1.into());
        assert!(std::ptr::eq(ours, PLACE.get(|| 2.into())));
        let held = ours.lock().unwrap();
        // SAFETY: the child makes one small value and exits without unwinding.
        let forked = unsafe { libc::fork() };
        if forked == 0 {
            let made = PLACE.get(|| 3.into()).try_lock().map(|value| *value);
            // SAFETY: ends this process at once.
            unsafe { libc::_exit(i32::from(!matches!(made, Ok(3)))) };
        }
        let mut status = 0;
        // SAFETY: waits for the child above; `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(forked, &mut status, 0) }, forked);
        assert_eq!((status, *held), (0, 1));
    }
}
