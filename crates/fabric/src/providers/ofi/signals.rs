//! The program's signal actions, restored after a library's initialisers have run.
//!
//! libinfinipath and libpsm2, which libfabric loads for the providers psm and psm2, replace the actions
//! for SIGINT, SIGTERM, SIGSEGV and others: Ctrl-C would end the process instead of raising
//! `KeyboardInterrupt`.

use libc::{c_int, sigaction};
use std::ptr::{null, null_mut};

/// Highest Linux signal number.
const MAX_SIGNAL: c_int = 64;

/// Runs `work`, then restores each signal action that it has changed.
pub fn preserving_actions<T>(work: impl FnOnce() -> T) -> T {
    // Numbers that glibc reserves have no action.
    let before: Vec<(c_int, sigaction)> =
        (1..=MAX_SIGNAL).filter_map(|signal| Some((signal, action(signal)?))).collect();
    let result = work();
    for (signal, old) in before {
        let is_kept = action(signal).is_some_and(|new| {
            (new.sa_sigaction, new.sa_flags) == (old.sa_sigaction, old.sa_flags)
        });
        if !is_kept {
            log::debug!("libfabric changed the action of signal {signal}; restored");
            // SAFETY: the action was in force before, so the handler is valid.
            unsafe { libc::sigaction(signal, &old, null_mut()) };
        }
    }
    result
}

/// Current signal action.
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

    extern "C" fn library_handler(_: c_int) {}

    #[test]
    #[cfg_attr(miri, ignore = "miri has no signals")]
    fn an_action_that_a_library_sets_is_restored() {
        // Taken once: a function may have several addresses, one for each codegen unit that names it.
        let handler = library_handler as *const () as usize;
        let signal = libc::SIGUSR2;
        let before = action(signal).unwrap();
        let set = preserving_actions(|| {
            // SAFETY: the handler is empty.
            unsafe {
                let mut new: sigaction = std::mem::zeroed();
                new.sa_sigaction = handler;
                libc::sigaction(signal, &new, null_mut());
            }
            action(signal).unwrap().sa_sigaction
        });
        assert_eq!(set, handler);
        assert_eq!(action(signal).unwrap().sa_sigaction, before.sa_sigaction);
    }
}
