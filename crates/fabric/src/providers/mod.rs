//! The ways of reaching peers, a folder each; [`crate::registry`] lists them.

pub mod copy;
pub mod shm;
pub mod sim;
pub mod tcp;

pub use copy::{CopyConfig, CopyDevice, Devices};
pub use shm::{ShmConfig, ShmDevice};
pub use tcp::{TcpConfig, TcpDevice};
