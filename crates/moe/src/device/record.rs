//! What a device tells its host: two records of 64 bytes, one for what ends the group and one for what
//! does not.
//!
//! They lie as [`RecordLayout`](weft_gpu::domain::RecordLayout) says. The code is written last, with release, so whoever
//! acquires one that is not 0 finds the rest complete. The host writes 0 over the code of a notice to
//! make room for the next.

/// Bytes of a record; that of a notice follows the fatal one.
pub const RECORD_BYTES: u64 = weft_gpu::domain::RecordLayout::SIZE as u64;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// A wait took longer than the limit. `peer` is whom it waited for and `slot` the row, or the number of
    /// the count; `expected` and `seen` are epochs.
    Timeout = 1,
    /// The host ended all waits.
    Aborted = 2,
    /// A call began while the same call ran on that channel. `expected` calls of that phase had ended,
    /// `seen` had begun.
    TwoLaunches = 3,
    /// A call came out of order: `expected` is the phase that is next on the channel, `seen` the one called.
    OutOfOrder = 4,
    /// A notice: an expert id that is out of range, or that its token names twice; the slot counts as masked.
    /// `slot` is the token, `peer` the top-k slot, `expected` the number of experts and `seen` the id.
    Expert = 5,
    /// A notice: rank `peer` lacks room. `expected` are the positions it needed, or 0 if only that
    /// rank knows, and `seen` its room.
    Capacity = 6,
    /// Rank `peer` released a round that this rank combines.
    Released = 7,
}

/// What a call was about when it wrote a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Tokens leave.
    DispatchSend = 0,
    /// Tokens arrive.
    DispatchRecv = 1,
    /// Answers leave.
    CombineSend = 2,
    /// Answers arrive.
    CombineRecv = 3,
    /// The plan of the bandwidth path.
    Plan = 4,
}

/// A record, as it was read from memory. Codes are plain numbers, since memory may hold any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// A [`Code`], or 0 for none.
    pub code: u32,
    /// Who wrote it.
    pub rank: u32,
    /// A [`Phase`].
    pub phase: u32,
    /// The peer it is about; see [`Code`].
    pub peer: u32,
    /// The channel.
    pub channel: u32,
    /// The row, or what else [`Code`] says.
    pub slot: u32,
    /// What would have been right.
    pub expected: u64,
    /// What was there.
    pub seen: u64,
}
