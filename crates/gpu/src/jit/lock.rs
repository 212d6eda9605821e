//! One compiles, the others wait: a lock that a dying process lets go of.

use rustix::fd::OwnedFd;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;
use std::path::Path;
use std::time::{Duration, Instant};

/// The longest pause between two tries.
const NAP: Duration = Duration::from_millis(100);

/// Held until it is dropped, or until the process ends.
#[derive(Debug)]
pub(super) struct Lock {
    _file: OwnedFd,
}

/// How it ended.
#[derive(Debug)]
pub(super) enum Tried<T> {
    /// The lock is held.
    Held(Lock),
    /// Nothing is to be done any more.
    Done(T),
    /// Nobody can lock here, or the holder takes too long.
    Not(std::io::Error),
}

/// Locks the file at `path`, and makes it if need be. Before each try `done` may end it all: whoever
/// held the lock has often done the work. A holder that is stopped is waited for no longer than
/// `patience`.
pub(super) fn lock<T>(
    path: &Path,
    patience: Duration,
    mut done: impl FnMut() -> Option<T>,
) -> Tried<T> {
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = match open(path, flags, Mode::from_raw_mode(0o644)) {
        Ok(file) => file,
        Err(error) => return Tried::Not(error.into()),
    };
    let begin = Instant::now();
    let mut nap = Duration::from_millis(1);
    loop {
        // The lock belongs to this opening of the file, so threads exclude each other as well.
        let held = match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => true,
            Err(Errno::WOULDBLOCK | Errno::INTR) => false,
            Err(error) => return Tried::Not(error.into()),
        };
        if let Some(result) = done() {
            return Tried::Done(result);
        }
        if held {
            return Tried::Held(Lock { _file: file });
        }
        if begin.elapsed() >= patience {
            return Tried::Not(std::io::Error::other(format!(
                "another process has held {} for {patience:?}",
                path.display()
            )));
        }
        std::thread::sleep(nap);
        nap = (nap * 2).min(NAP);
    }
}
