//! Signal actions of the program, kept while the initialisers of a library run.
//!
//! libinfinipath and libpsm2, which libfabric loads for its providers psm and psm2, replace the actions of
//! SIGINT, SIGTERM, SIGSEGV and others in theirs: Ctrl-C would end the process in place of raising
//! `KeyboardInterrupt`.

use libc::{c_int, sigaction};
use std::ptr::{null, null_mut};

/// Highest signal number of Linux.
const MOST: c_int = 64;

/// Runs `work`, and restores the action of each signal that it has changed.
pub fn kept<T>(work: impl FnOnce() -> T) -> T {
    // Numbers that glibc reserves have no action.
    let before: Vec<(c_int, sigaction)> =
        (1..=MOST).filter_map(|signal| Some((signal, action(signal)?))).collect();
    let result = work();
    for (signal, old) in before {
        let is_kept = action(signal).is_some_and(|new| {
            (new.sa_sigaction, new.sa_flags) == (old.sa_sigaction, old.sa_flags)
        });
        if !is_kept {
            log::debug!("libfabric changed the action of signal {signal}; restored");
            // SAFETY: the action was in force before, so its handler is valid.
            unsafe { libc::sigaction(signal, &old, null_mut()) };
        }
    }
    result
}

/// The action of a signal.
fn action(signal: c_int) -> Option<sigaction> {
    // SAFETY: all zero is a valid value; the call fills it in.
    unsafe {
        let mut found: sigaction = std::mem::zeroed();
        (libc::sigaction(signal, null(), &mut found) == 0).then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn of_the_library(_: c_int) {}

    #[test]
    #[cfg_attr(miri, ignore = "miri has no signals")]
    fn an_action_that_a_library_sets_is_taken_back() {
        let signal = libc::SIGUSR2;
        let before = action(signal).unwrap();
        let set = kept(|| {
            // SAFETY: the handler does nothing.
            unsafe {
                let mut new: sigaction = std::mem::zeroed();
                new.sa_sigaction = of_the_library as *const () as usize;
                libc::sigaction(signal, &new, null_mut());
            }
            action(signal).unwrap().sa_sigaction
        });
        assert_eq!(set, of_the_library as *const () as usize);
        assert_eq!(action(signal).unwrap().sa_sigaction, before.sa_sigaction);
    }
}
