//! Providers: implementations of device and link, a folder each; [`crate::registry`] lists them.
//! [`hostile`] wraps any of them for tests.

mod control_lanes;
pub mod copy;
mod dynamic_library;
mod granted_regions;
pub mod hostile;
pub mod ofi;
mod presence;
pub mod shm;
pub mod sim;
pub mod tcp;
pub mod verbs;

pub use copy::{CopyBackend, CopyConfig, CopyDevice};
pub use hostile::{HostileConfig, HostileDevice};
pub use ofi::{OfiChoice, OfiConfig, OfiDevice, OfiProvider};
pub use shm::{ShmConfig, ShmDevice};
pub use tcp::{TcpConfig, TcpDevice};
pub use verbs::{NicAddress, VerbsChoice, VerbsConfig, VerbsDevice};
