//! Dispatch and combine between GPUs on one host, without the fabric: ranks write directly into each other's
//! memory, and a row has arrived when its flag holds the round's epoch.
//!
//! A [`DeviceShape`] has the offset of every symmetric heap area and the kernel macros. A [`Twin`] is one
//! rank's kernels on the CPU: same areas, same protocol, same arithmetic, over plain addresses. Tests compare
//! the kernels with it, and tests without a GPU run it. A [`DeviceAllToAll`] is one rank's part in an
//! all-to-all: a block in a domain's heap, and the kernels or the twin.
//!
//! # The protocol
//! A channel is a set of areas for one round at a time. The four calls come in the order dispatch send,
//! dispatch receive, combine send, combine receive. Each call counts rounds in a 32-bit *epoch*, which wraps;
//! all data that one rank writes for another carries the round's epoch.
//!
//! 1. *Dispatch send* writes, at each rank, the token count for each of that rank's experts, and the rows
//!    themselves, to slots that only this source uses. It neither asks nor waits.
//! 2. *Dispatch receive* waits for all sources' counts, from which the position of each (token, expert) pair
//!    follows, and for each row.
//! 3. *Combine send* signals every rank that its rows have been read, and writes the reply for each row to a
//!    slot at the row's source.
//! 4. *Combine receive* waits for every rank's signal, then for the replies, and sums them.
//!
//! The signals also permit the next round: every rank has read this round's rows. No other credit is needed:
//! the next round's counts imply that the replies have been read.
//!
//! The dispatch plan lies in the channel or at the call's [`PlanLocation`]. There it outlives the round, and
//! a later round can reuse it: rows use the same slots and positions. In place of counts, every source then
//! sends its plan's key, which shows the receiver that both use the same plan, and that its replies have been
//! read.

mod abi;
mod calls;
mod launch;
mod options;
mod shape;
mod twin;

/// Call arguments.
pub use abi::arguments::{
    ArgumentBlock, CombineOutputs, DeviceCounts, DispatchInputs, DispatchOutputs, PlanLocation,
    arguments_header,
};
/// MoE as a device operator family.
pub use abi::family::FAMILY;
/// Phases and codes in device records.
pub use abi::record::{MoeCode, MoePhase};
/// Kernel source files.
pub use abi::sources::{PROGRAM, SOURCES};
/// Calls.
pub use calls::all_to_all::{DeviceAllToAll, ReceivedRows};
/// Launch configuration for a call.
pub use launch::config::LaunchConfig;
/// Kernels and grids for an operation.
pub use launch::grid::{BlockSize, Kernel, LaunchSize, Operation, SmBudget, launch_size};
/// Kernel compile time.
pub use launch::program::BuildInfo;
/// Option types.
pub use options::types::{DeviceLayout, IdWidth, ScaleLayout, TransferPath};
/// Options: agreed configuration, per-rank setup, and Python keywords.
pub use options::{
    Audience, CreationOptions, DeviceConfig, DeviceSetup, Keyword, Keywords, OptionError,
    OptionValue, Options, keywords, python_module,
};
/// Channel layout.
pub use shape::channel_layout::{ChannelLayout, DeviceArea, PlanWord, StateWord};
/// A checked configuration with the derived sizes.
pub use shape::{DeviceShape, ScaleArrays};
/// CPU implementation of the kernels.
pub use twin::{Twin, TwinLaunch};
