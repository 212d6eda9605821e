//! The ways of reaching peers, a folder each; [`crate::registry`] lists them. [`hostile`] is a wrapper
//! around any of them, for tests.

pub mod copy;
pub mod hostile;
pub mod ofi;
pub mod shm;
pub mod sim;
pub mod tcp;

pub use copy::{CopyConfig, CopyDevice, Devices};
pub use hostile::{Hostile, HostileConfig};
pub use ofi::{OfiChoice, OfiConfig, OfiDevice, OfiProvider};
pub use shm::{ShmConfig, ShmDevice};
pub use tcp::{TcpConfig, TcpDevice};
