//! What a side can do, and both patterns over it.

use super::Pattern;
use crate::Outcome;
use std::time::Instant;

/// One way of moving messages between the two ranks.
pub trait Side {
    /// As results call it.
    fn name(&self) -> &'static str;

    /// Whether it takes part in this measurement.
    fn moves(&self, _pattern: Pattern, _size: usize) -> bool {
        true
    }

    /// Whether messages have bytes, or are flags only.
    fn carries_bytes(&self) -> bool {
        true
    }

    /// Both ranks have come before either goes on.
    fn meet(&mut self) -> Outcome<()>;

    /// Sends the bytes at `offset` of the source to the peer's inbox.
    fn send(&mut self, offset: usize, length: usize) -> Outcome<()>;

    /// Returns once the next message from the peer, which goes to `offset`, is seen to be there.
    fn receive(&mut self, offset: usize, length: usize) -> Outcome<()>;

    /// Sends a window of messages, once that before the last was acknowledged.
    fn send_window(&mut self, offsets: &[usize], length: usize) -> Outcome<()>;

    /// Receives a window of messages and acknowledges it.
    fn receive_window(&mut self, offsets: &[usize], length: usize) -> Outcome<()>;

    /// Returns once every window was acknowledged.
    fn finish_windows(&mut self) -> Outcome<()>;
}

/// Messages that are measured together.
pub struct Batch {
    /// Where each goes.
    pub offsets: Vec<usize>,
    /// Bytes of each.
    pub length: usize,
}

/// Each message goes from rank 0 to rank 1, and back. Nanoseconds one way: half the time from one
/// arrival to the next, on both ranks; on rank 1, whose first arrival has none before it, one less.
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

/// All messages go from rank 0 to rank 1. One figure: nanoseconds for each, all taken together.
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
