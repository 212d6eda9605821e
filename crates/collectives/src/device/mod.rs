//! Collectives between the GPUs on one host.
//!
//! [`DeviceCollectives`] are calls on a stream. A call is planned by a pure function, equal on all ranks, and runs as
//! one kernel; each block exchanges data with the block that has the same number on each peer. Short messages travel as
//! packets, long ones as chunks with flags; on request, copy engines copy them between two one-warp kernels. The twin
//! does the same on the CPU.
//!
//! - `message.rs`: operations, and the bytes that each rank pair exchanges
//! - `plan.rs`: kernel, grid and chunk selection
//! - `layout.rs`: memory in the symmetric heap
//! - `copies.rs`: copies in a copy-engine call
//! - `arguments.rs`: the kernels' argument; `program.rs`: compilation and launch; `family.rs`: phase names
//! - `transfers.rs`: sends and receives, which only rank pairs match
//! - `call_board.rs`: last calls on all ranks, for errors
//! - `call.rs`: call arguments; `config.rs`: configuration; `construction.rs`: what ranks agree on
//! - `parts.rs`: resources for a rank's kernels
//! - `device_collectives.rs`: calls and end; `error.rs`: errors
//! - `twin/`: the kernels on the CPU

mod arguments;
mod call;
mod call_board;
mod config;
mod construction;
mod copies;
mod device_collectives;
mod error;
mod family;
mod layout;
mod message;
mod parts;
mod plan;
mod program;
mod transfers;
mod twin;

pub use arguments::arguments_header;
pub use call::DeviceCall;
pub use config::DeviceConfig;
pub use device_collectives::DeviceCollectives;
pub use error::DeviceError;
pub use family::FAMILY;
pub use layout::Layout;
pub use message::{DeviceOperation, Message};
pub use plan::{CallOptions, DeviceAlgorithm};
pub use program::{Arithmetic, SOURCES, compile_request, transfers_request};
pub use transfers::{MAX_TRANSFERS, Transfer, transfer_arguments_header};
