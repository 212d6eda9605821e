//! C table status codes, and each thread's last error text.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use weft_collectives::RunError;
use weft_control::Error as ControlError;
use weft_fabric::{Error as FabricError, Rank, missing_text};

/// Table function result; `enum weft_status` in `weft.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    Ok = 0,
    Timeout = 1,
    Lost = 2,
    Invalid = 3,
    Closed = 4,
    Failed = 5,
}

/// Error status and text.
#[derive(Clone, Debug)]
pub struct Failure {
    pub status: Status,
    pub text: String,
    /// Ranks that a wait lacked at the timeout.
    pub missing: Vec<Rank>,
}

impl Failure {
    pub fn new(status: Status, text: String) -> Failure {
        Failure { status, text, missing: Vec::new() }
    }

    pub fn invalid(text: String) -> Failure {
        Failure::new(Status::Invalid, text)
    }
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Failure {
        let status = match &error {
            RunError::Timeout { .. }
            | RunError::Fabric(FabricError::Timeout { .. } | FabricError::Interrupted) => {
                Status::Timeout
            }
            RunError::Closed | RunError::Fabric(FabricError::Control(ControlError::Closed)) => {
                Status::Closed
            }
            RunError::Fabric(
                FabricError::Poisoned(_) | FabricError::Control(ControlError::Poisoned(_)),
            )
            | RunError::PeerMemory { .. }
            | RunError::Violation { .. } => Status::Lost,
            RunError::Fabric(_) => Status::Failed,
            _ => Status::Invalid,
        };
        // The caller waits in slices and adds the whole time.
        let text = match &error {
            RunError::Timeout { missing, .. } if !missing.is_empty() => missing_text(missing),
            _ => error.to_string(),
        };
        let missing = match &error {
            RunError::Timeout { missing, .. }
            | RunError::Fabric(FabricError::Timeout { missing, .. }) => {
                missing.iter().map(|each| each.rank).collect()
            }
            _ => Vec::new(),
        };
        Failure { status, text, missing }
    }
}

thread_local! {
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs a table function: its error becomes the thread's last one, and so does a panic.
pub fn guarded(work: impl FnOnce() -> Result<(), Failure>) -> i32 {
    let failure = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return Status::Ok as i32,
        Ok(Err(failure)) => failure,
        Err(_) => {
            let text = "internal error of Weft (panic); please report it".to_owned();
            Failure::new(Status::Failed, text)
        }
    };
    LAST_ERROR.with(|last| *last.borrow_mut() = failure.text);
    failure.status as i32
}

/// Passes the thread's last error text to `read`.
pub fn last_error<T>(read: impl FnOnce(&str) -> T) -> T {
    LAST_ERROR.with(|last| read(&last.borrow()))
}
