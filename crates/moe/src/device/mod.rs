//! Dispatch and combine between the GPUs of one host, without the fabric: ranks write straight into each
//! other's memory, and a row is there when its flag holds the number of the round.
//!
//! A [`DeviceShape`] says where every area of the symmetric heap lies and what the kernels are compiled
//! with. A [`Twin`] is one rank's kernels on the CPU: the same areas, the same protocol, the same
//! arithmetic, over plain addresses. Kernels are compared with it, and what needs no GPU is tested
//! with it. A [`DeviceAllToAll`] is one rank's end of it all: its part of a domain's heap, its kernels or
//! its twin.
//!
//! # The protocol
//! A channel is a set of areas that takes one round at a time; its four calls come in the order dispatch
//! send, dispatch receive, combine send, combine receive. Every call counts its rounds in an *epoch* of 32
//! bits, which wraps; whatever one rank writes for another is marked with the round's epoch.
//!
//! 1. *Dispatch send* writes, at each rank, how many tokens it has for each of that rank's experts, and the
//!    rows themselves, to slots that belong to this source alone. Nobody is asked and nothing is waited for.
//! 2. *Dispatch receive* waits for the counts of all sources, which give the position of every (token,
//!    expert) pair, and for each row.
//! 3. *Combine send* tells every rank that its rows have been read, and writes the answer for each row
//!    where the row's source finds it.
//! 4. *Combine receive* waits for the word of every rank, then for the answers, and adds them up.
//!
//! That word is also what lets a source begin the next round: every rank has read the rows of this one.
//! No other credit is needed: counts of the next round tell a rank that its answers have been read.

mod agreement;
mod all_to_all;
mod areas;
mod arguments;
mod config;
mod connect;
mod defines;
mod family;
mod given;
mod launch;
mod program;
mod record;
mod shape;
mod sources;
mod twin;

/// The calls.
pub use all_to_all::{DeviceAllToAll, Landed, Site};
/// What a channel is made of.
pub use areas::{Areas, DeviceArea, StateWord};
/// What calls are given.
pub use arguments::{ArgumentBlock, DispatchInputs, DispatchOutputs, arguments_header};
/// What ranks agree on.
pub use config::{DeviceConfig, DeviceLayout, IdWidth, Path};
/// Where a rank runs.
pub use connect::DeviceSetup;
/// The family's phases, codes and texts.
pub use family::FAMILY;
/// How kernels are launched.
pub use launch::{Block, Entry, Launch, Operation, Sms, launch_of};
/// What kernels cost to get.
pub use program::Build;
/// What a device tells its host.
pub use record::{Code, Phase, RECORD_BYTES, Record};
/// What follows from it.
pub use shape::DeviceShape;
/// What the kernels are compiled from.
pub use sources::{PROGRAM, SOURCES};
/// The kernels on the CPU.
pub use twin::Twin;
