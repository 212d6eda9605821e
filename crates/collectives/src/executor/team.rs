//! Team: threads that share the parts in one computation with the caller.
//!
//! The caller takes parts too, and returns once all parts are done. Threads start at the first computation with several
//! parts and sleep between two computations; a caller whose threads have not woken, or could not be started, computes
//! all parts itself. Dropping the team ends the threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// One owner's threads.
pub(super) struct Team {
    members: usize,
    shared: Arc<Shared>,
    /// All members but the caller.
    threads: Vec<JoinHandle<()>>,
    started: bool,
    /// Process that owns the threads.
    process: u32,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// There are parts to take, or the team ends.
    wake: Condvar,
    /// No thread computes a part.
    idle: Condvar,
}

#[derive(Default)]
struct State {
    work: Option<Work>,
    next: usize,
    parts: usize,
    /// Parts that threads compute.
    running: usize,
    panicked: bool,
    ended: bool,
}

/// Computation for a part by a member: `work(member, part)`.
#[derive(Clone, Copy)]
struct Work(*const (dyn Fn(usize, usize) + Sync));

// SAFETY: `Team::run` keeps the function alive and borrowed until no thread computes a part; it is `Sync`.
unsafe impl Send for Work {}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that may panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The next part, if there is one.
    fn take(&mut self) -> Option<(Work, usize)> {
        let work = self.work.filter(|_| self.next < self.parts)?;
        self.next += 1;
        Some((work, self.next - 1))
    }
}

impl Team {
    /// Team with this many members including the caller, at least one.
    pub fn new(members: usize) -> Team {
        Team {
            members: members.max(1),
            shared: Arc::default(),
            threads: Vec::new(),
            started: false,
            process: std::process::id(),
        }
    }

    /// Members with the caller.
    pub fn members(&self) -> usize {
        self.members
    }

    /// Runs `work(member, part)` for each part. One member computes one part at a time.
    pub fn run(&mut self, parts: usize, work: &(dyn Fn(usize, usize) + Sync)) {
        if self.members == 1 || parts < 2 {
            (0..parts).for_each(|part| work(0, part));
            return;
        }
        self.start();
        let erased: *const (dyn Fn(usize, usize) + Sync + '_) = work;
        // SAFETY: only the lifetime changes; `Running` waits for the threads before the function ends, also by a panic.
        let erased: *const (dyn Fn(usize, usize) + Sync + 'static) =
            unsafe { std::mem::transmute(erased) };
        let mut state = self.shared.lock();
        (state.work, state.next, state.parts) = (Some(Work(erased)), 0, parts);
        // The caller's own panic may have left it.
        state.panicked = false;
        drop(state);
        let running = Running(&self.shared);
        for _ in 1..parts.min(self.members) {
            self.shared.wake.notify_one();
        }
        loop {
            let taken = self.shared.lock().take();
            let Some((_, part)) = taken else { break };
            work(0, part);
        }
        drop(running);
        let panicked = std::mem::take(&mut self.shared.lock().panicked);
        assert!(!panicked, "a reduction thread panicked");
    }

    /// Starts the threads, once.
    fn start(&mut self) {
        if std::mem::replace(&mut self.started, true) {
            return;
        }
        for member in 1..self.members {
            let shared = self.shared.clone();
            let named = std::thread::Builder::new().name(format!("weft-reduce-{member}"));
            match named.spawn(move || attend(&shared, member)) {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    log::warn!("reductions run by {member} threads: cannot start another: {error}");
                    return;
                }
            }
        }
    }
}

/// Parts under way; when dropped, waits for parts on threads.
struct Running<'a>(&'a Shared);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.next = state.parts;
        // Each ends after one part, whose length is bounded.
        while state.running > 0 {
            state = self.0.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.work = None;
    }
}

/// Computes parts until the team ends.
fn attend(shared: &Shared, member: usize) {
    let mut state = shared.lock();
    while !state.ended {
        let Some((Work(work), part)) = state.take() else {
            state = shared.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        state.running += 1;
        drop(state);
        // SAFETY: `Team::run` returns only once no part is running, and keeps the function until then.
        let computed = catch_unwind(AssertUnwindSafe(|| unsafe { (*work)(member, part) }));
        state = shared.lock();
        state.panicked |= computed.is_err();
        state.running -= 1;
        if state.running == 0 {
            shared.idle.notify_one();
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        // A forked child has none of these threads, and one of them may have held the lock.
        if self.process != std::process::id() {
            self.threads.drain(..).for_each(std::mem::forget);
            return;
        }
        self.shared.lock().ended = true;
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // Panics in parts are caught.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const ROUNDS: usize = if cfg!(miri) { 4 } else { 300 };

    #[test]
    fn each_part_is_computed_once_by_one_member_at_a_time() {
        for members in [1, 2, 5] {
            let mut team = Team::new(members);
            let busy: Vec<_> = (0..members).map(|_| Mutex::new(())).collect();
            for round in 0..ROUNDS {
                let parts = round % 9;
                let computed: Vec<_> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                team.run(parts, &|member, part| {
                    let _alone = busy[member].try_lock().unwrap();
                    computed[part].fetch_add(1, Ordering::Relaxed);
                });
                assert!(computed.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn threads_compute_parts_while_the_caller_is_in_its_own() {
        let mut team = Team::new(2);
        let barrier = std::sync::Barrier::new(2);
        team.run(2, &|_, _| {
            barrier.wait();
        });
    }

    #[test]
    fn threads_start_with_the_first_parts_and_end_with_the_team() {
        let mut team = Team::new(3);
        team.run(1, &|_, _| {});
        assert!(team.threads.is_empty());
        team.run(3, &|_, _| {});
        assert_eq!(team.threads.len(), 2);
        let shared = Arc::downgrade(&team.shared);
        drop(team);
        assert!(shared.upgrade().is_none());
    }

    #[test]
    fn a_panic_of_a_part_reaches_the_caller_and_the_team_goes_on() {
        let mut team = Team::new(2);
        for culprit in 0..2 {
            // Both members have a part.
            let barrier = std::sync::Barrier::new(2);
            let run = catch_unwind(AssertUnwindSafe(|| {
                team.run(2, &|member, _| {
                    barrier.wait();
                    assert!(member != culprit, "expected by the test");
                });
            }));
            assert!(run.is_err());
            let count = AtomicUsize::new(0);
            team.run(4, &|_, _| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 4);
        }
    }
}
