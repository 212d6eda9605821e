//! Messages as calls: thin loops over [`Driver`].

use super::driver::Driver;
use super::memory::UserMemory;
use super::operations::{Completed, OperationId};
use crate::run_error::RunError;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use weft_fabric::{
    CounterId, Driver as _, EngineAccess, Rank, Region, Requests, SharedDriver, WaitOptions,
};

/// Tagged messages between the ranks in a communicator. Any thread may call at any time: no call blocks on another
/// thread's wait.
///
/// Each call takes an access: [`weft_fabric::Communicator::access`], or the caller's engine.
pub struct Messages {
    pub(super) driver: SharedDriver<Driver>,
    pub(super) counters: Vec<CounterId>,
    pub(super) stopped: Arc<AtomicBool>,
    direct_bytes: u64,
}

impl Messages {
    /// Calls on a driver that is linked with every peer.
    pub fn new(driver: Driver) -> Messages {
        let (counters, requests) = (driver.counters().to_vec(), driver.requests());
        let (stopped, direct_bytes) = (driver.stop_flag().clone(), driver.direct_bytes());
        let driver = SharedDriver::new(driver, requests);
        Messages { driver, counters, stopped, direct_bytes }
    }

    /// True after a close.
    pub fn is_closed(&self) -> bool {
        self.driver.is_ended()
    }

    /// Starts a send. It has ended once all bytes have left this process, which precedes their receive if the ring has
    /// room for them.
    ///
    /// # Errors
    /// [`RunError::Invalid`] for a rank outside the group; [`RunError::Closed`]; fabric errors. The memory is not
    /// accessed then.
    ///
    /// # Safety
    /// `bytes` bytes at `source` stay valid for reads until the operation has ended: until
    /// [`Messages::wait`] has returned anything but a timeout or an interruption, or the communicator was closed.
    pub unsafe fn send(
        &self,
        access: &mut impl EngineAccess,
        to: Rank,
        tag: u64,
        source: *const u8,
        bytes: u64,
    ) -> Result<OperationId, RunError> {
        access.with(|engine| engine.check())?;
        // SAFETY: by this function's contract.
        let region = unsafe { self.register_long(access, source, bytes) };
        let id = self.call(access, |driver, requests| {
            // SAFETY: as above.
            unsafe { driver.send_from(to, tag, (source, bytes), region, requests) }
        })?;
        self.drive(access)?;
        Ok(id)
    }

    /// Starts to receive the oldest message with this tag from `from`, or from any rank. It has ended once the whole
    /// message is in `target`. A shorter message is received; the result has the message length.
    ///
    /// # Errors
    /// As [`Messages::send`].
    ///
    /// # Safety
    /// `bytes` bytes at `target` stay valid for writes, and are not read, until the operation has ended, as for
    /// [`Messages::send`].
    pub unsafe fn receive(
        &self,
        access: &mut impl EngineAccess,
        from: Option<Rank>,
        tag: u64,
        target: *mut u8,
        bytes: u64,
    ) -> Result<OperationId, RunError> {
        access.with(|engine| engine.check())?;
        self.call(access, |driver, requests| {
            // SAFETY: by this function's contract.
            unsafe { driver.receive(from, tag, target, bytes, requests) }
        })
    }

    /// Makes progress; true if an operation has ended, with or without an error. A wait for it then returns at once.
    ///
    /// # Errors
    /// As [`Messages::wait`], except that an operation that has ended with an error is `true`.
    pub fn is_done(
        &self,
        access: &mut impl EngineAccess,
        id: OperationId,
    ) -> Result<bool, RunError> {
        if self.call(access, |driver, _| driver.is_done(id))? {
            return Ok(true);
        }
        self.drive(access)?;
        self.call(access, |driver, _| driver.is_done(id))
    }

    /// Waits until an operation ends, and removes it.
    ///
    /// # Errors
    /// [`RunError::Timeout`], which names the peer, and an interruption, after which the wait may be repeated.
    /// [`RunError::MessageTooLong`]; [`RunError::Invalid`] for an operation that was removed. Protocol violations and
    /// lost peers, after which the group is poisoned and all operations have ended; [`RunError::Closed`].
    pub fn wait(
        &self,
        access: &mut impl EngineAccess,
        id: OperationId,
        options: &mut WaitOptions<'_>,
    ) -> Result<Completed, RunError> {
        if let Some(completed) = self.take(access, id)? {
            return Ok(completed);
        }
        let ended = self.driver.wait(
            access,
            "a message",
            options,
            |driver| driver.is_done(id).unwrap_or(true).then_some(()),
            |driver| driver.missing(id),
        );
        match self.concluded(access, ended) {
            Err(RunError::Fabric(weft_fabric::Error::Timeout { waited, missing, .. })) => {
                let what = self.call(access, |driver, _| Ok(driver.describe(id)))?;
                Err(RunError::Timeout { what, waited, missing })
            }
            Err(error) => Err(error),
            Ok(()) => self.take(access, id)?.ok_or(RunError::Closed),
        }
    }

    /// Registers the memory for a long send. A send without a region goes through the staging ring.
    ///
    /// # Safety
    /// Same as for [`Messages::send`]: the region is released when the send's result is taken, or at the close.
    unsafe fn register_long(
        &self,
        access: &mut impl EngineAccess,
        source: *const u8,
        bytes: u64,
    ) -> Option<Region> {
        if bytes < self.direct_bytes {
            return None;
        }
        // SAFETY: by this function's contract.
        let memory = unsafe { UserMemory::source(source, bytes).register()? };
        access.with(|engine| engine.register(memory)).ok()
    }

    /// Takes an operation's result, and releases the memory of sends that have ended.
    fn take(
        &self,
        access: &mut impl EngineAccess,
        id: OperationId,
    ) -> Result<Option<Completed>, RunError> {
        let mut regions = Vec::new();
        let taken = self.call(access, |driver, _| {
            let taken = driver.take(id);
            regions = driver.take_regions();
            taken
        });
        if !regions.is_empty() {
            access.with(|engine| regions.iter().for_each(|region| engine.release(region)));
        }
        taken
    }

    /// Polls once, and advances all messages.
    ///
    /// # Errors
    /// As [`Messages::wait`].
    pub fn drive(&self, access: &mut impl EngineAccess) -> Result<(), RunError> {
        let driven = self.driver.drive(access);
        self.concluded(access, driven)
    }

    fn call<T>(
        &self,
        access: &mut impl EngineAccess,
        work: impl FnOnce(&mut Driver, &mut Requests) -> Result<T, RunError>,
    ) -> Result<T, RunError> {
        let result = self.driver.call(access, work);
        self.concluded(access, result)
    }

    /// Call result. A fatal error stops all messages first, so that no thread accesses operation memory afterwards; a
    /// protocol violation also poisons the group.
    pub(super) fn concluded<T>(
        &self,
        access: &mut impl EngineAccess,
        result: Result<Option<T>, RunError>,
    ) -> Result<T, RunError> {
        use weft_fabric::Error::{Interrupted, Timeout};
        let error = match result {
            Ok(Some(value)) => return Ok(value),
            Ok(None) => RunError::Closed,
            Err(error) => error,
        };
        match &error {
            RunError::Fabric(Interrupted | Timeout { .. })
            | RunError::Invalid { .. }
            | RunError::TooLarge { .. }
            | RunError::MessageTooLong { .. } => return Err(error),
            _ => {}
        }
        if let Some(cause) = error.poison() {
            access.with(|engine| engine.poison(cause));
        }
        // Waits for a thread that holds the driver, also if it has ended.
        let _ = self.driver.call(access, |driver, _| {
            driver.stop();
            Ok(())
        });
        Err(error)
    }
}
