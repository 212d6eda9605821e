//! Dispatch and combine between the GPUs of one host, without the fabric: ranks write directly into each
//! other's memory, and a row has arrived when its flag holds the epoch of the round.
//!
//! A [`DeviceShape`] has the offset of every area of the symmetric heap and the macros of the kernels. A
//! [`Twin`] is one rank's kernels on the CPU: same areas, same protocol, same arithmetic, over plain
//! addresses. Tests compare the kernels with it, and tests without a GPU run it. A [`DeviceAllToAll`] is one
//! rank's part of an all-to-all: its block of a domain's heap, and its kernels or its twin.
//!
//! # The protocol
//! A channel is a set of areas for one round at a time. Its four calls come in the order dispatch send,
//! dispatch receive, combine send, combine receive. Each call counts its rounds in a 32-bit *epoch*, which
//! wraps; all data that one rank writes for another carries the round's epoch.
//!
//! 1. *Dispatch send* writes, at each rank, the number of its tokens for each of that rank's experts, and the
//!    rows themselves, to slots of this source alone. It neither asks nor waits.
//! 2. *Dispatch receive* waits for the counts of all sources, from which the position of each (token, expert)
//!    pair follows, and for each row.
//! 3. *Combine send* signals every rank that its rows have been read, and writes the reply for each row to a
//!    slot at the row's source.
//! 4. *Combine receive* waits for the signal of every rank, then for the replies, and sums them.
//!
//! The signals also permit the next round: every rank has read the rows of this one. No other credit is
//! needed: the counts of the next round imply that the replies have been read.
//!
//! The plan of dispatch lies in the channel or at the [`PlanLocation`] of the call. There it outlives the
//! round, and a later round can reuse it: rows use the same slots and positions. In place of counts, every
//! source then sends the key of its plan, which shows the receiver that both use the same plan, and that its
//! replies have been read.

mod abi;
mod calls;
mod launch;
mod options;
mod shape;
mod twin;

/// Arguments of calls.
pub use abi::arguments::{
    ArgumentBlock, CombineOutputs, DeviceCounts, DispatchInputs, DispatchOutputs, PlanLocation,
    arguments_header,
};
/// MoE as a family of device operators.
pub use abi::family::FAMILY;
/// Phases and codes of device records.
pub use abi::record::{MoeCode, MoePhase};
/// Source files of the kernels.
pub use abi::sources::{PROGRAM, SOURCES};
/// Calls.
pub use calls::all_to_all::{DeviceAllToAll, ReceivedRows};
/// Launch configuration of a call.
pub use launch::config::LaunchConfig;
/// Kernels of an operation and their grids.
pub use launch::grid::{BlockSize, Kernel, LaunchSize, Operation, SmBudget, launch_size};
/// Compile time of the kernels.
pub use launch::program::BuildInfo;
/// Types of options.
pub use options::types::{DeviceLayout, IdWidth, ScaleLayout, TransferPath};
/// Options: agreed configuration, per-rank setup, and Python keywords.
pub use options::{
    Audience, CreationOptions, DeviceConfig, DeviceSetup, Keyword, Keywords, OptionError,
    OptionValue, Options, keywords, python_module,
};
/// ChannelLayout of a channel.
pub use shape::channel_layout::{ChannelLayout, DeviceArea, PlanWord, StateWord};
/// A checked configuration with its sizes.
pub use shape::{DeviceShape, ScaleArrays};
/// CPU implementation of the kernels.
pub use twin::{Twin, TwinLaunch};
