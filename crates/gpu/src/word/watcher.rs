//! A thread that looks at words, and calls back when they change.
//!
//! A store by a GPU wakes no thread, so this one polls: it yields between looks for a millisecond after a change, then
//! naps. It sleeps while nothing is watched.

use super::memory::{Word, has_reached};
use crate::error::Result;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

/// Nap between two looks.
const NAP: Duration = Duration::from_micros(100);
/// Time after a change for which the thread only yields between two looks.
const ALERT: Duration = Duration::from_millis(1);

/// Callback with a word's former value and the present one, on the watcher's thread.
pub type WordCallback = Box<dyn FnMut(u32, u32) + Send>;

/// Watched words and the thread that polls them; dropping it ends the thread.
pub struct WordWatcher {
    shared: Arc<Shared>,
    /// `None` only while it is dropped.
    thread: Option<JoinHandle<()>>,
}

/// A watched word, until it is closed or dropped.
pub struct WordWatch {
    id: u64,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// A watch was added, or the watcher ends.
    added: Condvar,
    /// A callback has returned.
    returned: Condvar,
}

#[derive(Default)]
struct State {
    entries: Vec<Entry>,
    last: u64,
    /// The watch whose callback runs, and its thread.
    running: Option<(u64, ThreadId)>,
    ending: bool,
}

struct Entry {
    id: u64,
    word: Arc<Word>,
    /// Value that the callback has seen.
    seen: u32,
    /// Value at which it is called once; `None`: at each change.
    until: Option<u32>,
    /// `None` while it runs.
    callback: Option<WordCallback>,
}

impl Entry {
    /// The word's value, if the callback is due.
    fn due(&self) -> Option<u32> {
        let value = self.word.get();
        let is_due = match self.until {
            Some(until) => has_reached(value, until),
            None => value != self.seen,
        };
        (self.callback.is_some() && is_due).then_some(value)
    }
}

impl WordWatcher {
    /// Starts the thread.
    ///
    /// # Errors
    /// A system call error.
    pub fn start() -> Result<WordWatcher> {
        let shared = Arc::<Shared>::default();
        let theirs = shared.clone();
        let thread =
            std::thread::Builder::new().name("weft-words".to_owned()).spawn(move || theirs.run());
        let refused = weft_control::Error::thread("the thread that watches words");
        let thread = thread.map_err(|error| weft_fabric::Error::from(refused(error)))?;
        Ok(WordWatcher { shared, thread: Some(thread) })
    }

    /// Calls back at each change, with the former value and the present one; values between two looks are skipped.
    pub fn on_change(&self, word: Arc<Word>, callback: WordCallback) -> WordWatch {
        self.add(word, None, callback)
    }

    /// Calls back once, when the word has reached a value modulo 2^32, perhaps at once.
    pub fn on(&self, word: Arc<Word>, value: u32, callback: WordCallback) -> WordWatch {
        self.add(word, Some(value), callback)
    }

    /// Ends all watches for good, and waits for a running callback; false if it runs for longer than `patience`.
    pub fn end(&self, patience: Duration) -> bool {
        let mut state = self.shared.lock();
        state.ending = true;
        self.shared.added.notify_one();
        let own = std::thread::current().id();
        let runs = |state: &mut State| state.running.is_some_and(|(_, thread)| thread != own);
        let waited = self.shared.returned.wait_timeout_while(state, patience, runs);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn add(&self, word: Arc<Word>, until: Option<u32>, callback: WordCallback) -> WordWatch {
        let mut state = self.shared.lock();
        state.last += 1;
        let (id, seen) = (state.last, word.get());
        state.entries.push(Entry { id, word, seen, until, callback: Some(callback) });
        self.shared.added.notify_one();
        WordWatch { id, shared: self.shared.clone() }
    }
}

impl Drop for WordWatcher {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // Panics of callbacks are caught.
            let _ = thread.join();
        }
    }
}

impl WordWatch {
    /// Ends the watch. A callback that runs on another thread has returned then, and none follows.
    pub fn close(&self) {
        let mut state = self.shared.lock();
        let entry = state.entries.iter().position(|entry| entry.id == self.id);
        let entry = entry.map(|at| state.entries.remove(at));
        let own = std::thread::current().id();
        while state.running.is_some_and(|(id, thread)| id == self.id && thread != own) {
            state = self.shared.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        // The callback's destructor may make calls.
        drop(entry);
    }

    /// True until the callback was called for the last time, or the watch was closed.
    pub fn is_open(&self) -> bool {
        self.shared.lock().entries.iter().any(|entry| entry.id == self.id)
    }
}

impl Drop for WordWatch {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut changed = Instant::now();
        loop {
            let mut state = self.lock();
            while state.entries.is_empty() && !state.ending {
                state = self.added.wait(state).unwrap_or_else(PoisonError::into_inner);
                changed = Instant::now();
            }
            if state.ending {
                return;
            }
            let mut last = 0;
            // In the order of the watches, each at most once, so that a word that changes always holds up no other.
            while !state.ending
                && let Some((at, value)) = next_due(&state.entries, last)
            {
                last = state.entries[at].id;
                state = self.call(state, at, value);
                changed = Instant::now();
            }
            drop(state);
            if changed.elapsed() > ALERT {
                std::thread::sleep(NAP);
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// Calls back without the lock.
    fn call<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        at: usize,
        value: u32,
    ) -> MutexGuard<'a, State> {
        let entry = &mut state.entries[at];
        let (id, former, is_last) = (entry.id, entry.seen, entry.until.is_some());
        entry.seen = value;
        let Some(mut callback) = entry.callback.take() else { return state };
        if is_last {
            state.entries.remove(at);
        }
        state.running = Some((id, std::thread::current().id()));
        drop(state);
        let returned = catch_unwind(AssertUnwindSafe(|| callback(former, value)));
        if returned.is_err() {
            log::error!("the callback for a word panicked; it is not called again");
        }
        let mut state = self.lock();
        let entry = state.entries.iter().position(|entry| entry.id == id);
        let callback = match entry {
            Some(at) if returned.is_ok() => {
                state.entries[at].callback = Some(callback);
                None
            }
            Some(at) => {
                state.entries.remove(at);
                Some(callback)
            }
            None => Some(callback),
        };
        drop(state);
        // Before `close` returns; its destructor may make calls.
        drop(callback);
        let mut state = self.lock();
        state.running = None;
        self.returned.notify_all();
        state
    }
}

/// The next due watch behind a number, with the word's value.
fn next_due(entries: &[Entry], last: u64) -> Option<(usize, u32)> {
    let behind = entries.iter().enumerate().filter(|(_, entry)| entry.id > last);
    behind.filter_map(|(at, entry)| entry.due().map(|value| (at, value))).next()
}

impl std::fmt::Debug for WordWatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WordWatcher({} watches)", self.shared.lock().entries.len())
    }
}

impl std::fmt::Debug for WordWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WordWatch({})", self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::WordHome;
    use std::sync::mpsc::{Receiver, channel};

    const PATIENCE: Duration = Duration::from_secs(60);

    fn word() -> Arc<Word> {
        Arc::new(Word::alloc(None, WordHome::Pinned).unwrap())
    }

    /// A callback, and what it receives.
    fn calls() -> (WordCallback, Receiver<(u32, u32)>) {
        let (sender, receiver) = channel();
        (Box::new(move |former, value| sender.send((former, value)).unwrap()), receiver)
    }

    #[test]
    fn each_change_calls_back_with_both_values_until_it_is_closed() {
        let (watcher, word) = (WordWatcher::start().unwrap(), word());
        word.set(3);
        let (callback, received) = calls();
        let watch = watcher.on_change(word.clone(), callback);
        for value in [5, 4, u32::MAX] {
            let former = word.get();
            word.set(value);
            assert_eq!(received.recv_timeout(PATIENCE), Ok((former, value)));
        }
        assert!(watch.is_open());
        watch.close();
        assert!(!watch.is_open());
        word.set(1);
        // The callback, with its sender, is gone.
        assert!(received.recv().is_err());
    }

    #[test]
    fn a_value_calls_back_once_also_if_it_was_reached_before_or_is_passed() {
        let (watcher, word) = (WordWatcher::start().unwrap(), word());
        word.set(u32::MAX);
        for (value, set) in [(u32::MAX, None), (2, Some(4)), (4, None)] {
            let (callback, received) = calls();
            let watch = watcher.on(word.clone(), value, callback);
            if let Some(set) = set {
                assert!(watch.is_open() && received.try_recv().is_err());
                word.set(set);
            }
            let (_, seen) = received.recv_timeout(PATIENCE).unwrap();
            assert_eq!(seen, word.get());
            word.set(seen);
            assert!(received.recv().is_err(), "it was called once");
            assert!(!watch.is_open());
        }
    }

    #[test]
    fn a_word_that_always_changes_holds_up_no_other() {
        let (watcher, busy, other) = (WordWatcher::start().unwrap(), word(), word());
        let theirs = busy.clone();
        busy.set(1);
        let first =
            watcher.on_change(busy.clone(), Box::new(move |_, value| theirs.set(value + 1)));
        busy.set(2);
        let (callback, received) = calls();
        let second = watcher.on(other.clone(), 1, callback);
        other.set(1);
        assert_eq!(received.recv_timeout(PATIENCE), Ok((0, 1)));
        drop((first, second));
    }

    #[test]
    fn close_waits_for_a_callback_on_another_thread_and_may_be_called_inside_one() {
        let (watcher, word) = (WordWatcher::start().unwrap(), word());
        let (began, begun) = channel();
        let (finish, finished) = channel::<()>();
        let done = Arc::new(Mutex::new(false));
        let theirs = done.clone();
        let watch = watcher.on(
            word.clone(),
            1,
            Box::new(move |_, _| {
                began.send(()).unwrap();
                finished.recv().unwrap();
                *theirs.lock().unwrap() = true;
            }),
        );
        word.set(1);
        begun.recv_timeout(PATIENCE).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                watch.close();
                assert!(*done.lock().unwrap(), "it waits");
            });
            std::thread::sleep(Duration::from_millis(20));
            finish.send(()).unwrap();
        });
        // Inside a callback.
        let own = Arc::new(Mutex::new(None::<WordWatch>));
        let (slot, (sender, received)) = (own.clone(), channel());
        *own.lock().unwrap() = Some(watcher.on_change(
            word.clone(),
            Box::new(move |_, value| {
                slot.lock().unwrap().take().unwrap().close();
                sender.send(value).unwrap();
            }),
        ));
        word.set(2);
        assert_eq!(received.recv_timeout(PATIENCE), Ok(2));
        assert!(received.recv().is_err(), "the callback is gone");
    }

    #[test]
    fn an_ending_watcher_waits_for_its_callback_and_calls_no_other() {
        let (watcher, word, other) = (WordWatcher::start().unwrap(), word(), word());
        let (began, begun) = channel();
        let (finish, finished) = channel::<()>();
        let slow = Box::new(move |_, _| {
            began.send(()).unwrap();
            finished.recv().unwrap();
        });
        let first = watcher.on(word.clone(), 1, slow);
        let (callback, received) = calls();
        let second = watcher.on(other.clone(), 1, callback);
        word.set(1);
        begun.recv_timeout(PATIENCE).unwrap();
        other.set(1);
        assert!(!watcher.end(Duration::from_millis(1)), "it still runs");
        finish.send(()).unwrap();
        assert!(watcher.end(PATIENCE));
        drop(watcher);
        assert!(received.try_recv().is_err());
        drop((first, second));
    }

    #[test]
    fn a_panic_ends_its_watch_only() {
        let (watcher, first, second) = (WordWatcher::start().unwrap(), word(), word());
        let broken = watcher.on_change(first.clone(), Box::new(|_, _| panic!("in a callback")));
        let (callback, received) = calls();
        let _watch = watcher.on_change(second.clone(), callback);
        first.set(1);
        let begin = Instant::now();
        while broken.is_open() {
            assert!(begin.elapsed() < PATIENCE);
            std::thread::yield_now();
        }
        second.set(8);
        assert_eq!(received.recv_timeout(PATIENCE), Ok((0, 8)));
        drop(watcher);
        second.set(9);
        assert!(received.try_recv().is_err());
    }
}
