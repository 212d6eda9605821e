//! File lock (`flock`), so that one process compiles while others wait; released when the process ends.

use super::folder::Folder;
use rustix::fd::OwnedFd;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use std::time::{Duration, Instant};

/// Longest sleep between two attempts.
const MAX_SLEEP: Duration = Duration::from_millis(100);

/// Lock, held until it is dropped or the process ends.
#[derive(Debug)]
pub(super) struct Lock {
    _file: OwnedFd,
}

/// Outcome of [`lock`].
#[derive(Debug)]
pub(super) enum LockOutcome<T> {
    /// The lock is held.
    Held(Lock),
    /// Another process has done the work.
    Done(T),
    /// The file cannot be locked, or the holder exceeded the timeout.
    Unavailable(std::io::Error),
}

/// Locks a file in the folder, creating it if necessary. `done` runs at each attempt: the last holder has usually done
/// the work. Waits at most `lock_timeout` for a stopped holder.
pub(super) fn lock<T>(
    folder: &Folder,
    name: &str,
    lock_timeout: Duration,
    mut done: impl FnMut() -> Option<T>,
) -> LockOutcome<T> {
    let file = match folder.write(name, OFlags::empty()) {
        Ok(file) => file,
        Err(error) => return LockOutcome::Unavailable(error),
    };
    let begin = Instant::now();
    let mut sleep = Duration::from_millis(1);
    loop {
        // The lock belongs to this open file description, so threads exclude each other as well.
        let held = match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => true,
            Err(Errno::WOULDBLOCK | Errno::INTR) => false,
            Err(error) => return LockOutcome::Unavailable(error.into()),
        };
        if let Some(result) = done() {
            return LockOutcome::Done(result);
        }
        if held {
            return LockOutcome::Held(Lock { _file: file });
        }
        if begin.elapsed() >= lock_timeout {
            return LockOutcome::Unavailable(std::io::Error::other(format!(
                "another process has held {} for {lock_timeout:?}",
                folder.path().join(name).display()
            )));
        }
        std::thread::sleep(sleep);
        sleep = (sleep * 2).min(MAX_SLEEP);
    }
}
