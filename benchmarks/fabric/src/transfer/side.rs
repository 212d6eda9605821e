//! Trait of an implementation, and both patterns over it.

use super::Pattern;
use crate::Outcome;
use std::time::Instant;

/// Implementation of messages between the two ranks.
pub trait Side {
    /// Name in results.
    fn name(&self) -> &'static str;

    /// True if it takes part in this measurement.
    fn moves(&self, _pattern: Pattern, _size: usize) -> bool {
        true
    }

    /// True if messages have bytes, false if they are flags alone.
    fn carries_bytes(&self) -> bool {
        true
    }

    /// Barrier of both ranks.
    fn barrier(&mut self) -> Outcome<()>;

    /// Sends the bytes at `offset` of the source to the peer's inbox.
    fn send(&mut self, offset: usize, length: usize) -> Outcome<()>;

    /// Returns once the next message of the peer, to `offset`, has arrived.
    fn receive(&mut self, offset: usize, length: usize) -> Outcome<()>;

    /// Sends a window of messages after the acknowledgement of the last but one.
    fn send_window(&mut self, offsets: &[usize], length: usize) -> Outcome<()>;

    /// Receives a window of messages and acknowledges it.
    fn receive_window(&mut self, offsets: &[usize], length: usize) -> Outcome<()>;

    /// Returns once every window is acknowledged.
    fn finish_windows(&mut self) -> Outcome<()>;
}

/// Messages of one measurement.
pub struct Batch {
    /// Offset of each message.
    pub offsets: Vec<usize>,
    /// Bytes of each message.
    pub length: usize,
}

/// Sends each message from rank 0 to rank 1, and back. One-way nanoseconds: half the time from one arrival
/// to the next, on both ranks; one fewer on rank 1, whose first arrival has no predecessor.
pub fn ping_pong(side: &mut dyn Side, batch: &Batch, rank: u32) -> Outcome<Vec<f64>> {
    let mut arrivals = Vec::with_capacity(batch.offsets.len() + 1);
    if rank == 0 {
        arrivals.push(Instant::now());
    }
    for &offset in &batch.offsets {
        if rank == 0 {
            side.send(offset, batch.length)?;
            side.receive(offset, batch.length)?;
            arrivals.push(Instant::now());
        } else {
            side.receive(offset, batch.length)?;
            arrivals.push(Instant::now());
            side.send(offset, batch.length)?;
        }
    }
    let trips = arrivals.windows(2).map(|pair| pair[1] - pair[0]);
    Ok(trips.map(|trip| trip.as_nanos() as f64 / 2.0).collect())
}

/// Sends all messages from rank 0 to rank 1. One figure: nanoseconds per message over all of them.
pub fn stream(side: &mut dyn Side, batch: &Batch, rank: u32, window: usize) -> Outcome<Vec<f64>> {
    let begin = Instant::now();
    for offsets in batch.offsets.chunks(window) {
        if rank == 0 {
            side.send_window(offsets, batch.length)?;
        } else {
            side.receive_window(offsets, batch.length)?;
        }
    }
    if rank == 0 {
        side.finish_windows()?;
    }
    Ok(vec![begin.elapsed().as_nanos() as f64 / batch.offsets.len() as f64])
}
