//! Providers: implementations of device and link, a folder each; [`crate::registry`] lists them.
//! [`hostile`] wraps any of them for tests.

pub mod copy;
pub mod hostile;
pub mod ofi;
pub mod shm;
pub mod sim;
pub mod tcp;

pub use copy::{CopyBackend, CopyConfig, CopyDevice};
pub use hostile::{HostileConfig, HostileDevice};
pub use ofi::{OfiChoice, OfiConfig, OfiDevice, OfiProvider};
pub use shm::{ShmConfig, ShmDevice};
pub use tcp::{TcpConfig, TcpDevice};
