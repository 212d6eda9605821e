//! A waiting thread's access to the engine.

use crate::engine::Engine;
use crate::error::Result;
use crate::types::Time;
use std::sync::atomic::AtomicU32;

/// A waiting thread's access to the engine: an exclusive [`Engine`], or one that threads share
/// ([`crate::Communicator::access`]).
pub trait EngineAccess {
    /// Runs `work` on the engine. Other threads may use the engine between two calls.
    fn with<R>(&mut self, work: impl FnOnce(&mut Engine) -> R) -> R;

    /// Same as [`EngineAccess::with`], with a count of callers that wait for the engine: a spinning
    /// thread yields to them.
    fn spin<R>(&mut self, work: impl FnOnce(&mut Engine, Option<&AtomicU32>) -> R) -> R;

    /// Event count so far, for [`EngineAccess::park`].
    fn ticket(&self) -> u32;

    /// Sleeps until an event after `ticket`, at most until `until`.
    fn park(&mut self, ticket: u32, until: Time);

    /// Passes the lead to another waiting thread, before the caller does something other than a poll.
    fn yield_lead(&self);

    /// Error from every wait on a closed engine.
    fn closed(&self) -> Result<()>;
}

impl EngineAccess for Engine {
    #[inline(always)]
    fn with<R>(&mut self, work: impl FnOnce(&mut Engine) -> R) -> R {
        work(self)
    }

    #[inline(always)]
    fn spin<R>(&mut self, work: impl FnOnce(&mut Engine, Option<&AtomicU32>) -> R) -> R {
        work(self, None)
    }

    fn ticket(&self) -> u32 {
        0
    }

    fn park(&mut self, _ticket: u32, until: Time) {
        if let Some(park) = self.prepare_park() {
            park.sleep(until);
            self.finish_park(&park);
        }
    }

    fn yield_lead(&self) {}

    fn closed(&self) -> Result<()> {
        Ok(())
    }
}
