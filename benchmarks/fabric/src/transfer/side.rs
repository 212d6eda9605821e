//! Implementation trait, and both patterns over it.

use super::Pattern;
use crate::Outcome;
use std::time::Instant;

/// Implementation that sends messages between the two ranks.
pub trait Side {
    /// Name in results.
    fn name(&self) -> &'static str;

    /// True if it takes part in this measurement.
    fn moves(&self, _pattern: Pattern, _size: usize) -> bool {
        true
    }

    /// True if messages have bytes, false if they are only flags.
    fn carries_bytes(&self) -> bool {
        true
    }

    /// Barrier between both ranks.
    fn barrier(&mut self) -> Outcome<()>;

    /// Sends the source's bytes at `offset` to the peer's inbox.
    fn send(&mut self, offset: usize, length: usize) -> Outcome<()>;

    /// Returns once the peer's next message, to `offset`, has arrived.
    fn receive(&mut self, offset: usize, length: usize) -> Outcome<()>;

    /// Sends a message window once the last but one is acknowledged.
    fn send_window(&mut self, offsets: &[usize], length: usize) -> Outcome<()>;

    /// Receives a message window and acknowledges it.
    fn receive_window(&mut self, offsets: &[usize], length: usize) -> Outcome<()>;

    /// Returns once every window is acknowledged.
    fn finish_windows(&mut self) -> Outcome<()>;
}

/// Messages in one measurement.
pub struct Batch {
    /// Offset by message.
    pub offsets: Vec<usize>,
    /// Bytes per message.
    pub length: usize,
}

/// Sends each message from rank 0 to rank 1, and back. One-way nanoseconds: half the time from one arrival
/// to the next, on both ranks; one fewer on rank 1, whose first arrival has no predecessor.
pub fn ping_pong(side: &mut dyn Side, batch: &Batch, rank: u32) -> Outcome<Vec<f64>> {
    let mut arrivals = Vec::with_capacity(batch.offsets.len() + 1);
    let begin = (Instant::now(), ticks());
    if rank == 0 {
        arrivals.push(begin.1);
    }
    for &offset in &batch.offsets {
        if rank == 0 {
            side.send(offset, batch.length)?;
            side.receive(offset, batch.length)?;
            arrivals.push(ticks());
        } else {
            side.receive(offset, batch.length)?;
            arrivals.push(ticks());
            side.send(offset, batch.length)?;
        }
    }
    let all = ticks().wrapping_sub(begin.1).max(1);
    let tick_ns = begin.0.elapsed().as_nanos() as f64 / all as f64;
    let trips = arrivals.windows(2).map(|pair| pair[1].wrapping_sub(pair[0]));
    Ok(trips.map(|trip| trip as f64 * tick_ns / 2.0).collect())
}

/// Time in units that [`ping_pong`] measures: the processor's time stamp counter, as perftest reads it
/// (see <https://github.com/linux-rdma/perftest>), since the clock takes a system call in a lab guest.
#[cfg(target_arch = "x86_64")]
fn ticks() -> u64 {
    // SAFETY: reads a register that every processor with this architecture has.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Time in nanoseconds.
#[cfg(not(target_arch = "x86_64"))]
fn ticks() -> u64 {
    weft_fabric::clock::now().0
}

/// Sends all messages from rank 0 to rank 1. One figure: nanoseconds per message over all.
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
