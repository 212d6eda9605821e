//! The ways of reaching peers, a folder each, and one that gives any of them a thread.

pub mod copy;
pub mod shm;
pub mod sim;
pub mod tcp;
pub mod threaded;

pub use copy::{CopyConfig, CopyProvider, Devices};
pub use shm::{ShmConfig, ShmProvider};
pub use tcp::{TcpConfig, TcpProvider};
pub use threaded::Threaded;
