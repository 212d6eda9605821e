//! Collectives between the GPUs of one host.
//!
//! [`DeviceCollectives`] are calls on a stream. A call is planned by a pure function, equal on all ranks, and runs as one
//! kernel; its blocks exchange data with the blocks of equal number at the other ranks. Short messages travel as packets,
//! long ones as chunks with flags; on request, copy engines copy them between two kernels of one warp. The twin does the
//! same on the CPU.
//!
//! - `message.rs`: operations, and the bytes that each pair of ranks exchanges
//! - `plan.rs`: choice of the kernel, the grid and the chunks
//! - `layout.rs`: memory in the symmetric heap
//! - `copies.rs`: copies of a call by copy engines
//! - `arguments.rs`: the kernels' argument; `program.rs`: compilation and launch; `family.rs`: names of phases
//! - `transfers.rs`: sends and receives, which are matched by pairs of ranks alone
//! - `call_board.rs`: last calls of all ranks, for errors
//! - `call.rs`: arguments of a call; `config.rs`: configuration; `construction.rs`: what ranks agree on
//! - `parts.rs`: resources of a rank's kernels
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
